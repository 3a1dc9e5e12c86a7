"""`python -m parallel3d.launcher` is the command `parallel3d`."""

import sys

from parallel3d.launcher.cli import main

sys.exit(main())
