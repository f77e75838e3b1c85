"""`python -m wbmm`: the same as the `wbmm` command."""

import sys

from .cli import main

sys.exit(main())
