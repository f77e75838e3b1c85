#!/usr/bin/env bash
# What docs/results/cpu holds, measured again: about 20 minutes on 2 cores with nothing else to do.
# A second call goes on where the first one stopped. Then the pages and pictures are made from the logs.
#
#   bash scripts/measure_cpu.sh                  # into docs/results/cpu
#   bash scripts/measure_cpu.sh /tmp/try --quick # elsewhere, with fewer rounds
set -euo pipefail
cd "$(dirname "$0")/.."
OUT=${1:-docs/results/cpu}
shift || true
WBMM=${WBMM:-.venv/bin/wbmm}

"$WBMM" bench op --quick --budget 6 --out "$OUT" "$@"
"$WBMM" bench model --preset paper --sizes p t --px 224 512 --rounds 9 --budget 5 --out "$OUT" "$@"
"$WBMM" bench train --preset paper --sizes p t --batch 8 --rounds 5 --budget 4 --out "$OUT" "$@"
"$WBMM" bench seg --sizes 512x512 --batch 2 --rounds 4 --budget 4 --out "$OUT" "$@"
"$WBMM" bench model --preset edge --sizes p --px 224 --rounds 9 --budget 2 --out "$OUT" "$@"
"$WBMM" bench report "$OUT"
if [ "$OUT" = docs/results/cpu ]; then
    .venv/bin/python scripts/speed_page.py
fi
