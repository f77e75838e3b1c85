"""Compares models trained with one recipe over several seeds; interrupted, the same command continues.

python tools/compare.py configs/digits.yaml --models wbmm_a convnext_atto --seeds 0 1 2
"""

import sys

from wbmm.bench.compare import main

if __name__ == "__main__":
    sys.exit(main())
