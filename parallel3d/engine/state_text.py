"""Text of what was configured and built, which `dump_state` prints."""

from __future__ import annotations

from collections import Counter

from pydantic import BaseModel
from rich.console import Console
from rich.markup import escape
from rich.tree import Tree

from parallel3d.comm.collectives import all_gather_object
from parallel3d.config import BatchSizes, Config
from parallel3d.engine.update import WeightUpdate
from parallel3d.pipe.module import PipelineModule
from parallel3d.schedule.instructions import Program
from parallel3d.schedule.timing import simulate


def describe_state(
    config: Config, sizes: BatchSizes, model: PipelineModule, update: WeightUpdate, program: Program
) -> str:
    """Describe the resolved configuration, batch sizes, topology, partition, buckets and program. Collective.

    The text is as wide as the terminal, or else 160 columns. Values that differ from the defaults are bold.
    """
    own = {owners: [b.numel for b in buckets] for owners, buckets in update.reducer.buckets.items()}
    everyone = all_gather_object(own, model.groups.control)
    buckets = {owners: numels for rank in everyone for owners, numels in rank.items()}
    topology, num_shards = model.groups.topology, update.policy.num_shards(model.groups.data.size)
    tree = Tree("parallel3d")
    _add_section(tree.add("configuration in force"), config)
    batch = tree.add("batch")
    for name, value in vars(sizes).items():
        batch.add(escape(f"{name}: {value}"))
    axes = " x ".join(f"{axis} {topology.get_dim(axis)}" for axis in topology.get_axis_names())
    tree.add(f"topology: {axes} = {topology.world_size()} ranks")
    tree.add("partition").add(escape(model.partition_table))
    cut = tree.add(f"gradient buckets, each updated in {num_shards} parts")
    for owners, numels in sorted(buckets.items()):
        where = f"chunk {owners[0]}" if len(owners) == 1 else f"shared by chunks {', '.join(map(str, owners))}"
        cut.add(f"{where}: {len(numels)} buckets, {sum(numels):,} elements, the largest {max(numels):,}")
    instructions = tree.add(
        escape(
            f"program {program.name}: {sum(map(len, program.instructions))} instructions for {program.num_micro_batches} "
            f"micro-batches, bubble {simulate(program).bubble:.1%} where a backward takes twice as long as a forward"
        )
    )
    for stage, listed in enumerate(program.instructions):
        ops = Counter(i.op.name for i in listed)
        instructions.add(f"stage {stage}: " + ", ".join(f"{n} {op}" for op, n in ops.items()))
    console = Console()
    console = console if console.is_terminal else Console(width=160)
    with console.capture() as shown:
        console.print(tree, highlight=False)
    return shown.get().rstrip("\n")


def _add_section(tree: Tree, section: BaseModel) -> None:
    for name, field in type(section).model_fields.items():
        value = getattr(section, name)
        if isinstance(value, BaseModel):
            _add_section(tree.add(name), value)
        else:
            line = escape(f"{name}: {value!r}")
            tree.add(line if value == field.default else f"[bold]{line}[/bold]")
