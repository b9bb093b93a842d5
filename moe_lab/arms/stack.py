"""The experts' weights as an arm sees them: stacked by slot, in one layout, with the biases of all experts."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from moe_lab._types import Tensor
from moe_lab.errors import LabError
from moe_lab.formats import QuantTensor
from moe_lab.formats.layouts import Laid, layout_of
from moe_lab_kernels.slots.pointer_table import Weights


@dataclass(frozen=True, slots=True, eq=False)
class ExpertBiases:
    """Biases of all E experts, whichever of them are at hand: gate, up [E, F], down [E, D]. No gate, no gate bias."""

    up: Tensor
    down: Tensor
    gate: Tensor | None = None


class ExpertStack:
    """Expert weights at hand: gate and up [S, F, D], down [S, D, F], and which slot holds which expert. `gate` is None
    where experts have none. All parts lie in one layout (`formats.layouts`); LabError where they do not.

    Remembers what the CPU paths decode from a slot (fp32 values, integer forms) for as long as it lives: for ever when
    the layer is resident, one wave of experts when streamed.
    """

    def __init__(
        self,
        gate: Laid | None,
        up: Laid,
        down: Laid,
        slot_of: dict[int, int],
        biases: ExpertBiases | None = None,
    ) -> None:
        self.up, self.down, self.slot_of, self.biases = up, down, slot_of, biases
        self._gate = gate
        self._decoded: dict[tuple[str, str, int], Any] = {}
        self.layout = layout_of(self.parts)

    @property
    def gate(self) -> Laid:
        """The gate projections. LabError where experts have none."""
        if self._gate is None:
            raise LabError("these experts have no gate projection.")
        return self._gate

    @cached_property
    def parts(self) -> dict[str, Laid]:
        """What there is of gate, up and down; not to be changed."""
        named = {"gate": self._gate, "up": self.up, "down": self.down}
        return {name: q for name, q in named.items() if q is not None}

    def bias(self, part: str, expert: int) -> Tensor | None:
        """One expert's bias [N], or None."""
        bias = None if self.biases is None else getattr(self.biases, part)
        return None if bias is None else bias[expert]

    def part(self, name: str) -> Laid:
        """ "gate", "up" or "down", stacked over slots."""
        return getattr(self, name)

    def weights(self, part: str) -> Weights:
        """A part's bytes of all slots as the kernels for its layout take them: raw rows [S, N, row_bytes], tiles
        [S, N / 16, tile_bytes], planes [S, 1, bytes]."""
        return by_slot(self.part(part))

    def matrix(self, part: str, expert: int) -> QuantTensor:
        """One expert's matrix as raw bytes, whatever the layout."""
        return self.part(part)[self.slot_of[expert]].to_raw()

    def values(self, part: str, expert: int) -> Tensor:
        """One expert's matrix in fp32 [N, Kd]."""
        return self._remember("values", part, expert, QuantTensor.dequantize)

    def integers(self, part: str, expert: int) -> Any:
        """One expert's matrix as an IntegerForm."""
        return self._remember("integers", part, expert, QuantTensor.integer_form)

    def _remember(self, kind: str, part: str, expert: int, decode: Callable[[QuantTensor], Any]) -> Any:
        key = (kind, part, self.slot_of[expert])
        if key not in self._decoded:
            self._decoded[key] = decode(self.matrix(part, expert))
        return self._decoded[key]

    @cached_property
    def expert_bytes(self) -> int:
        """Bytes of one expert's matrices."""
        return sum(q.nbytes // max(1, len(q)) for q in self.parts.values())


def by_slot(weight: Laid) -> Tensor:
    """Bytes of a stack of matrices, three axes in every layout: planes are one row a slot."""
    return weight.data if weight.data.ndim == 3 else weight.data.unsqueeze(1)
