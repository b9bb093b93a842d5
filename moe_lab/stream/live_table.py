"""A cache's slots as the device looks them up: which expert of which layer lies where, kept in step with the cache.

One int32 vector on the device: slot_of of every layer, one after another (N experts in all), then owner [S], which
counts experts the same way. The cache tells of every expert that arrives in a slot, from whatever thread; the changes
wait on the host, of several to one entry the last, until a call's own stream takes them along in one small copy. Who
computes with a slot holds a lease on it: the table only says where to look, so one that lags behind a slot that has
just changed hands costs a second look and never a wrong expert.
"""

import threading
from collections.abc import Iterable, Mapping
from itertools import accumulate
from typing import Any

import torch

from moe_lab._types import Tensor
from moe_lab.errors import LabError
from moe_lab.stream.device_table import DeviceTable
from moe_lab.stream.fills import Partition
from moe_lab.stream.policy import Key
from moe_lab.stream.source import ExpertSource
from moe_lab.system.devices import current_stream


class LiveTable:
    """`experts`: E of each layer by its number; S = `slots`. `cuda` stands in for `torch.cuda` in tests of order."""

    def __init__(self, experts: Mapping[int, int], slots: int, device: torch.device, cuda: Any = torch.cuda) -> None:
        ends = list(accumulate(experts.values(), initial=0))
        self._experts = dict(experts)
        self._base = dict(zip(experts, ends, strict=False))
        self._n, self.slots = ends[-1], slots
        self._host = [-1] * (self._n + slots)
        self._device = torch.full((self._n + slots,), -1, dtype=torch.int32, device=device)
        self._pending: dict[int, int] = {}
        self._lock = threading.Lock()
        self._cuda = cuda if device.type == "cuda" else None
        self._flushed: Any = None  # event behind the last copy, and the stream that it went to
        self._flushed_on = 0

    def arrived(self, key: Key, slot: int) -> None:
        """Expert `key` is in `slot`, and so nothing else is."""
        layer, expert = key
        who, place = self._base[layer] + expert, self._n + slot
        with self._lock:
            before, elsewhere = self._host[place], self._host[who]
            if before >= 0 and before != who:
                self._set(before, -1)
            if elsewhere >= 0 and elsewhere != slot:
                self._set(self._n + elsewhere, -1)
            self._set(who, slot)
            self._set(place, who)

    def of(self, layer: int) -> DeviceTable:
        """The table of one layer, all that is known queued on the current stream."""
        self.flush()
        return DeviceTable(self._row(layer, self._device), self._device[self._n :], self._base[layer])

    def only(self, layer: int, slots: Mapping[int, int]) -> DeviceTable:
        """The same for these experts alone, in `slots`: what a wave may compute, whatever else lies in the arena."""
        row = torch.full((self._experts[layer],), -1, dtype=torch.int32, pin_memory=self._cuda is not None)
        for expert, slot in slots.items():
            row[expert] = slot
        table = self.of(layer)
        return DeviceTable(row.to(self._device.device, non_blocking=True), table.owner, table.base)

    def flush(self) -> None:
        """Queue what changed on the current stream, behind what other streams queued before."""
        with self._lock:
            self._flush()

    def check(self) -> None:
        """LabError naming the first entry in which the device's table is not what the cache has told. Waits for it."""
        with self._lock:
            self._flush()
            found = self._device.tolist()
            wrong = next((i for i, (want, got) in enumerate(zip(self._host, found, strict=True)) if want != got), None)
            if wrong is not None:
                what = f"owner[{wrong - self._n}]"
                for layer, base in self._base.items():
                    if base <= wrong < base + self._experts[layer]:
                        what = f"layer {layer}'s slot_of[{wrong - base}]"
                want, got = self._host[wrong], found[wrong]
                raise LabError(f"slot table: {what} is {got} on the device and {want} on the host.")

    def _flush(self) -> None:
        stream = None if self._cuda is None else current_stream(self._device.device, self._cuda)
        if stream is not None and self._flushed is not None and self._flushed_on != stream.cuda_stream:
            stream.wait_event(self._flushed)
        changes, self._pending = self._pending, {}
        if not changes:
            return
        self._write(changes)
        if self._cuda is not None and stream is not None:
            self._flushed, self._flushed_on = self._cuda.Event(), stream.cuda_stream
            self._flushed.record(stream)

    def _row(self, layer: int, table: Tensor) -> Tensor:
        start = self._base[layer]
        return table[start : start + self._experts[layer]]

    def _set(self, at: int, value: int) -> None:
        self._host[at] = value
        self._pending[at] = value

    def _write(self, changes: Mapping[int, int]) -> None:
        on_gpu = self._cuda is not None
        made = torch.tensor([list(changes), list(changes.values())], pin_memory=on_gpu)
        at, value = made.to(self._device.device, non_blocking=on_gpu)
        self._device.scatter_(0, at, value.int())


def follow(source: ExpertSource, slots: int, device: torch.device, partitions: Iterable[Partition]) -> LiveTable:
    """A table that these partitions keep in step from now on. Call it under the cache's lock."""
    made = LiveTable({layer: source.num_experts(layer) for layer in source.layers}, slots, device)
    for part in partitions:
        part.on_arrive = made.arrived
        for entry in part.entries.values():
            if entry.ready:
                made.arrived(entry.key, entry.slot)
    return made
