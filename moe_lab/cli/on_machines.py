"""Commands that measure a machine and their options; the work of each is in the module of its name."""

from pathlib import Path
from typing import Annotated

import typer

from moe_lab.cli.options import Json, answer


def doctor(json: Json = False) -> None:
    """What this machine can run, and what is missing for the rest."""
    from moe_lab.cli.doctor import checks

    answer("doctor", checks(), as_json=json, title="MoE Lab on this machine")


def bench(
    model: Annotated[
        str | None, typer.Option(help="Shapes by name, with commas, or all: qwen3-30b-a3b, mixtral-8x7b, ...")
    ] = None,
    file: Annotated[Path | None, typer.Option(help="A model file instead; one of its layers is measured.")] = None,
    layer: Annotated[str, typer.Option(help="The file's layer.")] = "all",
    arms: Annotated[str | None, typer.Option(help="Arms, with commas; default: reference,gemv.")] = None,
    formats: Annotated[str | None, typer.Option(help="Formats of a shape: bf16,q2_k+q3_k; default: as served.")] = None,
    tokens: Annotated[str | None, typer.Option(help="T, or several: 1,8,64.")] = None,
    picks: Annotated[str, typer.Option(help="A shape's picks: uniform or zipf.")] = "uniform",
    device: Annotated[
        str | None, typer.Option(help="cpu or cuda; default for shapes: a GPU where there is one.")
    ] = None,
    peers: Annotated[bool, typer.Option("--peers", help="Also show other engines' recorded times.")] = False,
    budget_s: Annotated[float | None, typer.Option(help="Seconds; what does not fit is left out by name.")] = None,
    shrink: Annotated[
        int | None, typer.Option(help="Divide a shape's widths; default: 8 on a CPU, 1 on a GPU.")
    ] = None,
    save: Annotated[Path | None, typer.Option(help="Folder for the run: runs/.")] = None,
    recorded: Annotated[
        Path | None, typer.Option("--input", help="A file's activations; default: activations.npz beside it.")
    ] = None,
    tune: Annotated[
        bool, typer.Option("--tune", help="Measure roof and arms anew; write what arm auto goes by.")
    ] = False,
    table: Annotated[
        Path | None, typer.Option(help="With --tune: the table's folder; default: the user's cache.")
    ] = None,
    json: Json = False,
) -> None:
    """Time arms on a layer, each checked first; exit code 1 when one of them is wrong or fails."""
    from moe_lab.cli.bench import Asked, run_bench, run_tune, shown

    asked = Asked(
        model=model, file=file, layer=layer, arms=arms, formats=formats, tokens=tokens, picks=picks, device=device,
        peers=peers, budget_s=budget_s, shrink=shrink, save=save, recorded=recorded, table=table,
    )  # fmt: skip
    rows, notes, ok = run_tune(asked) if tune else run_bench(asked)
    answer("bench", rows if json else shown(rows), as_json=json, ok=ok, title=asked.title, notes=notes)


def calibrate(
    path: Annotated[
        Path | None, typer.Argument(help="A large file to read, or a folder of the disk; default: this folder.")
    ] = None,
    rounds: Annotated[int | None, typer.Option(help="Trials of each setting; default: 5.")] = None,
    gib: Annotated[float | None, typer.Option(help="Size of the file written in a folder; default: 1.")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Few settings, small trials: a first idea.")] = False,
    json: Json = False,
) -> None:
    """Measure a disk, and copies to a GPU, as experts are read; saved for this machine and used from then on."""
    from moe_lab.cli.calibrate import calibrate as measure

    rows, notes = measure(path, rounds=rounds, gib=gib, quick=quick, quiet=json)
    answer("calibrate", rows, as_json=json, title="What this machine reads and copies", notes=notes)
