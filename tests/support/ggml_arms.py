"""ggml's products in numpy, from the formats' description: the truth for `lab.matmul`, sharing no code with the lab.

Weights are unpacked by closed-form index maps, activations quantised and summed by ggml's trees, dots are integers, and
every fp32 step is rounded; whole outputs [T, N] of the decode arm, the prefill arm and (k-quants) the CPU arm.
"""

from typing import NamedTuple

import numpy as np

F32, F16, E = np.float32, np.float16, np.arange(256)
HALF, QUARTER, LANE = E // 128, E % 128 // 32, E % 32
DOUBLED_E2M1 = np.array([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], np.int32)
SIZES = {"q2_k": (256, 84), "q3_k": (256, 110), "q4_k": (256, 144), "q5_k": (256, 176), "q6_k": (256, 210),
         "q8_0": (32, 34), "q4_0": (32, 18), "mxfp4": (32, 17), "nvfp4": (64, 36)}  # fmt: skip


class Weights(NamedTuple):
    """codes int [N, blocks, V], d and dmin fp32 [N, blocks, 1] (nvfp4: d a scale for 16), scales and mins int."""

    codes: np.ndarray
    d: np.ndarray
    scales: np.ndarray | None = None
    dmin: np.ndarray | None = None
    mins: np.ndarray | None = None


def _half(b: np.ndarray, at: int) -> np.ndarray:
    return np.ascontiguousarray(b[..., at : at + 2]).view(F16).astype(F32)


def _six_bit_pairs(s: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    i = np.arange(8)
    near, far = i % 4, i % 4
    scale = np.where(i < 4, s[..., near] & 63, s[..., 8 + far] & 15 | s[..., near] >> 6 << 4)
    low = np.where(i < 4, s[..., 4 + near] & 63, s[..., 8 + far] >> 4 | s[..., 4 + near] >> 6 << 4)
    return scale.astype(np.int32), low.astype(np.int32)


def unpack(raw: np.ndarray, format: str) -> Weights:
    """uint8 [N, row_bytes] taken apart."""
    b = raw.reshape(len(raw), -1, SIZES[format][1]).astype(np.int32)
    bytes_ = raw.reshape(b.shape)
    i, e = np.arange(32), np.arange(64)
    if format == "q2_k":
        q, s = b[..., 16 + 32 * HALF + LANE] >> 2 * QUARTER & 3, b[..., :16]
        return Weights(q, _half(bytes_, 80), s & 15, _half(bytes_, 82), s >> 4)
    if format == "q3_k":
        q = b[..., 32 + 32 * HALF + LANE] >> 2 * QUARTER & 3 | (b[..., LANE] >> E // 32 & 1) << 2
        s, k = np.arange(16), b[..., 96:108]
        sc = k[..., s % 8] >> 4 * (s // 8) & 15 | (k[..., 8 + s % 4] >> 2 * (s // 4) & 3) << 4
        return Weights(q - 4, _half(bytes_, 108), sc - 32)
    if format in ("q4_k", "q5_k"):
        q = b[..., (16 if format == "q4_k" else 48) + 32 * (E // 64) + LANE] >> 4 * (E % 64 // 32) & 15
        if format == "q5_k":
            q = q | (b[..., 16 + LANE] >> E // 32 & 1) << 4
        sc, m = _six_bit_pairs(b[..., 4:16])
        return Weights(q, _half(bytes_, 0), sc, _half(bytes_, 2), m)
    if format == "q6_k":
        q = b[..., 64 * HALF + 32 * (QUARTER % 2) + LANE] >> 4 * (QUARTER // 2) & 15
        q = q | (b[..., 128 + 32 * HALF + LANE] >> 2 * QUARTER & 3) << 4
        return Weights(q - 32, _half(bytes_, 208), np.ascontiguousarray(bytes_[..., 192:208]).view(np.int8).astype(int))
    if format == "q8_0":
        return Weights(np.ascontiguousarray(bytes_[..., 2:]).view(np.int8).astype(int), _half(bytes_, 0))
    if format == "q4_0":
        return Weights((b[..., 2 + i % 16] >> 4 * (i // 16) & 15) - 8, _half(bytes_, 0))
    if format == "mxfp4":
        q = DOUBLED_E2M1[b[..., 1 + i % 16] >> 4 * (i // 16) & 15]
        return Weights(q, np.ldexp(F32(1), b[..., :1] - 128).astype(F32))
    q = DOUBLED_E2M1[b[..., 4 + 8 * (e // 16) + e % 8] >> 4 * (e % 16 // 8) & 15]
    exponent, mantissa = b[..., :4] >> 3 & 15, b[..., :4] & 7
    value = np.where(exponent == 0, np.ldexp(mantissa, -9), np.ldexp(1 + mantissa / 8, exponent - 7))
    return Weights(q, (value / 2).astype(F32))


def away(v: np.ndarray) -> np.ndarray:
    """Nearest integers, halves away from zero."""
    whole = np.trunc(v)
    return whole + np.sign(v) * (np.abs(v - whole) >= 0.5)


def h(v: np.ndarray) -> np.ndarray:
    """Through fp16."""
    with np.errstate(over="ignore"):
        return v.astype(F16).astype(F32)


def tree(v: np.ndarray) -> np.ndarray:
    """First half plus second half until one is left."""
    while v.shape[-1] > 1:
        v = (v[..., : v.shape[-1] // 2] + v[..., v.shape[-1] // 2 :]).astype(F32)
    return v[..., 0]


def fours(v: np.ndarray) -> np.ndarray:
    """Four neighbours in sequence, then `tree`."""
    v = v.reshape(*v.shape[:-1], -1, 4)
    return tree((((v[..., 0] + v[..., 1]).astype(F32) + v[..., 2]).astype(F32) + v[..., 3]).astype(F32))


def decode_rows(x: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """q8_1: codes [T, blocks, 32], fp16-rounded scales and raw sums [T, blocks]."""
    v = x.reshape(len(x), -1, 32).astype(F32)
    d = (np.abs(v).max(-1) / F32(127)).astype(F32)
    with np.errstate(all="ignore"):
        q = np.where(d[..., None] == 0, 0, away(np.nan_to_num(v / d[..., None])))
    return q.astype(int), h(d), h(tree(v))


def prefill_rows(x: np.ndarray, block: int) -> tuple[np.ndarray, np.ndarray]:
    """Codes [T, Kd] and unrounded scales [T, blocks] of ggml's MMQ quantiser."""
    v = x.reshape(len(x), -1, block).astype(F32)
    amax = np.abs(v).max(-1)
    with np.errstate(all="ignore"):
        inv = (F32(127) / amax).astype(F32)
        q = np.where(amax[..., None] == 0, 0, away(np.nan_to_num(v * inv[..., None])))
        d = np.where(amax == 0, 0, F32(1) / inv).astype(F32)
    return q.astype(int).reshape(len(x), -1), d


def cpu_rows(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """q8_K: codes [T, Kd], signed scales [T, blocks]."""
    v = x.reshape(len(x), -1, 256).astype(F32)
    top = np.take_along_axis(v, np.abs(v).argmax(-1)[..., None], -1)
    with np.errstate(all="ignore"):
        inv = (F32(-127) / top).astype(F32)
        q = np.where(top == 0, 0, np.minimum(127, np.rint(np.nan_to_num(inv * v))))
        d = np.where(top == 0, 0, F32(1) / inv).astype(F32)
    return q.astype(int).reshape(len(x), -1), d[..., 0]


def _dots(codes: np.ndarray, w: np.ndarray, group: int) -> np.ndarray:
    """Integers [groups, T, N]."""
    a = codes.reshape(len(codes), -1, group).transpose(1, 0, 2).astype(np.float64)
    return a @ w.reshape(len(w), -1, group).transpose(1, 2, 0).astype(np.float64)


def _spread(per_row: np.ndarray, groups: int) -> np.ndarray:
    """[groups, T, 1] of [T, fewer]."""
    return np.repeat(per_row, groups // per_row.shape[1], 1).T[..., None]


def _of(w: np.ndarray, groups: int) -> np.ndarray:
    """[groups, 1, N] of [N, blocks, per block]."""
    flat = w.reshape(len(w), -1)
    return np.repeat(flat, groups // flat.shape[1], 1).T[:, None]


def _sum(terms: np.ndarray) -> np.ndarray:
    total = np.zeros(terms.shape[1:], F32)
    for term in terms:
        total = (total + term.astype(F32)).astype(F32)
    return total


def decode_arm(raw: np.ndarray, x: np.ndarray, format: str) -> np.ndarray:
    """MMVQ: fp32 [T, N]."""
    w, (codes, d8, s) = unpack(raw, format), decode_rows(x)
    codes = codes.reshape(len(x), -1)
    if format == "q4_0":  # unsigned nibbles; the 8 comes back through the raw sums
        idot = _dots(codes, w.codes + 8, 32).astype(F32)
        return _sum(_of(w.d, len(idot)) * (_spread(d8, len(idot)) * idot - F32(8) * _spread(s, len(idot))))
    idot = _dots(codes, w.codes, 16)
    g = len(idot)
    sc = 1 if w.scales is None else _of(w.scales, g)
    main = _of(w.d, g) * (_spread(d8, g) * (idot * sc).astype(F32)).astype(F32)
    if w.mins is None:
        return _sum(main)
    isum = codes.reshape(len(x), -1, 16).sum(-1).T[..., None]
    assert w.dmin is not None
    return _sum(main - _of(w.dmin, g) * (_spread(d8, g) * (isum * _of(w.mins, g)).astype(F32)).astype(F32))


def prefill_arm(raw: np.ndarray, x: np.ndarray, format: str) -> np.ndarray:
    """MMQ on tensor cores: fp32 [T, N]."""
    w = unpack(raw, format)
    codes, d = prefill_rows(x, 64 if format == "q2_k" else 32)
    if format in ("q8_0", "q4_0", "mxfp4"):
        idot = _dots(codes, w.codes, 32).astype(F32)
        dy = h(d) if format == "q4_0" else d
        return _sum(_of(w.d, len(idot)) * _spread(dy, len(idot)) * idot)
    idot = _dots(codes, w.codes, 16)
    g = len(idot)
    if format == "nvfp4":
        return _sum(_of(w.d, g) * _spread(d, g) * idot.astype(F32))
    assert w.scales is not None
    if format == "q3_k":
        return _sum(_spread(d, g) * (idot.astype(F32) * _of(w.d * w.scales.astype(F32), g)))
    if format == "q6_k":
        pairs = (idot * _of(w.scales, g)).reshape(g // 2, 2, *idot.shape[1:]).sum(1).astype(F32)
        return _sum(_of(w.d, g // 2) * (_spread(d, g // 2) * pairs))
    assert w.dmin is not None
    assert w.mins is not None
    a, low = h(w.d * w.scales.astype(F32)), h(w.dmin * w.mins.astype(F32))
    if format in ("q4_k", "q5_k"):
        wide = idot.reshape(g // 2, 2, *idot.shape[1:]).sum(1).astype(F32)
        s = h(fours(x.reshape(len(x), -1, 32).astype(F32)))
        return _sum(_of(a, g // 2) * _spread(h(d), g // 2) * wide - _of(low, g // 2) * _spread(s, g // 2))
    s = _spread(h(fours(x.reshape(len(x), -1, 16).astype(F32))), g)
    isum = codes.reshape(len(x), -1, 16).sum(-1).T[..., None].astype(F32)
    dy, kept = _spread(h(d), g), (np.arange(g) % 8 < 6)[:, None, None]
    with np.errstate(invalid="ignore"):
        return _sum(dy * _of(a, g) * idot.astype(F32) - np.where(kept, _of(low, g) * s, dy * _of(low, g) * isum))


def cpu_arm(raw: np.ndarray, x: np.ndarray, format: str) -> np.ndarray:
    """k-quants against q8_K: fp32 [T, N]."""
    w, (codes, d8) = unpack(raw, format), cpu_rows(x)
    idot = _dots(codes, w.codes, 16)
    assert w.scales is not None
    whole = (idot * _of(w.scales, len(idot))).reshape(-1, 16, *idot.shape[1:]).sum(1).astype(F32)
    terms = _of(w.d, len(whole)) * _spread(d8, len(whole)) * whole
    if w.mins is not None:
        assert w.dmin is not None
        isum = codes.reshape(len(x), -1, 16).sum(-1).T[..., None] * _of(w.mins, len(idot))
        low = isum.reshape(-1, 16, *isum.shape[1:]).sum(1).astype(F32)
        terms = terms - _of(w.dmin, len(whole)) * _spread(d8, len(whole)) * low
    return _sum(terms)
