"""`python -m parallel3d.cli` is the command `p3d`."""

import sys

from parallel3d.cli import main

sys.exit(main())
