#!/bin/sh
# tools/venv.sh EXTRA: make the virtual environment and install the project into it, with moe-lab[EXTRA].
# Called by the Makefile. Settings from the environment: PYTHON, VENV, CONSTRAINTS. A failure says what to do.
set -u
extra=$1
python=${PYTHON:-python3}
venv=${VENV:-.venv}
constraints=${CONSTRAINTS-constraints.txt}

fail() {
    printf '\nCould not install: %s\n' "$*" >&2
    exit 1
}

command -v "$python" >/dev/null 2>&1 ||
    fail "there is no '$python'. Install Python 3.11 or newer, or name one: make demo PYTHON=python3.12"
"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' ||
    fail "Python 3.11 or newer is needed, '$python' is $("$python" -V 2>&1). Name a newer one: make demo PYTHON=python3.12"

if [ ! -x "$venv/bin/python" ]; then
    echo "Creating $venv with $("$python" -V 2>&1)"
    "$python" -m venv "$venv" || {
        rm -rf "$venv"
        fail "'$python -m venv' failed. On Debian and Ubuntu: apt install python3-venv, then run make again."
    }
fi

echo "Installing moe-lab[$extra] into $venv. The first time this takes some minutes; PyTorch is most of it."
"$venv/bin/python" -m pip install ${constraints:+-c "$constraints"} -e ".[$extra]" ||
    fail "pip stopped (its message is above). No network? Try again later. No build of a pinned version for this Python
or system? Let pip choose: make demo CONSTRAINTS=   (docs/install.md says more)"
