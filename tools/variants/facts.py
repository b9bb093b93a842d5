"""A kernel variant: its name in the table, and what its machine code says."""

import re
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import triton

from moe_lab_kernels.launch.ahead import Job, Pointer, compile_job

CUOBJDUMP = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
FLOATS = {torch.bfloat16: "bf16", torch.float16: "f16", torch.float32: "f32", torch.float8_e4m3fn: "e4m3"}
OPTIONS = {"num_warps": "warps", "num_stages": "stages", "maxnreg": "cap", "launch_pdl": "early"}
STAGES = 3  # where a launcher names none
WIDE = 1 << 31


@dataclass(frozen=True, slots=True)
class Machine:
    """A variant compiled: registers and spilled bytes a thread, static shared bytes a program, instructions."""

    registers: int
    shared_bytes: int
    spill_bytes: int
    code_bytes: int


def name_of(job: Job) -> str:
    """What tells a variant from its kernel's others: constants, float dtypes, numbers that the compiler is told of
    (1, or no multiple of 16, or wider than 32 bits), unaligned tensors, launch options."""
    words, given = [], dict(job.meta)
    params = job.function().params
    values = dict(zip((p.name for p in params), job.args, strict=False)) | given
    for p in params:
        word = _word(p, values.get(p.name))
        words += [word] if word else []
    for option, short in OPTIONS.items():
        value = given.get(option)
        if value is not None and value is not False and (option, value) != ("num_stages", STAGES):
            words.append(f"{short}={_text(value)}")
    return " ".join(words)


def _word(p: Any, value: Any) -> str:
    if p.is_constexpr:
        return "" if isinstance(value, float) else f"{p.name}={_text(value)}"
    if isinstance(value, Pointer):
        kind = FLOATS.get(value.dtype, "")
        return f"{p.name}:{kind}{'' if value.aligned else '?'}" if kind or not value.aligned else ""
    if isinstance(value, bool) or not isinstance(value, int):
        return ""
    size = ":i64" if value >= WIDE else ""
    if p.do_not_specialize:
        return f"{p.name}{size}" if size else ""
    odd = "=1" if value == 1 else "%16" if value % 16 else ""
    return f"{p.name}{odd}{size}" if odd or size else ""


def _text(value: Any) -> str:
    return str(int(value)) if isinstance(value, bool) else str(value).removeprefix("torch.")


def short_name(job: Job) -> str:
    """The kernel: folder, module and function."""
    return f"{job.module.removeprefix('moe_lab_kernels.')}.{job.kernel.lstrip('_')}"


def machine(job: Job) -> Machine:
    """Compile, and read registers, shared memory and stack off the machine code."""
    made = compile_job(job)
    use = use_of(made.asm["cubin"])
    return Machine(use["REG"], made.metadata.shared, use["STACK"], len(made.asm["cubin"]))


def use_of(cubin: bytes) -> dict[str, int]:
    """REG, registers, and STACK, bytes, of a thread. Spilled registers go to the stack, and nothing else does: none of
    the kernels has arrays."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [str(CUOBJDUMP), "-res-usage", file.name]
        said = subprocess.run(command, capture_output=True, text=True, check=True)
    return {key: int(n) for key, n in re.findall(r"\b(REG|STACK):(\d+)", said.stdout + said.stderr)}
