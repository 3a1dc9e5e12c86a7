"""The pool of ranks that other tests run on."""

from __future__ import annotations

import time
from pathlib import Path
from unittest import mock

import torch.distributed as dist


def leaves(folder: str) -> bool:
    """Rank 0 is through at once; the other tells whether it has left the world by then."""
    rank, destroy = dist.get_rank(), dist.destroy_process_group

    def noted(group: dist.ProcessGroup | None = None) -> None:
        patch.stop()
        Path(folder, str(rank)).touch()
        destroy(group)

    patch = mock.patch.object(dist, "destroy_process_group", noted)
    patch.start()
    time.sleep(0.5 * rank)
    return Path(folder, "0").exists()


def test_no_rank_leaves_the_world_before_all_are_through(run_ranks, tmp_path: Path) -> None:
    """Another may still be connecting to it: that fails once it has left."""
    assert run_ranks(2, leaves, str(tmp_path)) == [False, False]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0", "1"]
