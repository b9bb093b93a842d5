"""The commands, in the order in which the help lists them; their options are in `on_*`."""

from typing import Annotated, Any

from moe_lab.cli import refuse
from moe_lab.errors import LabError, MissingExtra
from moe_lab.system.interrupt import STOPPED

try:
    import typer
except ImportError as e:  # before any module that takes it for granted
    raise MissingExtra("typer", "lab", "the moe-lab command") from e

from moe_lab.cli.on_machines import bench, calibrate, doctor
from moe_lab.cli.on_models import inspect, pack, parity, run
from moe_lab.cli.on_recordings import diff, report, reproduce, simulate, trace

# Typer carries its own click or uses the installed one, depending on its version; the base of its errors serves both.
ClickError: Any = next(c for c in typer.BadParameter.__mro__ if c.__name__ == "ClickException")
COMMANDS = (doctor, inspect, run, trace, simulate, bench, parity, diff, pack, calibrate, report, reproduce)

app = typer.Typer(
    add_completion=False, pretty_exceptions_enable=False, help="A workbench for Mixture-of-Experts inference."
)
for command in COMMANDS:
    app.command()(command)


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
