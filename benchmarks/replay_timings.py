"""What the record costs, and where a streamed step's time goes: `lab.replay` on the shipped model, as CSV.

    python benchmarks/replay_timings.py --device cuda --out benchmarks/results/h200

Writes replay_levels.csv (each level against level 0, the same tokens interleaved; see moe_lab.replay.levels),
replay_table.csv (a row a step and layer at level 2) and replay_ledger.csv (what became of each layer's reads ahead,
plain and with the token before as a control). Prints the same, shortened, as it goes. Every output is compared with the
resident layers' first: a wrong one ends the run.
"""

import argparse
import time
from pathlib import Path
from typing import Any

import pandas as pd

import moe_lab as lab
from moe_lab.replay import overhead, run, summary, waterfall
from moe_lab.system.environment import driver, environment
from moe_lab.timing import record

SLOTS, FILE = 48, Path(__file__).resolve().parents[1] / "data" / "lab-42m.gguf"


def main() -> None:
    args = arguments()
    args.out.mkdir(parents=True, exist_ok=True)
    env = environment()
    about = {name: env[name] for name in ("device", "torch", "triton", "commit")} | {"driver": driver()}
    if args.commit:
        about["commit"] = args.commit
    ckpt = lab.open(FILE)
    if "levels" in args.parts:
        save(levels(ckpt, args).assign(**about), args.out / "replay_levels.csv")
    if "story" in args.parts:
        story(ckpt, args, about)


def levels(ckpt: Any, args: argparse.Namespace) -> pd.DataFrame:
    """Each level against level 0; 3, whose profiler starts anew at each step, in a shorter run of its own. Few tokens
    and many squares: the two steps of a pair lie within a tenth of a second, in the same spell of the machine."""
    how: dict[str, Any] = {"slots": SLOTS, "device": args.device, "arm": args.arm}
    near = overhead(ckpt, levels=(0, 1, 2, "S"), squares=args.squares, tokens=6, **how)
    print(near.round(4).to_string(), flush=True)
    far = overhead(ckpt, levels=(0, 3), squares=max(1, args.squares // 8), tokens=6, **how)
    print(far.round(4).to_string(), flush=True)
    others: Any = far[far["level"] != "0"]
    return pd.concat([near, others])


def story(ckpt: Any, args: argparse.Namespace, about: dict[str, str]) -> None:
    """Where the time of streamed steps goes, and what became of what was read ahead."""
    how: dict[str, Any] = {"tokens": args.tokens, "device": args.device, "arm": args.arm, "digest": True}
    with record() as rec:
        resident = run(ckpt, **how)
    check(resident, how, ckpt)
    trace, options = rec.trace, lab.Options(prefetch=args.prefetch)
    plain = streamed(ckpt, resident, level=2, **how)
    save(plain.table.assign(**about), args.out / "replay_table.csv")
    shown = plain.table.groupby("layer").median(numeric_only=True)
    print(shown[[name for name in shown if name.endswith("_ms")]].round(3).T.to_string(), flush=True)
    print(waterfall(plain).round(3).to_string(), flush=True)
    print(plain.stalls.groupby("cause").wait_ms.agg(["size", "sum"]).round(3).to_string(), flush=True)
    ahead = {
        "next layer's router": streamed(ckpt, resident, options=options, **how),
        "token before": streamed(ckpt, resident, forecast=lab.caching.previous_token(trace), **how),
        "the trace itself": streamed(ckpt, resident, forecast=trace, **how),
    }
    ledger = pd.concat([summary(one.story).assign(predictor=name) for name, one in ahead.items()])
    save(ledger.assign(**about), args.out / "replay_ledger.csv")
    print(ledger.round(3).to_string(), flush=True)
    waits = {name: one.table.demand_wait_ms.sum() for name, one in {"none": plain, **ahead}.items()}
    print("ms waited:", {name: round(ms, 2) for name, ms in waits.items()}, flush=True)


def streamed(ckpt: Any, resident: Any, **how: Any) -> Any:
    """A run through a warm cache whose outputs are the resident layers'."""
    with lab.ExpertCache(slots=SLOTS) as cache:
        run(ckpt, cache=cache, **{**how, "level": 0, "digest": False, "forecast": None})
        found = run(ckpt, cache=cache, **how)
    if found.digest != resident.digest:
        raise SystemExit(f"outputs differ from the resident layers': {how}")
    return found


def check(resident: Any, how: dict[str, Any], ckpt: Any) -> None:
    """The record of a second resident run has the same outputs."""
    if run(ckpt, **how).digest != resident.digest:
        raise SystemExit("two resident runs differ")


def save(df: pd.DataFrame, path: Path) -> None:
    df.to_csv(path, index=False, lineterminator="\n")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--arm", default="gemv")
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--prefetch", type=int, default=4)
    parser.add_argument("--squares", type=int, default=16)
    parser.add_argument("--parts", default="levels,story")
    parser.add_argument("--commit", default="", help="what the commit column says; default: the tree's")
    parser.add_argument("--out", type=Path, default=Path("."))
    return parser.parse_args()


if __name__ == "__main__":
    begin = time.perf_counter()
    main()
    print(f"{time.perf_counter() - begin:.1f} s")
