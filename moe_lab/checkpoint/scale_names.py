"""Which tensors belong together: a weight's codes and the scales that stand beside them under names of their own.

One row a layout. Tools disagree on names and on what a name means (one stores a global scale, another its inverse), so
codes whose neighbours match no row are refused when they are read, never decoded by the nearest guess.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from moe_lab.checkpoint.scale_shapes import affine_shape, value_shape
from moe_lab.checkpoint.tensor_info import ScaledInfo, TensorInfo
from moe_lab.errors import CheckpointError

_E4M3, _FP4_BYTES, _E8M0 = frozenset({"F8_E4M3"}), frozenset({"U8", "I8"}), frozenset({"F8_E8M0", "U8"})
_FLOATS = frozenset({"F32", "BF16", "F16"})


@dataclass(frozen=True, slots=True)
class ScaleRule:
    """Suffixes after a common stem, and the dtypes that may stand there. `weight` makes the weight's own name.

    `shared_names`: layouts unknown here use the same names, so scales of another shape are no broken file.
    """

    format: str
    codes: str
    code_dtypes: frozenset[str]
    scales: str
    scale_dtypes: frozenset[str]
    global_scale: str | None = None
    biases: str | None = None
    weight: str = ""
    shared_names: bool = False


RULES = (
    # DeepSeek-V3 and its likes: multiplied, in spite of the name.
    ScaleRule("fp8_block", "", _E4M3, "_scale_inv", _FLOATS),
    # Other tools give a scale a row under these names, which is not read here.
    ScaleRule("fp8_block", "", _E4M3, "_scale", _FLOATS, shared_names=True),
    # DeepSeek-V4: powers of two as scales, fp4 experts in signed bytes.
    ScaleRule("fp8_block", ".weight", _E4M3, ".scale", frozenset({"F8_E8M0", "F32"}), weight=".weight"),
    ScaleRule("mxfp4_oss", ".weight", _FP4_BYTES, ".scale", frozenset({"F8_E8M0"}), weight=".weight"),
    ScaleRule("mxfp8", "", _E4M3, "_scale", _E8M0),
    ScaleRule("nvfp4_modelopt", "", _FP4_BYTES, "_scale", _E4M3, global_scale="_scale_2"),
    ScaleRule("nvfp4_ct", "_packed", _FP4_BYTES, "_scale", _E4M3, global_scale="_global_scale"),
    ScaleRule("mxfp4_oss", "_packed", _FP4_BYTES, "_scale", _E8M0),
    ScaleRule("mxfp4_oss", "_blocks", _FP4_BYTES, "_scales", _E8M0),
    # Bits and group size stand in config.json alone: int4_g64 and int8_g32 have the same shapes.
    ScaleRule(
        "affine", ".weight", frozenset({"U32"}), ".scales", _FLOATS, biases=".biases", weight=".weight"
    ),
)  # fmt: skip

_CODES = tuple(dict.fromkeys(rule.codes for rule in RULES))
_SCALE_NAME = re.compile(r"(.+?)(_(?:global_)?scales?(?:_[a-z0-9]+)*|_zero_point|\.scales?)", re.DOTALL)
# Types that hold codes rather than values when scales stand beside them.
_CODED = frozenset({"U8", "I8", "I32", "U32", "F4"})


@dataclass(frozen=True, slots=True)
class Pairing:
    """`scaled` by the weight's name; `by_codes`: the same by the name of the codes where it differs; `refused`: codes
    with neighbours of an unknown kind -> why.
    """

    scaled: Mapping[str, ScaledInfo]
    by_codes: Mapping[str, ScaledInfo]
    refused: Mapping[str, str]

    def find(self, name: str) -> ScaledInfo | None:
        """The weight of that name, or whose codes have that name."""
        return self.scaled.get(name) or self.by_codes.get(name)


def pair_scales(tensors: Mapping[str, TensorInfo], config: Mapping[str, Any]) -> Pairing:
    """Find every weight with separate scales. CheckpointError "scale shape" where shapes cannot belong together."""
    scaled: dict[str, ScaledInfo] = {}
    by_codes: dict[str, ScaledInfo] = {}
    refused: dict[str, str] = {}
    for stem, suffixes in _neighbours(tensors).items():
        for codes in _CODES:
            data = tensors.get(stem + codes)
            if data is None or not _is_coded(data):
                continue
            weight = _pair(stem, data, suffixes, tensors, config, refused)
            if weight is None:
                continue
            # A plain tensor may have the weight's name already: then the weight goes by the name of its codes.
            name = data.name if weight.name in tensors else weight.name
            scaled[name] = weight
            if name != data.name:
                by_codes[data.name] = weight
    return Pairing(scaled, by_codes, refused)


def _neighbours(tensors: Mapping[str, TensorInfo]) -> dict[str, set[str]]:
    """Stem -> suffixes of the scale-like tensors that follow it."""
    found: dict[str, set[str]] = {}
    for name in tensors:
        if ("scale" in name or "zero_point" in name) and (match := _SCALE_NAME.fullmatch(name)):
            found.setdefault(match[1], set()).add(match[2])
    return found


def _is_coded(data: TensorInfo) -> bool:
    return data.dtype in _CODED or data.dtype.startswith(("F8_", "F6_"))


def _pair(
    stem: str,
    data: TensorInfo,
    suffixes: set[str],
    tensors: Mapping[str, TensorInfo],
    config: Mapping[str, Any],
    refused: dict[str, str],
) -> ScaledInfo | None:
    rule = next((r for r in RULES if stem + r.codes == data.name and _fits(r, stem, data, suffixes, tensors)), None)
    if rule is None:
        beside = ", ".join(f"{stem + s!r} ({tensors[stem + s].dtype})" for s in sorted(suffixes))
        refused[data.name] = (
            f"its codes ({data.dtype}) stand beside {beside}, a pair of names and types that no known layout has. "
            f"Known: {', '.join(sorted({known(r) for r in RULES}))}."
        )
        return None
    scales, biases = tensors[stem + rule.scales], tensors[stem + rule.biases] if rule.biases else None
    global_scale = tensors[stem + rule.global_scale] if rule.global_scale else None
    if biases is not None:
        told = affine_shape(stem, data, scales, biases, config)
        if isinstance(told, str):
            refused[data.name] = told
            return None
        format, shape = told
    else:
        try:
            format, shape = rule.format, value_shape(rule.format, data, scales, global_scale)
        except CheckpointError as error:
            if not rule.shared_names:
                raise
            refused[data.name] = f"its scales {scales.name!r} are not those of a known layout: {error}"
            return None
    return ScaledInfo(stem + rule.weight, format, shape, data, scales, global_scale, biases)


def _fits(rule: ScaleRule, stem: str, data: TensorInfo, suffixes: set[str], tensors: Mapping[str, TensorInfo]) -> bool:
    wanted = {s for s in (rule.scales, rule.global_scale) if s}
    return (
        data.dtype in rule.code_dtypes
        and suffixes == wanted
        and tensors[stem + rule.scales].dtype in rule.scale_dtypes
        and (rule.global_scale is None or tensors[stem + rule.global_scale].dtype in _FLOATS)
        and (rule.biases is None or stem + rule.biases in tensors)
    )


def known(rule: ScaleRule) -> str:
    """A row as a message names it: "nvfp4_ct (X_packed, X_scale, X_global_scale)"."""
    names = [f"X{s}" for s in (rule.codes, rule.scales, rule.global_scale, rule.biases) if s is not None]
    return f"{rule.format} ({', '.join(names)})"
