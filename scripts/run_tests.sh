#!/usr/bin/env bash
# Tests in two processes side by side, one thread each: half the time on two cores. The first half's output comes when
# both are done.
#
#   scripts/run_tests.sh           the ordinary tests
#   scripts/run_tests.sh heavy     the heavy ones
#   scripts/run_tests.sh fast      operators, layers, models and files; what is about GPUs is left to the whole suite
#   python -m pytest tests/ops -m "not heavy"    a part, as usual
set -uo pipefail
cd "$(dirname "$0")/.."
export OMP_NUM_THREADS=1
first=(tests/train tests/data tests/mm tests/layers tests/models tests/io tests/third_party tests/docs)
second=("${first[@]/#/--ignore=}")
marker="not heavy"
case ${1:-} in
"") ;;
heavy) marker=heavy ;;
fast)
    first=(tests/models --ignore=tests/models/test_fake_cuda.py --ignore=tests/models/test_contract.py)
    first+=(--ignore=tests/models/test_hub.py)
    second=(tests/layers tests/io tests/models/test_contract.py tests/ops --ignore=tests/ops/backends/triton tests/test_rooms.py tests/test_text.py tests/test_zoo.py tests/test_habits.py)
    ;;
*) echo "run_tests.sh: '$1': expected heavy, fast or nothing" >&2 && exit 2 ;;
esac
output=$(mktemp)
trap 'rm -f "$output"; kill $(jobs -p) 2>/dev/null' EXIT

.venv/bin/python -m pytest -m "$marker" --durations=10 "${first[@]}" >"$output" 2>&1 &
.venv/bin/python -m pytest -m "$marker" --durations=10 "${second[@]}"
status=$?
wait $!
first_status=$?
cat "$output"
exit $((first_status > status ? first_status : status))
