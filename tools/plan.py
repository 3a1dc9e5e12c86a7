"""The topology planning tool, as `p3d plan`: python tools/plan.py --model 7b --cluster 4xH200 --global-batch 64"""

from __future__ import annotations

import sys

from parallel3d.cli import main

if __name__ == "__main__":
    sys.exit(main(["plan", *sys.argv[1:]]))
