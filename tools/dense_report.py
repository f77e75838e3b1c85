"""Tests every form of finished runs of train_seg or train_det, and writes the figures into a page of docs/results.

python tools/dense_report.py docs/results/camvid.md runs/camvid/*
"""

import sys

from wbmm.bench.dense_page import main

if __name__ == "__main__":
    sys.exit(main())
