"""Exports a checkpoint for ONNX Runtime, OpenVINO or torch.export; the file is run there and compared.

python tools/export.py runs/wbmm_t/best.pt wbmm_t.onnx --dynamic-batch --dynamic-size
"""

import sys

from wbmm.cli import main

if __name__ == "__main__":
    sys.exit(main(["export", *sys.argv[1:]]))
