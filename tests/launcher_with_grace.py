"""The launcher with another time between asking a worker to end and killing it: `python -m launcher_with_grace SECONDS ...`."""

import sys

from parallel3d.launcher import agent, cli

agent.GRACE_S = int(sys.argv.pop(1))
sys.exit(cli.main())
