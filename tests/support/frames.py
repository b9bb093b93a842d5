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
