"""What a call of a layer gives."""

from dataclasses import dataclass

from moe_lab._types import Tensor
from moe_lab.card import byte_size, card
from moe_lab.routing import Routing
from moe_lab.timing import Timing


@dataclass(frozen=True, slots=True, eq=False)
class MoEOutput:
    """`out` [T, D] in x's dtype, the picks, the timing record, and the arm that ran."""

    out: Tensor
    routing: Routing
    timing: Timing
    arm: str

    def _repr_html_(self) -> str:
        t = self.timing
        phases = f"route {t.route_ms:.3g}, fetch {t.fetch_ms:.3g}, compute {t.compute_ms:.3g}, all {t.wall_ms:.3g}"
        facts = {
            "out": f"{list(self.out.shape)} {self.out.dtype} on {self.out.device}",
            "arm": f"{self.arm}, backend {t.backend}",
            "time (ms)": phases,
            "picks": f"K = {self.routing.top_k} of each of T = {self.routing.tokens} tokens",
            "cache": f"{t.hits} hits, {t.misses} misses, {byte_size(t.bytes_read)} read" if t.hits + t.misses else None,
        }
        return card("MoEOutput", facts)
