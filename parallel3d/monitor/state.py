"""The tree that `dump_state` prints: the configuration in force, and what was built from it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from pydantic import BaseModel
from rich.console import Console
from rich.markup import escape
from rich.tree import Tree

from parallel3d.comm.topology import ProcessTopology
from parallel3d.config import BatchSizes, Config
from parallel3d.schedule.instructions import Program
from parallel3d.schedule.timing import simulate

# Owners (see ParameterInfo) -> the number of elements of each of their gradient buckets.
Buckets = Mapping[tuple[int, ...], Sequence[int]]


def print_state(
    config: Config,
    sizes: BatchSizes,
    topology: ProcessTopology,
    partition: str,
    buckets: Sequence[Buckets],
    num_shards: int,
    program: Program,
) -> None:
    """Print the tree, as wide as the terminal, or 160 columns wide. Values that differ from the defaults are bold.

    partition: the partition's table; buckets: of every rank; num_shards: the parts in which a bucket is updated.
    """
    tree = Tree("parallel3d")
    _add_section(tree.add("configuration in force"), config)
    batch = tree.add("batch")
    for name, value in vars(sizes).items():
        batch.add(escape(f"{name}: {value}"))
    axes = " x ".join(f"{axis} {topology.get_dim(axis)}" for axis in topology.get_axis_names())
    tree.add(f"topology: {axes} = {topology.world_size()} ranks")
    tree.add("partition").add(escape(partition))
    cut = tree.add(f"gradient buckets, each updated in {num_shards} parts")
    for owners, numels in sorted({owners: numels for rank in buckets for owners, numels in rank.items()}.items()):
        where = f"chunk {owners[0]}" if len(owners) == 1 else f"shared by chunks {', '.join(map(str, owners))}"
        cut.add(f"{where}: {len(numels)} buckets, {sum(numels):,} elements, the largest {max(numels):,}")
    instructions = tree.add(
        escape(
            f"program {program.name}: {sum(map(len, program.instructions))} instructions for {program.num_micro_batches} "
            f"micro-batches, bubble {simulate(program).bubble:.1%} where a backward takes twice as long as a forward"
        )
    )
    for stage, own in enumerate(program.instructions):
        ops = Counter(i.op.name for i in own)
        instructions.add(f"stage {stage}: " + ", ".join(f"{n} {op}" for op, n in ops.items()))
    console = Console()
    (console if console.is_terminal else Console(width=160)).print(tree, highlight=False)


def _add_section(tree: Tree, section: BaseModel) -> None:
    for name, field in type(section).model_fields.items():
        value = getattr(section, name)
        if isinstance(value, BaseModel):
            _add_section(tree.add(name), value)
        else:
            line = escape(f"{name}: {value!r}")
            tree.add(line if value == field.default else f"[bold]{line}[/bold]")
