"""Entry point of `python -m parallel3d.launcher`, the same as the command `parallel3d`."""

import sys

from parallel3d.launcher.cli import main

sys.exit(main())
