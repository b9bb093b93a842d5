"""What a training run writes down: one CSV row every 20 steps, and a record of every turn of the controls."""

import csv
from pathlib import Path
from typing import Any

COLUMNS = ("step", "phase", "loss", "balance", "lr", "tokens_per_s", "held_out", "min_share", "recall")


class TrainLog:
    """log.csv (loss and held_out in nats a token; empty where not measured) and the printed excerpt of it."""

    def __init__(self, path: Path, tokens_per_step: int) -> None:
        self.file = path.open("w", newline="")
        self.csv = csv.writer(self.file)
        self.csv.writerow(COLUMNS)
        self.tokens_per_step = tokens_per_step
        self.last_step, self.last_s = 0, 0.0

    def start(self, now_s: float) -> None:
        self.last_s = now_s

    def write(self, step: int, now_s: float, row: dict[str, Any]) -> None:
        """`row` holds the columns between step and the end, tokens_per_s excepted."""
        rate = (step - self.last_step) * self.tokens_per_step / max(now_s - self.last_s, 1e-9)
        self.last_step, self.last_s = step, now_s
        values = [{"step": step, "tokens_per_s": f"{rate:.0f}", **row}.get(name, "") for name in COLUMNS]
        self.csv.writerow(values)
        if row.get("held_out") or row.get("min_share"):
            print(" ".join(map(str, values)), flush=True)

    def close(self) -> None:
        self.file.close()
