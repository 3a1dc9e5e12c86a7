"""Text of what was configured and built, which `dump_state` prints."""

from __future__ import annotations

from collections import Counter
from textwrap import indent

import yaml

from parallel3d.comm.collectives import all_gather_object
from parallel3d.config import BatchSizes, Config
from parallel3d.engine.update import WeightUpdate
from parallel3d.pipe.module import PipelineModule
from parallel3d.schedule.instructions import Program
from parallel3d.schedule.timing import simulate


def describe_state(
    config: Config, sizes: BatchSizes, model: PipelineModule, update: WeightUpdate, program: Program
) -> str:
    """Describe the resolved configuration, batch sizes, topology, partition, buckets and program. Collective."""
    own = {owners: [b.numel for b in buckets] for owners, buckets in update.reducer.buckets.items()}
    everyone = all_gather_object(own, model.groups.control)
    buckets = {owners: numels for rank in everyone for owners, numels in rank.items()}
    topology, num_shards = model.groups.topology, update.policy.num_shards(model.groups.data.size)
    axes = " x ".join(f"{axis} {topology.get_dim(axis)}" for axis in topology.get_axis_names())
    cut = []
    for owners, numels in sorted(buckets.items()):
        where = f"chunk {owners[0]}" if len(owners) == 1 else f"shared by chunks {', '.join(map(str, owners))}"
        cut.append(f"{where}: {len(numels)} buckets, {sum(numels):,} elements, the largest {max(numels):,}")
    counts = [Counter(i.op.name for i in instructions) for instructions in program.instructions]
    stages = [f"stage {k}: " + ", ".join(f"{n} {op}" for op, n in ops.items()) for k, ops in enumerate(counts)]
    parts = {
        "configuration in force": yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False),
        "batch": yaml.safe_dump(vars(sizes), sort_keys=False),
        "topology": f"{axes} = {topology.world_size()} ranks",
        "partition": model.partition_table,
        f"gradient buckets, each updated in {num_shards} parts": "\n".join(cut),
        f"program {program.name}: {sum(map(len, program.instructions))} instructions for {program.num_micro_batches} "
        f"micro-batches, bubble {simulate(program).bubble:.1%} where a backward takes twice as long as a forward": (
            "\n".join(stages)
        ),
    }
    return "\n".join(f"{title}\n{indent(text.rstrip(), '  ')}" for title, text in parts.items())
