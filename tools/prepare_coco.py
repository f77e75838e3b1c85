"""Checks COCO, or own data in its format, before training reads them (and unpacks the archives, when given).

python tools/prepare_coco.py --root data/coco --archives train2017.zip val2017.zip annotations_trainval2017.zip
python tools/prepare_coco.py --root data/custom --train annotations/train.json train --val annotations/val.json val
"""

import sys

from wbmm.mm.prepare import prepare_coco

if __name__ == "__main__":
    sys.exit(prepare_coco())
