"""Shape annotations: jaxtyping's where it is installed, plain tensors where it is not.

`import moe_lab` needs torch, triton and numpy alone, so jaxtyping is optional. Annotations are checked only under
pytest (jaxtyping's import hook with beartype). Axis letters: T tokens, D model width, F expert width, E experts,
R router width (E + zero experts), K experts per token, L layers, B quant block, P = T*K (token, slot) pairs,
N rows of a weight, Kd its columns, S cache slots.
"""

from typing import TYPE_CHECKING, Any

from torch import Tensor

if TYPE_CHECKING:
    from jaxtyping import Bool, Float, Float32, Int, Int8, Int32, Num, Shaped, UInt8
else:
    try:
        from jaxtyping import Bool, Float, Float32, Int, Int8, Int32, Num, Shaped, UInt8
    except ImportError:

        class _Plain:
            """`Float[Tensor, "T D"]` means `Tensor` when jaxtyping is absent."""

            def __class_getitem__(cls, item: Any) -> Any:
                return item[0]

        Bool = Float = Float32 = Int = Int8 = Int32 = Num = Shaped = UInt8 = _Plain

__all__ = ["Bool", "Float", "Float32", "Int", "Int8", "Int32", "Num", "Shaped", "Tensor", "UInt8"]
