"""Run a notebook's cells in this interpreter's kernel, telling the caller after each cell how far it is.

Knows nothing about pages: it fills the notebook's outputs, or raises `CellError` with what was done still in place.
"""

import os
import re
import time
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from moe_lab.errors import LabError, MissingExtra

Progress = Callable[[int, int, str, float], None]


class CellError(LabError):
    """A cell that did not finish: `.cell` (1 = the first code cell), `.title`, `.why` (one line)."""

    def __init__(self, where: str, cell: int, title: str, why: str) -> None:
        self.cell, self.title, self.why = cell, title, why
        super().__init__(f"{where}: cell {cell} ({title}) {why}")

    @property
    def is_claim(self) -> bool:
        """Whether an assertion of the notebook failed: an answer, where anything else is an accident."""
        return self.why.startswith("raised AssertionError")


def execute(notebook: Any, folder: Path, where: str, *, timeout_s: float, progress: Progress | None) -> None:
    """Fill `notebook`'s outputs in place. The kernel starts in `folder`; each cell may take `timeout_s` seconds.

    `progress(done, total, title, seconds)` is called after each code cell. Raises CellError when a cell raises, runs
    too long or its kernel dies (a killed kernel is noticed within seconds).
    """
    nbclient = _nbclient()
    named = titles(notebook)
    with TemporaryDirectory(prefix="moe-lab-") as sockets:
        client = nbclient.NotebookClient(
            notebook,
            km=_kernel(Path(sockets)),
            timeout=timeout_s,
            resources={"metadata": {"path": str(folder)}},
            shutdown_kernel="immediate",
        )
        with client.setup_kernel(cleanup_kc=True):  # without it a manager given from outside keeps its kernel running
            for done, (index, title) in enumerate(named.items(), start=1):
                start = time.perf_counter()
                try:
                    client.execute_cell(notebook["cells"][index], index)
                except Exception as error:
                    raise CellError(where, done, title, _why(error, timeout_s)) from error
                if progress is not None:
                    progress(done, len(named), title, time.perf_counter() - start)
            client.set_widgets_metadata()


def _why(error: Any, timeout_s: float) -> str:
    """What went wrong with a cell, on one line; an exception that is none of nbclient's is a bug and goes on up."""
    exceptions = _nbclient().exceptions
    if isinstance(error, exceptions.CellExecutionError):
        return f"raised {error.ename}: {_one_line(error.evalue)}"
    if isinstance(error, exceptions.CellTimeoutError):
        return f"ran longer than {timeout_s:.0f} s."
    if isinstance(error, exceptions.DeadKernelError):
        return "lost its kernel: the process was killed or crashed (out of memory?)."
    raise error


def _nbclient() -> Any:
    try:
        import nbclient
    except ImportError as error:
        raise MissingExtra(error.name or "nbclient", "report", "Running a notebook") from error
    return nbclient


def _kernel(sockets: Path) -> Any:
    """A kernel manager bound to this interpreter, whatever kernels are registered on the machine.

    The kernel talks through sockets in the folder `sockets`: no open port, and a short path (AF_UNIX allows about 100
    characters). Windows has none of those; there it is TCP on the loopback address.
    """
    try:
        from ipykernel.kernelspec import RESOURCES, get_kernel_dict
        from jupyter_client.kernelspec import KernelSpec, KernelSpecManager
        from jupyter_client.manager import AsyncKernelManager
    except ImportError as error:
        raise MissingExtra(error.name or "ipykernel", "report", "Running a notebook") from error

    class ThisInterpreter(KernelSpecManager):
        """A kernelspec file of the same name elsewhere could start another environment's Python."""

        def get_kernel_spec(self, kernel_name: str) -> KernelSpec:
            return KernelSpec(resource_dir=RESOURCES, **get_kernel_dict())

    place = {} if os.name == "nt" else {"transport": "ipc", "connection_file": str(sockets / "kernel.json")}
    return AsyncKernelManager(kernel_name="python3", kernel_spec_manager=ThisInterpreter(), **place)


def titles(notebook: Any) -> dict[int, str]:
    """Index of each code cell -> the last heading above it, or its own first line."""
    heading, titles = "", {}
    for index, cell in enumerate(notebook["cells"]):
        if cell["cell_type"] == "markdown":
            heading = _heading(cell) or heading
        if cell["cell_type"] == "code":
            titles[index] = heading or _first_line(cell)
    return titles


def _heading(cell: Any) -> str:
    found = re.findall(r"^#+\s+(.+)$", cell["source"], flags=re.M)
    return found[-1].strip() if found else ""


def _first_line(cell: Any) -> str:
    lines = [line.strip() for line in cell["source"].splitlines() if line.strip()]
    return lines[0][:60] if lines else "empty cell"


def _one_line(text: str) -> str:
    """The error's own words on one line, without terminal colours."""
    plain = re.sub(r"\x1b\[[0-9;]*m", "", text)
    return " ".join(plain.split())[:400]
