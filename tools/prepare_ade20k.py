"""Checks the ADE20K folder that training reads (and unpacks the archive, when given), and says what is missing.

python tools/prepare_ade20k.py --root data/ade --archive ADEChallengeData2016.zip
"""

import sys

from wbmm.mm.prepare import prepare_ade20k

if __name__ == "__main__":
    sys.exit(prepare_ade20k())
