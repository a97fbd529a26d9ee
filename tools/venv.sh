#!/bin/sh
# Makes the development environment: sh tools/venv.sh VENV [PYTHON [EXTRAS]]
# With uv where it is installed, else with `python -m venv` and pip. An environment that exists is kept.
set -eu

venv=$1
wanted=${2:-}
extras=${3:-dev}
oldest="3.11"

new_enough() {
    "$1" -c "import sys; sys.exit(sys.version_info < (3, 11))" >/dev/null 2>&1
}

fail() {
    echo "kimi-k3: error: $1" >&2
    echo "hint: $2" >&2
    exit 1
}

find_python() {
    for name in ${wanted:-python3 python3.14 python3.13 python3.12 python3.11 python}; do
        if command -v "$name" >/dev/null 2>&1 && new_enough "$name"; then
            echo "$name"
            return
        fi
    done
}

create() {
    if command -v uv >/dev/null 2>&1; then
        uv venv --quiet --allow-existing --python "${wanted:->=$oldest}" "$venv"
        return
    fi
    python=$(find_python)
    if [ -z "$python" ]; then
        found=$(${wanted:-python3} --version 2>&1 | head -n 1 || true)
        fail "needs Python $oldest or newer; ${wanted:-python3} is ${found:-missing}." \
            "install a newer Python and run make PYTHON=python3.12 ..., or install uv (https://docs.astral.sh/uv)."
    fi
    "$python" -m venv "$venv" || fail "$python cannot make a virtual environment in $venv." \
        "on Debian or Ubuntu: apt-get install python3-venv"
}

install() {
    if command -v uv >/dev/null 2>&1; then
        uv pip install --quiet --python "$venv/bin/python" --editable ".[$extras]"
        return
    fi
    "$venv/bin/python" -m pip --version >/dev/null 2>&1 || "$venv/bin/python" -m ensurepip >/dev/null
    "$venv/bin/python" -m pip install -qq --disable-pip-version-check --editable ".[$extras]"
}

if [ ! -x "$venv/bin/python" ]; then
    echo "setting up $venv (once, about a minute)" >&2
    create
fi
new_enough "$venv/bin/python" || fail "$venv holds a Python older than $oldest." "rm -r $venv, then make again."
install
