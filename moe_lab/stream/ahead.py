"""The line of experts that may be read ahead: whose turn it is, and what has become stale while it waited.

A layer has one place in the line, with its experts likeliest first. Each new wish for a layer, and each settlement (its
picks are known), begins an epoch of that layer; what waits from an older epoch is dropped when its turn comes. The line
reads nothing itself and knows no slots: `Turn` says what is absent, the cache says what could begin.
"""

from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field

from moe_lab.stream.policies.base import Key


@dataclass(slots=True, eq=False)
class Turn:
    """One layer's wish: `keys` in all (no victims of its own reads), `todo` of them neither begun nor given up."""

    layer: int
    epoch: int
    keys: tuple[Key, ...]
    todo: list[Key] = field(default_factory=list)


class Line:
    """Wishes in order of asking. `dropped(key)` hears of each that became stale before it began."""

    def __init__(self, dropped: Callable[[Key], None] = lambda key: None) -> None:
        self._turns: deque[Turn] = deque()
        self._epochs: dict[int, int] = {}
        self._dropped = dropped

    def __bool__(self) -> bool:
        return bool(self._turns)

    def waiting(self) -> list[Key]:
        """What is in line and not stale, in order."""
        return [key for turn in self._turns if self._current(turn) for key in turn.todo]

    def ask(self, layer: int, keys: Sequence[Key], absent: Sequence[Key]) -> None:
        """Wish for `keys` of `layer`, of which `absent` are to be read; older wishes for the layer become stale."""
        epoch = self._begin_epoch(layer)
        if absent:
            self._turns.append(Turn(layer, epoch, tuple(keys), list(absent)))

    def settle(self, layer: int, wanted: Collection[Key]) -> None:
        """The picks of `layer` are known: what waits for it and is not `wanted` becomes stale."""
        waiting = [key for turn in self._turns if turn.layer == layer and self._current(turn) for key in turn.todo]
        if waiting:
            kept = [key for key in waiting if key in wanted]
            turns = [turn for turn in self._turns if turn.layer == layer and self._current(turn)]
            for turn in turns:
                turn.todo = [key for key in turn.todo if key not in wanted]
            self.ask(layer, kept, kept)

    def clear(self) -> None:
        """Everything that waits becomes stale."""
        for layer in {turn.layer for turn in self._turns}:
            self._begin_epoch(layer)

    def turns(self) -> Iterator[Turn]:
        """Those whose turn it is, one after another; the caller takes what begins off `todo`. Stale ones are dropped
        here, finished ones leave the line, and the first that could not finish ends it.
        """
        while self._turns:
            turn = self._turns[0]
            if self._current(turn):
                yield turn
                if turn.todo:
                    return
            else:
                for key in turn.todo:
                    self._dropped(key)
            self._turns.popleft()

    def _current(self, turn: Turn) -> bool:
        return self._epochs.get(turn.layer) == turn.epoch

    def _begin_epoch(self, layer: int) -> int:
        epoch = self._epochs[layer] = self._epochs.get(layer, 0) + 1
        return epoch
