"""Compile every kernel variant that the lab launches for Hopper, on any machine, and keep the table of them.

python -m tools.variants                      write the table; variants of unchanged text stay as they are
python -m tools.variants --check [--every 8]  exit 1 unless the table has the variants that are launched and no other,
                                              none spills, and those compiled again (changed text, and one of every 8)
                                              come out as the table says
python -m tools.variants --only grouped,q3_k  write the rows that hold both words, and print them
"""

import argparse
import os
import sys
import time
from collections.abc import Mapping
from pathlib import Path

from tools.variants.facts import Machine
from tools.variants.table import Found, Key, Row, compiled, found, is_current, read, sampled, write

PATH = Path(__file__).resolve().parents[2] / "benchmarks" / "results" / "sm_90" / "kernels.csv"
SHOWN, SAVED = 20, 50


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.variants")
    parser.add_argument("--check", action="store_true", help="compare with the table, write nothing")
    parser.add_argument("--every", type=int, default=8, help="with --check: how many variants one is compiled of again")
    parser.add_argument("--only", default="", help="compile what holds these words (with commas) alone, and print it")
    parser.add_argument("--processes", type=int, default=None, help="compilers at a time; default: one a core")
    given = parser.parse_args()
    begin, wanted, known = time.monotonic(), found(), read(PATH)
    wrong = (_check if given.check else _write)(wanted, known, given)
    for line in wrong[:SHOWN]:
        print(line)
    if len(wrong) > SHOWN:
        print(f"and {len(wrong) - SHOWN} more")
    print(f"{len(wanted)} variants, {len(wrong)} complaints, {time.monotonic() - begin:.0f} s")
    return int(bool(wrong))


def _write(wanted: Mapping[Key, Found], known: Mapping[Key, Row], given: argparse.Namespace) -> list[str]:
    rows = {key: known[key] for key in wanted if key in known}
    words = [word for word in given.only.split(",") if word]
    old = {key: one for key, one in wanted.items() if key not in rows or not is_current(rows[key], one)}
    picked = {k: one for k, one in old.items() if all(word in " ".join((*k, one.used_by)) for word in words)}
    for number, row in enumerate(compiled(picked, given.processes), 1):
        rows[row.key] = row
        if words:
            print(
                f"{row.registers:3d} registers {row.shared_bytes:6d} shared {row.spill_bytes:4d} spilled  {_named(row)}"
            )
        if number % SAVED == 0:  # an interrupted run keeps what it has
            write(PATH, rows)
    write(PATH, rows)
    print(f"{PATH}: {len(picked)} compiled, {len(wanted) - len(old)} as before, {len(set(known) - set(wanted))} gone")
    late = [f"not compiled yet: {' '.join(key)} ({old[key].used_by})" for key in old if key not in picked]
    return late + [_spill(row) for row in rows.values() if row.spill_bytes]


def _check(wanted: Mapping[Key, Found], known: Mapping[Key, Row], given: argparse.Namespace) -> list[str]:
    wrong = [f"not in the table: {' '.join(key)} ({wanted[key].used_by})" for key in wanted if key not in known]
    wrong += [f"no longer launched: {' '.join(key)}" for key in known if key not in wanted]
    wrong += [_spill(row) for key, row in known.items() if row.spill_bytes and key in wanted]
    stale = {key for key, one in wanted.items() if key in known and not is_current(known[key], one)}
    again = stale | sampled((key for key in wanted if key in known), given.every)
    print(f"{len(again)} compiled again, {len(stale)} of them because their text, or the compiler, is another")
    for row in compiled({key: wanted[key] for key in again}, given.processes):
        was = known[row.key].machine
        if _limits(row.machine) != _limits(was):
            wrong.append(f"another than in the table: {' '.join(row.key)}: {row.machine}, was {was}")
    if wrong:
        print("make kernels writes the table anew; a variant that spills wants another tile.")
    return wrong


def _limits(machine: Machine) -> tuple[int, int, int]:
    """What is compared. The code's size is told, not compared: of 133 variants compiled twice from one text, 11 came
    out 128 bytes longer or shorter, with the same registers."""
    return machine.registers, machine.shared_bytes, machine.spill_bytes


def _spill(row: Row) -> str:
    return f"spills {row.spill_bytes} bytes: {_named(row)}"


def _named(row: Row) -> str:
    return f"{row.kernel} {row.variant} ({row.used_by})"


if __name__ == "__main__":
    if os.environ.get("TRITON_INTERPRET"):
        sys.exit("unset TRITON_INTERPRET: kernels of the interpreter have no machine code.")
    sys.exit(main())
