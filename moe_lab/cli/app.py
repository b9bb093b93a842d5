"""The commands and their options; each one's work is in the module of its name."""

from pathlib import Path
from typing import Annotated, Any

from moe_lab.cli import refuse
from moe_lab.errors import LabError, MissingExtra

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
File = Annotated[Path, typer.Argument(help="A GGUF file.")]


@app.command()
def doctor(json: Json = False) -> None:
    """What this machine can run, and what is missing for the rest."""
    from moe_lab.cli.doctor import checks
    from moe_lab.cli.output import emit

    emit("doctor", checks(), as_json=json, title="MoE Lab on this machine")


@app.command()
def inspect(
    file: File,
    gib: Annotated[float | None, typer.Option(help="Memory for expert slots, GiB.")] = None,
    json: Json = False,
) -> None:
    """What a model file holds: MoE layers, formats, bytes. Reads the header alone."""
    from moe_lab.cli.output import emit
    from moe_lab.inspect import inspect_checkpoint, summary
    from moe_lab.open import open as open_checkpoint

    ckpt = open_checkpoint(file)
    rows = inspect_checkpoint(ckpt).to_dict("records")
    about = summary(ckpt, gib)
    emit(
        "inspect",
        rows if rows or not json else [about],
        as_json=json,
        title=str(file),
        notes=[f"{k}: {v}" for k, v in about.items()],
    )


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
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    recorded: Annotated[
        Path | None, typer.Option("--input", help="Activations (npz); default: activations.npz beside the file.")
    ] = None,
    json: Json = False,
) -> None:
    """Run MoE layers and show where the time went: route, fetch, compute."""
    from moe_lab.cli.output import emit
    from moe_lab.cli.run import run_layers

    rows, notes = run_layers(
        file,
        layer=layer,
        tokens=tokens,
        arm=arm,
        cache_gib=cache_gib,
        cache_slots=cache_slots,
        device=device,
        recorded=recorded,
    )
    emit("run", rows, as_json=json, title=f"{file}: {tokens} tokens", notes=notes)


@app.command()
def report(
    model: Annotated[Path | None, typer.Option(help="Model for the notebook; default: the sample model.")] = None,
    notebook: Annotated[Path | None, typer.Option(help="Notebook to run; default: the tour.")] = None,
    out: Annotated[Path | None, typer.Option(help="HTML file to write; default: reports/<notebook>.html.")] = None,
    json: Json = False,
) -> None:
    """Execute a notebook and write it as one self-contained HTML file."""
    from moe_lab.cli.output import emit
    from moe_lab.cli.report import write_report

    row, lines = write_report(model=model, notebook=notebook, out=out, quiet=json)
    emit("report", [row], as_json=json, title="Report", notes=lines)


def run_command(arguments: list[str] | None) -> int:
    """Run a command; every bad input or usage becomes one line on stderr and exit code 2."""
    try:
        result = app(args=arguments, standalone_mode=False, prog_name="moe-lab")
    except ClickError as e:
        return refuse(e.format_message())  # type: ignore[attr-defined]
    except (LabError, OSError) as e:
        return refuse(str(e))
    except (typer.Abort, KeyboardInterrupt):
        return refuse("stopped.")
    if result == 130:  # what typer makes of Ctrl-C
        return refuse("stopped.")
    return result if isinstance(result, int) else 0
