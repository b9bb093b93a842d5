"""A quantised tensor in tiles of 16 rows, each byte where a tensor core's lane finds it: see `storage.row_tiles`.

The bits of the raw blocks in another order, in the same bytes (where a row of small blocks is no whole number of steps,
up to three blocks a row more).
"""

from typing import ClassVar

from moe_lab._types import Tensor
from moe_lab.formats.repacked import Repacked
from moe_lab_kernels.storage import row_tiles


class Tiled(Repacked):
    """`data` uint8 [.., N / 16, tile_bytes]."""

    __slots__ = ()
    layout: ClassVar[str] = "tiles"

    @staticmethod
    def refusal(format: str, n: int, kd: int) -> str | None:
        """See `Repacked.refusal`."""
        return row_tiles.refusal(format, n, kd)

    @staticmethod
    def room(format: str, n: int, kd: int) -> tuple[int, ...]:
        """Tiles and the bytes of each."""
        return n // row_tiles.ROWS, row_tiles.tile_bytes(format, kd)

    @staticmethod
    def pack(raw: Tensor, format: str, kd: int, *, out: Tensor | None = None) -> Tensor:
        """See `Repacked.pack`."""
        return row_tiles.to_tiles(raw, format, kd, out=out)

    @staticmethod
    def unpack(data: Tensor, format: str, n: int, kd: int) -> Tensor:
        """See `Repacked.unpack`."""
        return row_tiles.from_tiles(data, format, kd)
