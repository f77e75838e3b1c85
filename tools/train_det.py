"""Trains a detector: on one device, or on many with torchrun.

python tools/train_det.py configs/coco/wbmm-t-dense_cascade-mask-rcnn_8xb2-3x_coco.py
torchrun --nproc_per_node=8 tools/train_det.py configs/coco/wbmm-t-hier_cascade-mask-rcnn_8xb2-3x_coco.py --resume
"""

import sys

from wbmm.mm.tools import train_tool

if __name__ == "__main__":
    sys.exit(train_tool("det"))
