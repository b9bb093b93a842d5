"""Commands on what was recorded (traces, runs, pages) and their options; the work is in the modules of their names."""

from pathlib import Path
from typing import Annotated

import typer

from moe_lab.cli.options import Json, answer


def trace(
    file: Annotated[Path, typer.Argument(help="A routing trace (.parquet, .csv, .npz), or a model to record.")],
    last: Annotated[bool, typer.Option("--last", help="The last token's picks instead of the summary.")] = False,
    recorded: Annotated[
        Path | None, typer.Option("--input", help="A model's activations; default: activations.npz beside the file.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Also write the trace to this Parquet file.")] = None,
    experts: Annotated[int | None, typer.Option(help="E, where the trace does not say it.")] = None,
    json: Json = False,
) -> None:
    """What a routing trace holds: load, idle experts and margins by layer."""
    from moe_lab.cli.trace import trace_rows

    rows, notes = trace_rows(file, last=last, recorded=recorded, out=out, num_experts=experts, as_json=json)
    answer("trace", rows, as_json=json, title=str(file), notes=notes)


def simulate(
    file: Annotated[Path, typer.Argument(help="A routing trace (.parquet, .csv, .npz).")],
    capacity: Annotated[
        str | None, typer.Option(help="Slots of the whole cache, with commas; default: a quarter of the experts.")
    ] = None,
    policies: Annotated[
        str | None,
        typer.Option(help="lru,random_oldest:percent=5,belady,...; default: all, and the optimum."),
    ] = None,
    per_layer: Annotated[bool, typer.Option("--per-layer", help="Split the slots evenly over the layers.")] = False,
    step_tokens: Annotated[int, typer.Option(help="Tokens served together.")] = 1,
    tokens: Annotated[int | None, typer.Option(help="The first tokens alone; default: all.")] = None,
    experts: Annotated[int | None, typer.Option(help="E, where the trace does not say it.")] = None,
    with_controls: Annotated[
        bool, typer.Option("--controls", help="Also LRU and the optimum on shuffled and drawn traces.")
    ] = False,
    model: Annotated[Path | None, typer.Option(help="The model's file, for the bytes of its experts.")] = None,
    json: Json = False,
) -> None:
    """What an expert cache would have read on a recorded trace: hits and misses by capacity and policy."""
    from moe_lab.cli.simulate import simulate_rows

    rows, notes = simulate_rows(
        file, capacity=capacity, policies=policies, per_layer=per_layer, step_tokens=step_tokens, tokens=tokens,
        experts=experts, with_controls=with_controls, model=model, as_json=json,
    )  # fmt: skip
    answer("simulate", rows, as_json=json, title=str(file), notes=notes)


def diff(
    a: Annotated[Path, typer.Argument(help="A saved run: the one before.")],
    b: Annotated[Path, typer.Argument(help="A saved run: the one after.")],
    threshold: Annotated[float, typer.Option(help="Smallest change that counts, as a share: 0.02 is 2 %.")] = 0.02,
    across: Annotated[
        str, typer.Option(help="What may differ between the runs all the same, with commas: device,triton.")
    ] = "",
    json: Json = False,
) -> None:
    """Whether run B is slower than run A, record by record; exit code 1 when it is, broke, or not all was compared."""
    from moe_lab.cli.diff import diff_rows

    rows, notes, ok = diff_rows(a, b, threshold=threshold, across=across, as_json=json)
    answer("diff", rows, as_json=json, ok=ok, title=f"A {a.stem}, B {b.stem}", notes=notes)


def report(
    model: Annotated[Path | None, typer.Option(help="Model for the notebook; default: the sample model.")] = None,
    notebook: Annotated[Path | None, typer.Option(help="Notebook to run; default: the tour.")] = None,
    out: Annotated[Path | None, typer.Option(help="HTML file to write; default: reports/<notebook>.html.")] = None,
    json: Json = False,
) -> None:
    """Execute a notebook and write it as one self-contained HTML file; exit code 1 when a claim in it fails."""
    from moe_lab.cli.report import write_report

    row, lines, ok = write_report(model=model, notebook=notebook, out=out, quiet=json)
    answer("report", [row], as_json=json, ok=ok, title="Report", notes=lines)


def reproduce(
    page: Annotated[Path, typer.Argument(help="A report (HTML). Its notebook is run: reproduce pages you trust.")],
    threshold: Annotated[
        float, typer.Option(help="Change beyond which a number moved, as a share: 0.05 is 5 %.")
    ] = 0.05,
    times: Annotated[
        bool, typer.Option("--times", help="Moved times count too; without it they are only listed.")
    ] = False,
    timeout_s: Annotated[float, typer.Option("--timeout", help="Seconds that one cell may take.")] = 600.0,
    json: Json = False,
) -> None:
    """Run a report again with its own parameters; exit code 1 when numbers moved or a claim fails."""
    from moe_lab.cli.reproduce import reproduce_page

    rows, notes, ok = reproduce_page(page, threshold=threshold, times=times, timeout_s=timeout_s, quiet=json)
    answer("reproduce", rows, as_json=json, ok=ok, title=f"{page}: what moved", notes=notes)
