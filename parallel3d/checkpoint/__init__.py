"""Checkpoints that do not depend on the layout: each rank writes its tensors as it holds them, and any other can read them.

format.py describes the files. These functions need only files, not an engine: `complete_checkpoints`, `find`, `latest_tag` and
`check_complete` for directories; `Reader(path)` with `.manifest`, `.tensors`, `.read(name)` and `.verify_all()` for tensors.
"""

from parallel3d.checkpoint.directory import CompleteCheckpoint, check_complete, complete_checkpoints, find, latest_tag
from parallel3d.checkpoint.format import MASTER, MODEL, OPTIMIZER, Manifest
from parallel3d.checkpoint.read import Reader
