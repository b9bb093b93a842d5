"""A tensor that carries a weight format: its bytes, its shape, and what else belongs to it."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from numbers import Integral

import torch

from moe_lab._types import Tensor
from moe_lab.card import byte_size, card
from moe_lab.checks import came, wants, wants_tensor, wants_whole, wants_wholes
from moe_lab.errors import LabError, LabTypeError
from moe_lab.formats.base import IntegerForm, WeightFormat, expect_rows
from moe_lab.formats.scaled import Flaw, Parts, ScaledFormat, first_true
from moe_lab.system.devices import resolve_device


@dataclass(frozen=True, slots=True, eq=False)
class QuantTensor:
    """A tensor kept as its format's raw bytes.

    `data` uint8 [.., N, row_bytes]; `shape` is the logical shape [.., N, Kd] in numpy order. Formats with scales in
    tensors of their own (`ScaledFormat`) have `scales`, and `global_scale` [..] or `biases` where they need them; block
    formats have None. Indexing slices leading axes (never the row), and everything moves together.
    """

    data: Tensor
    format: str
    shape: tuple[int, ...]
    codec: WeightFormat
    scales: Tensor | None = None
    global_scale: Tensor | None = None
    biases: Tensor | None = None

    def __post_init__(self) -> None:
        if isinstance(self.codec, ScaledFormat):
            missing = [name for name in self.codec.parts_needed if getattr(self, name) is None]
            if missing:
                raise LabError(
                    f"{self.format} codes have no value without {', '.join(missing)}. Where only codes are at hand, as "
                    "in the slots of an expert cache, use a block format or keep the experts resident."
                )

    @classmethod
    def from_bytes(cls, data: Tensor, format: "str | WeightFormat", shape: tuple[int, ...]) -> "QuantTensor":
        """Wrap raw blocks of logical `shape` [.., N, Kd]. LabError when the byte count disagrees with the shape."""
        codec, shape = _named(format), _checked_shape(shape)
        wants_tensor(f"raw {codec.name} data", data)
        if isinstance(codec, ScaledFormat):
            raise LabError(f"{codec.name} data comes with {', '.join(codec.parts_needed)}: use QuantTensor.from_parts.")
        if data.dtype != torch.uint8:
            raise LabTypeError(f"raw {codec.name} data is uint8, got {data.dtype}.")
        wanted = (*shape[:-1], codec.row_bytes(shape[-1]))
        if data.numel() != torch.Size(wanted).numel():
            raise LabError(
                f"{codec.name} of shape {shape} takes {torch.Size(wanted).numel()} bytes, got {data.numel()}."
            )
        return cls(data.reshape(wanted), codec.name, shape, codec)

    @classmethod
    def from_parts(
        cls,
        data: Tensor,
        scales: Tensor | None,
        global_scale: Tensor | None,
        format: "str | WeightFormat",
        shape: tuple[int, ...],
        *,
        biases: Tensor | None = None,
    ) -> "QuantTensor":
        """Wrap codes, scales and what else a file holds for a weight of logical `shape` [.., N, Kd], in the dtypes it
        holds them in. LabError for shapes that disagree or parts too many or too few, LabTypeError for a dtype that is
        read otherwise (float8_e4m3fnuz)."""
        codec, shape = _named(format), _checked_shape(shape)
        for name, given in {"data": data, "scales": scales, "global_scale": global_scale, "biases": biases}.items():
            if given is not None or name == "data":
                wants_tensor(name, given)
        if not isinstance(codec, ScaledFormat):
            if scales is not None or global_scale is not None or biases is not None:
                raise LabError(f"{codec.name} blocks hold their scales; none come beside them.")
            return cls.from_bytes(data, codec, shape)
        return cls._of(codec, codec.accept(Parts(data, scales, global_scale, biases), shape), shape)  # type: ignore[arg-type]

    @classmethod
    def encode(cls, w: Tensor, codec: WeightFormat) -> "QuantTensor":
        """Quantise w [.., N, Kd]; the format's own rules, no check of the values."""
        row_bytes = codec.row_bytes(w.shape[-1])
        if isinstance(codec, ScaledFormat):
            codec.scale_shape(tuple(w.shape))
            return cls._of(codec, codec.encode(w), tuple(w.shape))
        data = expect_rows(codec, codec.quantize(w.float()), (*w.shape[:-1], row_bytes), torch.uint8, "quantize")
        return cls(data, codec.name, tuple(w.shape), codec)

    @classmethod
    def stack(cls, tensors: "Sequence[QuantTensor]") -> "QuantTensor":
        """One tensor [n, ..] of n of the same format and shape, parts and all. LabError when they differ."""
        for i, q in enumerate(tensors):
            wants(f"tensors[{i}]", q, QuantTensor, "a QuantTensor")
        kinds = {(q.format, q.shape) for q in tensors}
        if len(kinds) != 1:
            found = ", ".join(f"{format} {list(shape)}" for format, shape in sorted(kinds)) or "none"
            raise LabError(f"tensors of one format and shape can be stacked; got {found}.")
        first = tensors[0]
        parts = {name: torch.stack([q.tensors[name] for q in tensors]) for name in first.tensors}
        shape = (len(tensors), *first.shape)
        return cls(shape=shape, format=first.format, codec=first.codec, **parts)

    @classmethod
    def _of(cls, codec: "ScaledFormat", parts: Parts, shape: tuple[int, ...]) -> "QuantTensor":
        return cls(parts.data, codec.name, shape, codec, parts.scales, parts.global_scale, parts.biases)

    @property
    def tensors(self) -> dict[str, Tensor]:
        """What the tensor is made of, by name: data, and scales, global_scale, biases where there are any."""
        named = {"data": self.data, "scales": self.scales, "global_scale": self.global_scale, "biases": self.biases}
        return {name: t for name, t in named.items() if t is not None}

    @property
    def layout(self) -> str:
        """Raw: as files have it. `moe_lab.formats.layouts` has the others."""
        return "raw"

    def to_raw(self) -> "QuantTensor":
        """Itself, as weights of every layout answer."""
        return self

    @property
    def nbytes(self) -> int:
        """Bytes of everything the tensor is made of."""
        return sum(t.numel() * t.element_size() for t in self.tensors.values())

    @property
    def device(self) -> torch.device:
        """Where the bytes live."""
        return self.data.device

    def dequantize(self) -> Tensor:
        """fp32 values of `.shape`."""
        if isinstance(self.codec, ScaledFormat):
            return self.codec.decode(self._parts(), self.shape[-1])
        return expect_rows(self.codec, self.codec.dequantize(self.data), self.shape, torch.float32, "dequantize")

    def integer_form(self) -> IntegerForm | None:
        """The integer view that the int8 arms use, or None when the format has none."""
        return self.codec.integer_form(self.data)

    def first_flaw(self) -> Flaw | None:
        """The first NaN, infinite or wrongly negative scale or code, or None; for block formats the first value that is
        not finite. Reads every scale (block formats: decodes everything)."""
        if isinstance(self.codec, ScaledFormat):
            return self.codec.first_flaw(self._parts(), self.shape[-1])
        values = self.dequantize()
        at = first_true(~values.isfinite())
        if at is None:
            return None
        index = tuple(int(i) for i in torch.unravel_index(torch.tensor(at), values.shape))
        return Flaw("data", index, at // self.codec.block, float(values.reshape(-1)[at]))

    def expect_finite(self, name: str) -> None:
        """LabError that names the tensor and its first flaw."""
        flaw = self.first_flaw()
        if flaw is not None:
            raise LabError(f"{name} ({self.format}, shape {list(self.shape)}): {flaw}; wanted finite weights.")

    def to(self, device: "torch.device | str") -> "QuantTensor":
        """The same bytes on `device`. LabError for one that this machine has not."""
        where = resolve_device(device)
        return self._each(lambda t: t.to(where), self.shape)

    def stacked(self) -> "QuantTensor":
        """The same with a leading axis of length 1."""
        return self._each(lambda t: t.unsqueeze(0), (1, *self.shape))

    def rows(self, which: slice) -> "QuantTensor":
        """Some of the N rows: one half of a fused tensor, or every second row of an interleaved one. LabError where a
        scale belongs to several rows and the slice would part them."""
        wants("the rows", which, slice, "a slice")
        start, stop, step = which.indices(self.shape[-2])
        shared = self.codec.layout.rows if isinstance(self.codec, ScaledFormat) else 1
        if shared > 1 and (step != 1 or start % shared or (stop % shared and stop != self.shape[-2])):
            raise LabError(
                f"{self.format} shares a scale among {shared} rows, so rows {start}:{stop}:{step} of {self.shape[-2]} "
                f"cannot be taken alone; wanted multiples of {shared} and step 1."
            )
        shape = (*self.shape[:-2], len(range(start, stop, step)), self.shape[-1])
        blocks = slice(start // shared, -(-stop // shared), step)

        def cut(name: str, t: Tensor) -> Tensor:
            return t if name == "global_scale" else t[..., which if name == "data" else blocks, :]

        return QuantTensor(shape=shape, format=self.format, codec=self.codec,
                           **{name: cut(name, t) for name, t in self.tensors.items()})  # fmt: skip

    def __getitem__(self, index: int) -> "QuantTensor":
        """The `index`-th of the first axis, counted from the end where it is negative. LabError for a matrix, for an
        index beyond the axis; LabTypeError for slices and lists, which `data` and the scales would take differently."""
        if len(self.shape) < 3:
            raise LabError(f"indexing slices leading axes, but this tensor of shape {self.shape} is a single matrix.")
        if isinstance(index, bool) or not isinstance(index, Integral):
            raise LabTypeError(
                f"a QuantTensor is indexed by one whole number at a time, got {came(index)}. Several at once: "
                "QuantTensor.stack([q[i] for i in ...])."
            )
        n = self.shape[0]
        wants_whole(f"the index into an axis of {n}", index, -n, n - 1)
        return self._each(lambda t: t[int(index)], self.shape[1:])

    def __iter__(self) -> "Iterator[QuantTensor]":
        return (self[i] for i in range(len(self)))

    def __len__(self) -> int:
        return self.shape[0]

    def __repr__(self) -> str:
        bits = 8 * self.nbytes / max(1, torch.Size(self.shape).numel())
        return f"QuantTensor({self.format}, shape={self.shape}, {bits:.4g} bits a weight, device={self.device})"

    def _repr_html_(self) -> str:
        parts = ", ".join(f"{name} {list(t.shape)} {t.dtype}" for name, t in self.tensors.items())
        facts = {"format": self.format, "shape": list(self.shape), "size": byte_size(self.nbytes), "made of": parts}
        return card("QuantTensor", {**facts, "device": self.device})

    def _each(self, change: Callable[[Tensor], Tensor], shape: tuple[int, ...]) -> "QuantTensor":
        made = {name: change(t) for name, t in self.tensors.items()}
        return QuantTensor(shape=shape, format=self.format, codec=self.codec, **made)

    def _parts(self) -> Parts:
        assert self.scales is not None  # __post_init__ has seen to it
        return Parts(self.data, self.scales, self.global_scale, self.biases)


def _named(format: "str | WeightFormat") -> WeightFormat:
    from moe_lab.formats import get_format

    return get_format(format)


def _checked_shape(shape: tuple[int, ...]) -> tuple[int, ...]:
    shape = tuple(wants_wholes("the shape", shape))
    if not shape or min(shape) < 0:
        raise LabError(f"a quantised tensor needs at least one axis and no negative length, got shape {shape}.")
    return shape
