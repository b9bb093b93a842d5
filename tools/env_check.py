"""`make env-check`: install environment.yml's pip section into an empty venv, as conda does, and start what it is for.

conda writes the section into a requirements file beside environment.yml and runs `pip install -r` on it there. The
conda solve itself (Python and pip) is not tried. Needs the package index and about 3 GB of disk; takes minutes.
"""

import subprocess
import sys
from pathlib import Path
from tempfile import NamedTemporaryFile, TemporaryDirectory

ROOT = Path(__file__).resolve().parents[1]
_STARTS = (
    "import moe_lab, moe_lab_kernels; print('moe_lab', moe_lab.__version__)",
    "import ipywidgets, jupyterlab, matplotlib, pandas, torch; print('jupyterlab', jupyterlab.__version__)",
)


def pip_section(text: str) -> list[str]:
    """The requirement lines below `- pip:` in environment.yml (which tools/sync_env.py writes, quoted, one a line)."""
    below = text.split("  - pip:\n", 1)[1].splitlines()
    return [line.strip().removeprefix("- ").strip('"') for line in below]


def main() -> int:
    requirements = pip_section((ROOT / "environment.yml").read_text())
    with (
        TemporaryDirectory(prefix="moe-lab-env-") as folder,
        NamedTemporaryFile("w", dir=ROOT, prefix="condaenv.", suffix=".requirements.txt") as file,
    ):
        file.write("\n".join(requirements) + "\n")
        file.flush()
        python = str(Path(folder) / "venv" / "bin" / "python")
        subprocess.run([sys.executable, "-m", "venv", str(Path(folder) / "venv")], check=True)
        installed = subprocess.run([python, "-m", "pip", "install", "-q", "-r", file.name], cwd=ROOT)
        if installed.returncode:
            print("The pip section of environment.yml does not install; pip's message is above.", file=sys.stderr)
            return 1
        for code in _STARTS:
            subprocess.run([python, "-c", code], cwd=folder, check=True)
        subprocess.run([python, "-m", "jupyter", "lab", "--version"], cwd=folder, check=True)
    print("The pip section of environment.yml installs into an empty venv and starts.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
