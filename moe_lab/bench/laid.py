"""An arm on experts in a layout of their own, by name: "gemv@tiles" is arm gemv on the layer repacked into tiles.

So raw blocks, planes and tiles stand side by side in one benchmark, one comparison and one row of an arm table.
"""

from weakref import WeakKeyDictionary

from moe_lab.arms import Arm
from moe_lab.arms.names import split_layout
from moe_lab.layer import MoELayer

_REPACKED: WeakKeyDictionary[MoELayer, dict[str, MoELayer]] = WeakKeyDictionary()


def laid(layer: MoELayer, arm: str | Arm) -> tuple[MoELayer, str | Arm]:
    """The layer and the arm that a name stands for: without "@", and for objects, the layer as it lies. What was
    repacked is kept as long as the layer is. LabError for a layout that there is not, or that these experts lack."""
    if not isinstance(arm, str) or "@" not in arm:
        return layer, arm
    name, layout = split_layout(arm)
    made = _REPACKED.setdefault(layer, {})
    if layout not in made:
        made[layout] = layer.repacked(layout)
    return made[layout], name
