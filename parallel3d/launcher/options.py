"""Options of a launch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

GRACE_S = 5
"""Seconds between asking a worker to end and killing it."""


class WorldSize(int):
    """Number of processes of all hosts together, as a layout has it."""


@dataclass(frozen=True)
class Node:
    """One of several hosts of a job.

    - hosts: names of all hosts, in the order of their ranks; index: this one's.
    - address, port: of the store where they meet, which the first host's launcher keeps.
    """

    hosts: Sequence[str]
    index: int
    address: str
    port: int


@dataclass(frozen=True)
class LaunchOptions:
    """Options of a launch.

    - command: the script, or a module's name if is_module, then its own arguments.
    - max_restarts: how often all workers are started again when one has failed.
    - is_program: the command is run as it is, not by Python. first_arguments: in front of its own, where ${local_rank} is
      replaced by the rank. binds_cores: whether the cores are divided among the workers.
    - node: this host among several; None if the job has one.
    """

    num_workers: int
    uses_gpus: bool
    command: Sequence[str]
    is_module: bool = False
    master_port: int = 0
    log_dir: str | None = None
    max_restarts: int = 0
    is_program: bool = False
    first_arguments: Sequence[str] = ()
    binds_cores: bool = False
    node: Node | None = None
