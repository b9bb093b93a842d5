"""Small frames with known answers, in the columns that the plots draw."""

import numpy as np
import pandas as pd

from moe_lab.caching.cost import Cost
from moe_lab.caching.study import COLUMNS as STUDY_COLUMNS


def timings(
    *, layers: int = 3, reps: int = 1, arm: str = "gemv", fetch_ms: float = 6.0, misses: int = 4
) -> pd.DataFrame:
    """rec.timings of `layers` x `reps` calls: route 1, fetch, compute 2, other 1 ms; repetition r is r ms slower."""
    rows = []
    for rep in range(reps):
        for layer in range(layers):
            parts = {"route_ms": 1.0, "fetch_ms": fetch_ms, "compute_ms": 2.0 + rep, "other_ms": 1.0}
            rows.append(
                {
                    "layer": layer,
                    "arm": arm,
                    "backend": "torch",
                    **parts,
                    "wall_ms": sum(parts.values()),
                    "hits": 8 - misses,
                    "misses": misses,
                    "bytes_read": 1000 * misses,
                }
            )
    return pd.DataFrame(rows)


def loads(counts: dict[int, list[int]]) -> pd.DataFrame:
    """Assignments by layer: {layer: [count of expert 0, 1, ...]}."""
    rows = [(layer, expert, n) for layer, row in counts.items() for expert, n in enumerate(row)]
    return pd.DataFrame(rows, columns=["layer", "expert", "assignments"])


def random_loads(layers: int = 6, experts: int = 32, seed: int = 0) -> pd.DataFrame:
    """Assignments of `layers` x `experts`, 100 on average."""
    counts = np.random.default_rng(seed).poisson(100, (layers, experts))
    return loads({layer: row.tolist() for layer, row in enumerate(counts)})


def sweep(times: dict[str, dict[int, float]]) -> pd.DataFrame:
    """Batching frame from {arm: {T: milliseconds}}; `per_token` submits T times and reads its weights T times."""
    rows = []
    for arm, points in times.items():
        for tokens, time_ms in points.items():
            each = tokens if arm == "per_token" else 1
            rows.append((arm, tokens, time_ms, each, 1000 * each, "torch", "cpu"))
    columns = ["arm", "tokens", "time_ms_p50", "submissions", "weight_bytes", "backend", "device"]
    return pd.DataFrame(rows, columns=columns)


def predictions(recalls: dict[str, float] | None = None) -> pd.DataFrame:
    """Rows of `lab.analysis.next_layer`, K = 2: recall of the next router by pair at k' = 2, controls at 0.3 and 0.2;
    0.1 more at k' = 3.
    """
    rows = []
    for pair, best in (recalls or {"0→1": 0.4, "1→2": 0.8}).items():
        here, there = map(int, pair.split("→"))
        for name, base in (("next router", best), ("previous token", 0.3), ("popularity", 0.2)):
            rows += [(here, there, name, k, base + 0.1 * (k - 2), 100) for k in (2, 3)]
    return pd.DataFrame(rows, columns=["layer", "next_layer", "predictor", "reads", "recall", "tokens"])


def flip_rates() -> pd.DataFrame:
    """Rows of `lab.analysis.flip_rate`: two variants, 100 tokens each, flips below a margin of 0.01 alone."""
    rows = [
        (pair, low, high, n, flipped, flipped / n)
        for pair, few in (("bf16 result", 5), ("bf16 inputs", 2))
        for low, high, n, flipped in ((0.0, 0.01, 40, few), (0.01, 0.1, 60, 0))
    ]
    return pd.DataFrame(rows, columns=["pair", "margin_from", "margin_to", "tokens", "flipped", "flip_rate"])


def benched(times_us: dict[str, dict[int, float]], state: str = "cold") -> pd.DataFrame:
    """A frame as `lab.bench` gives it: {arm: {rows: median in us}}, 10 % of spread, floors of 1 us a row."""
    same = {"workload": "w", "model": "m", "format": "q2_k", "backend": "torch", "device": "cpu", "source": "measured"}
    rows = [
        {**same, "arm": arm, "state": state, "tokens": m, "status": "PASSED", "unit": "us", "p20": 0.9 * t, "p50": t,
         "p80": 1.1 * t, "predicted": 2.0 * m, "floor": 1.0 * m, "n": 5}
        for arm, by_rows in times_us.items()
        for m, t in by_rows.items()
    ]  # fmt: skip
    return pd.DataFrame(rows)


def cost_curves() -> pd.DataFrame:
    """Two arms: rows after the first free, and none free."""
    from moe_lab.bench.cost import cost_curve

    return cost_curve(benched({"shared": {1: 10.0, 2: 10.0, 4: 10.0}, "alone": {1: 10.0, 2: 20.0, 4: 40.0}}))


def parts() -> pd.DataFrame:
    """Half of a call reads weights at T = 1, three quarters at T = 8."""
    rows = [
        (t, step, reads, share, share)
        for t, half in ((1, 0.5), (8, 0.75))
        for step, reads, share in (("experts' products", "weights", half), ("selection", "none", 1 - half))
    ]
    frame = pd.DataFrame(rows, columns=["tokens", "part", "reads", "time_ms", "share"])
    return frame.assign(arm="gemv", n=5, backend="torch", device="cpu")


def attribution(shares: dict[str, float] | None = None, case: str | None = None) -> pd.DataFrame:
    """Choices with their shares, switched first a tenth more and last a tenth less; choice z does not differ."""
    shares = {"a": 2e-5, "d": 7e-5, "e": -1e-6} if shares is None else shares
    rows = [(c, f"choice {c}", "x", "y", True, 1.1 * s, 0.9 * s, s, abs(s) / 20) for c, s in shares.items()]
    rows.append(("z", "choice z", "x", "x", False, 0.0, 0.0, 0.0, 0.0))
    names = ["choice", "name", "value_a", "value_b", "differs", "first", "last", "share", "share_se"]
    df = pd.DataFrame(rows, columns=names)
    return df if case is None else pd.DataFrame(df.assign(case=case), columns=["case", *names])


def attributions() -> pd.DataFrame:
    """Three cases: two with a leader each, one without a difference."""
    made = {"one": None, "two": {"a": 5e-5, "d": 1e-5}, "none": {"a": 0.0, "d": 0.0}}
    return pd.concat([attribution(shares, case) for case, shares in made.items()], ignore_index=True)


def error_map(experts: int = 3, blocks: int = 16) -> pd.DataFrame:
    """Error 3 in every block of side b but those of number 6 and 7 in each eight, where it is 1; side a has 1."""
    rows = [
        (part, expert, b, 16 * b, 16 * b + 15, 1.0, (1.0 if b % 8 > 5 else 3.0) * (1 + expert), 2.0)
        for part in ("gate", "down")
        for expert in range(experts)
        for b in range(blocks)
    ]
    names = ["part", "expert", "block", "first", "last", "nmse_a", "nmse_b", "nmse_ab"]
    return pd.DataFrame(rows, columns=names)


def cache_timings(
    *,
    layers: int = 4,
    calls: int = 40,
    start_ms: float = 0.4,
    ms_per_byte: float = 2e-7,
    idle_ms: float = 0.1,
    noise: float = 0.0,
) -> pd.DataFrame:
    """rec.timings of a streamed run that keeps to a straight line: 0 to 4 experts of 12 MB a call, layer n computes
    0.6 + 0.1 n ms; `noise` is the relative standard deviation of every part.
    """
    rng = np.random.default_rng(0)
    rows = []
    for call in range(calls):
        for layer in range(layers):
            misses = (call // 2 + layer) % 5
            fetch = start_ms + misses * 12e6 * ms_per_byte if misses else idle_ms
            parts = {"route_ms": 0.2, "fetch_ms": fetch, "compute_ms": 0.6 + 0.1 * layer, "other_ms": 0.05}
            noisy = {name: value * (1 + noise * rng.standard_normal()) for name, value in parts.items()}
            rows.append({"layer": layer, "misses": misses, "bytes_read": misses * 12_000_000, **noisy})
    return pd.DataFrame(rows)


def cost_model() -> Cost:
    """The model of that record: 0.95 to 1.25 ms a layer without reads, 0.4 ms and 5 GB/s with."""
    return Cost.fit(cache_timings())


def policy_study() -> pd.DataFrame:
    """Rows of lab.caching.study: LRU hits 50 %, the optimum 70 %, two policies on either side, one control."""
    rates = [("text", "static", 0.4), ("text", "lru", 0.5), ("text", "lfu_decay", 0.58), ("text", "belady", 0.7)]
    rows = []
    for order, policy, rate in [*rates, ("shuffled", "lru", 0.22)]:
        closed = (rate - 0.5) / 0.2 if order == "text" else 0.0
        hits = round(1000 * rate)
        rows.append((order, policy, 8, 0.25, 1000, hits, 1000 - hits, rate, float("nan"), closed))
    return pd.DataFrame(rows, columns=list(STUDY_COLUMNS))
