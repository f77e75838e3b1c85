"""Writes docs/results/int8.md: accuracy, agreement and speed of trained models in FP32, FP16 and INT8.

python tools/int8_report.py runs/compare-digits/wbmm_a-seed0 runs/compare-fashion_mnist/wbmm_a-seed0
"""

import sys

from wbmm.bench.int8_page import main

RESULTS = "docs/results/int8.md"

if __name__ == "__main__":
    sys.exit(main(["--results", RESULTS, *sys.argv[1:]]))
