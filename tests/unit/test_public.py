"""`import moe_lab as lab`: names are lazy, stay functions, and need torch, triton and numpy alone."""

import subprocess
import sys
from pathlib import Path

import pytest

import moe_lab

ROOT = Path(__file__).resolve().parents[2]
OPTIONAL = [
    *("pandas", "pyarrow", "matplotlib", "ipywidgets", "jupyterlab", "IPython", "ipykernel", "nbclient", "nbconvert"),
    *("nbformat", "latex2mathml", "rich", "typer", "transformers", "accelerate", "safetensors", "tokenizers", "gguf"),
    *("jaxtyping", "beartype", "hypothesis", "ggml", "playwright"),
]
BLOCK = """
import sys
class Block:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {blocked!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
sys.meta_path.insert(0, Block())
import moe_lab as lab
"""


# Each code in a child of its own: all of them start where the one process stands that has imported torch or the lab.
FORK = """
import os, traceback
for code in {codes!r}:
    child = os.fork()
    if not child:
        status = 1
        try:
            exec(code, dict(globals()))
            status = 0
        except BaseException:
            traceback.print_exc()
        print(flush=True)
        os._exit(status)
    if os.waitpid(child, 0)[1]:
        sys.exit(f"failed: {{code}}")
    print("-- next", flush=True)
"""


def python(*codes: str, blocked: list[str] | None = None, first: str = "import moe_lab as lab") -> list[str]:
    """What each of `codes` prints after `first`, in an environment of its own."""
    head = BLOCK.format(blocked=blocked) if blocked else f"import sys\n{first}\n"
    environment = {"PYTHONPATH": f"{ROOT}:{ROOT / 'kernels'}", "PATH": "/usr/bin:/bin", "HOME": "/nonexistent"}
    command = [sys.executable, "-c", head + FORK.format(codes=codes)]
    done = subprocess.run(command, capture_output=True, text=True, cwd="/", env=environment)
    assert done.returncode == 0, done.stderr
    return [said.strip() for said in done.stdout.split("-- next")[:-1]]


def test_every_public_name_resolves() -> None:
    for name in moe_lab.__all__:
        assert getattr(moe_lab, name) is not None
    assert set(moe_lab.__all__) == {*moe_lab._PUBLIC, "__version__"}
    assert set(moe_lab.__all__) <= set(dir(moe_lab))


@pytest.mark.parametrize("room", ["", "plot", "explore", "analysis"])
def test_completion_shows_the_public_names_and_nothing_else(room: str) -> None:
    module = getattr(moe_lab, room) if room else moe_lab
    assert dir(module) == sorted(module.__all__)
    assert all(getattr(module, name) is not None for name in dir(module))


def test_completion_in_a_notebook_follows() -> None:
    """What JupyterLab asks the kernel for; jedi reads the source as well, and must not bring private names in."""
    from IPython.core.completer import IPCompleter, provisionalcompleter
    from traitlets.config import Config

    for jedi in (True, False):
        completer = IPCompleter(namespace={"lab": moe_lab}, config=Config({"Completer": {"use_jedi": jedi}}))
        with provisionalcompleter():
            names = {c.text.lstrip(".") for c in completer.completions("lab.plot.", len("lab.plot."))}
        assert {name.rpartition(".")[2] for name in names} == set(moe_lab.plot.__all__)


def test_choices_of_arithmetic_and_sizes_of_formats_are_at_hand() -> None:
    assert moe_lab.Arithmetic(safe_sum=True).safe_sum
    bits = {name: format.bits_per_weight for name, format in moe_lab.FORMATS.items()}
    known = {"f32": 32, "bf16": 16, "q8_0": 8.5, "q4_k": 4.5, "q2_k": 2.625, "mxfp4": 4.25, "nvfp4_ct": 4.5}
    assert {name: bits[name] for name in known} == known
    assert bits["fp8_block"] == 8 + 32 / 128**2
    assert all(1 < b <= 32 for b in bits.values())


def test_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'opne'"):
        _ = moe_lab.opne


def test_import_loads_torch_alone() -> None:
    code = f"import sys; print([name for name in {['triton', *OPTIONAL]!r} if name in sys.modules])"
    assert python(code) == ["[]"]


def test_function_wins_over_its_module() -> None:
    """Importing the submodule first must not leave the module in the function's place."""
    names = ("open", "sample", "simulate", "runs", "bench")
    firsts = ("import moe_lab.{0}", "lab.{0}\nimport moe_lab.{0}", "from moe_lab import {0}")
    shown = f"\nprint([callable(getattr(lab, n)) for n in {names}])"
    said = python(*("\n".join(first.format(name) for name in names) + shown for first in firsts))
    assert said == [str([True] * len(names))] * len(firsts)


def test_core_needs_torch_triton_numpy_alone_and_the_rest_names_its_extra() -> None:
    names = [n for n in moe_lab.__all__ if n not in ("plot", "explore")]
    core = f"for name in {names!r}: getattr(lab, name)\nimport torch\n"
    core += "r = lab.route(torch.randn(5, 8), lab.RouterSpec(8, 2)); print(tuple(r.ids.shape))"
    extras = {"lab.plot": "lab", "lab.explore": "lab", "import moe_lab.report.exporter": "report"}
    uses = [f"try:\n    {use}\nexcept lab.MissingExtra as error:\n    print(error)" for use in extras]
    shape, *missing = python(core, *uses, blocked=OPTIONAL)
    assert shape == "(5, 2)"
    for said, extra in zip(missing, extras.values(), strict=True):
        assert f"pip install 'moe-lab[{extra}]'" in said


def test_import_without_triton() -> None:
    code = "import torch\nprint(tuple(lab.route(torch.randn(5, 8), lab.RouterSpec(8, 2)).ids.shape))"
    assert python(code, blocked=["triton"]) == ["(5, 2)"]


def test_a_module_behind_a_public_function_is_imported_by_name() -> None:
    """`lab.bench` is a function; what is in the package of that name can be had as well."""
    places = ("bench.cost", "runs.record", "simulate.bounds")
    code = "import moe_lab.{0} as c\nimport moe_lab as lab\nprint(c.__name__, callable(lab.{1}))"
    said = python(*(code.format(place, place.partition(".")[0]) for place in places), first="import torch")
    assert said == [f"moe_lab.{place} True" for place in places]
