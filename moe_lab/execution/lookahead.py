"""One call's guess about the next layer: made beside the router, read with the plan, handed to the cache last.

Last: the layer's own experts get slots, buffers and readers first; then what was guessed begins in the background,
while the layer computes.
"""

from moe_lab._types import Tensor
from moe_lab.execution.options import Options
from moe_lab.stream.prediction import REASONS, Guess, Successor, as_prefetch, why_not, width_of
from moe_lab.stream.provider import StreamedExperts


class Lookahead:
    """`predicted`: the next layer's experts, likeliest first; `prefetched`: how many of them were absent; `reason`: why
    there was no prediction though one was asked for."""

    def __init__(self, experts: object, successor: Successor | None, options: Options) -> None:
        self._experts, self._successor = experts, successor
        self._prefetch = as_prefetch(options.prefetch)
        self._guess: Guess | None = None
        self.predicted: tuple[int, ...] = ()
        self.prefetched = 0
        self.reason: str | None = None

    def guess(self, x: Tensor) -> None:
        """Queue the prediction from this layer's input x [T, D]."""
        if self._prefetch == 0 or not len(x):
            return
        streamed = isinstance(self._experts, StreamedExperts)
        code = why_not(self._successor, self._prefetch, len(x), streamed)
        if code is None:
            assert self._successor is not None
            self._guess = Guess(x, self._successor, width_of(self._prefetch, self._successor.number))
            return
        self.reason = REASONS[code]
        if isinstance(self._experts, StreamedExperts):
            self._experts.cache.no_prediction(self._experts.layer, code)

    def begin(self) -> None:
        """Begin to read what was guessed; a second call does nothing."""
        guess, self._guess = self._guess, None
        if guess is None:
            return
        assert isinstance(self._experts, StreamedExperts)
        assert self._successor is not None
        self.predicted = tuple(guess.read())
        self.prefetched = self._experts.prefetch(self.predicted, self._successor.number)


__all__ = ["Lookahead"]
