#!/usr/bin/env bash
# The test suite in two processes side by side, one thread each: half the time on two cores.
#
#   scripts/run_tests.sh                  the ordinary tests; the first half's output comes when both are done
#   scripts/run_tests.sh heavy            the heavy ones
#   python -m pytest tests/ops -m "not heavy"   a part, as usual
set -uo pipefail
cd "$(dirname "$0")/.."
marker=${1:-not heavy}
export OMP_NUM_THREADS=1
FIRST=(tests/train tests/data tests/mm tests/layers tests/models tests/io tests/third_party tests/docs)
output=$(mktemp)
trap 'rm -f "$output"; kill $(jobs -p) 2>/dev/null' EXIT

.venv/bin/python -m pytest -m "$marker" --durations=10 "${FIRST[@]}" >"$output" 2>&1 &
.venv/bin/python -m pytest -m "$marker" --durations=10 "${FIRST[@]/#/--ignore=}"
second=$?
wait $!
first=$?
cat "$output"
exit $((first > second ? first : second))
