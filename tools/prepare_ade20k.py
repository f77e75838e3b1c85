"""Checks the ADE20K folder that training reads (and unpacks the archive, when given), and says what is missing.

python tools/prepare_ade20k.py --root data/ade --archive ADEChallengeData2016.zip
"""

import sys

from wbmm.mm.ade20k import main

if __name__ == "__main__":
    sys.exit(main())
