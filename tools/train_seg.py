"""Trains a segmentor: on one device, or on many with torchrun.

python tools/train_seg.py configs/ade20k/wbmm-t-dense_upernet_8xb2-160k_ade20k-512x512.py
torchrun --nproc_per_node=8 tools/train_seg.py configs/ade20k/wbmm-t-hier_upernet_8xb2-160k_ade20k-512x512.py --resume
"""

import sys

from wbmm.mm.tools import train_tool

if __name__ == "__main__":
    sys.exit(train_tool("seg"))
