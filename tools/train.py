"""Trains a model: on one device, or on many with torchrun.

python tools/train.py configs/digits.yaml
torchrun --nproc_per_node=8 tools/train.py configs/imagenet/wbmm_t.yaml data.root=/data/imagenet
"""

import sys

from torch.distributed.elastic.multiprocessing.errors import record

from wbmm.commands.train import main

if __name__ == "__main__":
    sys.exit(record(main)())
