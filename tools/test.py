"""Evaluates model files in any form on labelled images, the same as `wbmm eval`.

python tools/test.py runs/wbmm_t/best.pt wbmm_t.safetensors wbmm_t.onnx --data /data/imagenet
"""

import sys

from wbmm.cli import main

if __name__ == "__main__":
    sys.exit(main(["eval", *sys.argv[1:]]))
