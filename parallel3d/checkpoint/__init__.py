"""Checkpoints that do not depend on the layout: each rank writes its tensors as it holds them, and any other can read them.

See format.py for what is on the disk. What needs files alone, and no engine: of directories `complete_checkpoints`, `find`,
`latest_tag` and `check_complete`; of tensors `Reader(path)` with `.manifest`, `.tensors`, `.read(name)` and `.verify_all()`.
"""

from parallel3d.checkpoint.directory import Found, check_complete, complete_checkpoints, find, latest_tag
from parallel3d.checkpoint.format import MASTER, MODEL, OPTIMIZER, Manifest
from parallel3d.checkpoint.read import Reader
