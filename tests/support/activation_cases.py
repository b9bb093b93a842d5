"""Inputs that break activation quantisers, and their definition in numpy, for the interpreter and the GPU alike."""

import numpy as np
import torch

from moe_lab_kernels.rows.arithmetic import ActivationLayout

F32 = np.float32
INT8_LAYOUTS = ("q8_0", "q8_1", "d4", "ds4", "d2s6", "q8_k")
KINDS = ("gauss", "bf16-grid", "huge", "tiny", "halves", "zeros", "sparse", "equal-sizes", "constant-3000", "subnormal")


def case(kind: str, rows: int = 9, kd: int = 768) -> torch.Tensor:
    """fp32 rows of one kind."""
    draw = torch.Generator().manual_seed(3)
    normal = torch.randn(rows, kd, generator=draw)
    if kind == "halves":  # a block's largest value is 127, so every odd half is a tie
        x = torch.randint(-254, 255, (rows, kd), generator=draw) / 2
        x[:, ::32] = 127
        return x
    if kind == "equal-sizes":
        return torch.where(torch.rand(rows, kd, generator=draw) < 0.5, 1.0, -1.0)
    return {
        "gauss": normal,
        "bf16-grid": normal.bfloat16().float(),
        "huge": normal * 3e4,
        "tiny": normal * 1e-6,
        "zeros": torch.zeros(rows, kd),
        "sparse": normal * (torch.rand(rows, kd, generator=draw) < 0.02),
        "constant-3000": torch.full((rows, kd), 3000.0),
        "subnormal": normal * 10.0 ** torch.linspace(-46, -36, rows)[:, None],
    }[kind]


def half_away(v: np.ndarray) -> np.ndarray:
    """Nearest integer, halves away from zero."""
    whole = np.trunc(v)
    return whole + np.sign(v) * (np.abs(v - whole) >= 0.5)


def halves(v: np.ndarray) -> np.ndarray:
    """The sum over the last axis, first half plus second half until one is left."""
    while v.shape[-1] > 1:
        n = v.shape[-1] // 2
        v = v[..., :n] + v[..., n:]
    return v[..., 0]


def fours(v: np.ndarray) -> np.ndarray:
    """Four consecutive values in sequence, then halves."""
    a, b, c, d = np.moveaxis(v.reshape(*v.shape[:-1], -1, 4), -1, 0)
    return halves(((a + b) + c) + d)


def _scale_and_quotient(v: np.ndarray, made: ActivationLayout) -> tuple[np.ndarray, np.ndarray]:
    """d [.., 1] and unrounded codes of blocks on the last axis; blocks of zeros give zeros."""
    top = np.abs(v).max(-1, keepdims=True)
    if made.signed:
        top = -np.take_along_axis(v, np.abs(v).argmax(-1)[..., None], -1)
    zero, one = top == 0, F32(1)
    if made.way == "multiply":
        inverse = F32(127) / top
        d, q = one / inverse, v * inverse
    else:
        d = top / F32(127)
        q = v / d if made.way == "divide" else v * (one / d)
    return np.where(zero, F32(0), d), np.where(zero, F32(0), q)


def emulate(x: torch.Tensor, made: ActivationLayout) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """(codes, scale, total) of finite rows by the definition, fp32 operation by operation; padded as the layout is."""
    x = torch.nn.functional.pad(x.float(), (0, -x.shape[1] % made.unit))
    v = x.numpy().reshape(len(x), -1, made.block)
    with np.errstate(all="ignore"):
        d, q = _scale_and_quotient(v, made)
        q = np.where(np.isfinite(q), q, 0)
        codes = np.clip(np.rint(q) if made.ties_to_even else half_away(q), -127, 127)
        groups = (v if made.adds == "raw" else codes).reshape(len(x), -1, made.sum_group)
        s = fours(groups) if made.in_fours else halves(groups)
        if made.adds == "quantised":
            s = s.astype(F32) * np.repeat(d[..., 0], made.block // made.sum_group, 1)
    codes_t = torch.from_numpy(codes.reshape(x.shape).astype(np.int8))
    scale = torch.from_numpy(d[..., 0].astype(F32)).to(made.scale_storage)
    if made.adds == "none":
        return codes_t, scale, None
    s = torch.from_numpy(np.where(s == 0, 0, s).astype(F32))
    if made.sums_kept < 8:
        s = s.unflatten(1, (-1, 8))[..., : made.sums_kept].flatten(1)
    return codes_t, scale, s.to(made.sum_storage)
