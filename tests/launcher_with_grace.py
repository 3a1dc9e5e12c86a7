"""The launcher, tuned: `python -m launcher_with_grace GRACE LATE ...`.

GRACE: seconds between asking a worker to end and killing it. LATE: seconds by which torch's agent looks at the workers later.
"""

import sys
import time
from typing import Any

from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent

from parallel3d.launcher import agent, cli

agent.GRACE_S, late_s = int(sys.argv.pop(1)), float(sys.argv.pop(1))


def look_late(*args: Any, look: Any = LocalElasticAgent._monitor_workers) -> Any:
    time.sleep(late_s)
    return look(*args)


LocalElasticAgent._monitor_workers = look_late
sys.exit(cli.main())
