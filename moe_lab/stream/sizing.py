"""How large a cache is and where: checks of its options before any memory is taken."""

from moe_lab.errors import LabError, LabTypeError
from moe_lab.stream.reader import MAX_THREADS
from moe_lab.stream.source import ExpertSource

MOST_GIB = 2.0**30


def check_size(slots: int | None, gib: float | None) -> None:
    """LabError unless exactly one of `slots` (whole, at least 1) and `gib` (above 0) is given."""
    if (slots is None) == (gib is None):
        raise LabError(f"an expert cache wants either slots or gib, got slots={slots!r} and gib={gib!r}.")
    if slots is not None and (not isinstance(slots, int) or isinstance(slots, bool)):
        raise LabTypeError(f"slots={slots!r} is a {type(slots).__name__}; wanted a whole number of experts.")
    if slots is not None and slots < 1:
        raise LabError(f"slots={slots}: an expert cache wants at least 1.")
    if gib is not None and not 0 < gib < MOST_GIB:
        raise LabError(f"gib={gib!r}: wanted a size above 0 and below {MOST_GIB:.0f}.")


def check_threads(threads: int | None) -> None:
    """LabError for a number of reader threads that cannot be; None leaves it to the disk's calibration."""
    whole = isinstance(threads, int) and not isinstance(threads, bool)
    if threads is not None and not (whole and 1 <= threads <= MAX_THREADS):
        raise LabError(f"threads={threads!r} reader threads: wanted 1..{MAX_THREADS}.")


def slots_in(gib: float, source: ExpertSource) -> int:
    """Slots that `gib` GiB hold, and no more than there are experts."""
    slots = int(gib * 2**30 // source.slot_bytes)
    if slots < 1:
        raise LabError(
            f"gib={gib} is {int(gib * 2**30):,} bytes, but one expert of {source.path} takes {source.slot_bytes:,}. "
            "Give it more."
        )
    return min(slots, source.total_experts)
