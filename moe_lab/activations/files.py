"""Recorded activations as files: npz written and read, safetensors read."""

import re
from pathlib import Path

import numpy as np

from moe_lab.activations.record import Activations
from moe_lab.errors import LabError, MissingExtra
from moe_lab.system.files import replace_file
from moe_lab.system.npz import optional_array, read_npz


def read(file: Path) -> Activations:
    """A recording out of npz or, by its suffix, safetensors."""
    return _read_safetensors(file) if file.suffix.lower() == ".safetensors" else _read_npz(file)


def write(activations: Activations, file: Path) -> Path:
    """Write an npz in one step."""
    if file.suffix.lower() != ".npz":
        raise LabError(f"{file}: activations are written as npz; give the file that suffix.")
    arrays: dict[str, np.ndarray] = {"x": activations.x, "layers": np.array(activations.layers, np.int64)}
    if activations.token_ids is not None:
        arrays["token_ids"] = activations.token_ids
    if activations.domains is not None:
        arrays["domain"] = activations.domains.astype(str)
    for name in ("source", "model_hash"):
        if text := getattr(activations, name):
            arrays[name] = np.array(text)

    def fill(part: Path) -> None:
        with part.open("wb") as out:  # np.savez would add its suffix to a name
            np.savez(out, **arrays)  # type: ignore[arg-type]

    return replace_file(file, fill)


def _read_npz(file: Path) -> Activations:
    arrays = read_npz(file, "activations")
    about = {n: str(a) for n in ("source", "model_hash") if (a := arrays.get(n)) is not None and a.dtype.kind == "U"}
    return _build(file, arrays, about)


def _build(file: Path, arrays: dict[str, np.ndarray], about: dict[str, str]) -> Activations:
    x = arrays.get("x")
    if x is None or x.ndim != 3 or x.dtype.kind != "f":
        seen = "no x" if x is None else f"{x.dtype} {x.shape}"
        raise LabError(f"{file} must hold x, floating point [L, T, D]; it has {seen} (arrays: {', '.join(arrays)}).")
    numbers = arrays["layers"] if "layers" in arrays else np.arange(x.shape[0])
    if numbers.dtype.kind not in "iu" or numbers.shape != (x.shape[0],) or len(np.unique(numbers)) != len(numbers):
        raise LabError(
            f"{file}: layers must be {x.shape[0]} different whole numbers, one for each layer of x; "
            f"it is {numbers.dtype} of shape {numbers.shape}."
        )
    token_ids = optional_array(arrays, file, "token_ids", (x.shape[1],), "iu")
    domains = optional_array(arrays, file, "domain", (x.shape[1],), "U")
    about = {name: about.get(name, "") for name in ("source", "model_hash")}
    try:
        return Activations(x, tuple(int(n) for n in numbers), token_ids, domains, **about)
    except LabError as e:
        raise LabError(f"{file}: {e}") from e


def _read_safetensors(file: Path) -> Activations:
    try:
        import safetensors
    except ImportError as e:
        raise MissingExtra("safetensors", "hf", "reading activations from safetensors") from e
    if not file.is_file():
        seen = "is not a regular file" if file.exists() else "does not exist"
        raise LabError(f"{file} {seen}; wanted a safetensors file of activations.")
    try:
        # torch, because numpy has no bf16
        with safetensors.safe_open(file, framework="pt") as opened:
            about = dict(opened.metadata() or {})
            arrays = {name: _array(opened.get_tensor(name)) for name in opened.keys()}  # noqa: SIM118
    except (OSError, safetensors.SafetensorError, RuntimeError, MemoryError) as e:
        raise LabError(f"{file} is not a readable safetensors file of activations: {e}") from e
    return _build(file, arrays if "x" in arrays else _stack(file, arrays), about)


def _array(tensor) -> np.ndarray:
    return (tensor.float() if tensor.dtype.is_floating_point and tensor.element_size() < 4 and
            str(tensor.dtype) != "torch.float16" else tensor).numpy()  # fmt: skip


def _stack(file: Path, arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """x and layers of a file with one tensor [T, D] a layer."""
    rest = {name: arrays[name] for name in ("token_ids",) if name in arrays}
    by_number: dict[int, str] = {}
    for name in arrays:
        if name in rest:
            continue
        number = _layer_number(name)
        if number is None or arrays[name].ndim != 2 or arrays[name].dtype.kind != "f":
            raise LabError(
                f"{file}: tensor {name} ({arrays[name].dtype} {arrays[name].shape}) is neither x [L, T, D] nor "
                "floating point [T, D] with one layer number in its name."
            )
        if number in by_number:
            raise LabError(f"{file}: tensors {by_number[number]} and {name} are both of layer {number}.")
        by_number[number] = name
    if not by_number:
        raise LabError(f"{file} holds no activations (tensors: {', '.join(arrays) or 'none'}).")
    rows = {number: arrays[by_number[number]] for number in sorted(by_number)}
    shapes = {by_number[number]: a.shape for number, a in rows.items()}
    if len(set(shapes.values())) > 1:
        raise LabError(f"{file}: every layer must have the same [T, D], got {shapes}.")
    return {"x": np.stack(list(rows.values())), "layers": np.array(list(rows)), **rest}


def _layer_number(name: str) -> int | None:
    """The one number that stands as a step of the name, else the one number anywhere in it; None for none or more."""
    steps = [step for step in re.split(r"[./_\-\[\]]", name) if step.isascii() and step.isdigit()]
    found = steps or re.findall(r"[0-9]+", name)
    return int(found[0]) if len(found) == 1 else None
