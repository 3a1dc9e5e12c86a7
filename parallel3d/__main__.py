"""`python -m parallel3d` is the command `parallel3d`."""

import sys

from parallel3d.launcher import main

sys.exit(main())
