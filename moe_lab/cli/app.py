"""The commands and their options; each one's work is in the module of its name."""

from pathlib import Path
from typing import Annotated, Any

from moe_lab.cli import refuse
from moe_lab.errors import LabError, MissingExtra
from moe_lab.system.interrupt import STOPPED

try:
    import typer
except ImportError as e:  # the one place that needs them
    raise MissingExtra("typer", "lab", "the moe-lab command") from e

# Typer carries its own click or uses the installed one, depending on its version; the base of its errors serves both.
ClickError: Any = next(c for c in typer.BadParameter.__mro__ if c.__name__ == "ClickException")

app = typer.Typer(
    add_completion=False, pretty_exceptions_enable=False, help="A workbench for Mixture-of-Experts inference."
)
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of a table.")]
File = Annotated[Path, typer.Argument(help="A GGUF, a safetensors file, its index, or a model folder.")]


def _version(asked: bool) -> bool:
    """Print the version and stop where that was asked; typer hands what comes back on as the option's value."""
    if asked:
        from moe_lab.system.environment import environment

        print(f"moe-lab {environment()['moe_lab']}")
        raise typer.Exit
    return asked


@app.callback()
def _every_command(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    pass  # the option does its work in its callback


@app.command()
def doctor(json: Json = False) -> None:
    """What this machine can run, and what is missing for the rest."""
    from moe_lab.cli.doctor import checks
    from moe_lab.cli.output import emit

    emit("doctor", checks(), as_json=json, title="MoE Lab on this machine")


@app.command()
def inspect(
    file: File,
    gib: Annotated[str | None, typer.Option(help="Memory for expert slots, GiB; several with commas: 8,16,24.")] = None,
    layouts: Annotated[
        bool, typer.Option("--layouts", help="One expert in each layout instead: bytes, decoding time, same values.")
    ] = False,
    layer: Annotated[int | None, typer.Option(help="With --layouts: the layer; default: the first.")] = None,
    device: Annotated[str | None, typer.Option(help="With --layouts: cpu (default) or cuda.")] = None,
    json: Json = False,
) -> None:
    """What a model file holds: MoE layers, formats, bytes. Reads the header alone, but for --layouts."""
    from moe_lab.cli.inspect import inspect_file, inspect_layouts
    from moe_lab.cli.output import emit

    if layouts and gib is not None:
        raise LabError("--gib counts expert slots, which --layouts does not show: give one of them.")
    if not layouts and (layer is not None or device is not None):
        raise LabError("--layer and --device go with --layouts; the table without it has every layer.")
    if layouts:
        rows, notes = inspect_layouts(file, layer, device=device or "cpu")
    else:
        rows, notes = inspect_file(file, gib, as_json=json)
    emit("inspect", rows, as_json=json, title=str(file), notes=notes)


@app.command()
def run(
    file: File,
    layer: Annotated[str, typer.Option(help="A layer number, or all.")] = "all",
    tokens: Annotated[int, typer.Option(help="Rows to run.")] = 512,
    arm: Annotated[str, typer.Option(help="reference, per_token, gemv or auto.")] = "auto",
    cache_gib: Annotated[
        float | None, typer.Option(help="Stream the experts through a cache of this many GiB.")
    ] = None,
    cache_slots: Annotated[int | None, typer.Option(help="Stream the experts through this many slots.")] = None,
    packed: Annotated[
        Path | None, typer.Option(help="With a cache: read the experts from this file of moe-lab pack.")
    ] = None,
    step_tokens: Annotated[
        int | None, typer.Option(help="Step by step through all layers, so many rows at a time, as decoding goes.")
    ] = None,
    policy: Annotated[
        str, typer.Option(help="With --step-tokens: which experts the cache keeps, as lru or random_oldest:5%.")
    ] = "lru",
    prefetch: Annotated[int, typer.Option(help="With --step-tokens: experts read ahead of the next layer.")] = 0,
    layout: Annotated[str, typer.Option(help="How experts are kept: raw, planar, tiles or auto.")] = "raw",
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    recorded: Annotated[
        Path | None, typer.Option("--input", help="Activations (npz); default: activations.npz beside the file.")
    ] = None,
    json: Json = False,
) -> None:
    """Run MoE layers and show where the time went: route, fetch, compute."""
    from moe_lab.cli.output import emit
    from moe_lab.cli.run import replay_layers, run_layers

    if step_tokens is not None:
        rows, notes = replay_layers(
            file, layer=layer, tokens=tokens, step_tokens=step_tokens, arm=arm, cache_gib=cache_gib,
            cache_slots=cache_slots, policy=policy, prefetch=prefetch, packed=packed, device=device, recorded=recorded,
            layout=layout, as_json=json,
        )  # fmt: skip
        emit("run", rows, as_json=json, title=f"{file}: {tokens} tokens, {step_tokens} a step", notes=notes)
        return
    if policy != "lru" or prefetch:
        raise LabError("--policy and --prefetch go with --step-tokens: all rows at once ask for each expert once.")
    rows, notes = run_layers(
        file,
        layer=layer,
        tokens=tokens,
        arm=arm,
        cache_gib=cache_gib,
        cache_slots=cache_slots,
        packed=packed,
        device=device,
        recorded=recorded,
        layout=layout,
    )
    emit("run", rows, as_json=json, title=f"{file}: {tokens} tokens", notes=notes)


@app.command()
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
    from moe_lab.cli.output import emit
    from moe_lab.cli.trace import trace_rows

    rows, notes = trace_rows(file, last=last, recorded=recorded, out=out, num_experts=experts, as_json=json)
    emit("trace", rows, as_json=json, title=str(file), notes=notes)


@app.command()
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
    from moe_lab.cli.output import emit
    from moe_lab.cli.simulate import simulate_rows

    rows, notes = simulate_rows(
        file, capacity=capacity, policies=policies, per_layer=per_layer, step_tokens=step_tokens, tokens=tokens,
        experts=experts, with_controls=with_controls, model=model, as_json=json,
    )  # fmt: skip
    emit("simulate", rows, as_json=json, title=str(file), notes=notes)


@app.command()
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
    from moe_lab.cli.output import emit

    asked = Asked(
        model=model, file=file, layer=layer, arms=arms, formats=formats, tokens=tokens, picks=picks, device=device,
        peers=peers, budget_s=budget_s, shrink=shrink, save=save, recorded=recorded, table=table,
    )  # fmt: skip
    rows, notes, ok = run_tune(asked) if tune else run_bench(asked)
    emit("bench", rows if json else shown(rows), as_json=json, ok=ok, title=asked.title, notes=notes)
    if not ok:
        raise typer.Exit(1)


@app.command()
def parity(
    file: File,
    layer: Annotated[str, typer.Option(help="A layer number, or all.")] = "all",
    arms: Annotated[str, typer.Option(help="Two arms or more, with commas.")] = "gemv,mmq",
    recorded: Annotated[
        Path | None, typer.Option("--input", help="Activations (npz); default: activations.npz beside the file.")
    ] = None,
    tokens: Annotated[int | None, typer.Option(help="Rows; default: 512, or as many as were recorded.")] = None,
    budget: Annotated[
        str | None, typer.Option(help="Bound on nmse_ab, or NAME=NUMBER with commas; exit code 1 when one is broken.")
    ] = None,
    why: Annotated[bool, typer.Option("--why", help="Also name causes and hazards (of arms gemv and mmq).")] = False,
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    json: Json = False,
) -> None:
    """Whether arms agree on the same rows and picks, and by how much."""
    from moe_lab.cli.output import emit
    from moe_lab.cli.parity import parity_rows

    rows, notes, ok = parity_rows(
        file, layer=layer, arms=arms, tokens=tokens, budget=budget, recorded=recorded, device=device, why=why,
        as_json=json,
    )  # fmt: skip
    emit("parity", rows, as_json=json, ok=ok, title=f"{file}: {arms}", notes=notes)
    if not ok:
        raise typer.Exit(1)


@app.command()
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
    from moe_lab.cli.output import emit

    rows, notes, ok = diff_rows(a, b, threshold=threshold, across=across, as_json=json)
    emit("diff", rows, as_json=json, ok=ok, title=f"A {a.stem}, B {b.stem}", notes=notes)
    if not ok:
        raise typer.Exit(1)


@app.command()
def pack(
    file: Annotated[Path, typer.Argument(help="A model; with --verify and without -o, a packed file.")],
    out: Annotated[Path | None, typer.Option("-o", "--out", help="The packed file to write.")] = None,
    order: Annotated[str, typer.Option(help="Rows of a layer by number (layer) or by coactivation.")] = "layer",
    trace: Annotated[Path | None, typer.Option(help="For coactivation: a routing trace of the model.")] = None,
    verify: Annotated[
        bool, typer.Option("--verify", help="Read every row back and compare checksums; exit code 1 if one differs.")
    ] = False,
    json: Json = False,
) -> None:
    """Copy a model's experts into one file of aligned rows, each read at once and straight into its slot."""
    from moe_lab.cli.output import emit
    from moe_lab.cli.pack import pack_file, verify_file

    if out is None and not verify:
        raise LabError("pack wants -o OUT, the file to write; with --verify alone it checks one that is there.")
    rows, notes, ok = [], [], True
    if out is not None:
        rows, notes = pack_file(file, out, order=order, trace=trace, quiet=json)
    if verify:
        checked, more, ok = verify_file(file if out is None else out)
        rows, notes = (checked if out is None else rows), [*notes, *more]
    emit("pack", rows, as_json=json, ok=ok, title=str(file if out is None else out), notes=notes)
    if not ok:
        raise typer.Exit(1)


@app.command()
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
    from moe_lab.cli.output import emit

    rows, notes = measure(path, rounds=rounds, gib=gib, quick=quick, quiet=json)
    emit("calibrate", rows, as_json=json, title="What this machine reads and copies", notes=notes)


@app.command()
def report(
    model: Annotated[Path | None, typer.Option(help="Model for the notebook; default: the sample model.")] = None,
    notebook: Annotated[Path | None, typer.Option(help="Notebook to run; default: the tour.")] = None,
    out: Annotated[Path | None, typer.Option(help="HTML file to write; default: reports/<notebook>.html.")] = None,
    json: Json = False,
) -> None:
    """Execute a notebook and write it as one self-contained HTML file; exit code 1 when a claim in it fails."""
    from moe_lab.cli.output import emit
    from moe_lab.cli.report import write_report

    row, lines, ok = write_report(model=model, notebook=notebook, out=out, quiet=json)
    emit("report", [row], as_json=json, ok=ok, title="Report", notes=lines)
    if not ok:
        raise typer.Exit(1)


@app.command()
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
    from moe_lab.cli.output import emit
    from moe_lab.cli.reproduce import reproduce_page

    rows, notes, ok = reproduce_page(page, threshold=threshold, times=times, timeout_s=timeout_s, quiet=json)
    emit("reproduce", rows, as_json=json, ok=ok, title=f"{page}: what moved", notes=notes)
    if not ok:
        raise typer.Exit(1)


def run_command(arguments: list[str] | None) -> int:
    """Run a command; every bad input or usage becomes one line on stderr and exit code 2."""
    try:
        result = app(args=arguments, standalone_mode=False, prog_name="moe-lab")
    except ClickError as e:
        return refuse(e.format_message())  # type: ignore[attr-defined]
    except (LabError, OSError) as e:
        return refuse(str(e))
    except (typer.Abort, KeyboardInterrupt):
        return refuse(STOPPED)
    if result == 130:  # what typer makes of Ctrl-C
        return refuse(STOPPED)
    return result if isinstance(result, int) else 0
