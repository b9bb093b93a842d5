"""One expert's stay in a slot of a cache, and who holds it: state alone, without waiting."""

from dataclasses import dataclass, field

from moe_lab.errors import CheckpointError, LabError
from moe_lab.stream.events import NONE
from moe_lab.stream.jobs import Job
from moe_lab.stream.policies.base import Key
from moe_lab.stream.source import ExpertSource
from moe_lab.stream.stages import Stage


@dataclass(slots=True, eq=False)
class Hold:
    """Who asked for a group of entries: the thread, how many are not ready yet (it is not woken for less), and the
    request's number, in errors and in the log."""

    thread: int
    missing: int = 0
    request: int = NONE


@dataclass(slots=True, eq=False)
class Entry:
    """One key's stay in one slot. Each transition is a single assignment, so an interrupt leaves no half-made state."""

    key: Key
    slot: int
    holds: set[Hold] = field(default_factory=set)
    stage: Stage | None = None
    left: int = 0  # jobs not yet reported
    stopped: bool = False  # a job was given up while it was read
    jobs: list[Job] | None = None  # None: RESERVED
    ready: bool = False
    ahead: bool = False  # first asked for by a prefetch
    cause: Exception | None = None  # why the fill failed
    read: int = NONE  # the read's number in the log
    begun: bool = False  # a reader has begun (noted only while there is a log)

    @property
    def staged(self) -> bool:
        """Read, but not yet copied to the device."""
        return self.jobs is not None and self.left == 0 and not self.ready and not self.stopped

    @property
    def reading(self) -> int:
        """Jobs that will still be reported: neither over nor taken back."""
        return self.left - sum(job.back for job in self.jobs or ()) if self.ahead else self.left

    @property
    def given_up(self) -> bool:
        """Whether a job was given up before it had read all of its pieces."""
        return self.ahead and (self.stopped or any(job.back for job in self.jobs or ()))


def read_error(source: ExpertSource, key: Key, cause: Exception, request: int) -> LabError:
    """A fresh exception for each waiter, with its request's number: threads that raise one shared object would tangle
    its traceback."""
    asked = "" if request == NONE else f"request {request}: "
    who = f"{asked}layer {key[0]} expert {key[1]}"
    if not isinstance(cause, CheckpointError):
        return LabError(f"{source.path}: {who} could not be read: {cause}")
    text = str(cause).removeprefix(f"{cause.file}: ").removeprefix(f"tensor {cause.tensor!r}: ")
    return CheckpointError(
        cause.file, cause.reason, f"{who}: {text}",
        tensor=cause.tensor, seen=cause.seen, wanted=cause.wanted,
    )  # fmt: skip


__all__ = ["Entry", "Hold", "read_error"]
