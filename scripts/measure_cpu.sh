#!/usr/bin/env bash
# Everything that docs/speed.md and docs/results/cpu show, measured again: 20 minutes on 2 cores with nothing else to do.
# A second call goes on where the first one stopped. Then pages and pictures are made from the files.
#
#   bash scripts/measure_cpu.sh                          # into docs/results/cpu
#   bash scripts/measure_cpu.sh --only peers runtime     # these parts alone
#   bash scripts/measure_cpu.sh --out /tmp/try --quick   # elsewhere, with fewer rounds
set -euo pipefail
cd "$(dirname "$0")/.."

OUT=docs/results/cpu TABLES=docs/results QUICK="" ONLY=""
MINUTES=${MINUTES:-18} # no part is started later than this
PARTS="peers runtime training sizes op model train seg edge profile tables"
while [ $# -gt 0 ]; do
    case $1 in
    --out) OUT=$2 TABLES=$2 && shift 2 ;;
    --quick) QUICK=--quick && shift ;;
    --only) shift && while [ $# -gt 0 ] && [ "${1#--}" = "$1" ]; do ONLY="$ONLY $1" && shift; done ;;
    *) echo "measure_cpu.sh: '$1': expected --out DIR, --quick or --only PARTS (of $PARTS)" >&2 && exit 2 ;;
    esac
done
for part in $ONLY; do
    case " $PARTS " in *" $part "*) ;; *) echo "measure_cpu.sh: no part '$part': expected some of $PARTS" >&2 && exit 2 ;; esac
done

rounds() { if [ -n "$QUICK" ]; then echo 1; else echo "$1"; fi; } # of the commands that have no --quick
bench() { # bench MINUTES NAME ARGUMENTS...
    local minutes=$1 && shift
    .venv/bin/wbmm bench "$@" $QUICK --budget "$minutes"
}

peers() { bench 4 peers --rounds 7 --out "$OUT"; }
runtime() {
    [ -e "$OUT/runtime/runtime.csv" ] || .venv/bin/wbmm bench runtime wbmm_t --baseline convnext_tiny --batch 1 16 \
        --runtimes eager compiled openvino --precisions float32 bf16 int8 --rounds "$(rounds 7)" --limit \
        --out "$OUT/runtime"
}
training() {
    bench 1 train wbmm_t --batch 16 --rounds 4 --memory --out "$OUT/training-float32"
    bench 1 train wbmm_t --batch 16 --rounds 4 --dtype bfloat16 --autocast --out "$OUT/training-bfloat16"
    bench 1 train wbmm_a --baseline convnext_atto --batch 32 --px 56 112 --rounds 7 --out "$OUT/training-small"
}
sizes() {
    bench 2 model wbmm_t:compact wbmm_t_hier:compact --baseline wbmm_t_dense:compact --batch 1 8 --px 512 --rounds 5 \
        --out "$OUT/512"
    bench 1 model wbmm_a:compact wbmm_a:plain --baseline convnext_atto --batch 1 16 --rounds 9 --out "$OUT/small"
}
op() { bench 2 op --quick --out "$OUT"; }
model() { bench 4 model --preset paper --sizes p t --px 224 --batch 1 16 --rounds 5 --out "$OUT"; }
train() { bench 5 train --preset paper --sizes p t --batch 8 --rounds 3 --out "$OUT"; }
seg() { bench 2 seg --sizes 512x512 --batch 2 --rounds 3 --out "$OUT"; }
edge() { bench 1.5 model --preset edge --sizes p --px 224 --rounds 7 --out "$OUT"; }
profile() {
    for kind in openvino eager training; do
        local net=wbmm_t:compact batch=1
        [ $kind = training ] && net=wbmm_t batch=16
        [ -e "$OUT/profile-$kind/profile.csv" ] || .venv/bin/wbmm bench profile $net --runtime $kind --batch $batch \
            --rounds "$(rounds 3)" --out "$OUT/profile-$kind"
    done
    for net in wbmm_t:compact convnext_tiny; do
        local folder="$OUT/profile-bf16-${net%:*}"
        [ -e "$folder/profile.csv" ] || .venv/bin/wbmm bench profile $net --runtime eager --dtype bf16 --batch 1 \
            --rounds "$(rounds 10)" --out "$folder"
    done
}
tables() { # speed alone: their small-scale accuracy stays, with its own date
    for name in cross-operator convnext; do
        local keep="" # elsewhere there is none to keep
        grep -qs "^## Small-scale" "$TABLES/$name.md" && keep=--keep-trained
        .venv/bin/wbmm table "$name" $keep --rounds "$(rounds 4)" --out "$TABLES"
    done
}

begun=$SECONDS late=""
for part in ${ONLY:-$PARTS}; do
    if [ $((SECONDS - begun)) -ge $((60 * MINUTES)) ]; then late="$late $part" && continue; fi
    echo "== $part, after $((SECONDS - begun)) s" >&2
    $part
done
.venv/bin/wbmm bench report "$OUT"
[ "$OUT" != docs/results/cpu ] || .venv/bin/python scripts/speed_page.py
echo "== done after $((SECONDS - begun)) s" >&2
[ -z "$late" ] || echo "left for a second call, for lack of time: --only$late" >&2
