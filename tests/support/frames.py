"""Small frames with known answers, in the columns that the plots draw."""

import numpy as np
import pandas as pd


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
