"""A pretended `torch.cuda`: streams are queues of work that runs only when somebody waits for it.

`LateArena` queues its copies there too, so a buffer refilled or a slot overwritten too early shows as wrong bytes.
"""

import threading
from collections import deque
from collections.abc import Callable
from typing import Any

import torch

from moe_lab.stream.arena import DeviceArena, Stage
from moe_lab.stream.packing import Packing

_ONE_DEVICE = threading.RLock()  # readers wait for events at the same time: what one takes off a queue it also does


class FakeStream:
    """Work in order. `run` does all of it; `run_until` does what stands before an event."""

    def __init__(self, number: int) -> None:
        self.cuda_stream = number
        self.queue: deque[Callable[[], None] | FakeEvent] = deque()

    def wait_event(self, event: "FakeEvent") -> None:
        self.queue.append(event.synchronize)

    def synchronize(self) -> None:
        with _ONE_DEVICE:
            while self.queue:
                work = self.queue.popleft()
                if isinstance(work, FakeEvent):
                    work.happened = True
                else:
                    work()


class FakeEvent:
    """Happens when its stream gets to it."""

    def __init__(self, blocking: bool = False) -> None:
        self.happened = False
        self.stream: FakeStream | None = None

    def record(self, stream: FakeStream) -> None:
        self.stream = stream
        stream.queue.append(self)

    def query(self) -> bool:
        return self.happened

    def synchronize(self) -> None:
        with _ONE_DEVICE:
            while not self.happened:
                assert self.stream is not None
                assert self.stream.queue, "waits for an event that is never reached"
                work = self.stream.queue.popleft()
                if work is self:
                    self.happened = True
                elif isinstance(work, FakeEvent):
                    work.happened = True
                else:
                    work()


class FakeRuntime:
    """Page-locking: address -> bytes of what is locked; `code` is what locking returns; 2 beyond `most` bytes."""

    def __init__(self) -> None:
        self.locked: dict[int, int] = {}
        self.code = 0
        self.most = 1 << 62

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:
        if sum(self.locked.values()) + nbytes > self.most:
            return 2
        if self.code == 0:
            assert address % 4096 == nbytes % 4096 == 0
            self.locked[address] = nbytes
        return self.code

    def cudaHostUnregister(self, address: int) -> int:
        del self.locked[address]
        return 0


class FakeContext:
    """Makes a stream current, as often as it is entered, one time after another."""

    def __init__(self, cuda: "FakeCuda", stream: FakeStream) -> None:
        self._cuda, self._stream = cuda, stream

    def __enter__(self) -> None:
        self._before, self._cuda.current = self._cuda.current, self._stream

    def __exit__(self, *_: object) -> None:
        self._cuda.current = self._before


class FakeCuda:
    """The names of `torch.cuda` that a device arena uses."""

    Event = FakeEvent

    def __init__(self, free_bytes: int = 1 << 40) -> None:
        self.streams = [FakeStream(1)]
        self.current = self.streams[0]
        self.free_bytes = free_bytes
        self.runtime = FakeRuntime()

    def cudart(self) -> FakeRuntime:
        return self.runtime

    def new_stream(self) -> FakeStream:
        self.streams.append(FakeStream(len(self.streams) + 1))
        return self.streams[-1]

    def Stream(self, device: object) -> FakeStream:
        return self.new_stream()

    def stream(self, stream: FakeStream) -> "FakeContext":
        return FakeContext(self, stream)

    def current_stream(self, device: object) -> FakeStream:
        return self.current

    def mem_get_info(self, device: object) -> tuple[int, int]:
        return self.free_bytes, self.free_bytes

    def synchronize(self, device: object = None) -> None:
        for stream in self.streams:
            stream.synchronize()


class LateArena(DeviceArena):
    """A device arena in host memory whose copies happen when its stream gets to them."""

    def __init__(
        self, slots: int, slot_bytes: int, buffers: int, cuda: FakeCuda, stage_bytes: int | None = None
    ) -> None:
        super().__init__(slots, slot_bytes, torch.device("cpu"), buffers, cuda=cuda, stage_bytes=stage_bytes)

    def _copy(self, slot: int, stage: Stage, nbytes: int, stream: Any) -> None:
        assert stage.tensor is not None
        source, target = stage.tensor[:nbytes], self.tensor[slot, :nbytes]
        stream.queue.append(lambda: target.copy_(source))

    def _fill(self, slot: int) -> None:
        self._cuda.current.queue.append(lambda: DeviceArena._fill(self, slot))

    def _pack(self, slot: int, stage: Stage, nbytes: int, raw: torch.Tensor, packing: Packing) -> None:
        self._cuda.current.queue.append(lambda: DeviceArena._pack(self, slot, stage, nbytes, raw, packing))
