"""Turns masks of any kind (colours, palettes, arbitrary numbers) into label maps 0, 1, 2, ... with a list of classes.

python tools/prepare_seg.py --data camvid_colours                                    # shows what the masks hold
python tools/prepare_seg.py --data camvid_colours --classes label_colors.txt --out camvid
"""

import sys

from wbmm.mm.own.seg import prepare_seg

if __name__ == "__main__":
    sys.exit(prepare_seg())
