"""MoE Lab: open a Mixture-of-Experts model, see where its tokens, bytes and milliseconds go, compare its arms.

`import moe_lab as lab` needs torch, triton and numpy alone and loads torch alone: each public name is imported on first
use, and a missing optional package is named then, with the extra that installs it.
"""

import sys
from importlib import import_module
from types import FunctionType, ModuleType
from typing import TYPE_CHECKING, Any

from moe_lab.system.interrupt import arm as _arm

_arm()  # before the import that takes seconds
# Everything here works on tensors; loading torch now keeps its 200 MB out of what opening a file seems to cost.
import torch as _torch  # noqa: E402, F401

__version__ = "0.1.0"

# Public name -> the module that defines it; a dotted target after the colon, or the module itself when there is none.
_PUBLIC = {
    "Activations": "activations:Activations",
    "Arithmetic": "formats:Arithmetic",
    "CheckpointError": "errors:CheckpointError",
    "ExpertCache": "stream.cache:ExpertCache",
    "ExpertPlan": "routing:ExpertPlan",
    "FORMATS": "formats:FORMATS",
    "LabError": "errors:LabError",
    "LabTypeError": "errors:LabTypeError",
    "MissingExtra": "errors:MissingExtra",
    "MoELayer": "layer:MoELayer",
    "MoEOutput": "layer:MoEOutput",
    "MoESpec": "spec:MoESpec",
    "Options": "layer:Options",
    "QuantTensor": "formats:QuantTensor",
    "RouterSpec": "spec:RouterSpec",
    "Routing": "routing:Routing",
    "RoutingTrace": "trace:RoutingTrace",
    "Run": "runs.run:Run",
    "SharedSpec": "spec:SharedSpec",
    "analysis": "analysis",
    "bench": "bench.harness:bench",
    "caching": "caching",
    "compare": "parity:compare",
    "diff": "runs.verdict:diff",
    "errors": "errors",
    "explore": "explore",
    "hf": "hf",
    "matmul": "numerics.matmul:matmul",
    "models": "models",
    "open": "open:open",
    "plan": "routing:plan",
    "plot": "plots",
    "prefill": "strategies:prefill",
    "quantize": "formats:quantize",
    "record": "timing:record",
    "replay": "replay:replay",
    "route": "routing:route",
    "runs": "runs.collect:runs",
    "sample": "sample:sample",
    "simulate": "simulate:simulate",
    "tolerances": "tolerances",
    "write_gguf": "export:write_gguf",
}

__all__ = [
    "FORMATS",
    "Activations",
    "Arithmetic",
    "CheckpointError",
    "ExpertCache",
    "ExpertPlan",
    "LabError",
    "LabTypeError",
    "MissingExtra",
    "MoELayer",
    "MoEOutput",
    "MoESpec",
    "Options",
    "QuantTensor",
    "RouterSpec",
    "Routing",
    "RoutingTrace",
    "Run",
    "SharedSpec",
    "__version__",
    "analysis",
    "bench",
    "caching",
    "compare",
    "diff",
    "errors",
    "explore",
    "hf",
    "matmul",
    "models",
    "open",
    "plan",
    "plot",
    "prefill",
    "quantize",
    "record",
    "replay",
    "route",
    "runs",
    "sample",
    "simulate",
    "tolerances",
    "write_gguf",
]

if TYPE_CHECKING:
    from moe_lab import analysis as analysis
    from moe_lab import caching as caching
    from moe_lab import errors as errors
    from moe_lab import explore as explore
    from moe_lab import hf as hf
    from moe_lab import models as models
    from moe_lab import plots as plot
    from moe_lab import tolerances as tolerances
    from moe_lab.activations import Activations
    from moe_lab.bench.harness import bench
    from moe_lab.errors import CheckpointError, LabError, LabTypeError, MissingExtra
    from moe_lab.export import write_gguf
    from moe_lab.formats import FORMATS, Arithmetic, QuantTensor, quantize
    from moe_lab.layer import MoELayer, MoEOutput, Options
    from moe_lab.numerics.matmul import matmul
    from moe_lab.open import open
    from moe_lab.parity import compare
    from moe_lab.replay import replay
    from moe_lab.routing import ExpertPlan, Routing, plan, route
    from moe_lab.runs.collect import runs
    from moe_lab.runs.run import Run
    from moe_lab.runs.verdict import diff
    from moe_lab.sample import sample
    from moe_lab.simulate import simulate
    from moe_lab.spec import MoESpec, RouterSpec, SharedSpec
    from moe_lab.strategies import prefill
    from moe_lab.stream.cache import ExpertCache
    from moe_lab.timing import record
    from moe_lab.trace import RoutingTrace


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module 'moe_lab' has no attribute {name!r}")
    where, _, attribute = _PUBLIC[name].partition(":")
    module = import_module(f"moe_lab.{where}")
    value = getattr(module, attribute) if attribute else module
    if isinstance(value, FunctionType) and where.partition(".")[0] == name:
        # It stands in the package's place: `import moe_lab.bench.cost as c` looks the rest up under this name.
        value.__name__ = f"moe_lab.{name}"
        package = import_module(f"moe_lab.{name}")
        for other in set(getattr(package, "__all__", ())) - {name}:  # lab.replay.run is moe_lab.replay's
            setattr(value, other, getattr(package, other))
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """The public names and nothing else: what a notebook completes after `lab.`."""
    return sorted(__all__)


class _Package(ModuleType):
    """Keeps `lab.open(...)` a function.

    Importing the submodule `moe_lab.open` makes Python bind that module as an attribute of the package, over the public
    function of the same name (likewise `sample` and `simulate`). Whichever comes first, the function is the public one.
    What is inside such a package is had by `from moe_lab.bench.cost import ...` or `import moe_lab.bench.cost as cost`.
    """

    def __setattr__(self, name: str, value: Any) -> None:
        shadows = isinstance(value, ModuleType) and ":" in _PUBLIC.get(name, "")
        if not shadows:
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package
