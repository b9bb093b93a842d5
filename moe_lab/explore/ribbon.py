"""The token ribbon: text whose pieces carry the colour and the number of the expert that weighs most, a row a layer.

Plain HTML tables without identifiers, scripts or anything loaded: a notebook and an exported page show the same.
Colour is the second channel: 32 hues cannot be told apart, so the number stands in every cell and the title (shown on
hover, read by screen readers) names all picks with their weights.
"""

import html
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from moe_lab.analysis.picks import wants_trace
from moe_lab.checks import came, wants_whole, wants_wholes
from moe_lab.errors import LabError, LabTypeError, MissingExtra
from moe_lab.trace import NO_PICK, RoutingTrace

MOST_CELLS = 6000  # 250 bytes each: 1.5 MB of page
GOLDEN_ANGLE = 137.508  # successive experts get hues far apart, whatever E is
_SEEN = {"\n": "↵", "\t": "⇥", "\r": "␍", "": "∅"}

Text = str | Path | Sequence[str] | Callable[[int], str]


@dataclass(frozen=True, slots=True)
class Ribbon:
    """A drawn ribbon; a notebook shows it. `html`: a self-contained fragment."""

    html: str
    about: str

    def to_html(self) -> str:
        """The fragment, for a page of your own."""
        return self.html

    def _repr_html_(self) -> str:
        return self.html

    def __repr__(self) -> str:
        return self.about


def ribbon(
    trace: RoutingTrace,
    text: Text,
    *,
    start: int = 0,
    stop: int | None = None,
    layers: Iterable[int] | None = None,
    per_line: int = 14,
) -> Ribbon:
    """Tokens start..stop - 1 as text, each cell coloured by the expert with the largest weight and holding its number.

    `text`: a tokenizer.json, the pieces of these tokens, or a function from token id to piece (the first and last need
    a trace with token ids). One row a layer, `per_line` tokens a table. A token without picks is white and holds "–".
    LabError: a range outside the trace, missing token ids, pieces that do not match, more than `MOST_CELLS` cells.
    """
    wants_trace("lab.explore.ribbon", trace)
    start = wants_whole("start", start)
    stop = min(trace.tokens, start + 64) if stop is None else wants_whole("stop", stop)
    if not 0 <= start < stop <= trace.tokens:
        raise LabError(f"tokens {start}..{stop} of a trace of {trace.tokens}: wanted 0 <= start < stop <= T.")
    chosen = trace.layers if layers is None else tuple(wants_wholes("layers", layers))
    picked = {n: (trace.layer(n)[start:stop], trace.weights[start:stop, trace.layers.index(n)]) for n in chosen}
    if (cells := (stop - start) * len(chosen)) > MOST_CELLS:
        raise LabError(f"a ribbon of {cells} cells; at most {MOST_CELLS}. Take fewer tokens or layers.")
    if wants_whole("per_line", per_line) < 1:
        raise LabError(f"per_line={per_line}; wanted at least 1 token a line.")
    pieces = _pieces(trace, text, start, stop)
    about = f"Tokens {start} to {stop - 1}, layers {', '.join(map(str, chosen))}: text by expert of largest weight"
    lines = [
        _line(picked, pieces, start, low, min(low + per_line, stop - start)) for low in range(0, stop - start, per_line)
    ]
    empty = f" {_SEEN['']} is a token without text, such as an id outside the vocabulary." if "" in pieces else ""
    caption = f'<p style="margin:0 0 4px">{html.escape(about)}; hover a cell for all picks.{empty}</p>'
    return Ribbon(f'<div class="moe-ribbon" style="overflow-x:auto">{caption}{"".join(lines)}</div>', about)


def _line(picked: dict[int, tuple[np.ndarray, np.ndarray]], pieces: list[str], start: int, low: int, high: int) -> str:
    rows = "".join(
        f'<tr><th scope="row" style="{_HEAD}">layer {number}</th>'
        + "".join(_cell(number, start + t, pieces[t], ids[t], weights[t]) for t in range(low, high))
        + "</tr>"
        for number, (ids, weights) in picked.items()
    )
    return f'<table style="border-collapse:collapse;margin:0 0 10px;width:auto"><tbody>{rows}</tbody></table>'


_HEAD = "text-align:left;font-weight:normal;padding:0 8px 0 0;white-space:nowrap;background:transparent"
_CELL = "border:1px solid #fff;padding:1px 4px;text-align:left;color:#000;white-space:pre;font-family:monospace"


def _cell(layer: int, token: int, piece: str, ids: np.ndarray, weights: np.ndarray) -> str:
    order = [k for k in np.argsort(-weights.astype(np.float64), kind="stable") if ids[k] != NO_PICK]
    named = [f"expert {ids[k]} ({float(weights[k]):.2f})" for k in order]
    title = f"layer {layer}, token {token} {piece!r}: {', '.join(named) or 'no pick'}"
    top = str(ids[order[0]]) if order else "–"
    colour = colour_of(int(ids[order[0]])) if order else "#fff"
    return (
        f'<td title="{html.escape(title, quote=True)}" style="{_CELL};background:{colour}">'
        f'{html.escape(_visible(piece))}<sub style="font-size:70%;margin-left:2px">{top}</sub></td>'
    )


def colour_of(expert: int) -> str:
    """A light colour on which black text reads (contrast above 9); the same expert always has the same."""
    return f"hsl({expert * GOLDEN_ANGLE % 360:.0f},70%,80%)"


def _visible(piece: str) -> str:
    shown = "".join(_SEEN.get(c, c) for c in piece) if piece else _SEEN[""]
    return shown if shown.strip(" ") else "·" * len(shown)


def _pieces(trace: RoutingTrace, text: Text, start: int, stop: int) -> list[str]:
    if not callable(text) and not isinstance(text, str | Path):
        if not isinstance(text, Sequence):
            raise LabTypeError(
                f"text is {came(text)}; wanted a tokenizer.json, a piece of text for each token, or a function from "
                "token id to piece."
            )
        if len(text) != stop - start:
            raise LabError(f"{len(text)} pieces of text for {stop - start} tokens.")
        return list(text)
    if trace.token_ids is None:
        raise LabError("the trace holds no token ids; pass the tokens' text itself, one piece a token.")
    piece = text if callable(text) else piece_of(text)
    return [piece(int(i)) for i in trace.token_ids[start:stop]]


def piece_of(tokenizer_file: str | Path) -> Callable[[int], str]:
    """A function from token id to text, from a tokenizer.json. Part of a character comes as the replacement sign."""
    try:
        from tokenizers import Tokenizer
    except ImportError as error:
        raise MissingExtra("tokenizers", "hf", "Turning token ids into text") from error
    if not Path(tokenizer_file).is_file():
        raise LabError(f"{tokenizer_file} is no file; wanted a tokenizer.json.")
    try:
        tokenizer = Tokenizer.from_file(str(tokenizer_file))
    except Exception as error:  # the library raises a bare Exception for what it cannot parse
        raise LabError(f"{tokenizer_file} is not a readable tokenizer.json: {' '.join(str(error).split())}") from error
    return lambda token: tokenizer.decode([token], skip_special_tokens=False)
