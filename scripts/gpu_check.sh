#!/usr/bin/env bash
# For the first person with an NVIDIA GPU: runs the tests that need one and the benchmarks, and writes one file to send back.
#   GPU=h100 scripts/gpu_check.sh [gpu_check.txt]
# GPU is one that `wbmm bench roofline --help` lists, for the computed limits (a100 if not given).
# A step that fails is reported in the file, and the next one runs.
#   DEVICE=cpu scripts/gpu_check.sh rehearsal.txt    # the same commands without a GPU, on small models: do they run?
set -uo pipefail
cd "$(dirname "$0")/.."
OUT=${1:-gpu_check.txt}
PYTHON=${PYTHON:-.venv/bin/python}
GPU=${GPU:-a100}
DEVICE=${DEVICE:-cuda}
WORK=$(mktemp -d)
trap 'rm -rf "$WORK"' EXIT

if [ "$DEVICE" = cpu ]; then
    MODELS="wbmm_a:compact wbmm_a_hier:compact convnext_atto" TRAINED="wbmm_a wbmm_a_hier convnext_atto"
    OPTIONS="--baseline convnext_atto --batch 2 --size 64 64 --rounds 1" OPERATORS="--batch 1 --map 7 --channels 8 --runs 1 --rounds 1"
else
    MODELS="wbmm_t:compact wbmm_t_hier:compact convnext_tiny" TRAINED="wbmm_t wbmm_t_hier convnext_tiny"
    OPTIONS="--batch 64" OPERATORS="--batch 64 --map 14 56 --runs 3 --layout nchw channels_last --mode forward training"
    if ! "$PYTHON" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; then
        echo "no CUDA device is visible to torch (PYTHON=$PYTHON)" >&2
        exit 1
    fi
fi

step() {
    local title=$1
    shift
    printf '\n## %s\n$ %s\n' "$title" "$*"
    "$@" 2>&1
    local code=$?
    if [ $code -ne 0 ]; then
        echo "$title" >>"$WORK/failed"
        echo "FAILED with exit code $code"
    fi
}

check() {
    local dtype backend autocast
    echo "# WBMM on a GPU, $(date -u +%Y-%m-%dT%H:%MZ), commit $(git rev-parse --short HEAD 2>/dev/null || echo unknown), $DEVICE"
    [ "$DEVICE" = cpu ] || step "the machine" nvidia-smi
    step "packages" "$PYTHON" -m wbmm doctor
    step "who computes what" "$PYTHON" -m wbmm info wbmm_t_hier --backends
    step "tests on the GPU" "$PYTHON" -m pytest -m cuda -rs --durations=10 -p no:cacheprovider tests
    step "operators" "$PYTHON" -m wbmm bench op --device "$DEVICE" $OPERATORS --out "$WORK" --markdown
    for dtype in float32 bfloat16; do
        autocast=$([ "$dtype" = float32 ] || echo --autocast)
        for backend in best reference; do
            export WBMM_BACKEND=${backend#best}
            step "inference, $dtype, backend: $backend" "$PYTHON" -m wbmm bench model $MODELS $OPTIONS --device "$DEVICE" \
                --dtype "$dtype" --markdown --out "$WORK/$dtype-$backend"
            step "training, $dtype, backend: $backend" "$PYTHON" -m wbmm bench train $TRAINED $OPTIONS --device "$DEVICE" \
                --dtype "$dtype" $autocast --markdown --out "$WORK/$dtype-$backend"
        done
    done
    unset WBMM_BACKEND
    step "beside the computed limits of $GPU" "$PYTHON" -m wbmm bench roofline --gpu "$GPU" --measured "$WORK"/*/*.csv --markdown
    printf '\n%s steps failed\n' "$(cat "$WORK/failed" 2>/dev/null | wc -l)"
}

check | tee "$OUT"
echo "written to $OUT"
test ! -e "$WORK/failed"
