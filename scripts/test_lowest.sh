#!/usr/bin/env bash
# Run the core tests with the lowest versions that setup.py allows.
#
#   scripts/test_lowest.sh [pytest arguments]
#
# The environment (about 8 GB, PyPI's builds of torch carry CUDA) goes into a temporary folder outside the checkout and
# is deleted at the end. KEEP=folder keeps it there, and takes it again the next time.  PYTHON: the interpreter.
#
# numpy: the interpreter of the Triton that comes with that torch works with none later than 2.3.
#
# Why not lower: torch 2.7 and 2.8 cannot prove that a model exports at every height and width, 2.8 writes the weights of
# a .pt2 file as a pickle, which our reader rejects, and 2.7's fx fails on annotations such as `Tensor | None`.
set -euo pipefail
cd "$(dirname "$0")/.."

lowest() { # lowest <package>: its lower bound in setup.py
    sed -nE "s/.*\"$1>=([0-9.]+)[,\"].*/\1/p" setup.py | head -n 1
}

torch=$(lowest torch) torchvision=$(lowest torchvision) timm=$(lowest timm)
if [ -n "${KEEP:-}" ]; then
    env=$KEEP
else
    env=$(mktemp -d)
    trap 'rm -rf "$env"' EXIT
fi
[ -x "$env/bin/python" ] || "${PYTHON:-python3}" -m venv "$env"
"$env/bin/python" -m pip --disable-pip-version-check install -q \
    "torch~=$torch.0" "torchvision~=$torchvision.0" "timm==$timm" "numpy<2.4" "pytest>=8" "pytest-timeout>=2.3"
"$env/bin/python" -c 'import timm, torch, torchvision as tv; print("torch", torch.__version__, "torchvision", tv.__version__, "timm", timm.__version__)'

# Not installed: `pythonpath` in pyproject.toml finds this checkout. No cache: the checkout's belongs to its own Python.
PYTHONDONTWRITEBYTECODE=1 "$env/bin/python" -m pytest -p no:cacheprovider -m "not heavy" --timeout=600 \
    tests/ops tests/layers tests/models tests/io "$@"
