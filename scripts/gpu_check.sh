#!/usr/bin/env bash
# For the first person with an NVIDIA GPU: runs the tests that need one and the benchmarks, and writes one file to send back.
#   GPU=h100 scripts/gpu_check.sh [gpu_check.txt]
# GPU is one that `wbmm bench roofline --help` lists, for the computed limits (a100 if not given).
# A step that fails is reported in the file, and the next one runs.
set -uo pipefail
cd "$(dirname "$0")/.."
OUT=${1:-gpu_check.txt}
PYTHON=${PYTHON:-.venv/bin/python}
failed=0

step() {
    local title=$1
    shift
    printf '\n## %s\n$ %s\n' "$title" "$*"
    "$@" 2>&1
    local code=$?
    if [ $code -ne 0 ]; then
        failed=$((failed + 1))
        echo "FAILED with exit code $code"
    fi
}

if ! "$PYTHON" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; then
    echo "no CUDA device is visible to torch (PYTHON=$PYTHON)" >&2
    exit 1
fi

{
    echo "# WBMM on a GPU, $(date -u +%Y-%m-%dT%H:%MZ), commit $(git rev-parse --short HEAD 2>/dev/null || echo unknown)"
    step "the machine" nvidia-smi
    step "packages" "$PYTHON" -m wbmm doctor
    step "tests on the GPU" "$PYTHON" -m pytest -m cuda -rs --durations=10 tests
    for backend in "" reference; do
        export WBMM_BACKEND=$backend
        step "inference, backend: ${backend:-the best}" "$PYTHON" -m wbmm bench model wbmm_t:compact wbmm_t_hier:compact convnext_tiny \
            --batch 1 64 --device cuda --markdown
        step "training, backend: ${backend:-the best}" "$PYTHON" -m wbmm bench train wbmm_t wbmm_t_hier convnext_tiny \
            --batch 64 --device cuda --markdown
    done
    unset WBMM_BACKEND
    step "computed limits, to compare with" "$PYTHON" -m wbmm bench roofline wbmm_t --gpu "${GPU:-a100}"
    printf '\n%s steps failed\n' "$failed"
} | tee "$OUT"
echo "written to $OUT"
