# Sourced by the other scripts: goes to the checkout, and makes sure that $PYTHON has hybridpar installed from it.
#
# Installs into the active virtual environment, else into .venv in the checkout, once; again when what is installed changes.
# An environment that has torch >= 2.11 keeps it (a GPU image, say); otherwise the tested version is installed.
#   PYTHON=python3.12     the interpreter that .venv is made from
#   EXTRAS=plot,dev       optional dependencies
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

TORCH="torch==2.13.0"
EXTRAS="${EXTRAS:-plot}"

if [ -n "${VIRTUAL_ENV:-}" ]; then
    PYTHON="$VIRTUAL_ENV/bin/python"
else
    if [ ! -x .venv/bin/python ]; then
        "${PYTHON:-python3}" -c 'import sys; v = sys.version_info; sys.exit(v < (3, 10) and f"hybridpar needs Python 3.10 or newer, this is {v.major}.{v.minor}")'
        # with torch already there (a GPU image), see it from inside
        "${PYTHON:-python3}" -c 'import torch' 2>/dev/null && site=--system-site-packages || site=
        "${PYTHON:-python3}" -m venv $site .venv
    fi
    PYTHON="$PWD/.venv/bin/python"
fi

wanted="$EXTRAS $(cat pyproject.toml setup.py csrc/*.c csrc/*/* | cksum)"
stamp="$("$PYTHON" -c 'import sys; print(sys.prefix)')/.hybridpar-installed"
if [ "$(cat "$stamp" 2>/dev/null)" != "$wanted $PWD" ]; then
    echo "installing hybridpar[$EXTRAS] into $("$PYTHON" -c 'import sys; print(sys.prefix)')" >&2
    pip() { "$PYTHON" -m pip --disable-pip-version-check "$@" --quiet; }
    pip install 'setuptools>=77' wheel
    "$PYTHON" -c 'import torch, sys; sys.exit(tuple(map(int, torch.__version__.split(".")[:2])) < (2, 11))' 2>/dev/null \
        || pip install "$TORCH"
    # no build isolation: the extension is built against the torch that is here
    pip install --no-build-isolation -e ".[$EXTRAS]"
    echo "$wanted $PWD" > "$stamp"
fi
