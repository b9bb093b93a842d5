"""The command line: `moe-lab` = `python -m moe_lab`.

Exit codes: 0 fine, 1 the answer is "no", 2 bad input or usage, then with exactly one line on stderr.
"""

import sys

from moe_lab.errors import MissingExtra
from moe_lab.system.interrupt import STOPPED, disarm


def main(arguments: list[str] | None = None) -> int:
    """Run a command. A package it needs and does not find is bad input too: one line that says what to install."""
    try:
        from moe_lab.cli.app import run_command

        disarm()
        return run_command(arguments)
    except MissingExtra as e:
        return refuse(str(e))
    except ModuleNotFoundError as e:
        return refuse(f"{e.name!r} is not installed: pip install 'moe-lab[lab]'.")
    except KeyboardInterrupt:
        return refuse(STOPPED)


def refuse(message: str) -> int:
    """One line on stderr, exit code 2."""
    print(f"moe-lab: {' '.join(message.split())}", file=sys.stderr)
    return 2
