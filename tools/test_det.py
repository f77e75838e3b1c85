"""Tests a detector: COCO's box and mask AP; --fuse in its inference form.

python tools/test_det.py configs/coco/wbmm-t-dense_cascade-mask-rcnn_8xb2-3x_coco.py detector.pth --fuse
"""

import sys

from wbmm.mm.tools import evaluate_tool

if __name__ == "__main__":
    sys.exit(evaluate_tool("det"))
