"""How one call of a layer runs, as data."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from moe_lab.arms import Arm
from moe_lab.arms.guard import unread
from moe_lab.errors import LabError
from moe_lab.stream.prediction import Prefetch, as_prefetch


@dataclass(frozen=True, slots=True)
class Options:
    """How a call runs; none of it changes the mathematics, and only `stores`, `combine_order` and the arms change bits.

    `routing`: "host" reads the plan back and groups on the host; "device" (T <= 8; any T for arms that take a plan and
    resident experts) does all of it on the device, through the cache's slot table where experts are streamed.
    `verify_routing` then computes picks, plan and launch table on the host once more and raises where a bit differs.
    `shared`: the shared expert runs behind the routed experts on the "main" stream, beside them on a "side" stream
    (on a CPU, which has none, before them), or "fused" into their launches where formats and widths agree.
    `stores`: "input" passes gate, up, h and each down row through x's dtype; "fp32" rounds the output only.
    `combine_order`: "rank" adds a token's slots as the router ranked them, "expert" by ascending expert id.
    `prefetch`: experts a token that the next MoE layer's router picks from this layer's input and that are read in the
    background (`stream.prediction`); a number, or widths by the number of the layer read ahead (sequence or mapping).
    `chunk_rows` 1..8: rows that share one weight read in `gemv`. `shared_arm`: the shared expert's arm (None: the
    routed one where it serves the shared format, else the reference). `sync_timing`: wait for the device at each
    phase's end.
    `activation`: what the activations of the decode arms (and of `grouped`, which knows the last two) become, "q8_1",
    "bf16" (rows as they come: the most accurate) or "fp8"; None is q8_1 for ggml's formats and rows as they
    come for the others. It changes bits.
    """

    routing: Literal["host", "device"] = "host"
    shared: Literal["main", "side", "fused"] = "main"
    shared_arm: str | Arm | None = None
    prefetch: Prefetch = 0
    combine_order: Literal["rank", "expert"] = "rank"
    stores: Literal["input", "fp32"] = "input"
    chunk_rows: int = 8
    sync_timing: bool = False
    verify_routing: bool = False
    activation: Literal["q8_1", "bf16", "fp8"] | None = None

    def __post_init__(self) -> None:
        for name, allowed in (
            ("routing", ("host", "device")), ("shared", ("main", "side", "fused")),
            ("combine_order", ("rank", "expert")), ("stores", ("input", "fp32")), ("chunk_rows", tuple(range(1, 9))),
            ("activation", (None, "q8_1", "bf16", "fp8")),
        ):  # fmt: skip
            if getattr(self, name) not in allowed:
                raise LabError(
                    f"Options.{name} is {getattr(self, name)!r}; this version serves {', '.join(map(repr, allowed))}."
                )
        object.__setattr__(self, "prefetch", as_prefetch(self.prefetch))
        if self.verify_routing and self.routing != "device":
            raise LabError("Options.verify_routing checks routing on the device, but routing is 'host'.")


def check_activation(arm: Arm, formats: Sequence[str], options: Options, layout: str) -> None:
    """LabError where the routed arm cannot give weights of these formats, kept so, the activations asked for."""
    if options.activation is None:
        return
    meets = getattr(arm, "meets", None)
    why = "it has no such setting" if meets is None else meets(formats, options.activation)
    why = why or unread(arm, layout, options.activation)
    if why is not None:
        raise LabError(f"arm {arm.name!r} does not take Options.activation={options.activation!r}: {why}.")
