"""Tests a segmentor: single scale, or --tta for several scales with flips; --fuse in its inference form.

python tools/test_seg.py configs/ade20k/wbmm-t-dense_upernet_8xb2-160k_ade20k-512x512.py segmentor.pth --tta
"""

import sys

from wbmm.mm.tools import evaluate_tool

if __name__ == "__main__":
    sys.exit(evaluate_tool("seg"))
