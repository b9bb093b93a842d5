"""Policies that keep a score for every expert: what they share is who may leave and in what order."""

from abc import ABC, abstractmethod
from collections.abc import Collection
from itertools import islice

from moe_lab.checks import wants_whole
from moe_lab.errors import LabError
from moe_lab.stream.policies.base import Key
from moe_lab.stream.policies.recency import InOrder

AMONG = 64


class Scored(InOrder, ABC):
    """Of the `among` longest unused candidates the one of the lowest score leaves, the longest unused among equals.

    `among` bounds the time of a miss in caches of thousands.
    """

    name: str

    def __init__(self, among: int = AMONG) -> None:
        self.among = wants_whole(f"among (of {self.name})", among, 1)
        super().__init__()

    @abstractmethod
    def score(self, key: Key) -> float:
        """How soon `key` is expected back: the higher, the longer it stays."""

    def victim(self, candidates: Collection[Key]) -> Key:
        oldest = list(islice((key for key in self._order if key in candidates), self.among))
        if not oldest:
            raise LabError(f"{self.name}: none of {len(candidates)} candidates was ever inserted.")
        return min(oldest, key=self.score)
