import sys

from wbmm.cli import main

sys.exit(main())
