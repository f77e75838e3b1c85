"""Converts a checkpoint to its fused inference form; the same as `wbmm reparam`.

python tools/reparameterize.py runs/wbmm_t/best.pt wbmm_t.safetensors --check
"""

import sys

from wbmm.cli import main

if __name__ == "__main__":
    sys.exit(main(["reparam", *sys.argv[1:]]))
