"""One process of this framework in the benchmark; rank 0 prints a line `RESULT {...}`.

torchrun --nproc_per_node 4 tools/bench/ours.py --size 7b --pp 4 --schedule 1f1b
torchrun --nproc_per_node 4 tools/bench/ours.py --size 7b --dp 4 --zero 2 --accumulate bf16

A Llama-shaped decoder on one fixed batch of random tokens, a seed a replica: bf16 weights with fp32 masters, AdamW,
clipping at 1.0, no recomputation, eager layers but with --compile. Stages hold equally many blocks unless --partition says
otherwise.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
import warnings
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from measured import Measured, measure
from profiled import roofline_figures
from torch import nn

import parallel3d
from parallel3d import DeepSpeedEngine as Engine
from parallel3d.models import DecoderConfig, causal_lm_loss, decoder
from parallel3d.pipe import LayerSpec, PipelineModule
from parallel3d.schedule.builders import one_f_one_b
from parallel3d.schedule.instructions import COMPUTE_OPS, Instruction, Op, Program
from parallel3d.schedule.timing import Cost, Timeline, measured_cost, simulate

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))

from train_llama import SIZES, UNITS, Attention, Size, decoder_layers, fixed_batch, forever, loss_fn

PEAK_FLOPS = 989e12  # a second, dense bf16: the H200's datasheet
PROFILED = 3  # steps, of which the one of medium length tells the bubble


def num_parameters(size: Size) -> int:
    """Return the parameters of the decoder: blocks, embedding, head and the last norm."""
    block = 4 * size.hidden**2 + 3 * size.hidden * size.ffn + 2 * size.hidden
    return size.layers * block + 2 * size.vocab * size.hidden + size.hidden


def flops_per_token(size: Size) -> int:
    """Model FLOPs, forward and backward: 6 for each parameter of a matmul, and causal attention; the look-up is none."""
    matmul = num_parameters(size) - size.vocab * size.hidden
    # Scores and values forward are 2 * 2 * hidden * seq for each layer; causal is half of it; the backward is twice that.
    return 6 * matmul + 6 * size.layers * size.hidden * size.seq


def flops_per_token_of(model: nn.Module, seq: int) -> tuple[int, int]:
    """(GEMMs, causal attention), forward and backward, of what this rank holds of a decoder, sliced or not.

    Each matrix but an embedding's is multiplied. Attention is as wide as the heads that its output projection takes.
    """
    modules = [module for module in model.modules() if "Embedding" not in type(module).__name__]
    matrices = [p for module in modules for p in module.parameters(recurse=False) if p.dim() == 2]
    outputs = [module.out for module in modules if isinstance(module, Attention)]
    outputs += [module.attention_out for module in modules if hasattr(module, "attention_out")]
    return 6 * sum(p.numel() for p in matrices), 6 * seq * sum(output.weight.shape[1] for output in outputs)


def model_flops_utilization(size: Size, tokens: int, seconds: float, num_ranks: int) -> float:
    """Share of the datasheet's peak of `num_ranks` devices that `tokens` in `seconds` are."""
    return tokens * flops_per_token(size) / seconds / num_ranks / PEAK_FLOPS


def equal_block_bounds(num_blocks: int, num_parts: int, units: int = 1, behind: int = 1) -> list[int]:
    """Bounds of [embedding, blocks of `units` layers, `behind` others]: as many blocks a part, or one more in the first."""
    if num_parts > num_blocks:
        raise ValueError(f"{num_blocks} blocks can't fill {num_parts} parts; use fewer stages or chunks")
    short, longer = divmod(num_blocks, num_parts)
    inner = [1 + units * (part * short + min(part, longer)) for part in range(1, num_parts)]
    return [0, *inner, 1 + units * num_blocks + behind]


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SIZES, default="tiny")
    parser.add_argument("--micro_batch", type=int, default=1, help="samples")
    parser.add_argument("--micro_batches", type=int, default=4, help="micro-batches a step, of each replica")
    parser.add_argument("--warmup", type=int, default=3, help="steps before the timed ones")
    parser.add_argument("--steps", type=int, default=6, help="timed steps")
    parser.add_argument("--pp", type=int, default=1, help="pipeline stages")
    parser.add_argument("--dp", type=int, default=1, help="replicas")
    parser.add_argument("--tp", type=int, default=1, help="tensor-parallel ranks, of parallel3d.models' decoder")
    parser.add_argument("--sliced_layers", action="store_true", help="that decoder even without tensor parallelism")
    parser.add_argument("--sequence_parallel", action="store_true")
    parser.add_argument("--shard_copies", action="store_true", help="its shards travel by copies beside the products")
    parser.add_argument("--compile", action="store_true", help="compile layers and loss")
    parser.add_argument("--cpp", action="store_true", help="compiled layers start kernels from C++")
    parser.add_argument("--graphs", action="store_true", help="capture forwards and backwards as CUDA graphs")
    parser.add_argument("--fp8", action="store_true", help="compute linears of blocks in fp8")
    parser.add_argument("--cudnn", action="store_true", help="attention by cuDNN where it can")
    parser.add_argument("--schedule", default="1f1b")
    parser.add_argument("--chunks", type=int, default=1, help="chunks a stage")
    parser.add_argument("--placement", choices=["loop", "v"], default="loop")
    parser.add_argument("--max_in_flight", type=float, help="activations that zb-looped and auto may hold, of 1f1b's")
    parser.add_argument("--units", choices=UNITS, default="block", help="layers of a block")
    parser.add_argument(
        "--partition", default="blocks", help="blocks (as many in each), a method, or JSON: bounds, weights"
    )
    parser.add_argument("--zero", type=int, default=0, help="ZeRO stage")
    parser.add_argument("--accumulate", choices=["fp32", "bf16"], help="dtype of gradient accumulation")
    parser.add_argument("--communicate", choices=["fp32", "bf16"], help="dtype of gradient reduction")
    parser.add_argument("--reduce_per_micro_batch", choices=["true", "false", "auto"], default="auto")
    parser.add_argument(
        "--details", action="store_true", help="print memory by component; time instructions at pp 1, too"
    )
    parser.add_argument("--roofline", action="store_true", help="profile one more step, kernel by kernel")
    parser.add_argument("--kernels", default="", help="keys of kernels that are turned on, separated by commas")
    parser.add_argument("--config", type=json.loads, default={}, help="JSON merged into the configuration")
    return parser.parse_args()


def make_config(args: argparse.Namespace, cuda: bool) -> dict[str, Any]:
    """The framework's configuration of a case."""
    per_micro_batch = {"true": True, "false": False, "auto": "auto"}[args.reduce_per_micro_batch]
    optimizer = {"lr": 1e-4, "betas": [0.9, 0.95], "weight_decay": 0.1, **({"fused": True} if cuda else {})}
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": args.micro_batch,
        "gradient_accumulation_steps": args.micro_batches,
        "gradient_clipping": 1.0,
        "steps_per_print": None,
        "optimizer": {"type": "AdamW", "params": optimizer},
        "bf16": {"enabled": True},
        "tensor_parallel": {
            "size": args.tp,
            "sequence_parallel": args.sequence_parallel,
            "peer_copies": args.shard_copies,
        },
        "compile": {"enabled": args.compile, "cuda_graphs": args.graphs, "options": {"cpp_wrapper": args.cpp}},
        "fp8": {"enabled": args.fp8},
        "attention": {"backend": ["cudnn", "flash", "efficient", "math"] if args.cudnn else "auto"},
        "zero_optimization": {"stage": args.zero, "reduce_per_micro_batch": per_micro_batch},
        "pipeline": {
            "stages": args.pp,
            "schedule": args.schedule,
            "num_chunks": args.chunks,
            "placement": args.placement,
            "partition": _partition(args),
        },
    }
    if args.max_in_flight is not None:
        config["pipeline"]["max_in_flight"] = args.max_in_flight
    if args.kernels:
        config["kernels"] = dict.fromkeys(args.kernels.split(","), True)
    if args.accumulate:
        config["data_types"] = {"grad_accum_dtype": args.accumulate}
    if args.communicate:
        config["communication_data_type"] = args.communicate
    return merge(config, args.config)


def _partition(args: argparse.Namespace) -> str | list[int] | dict[str, Any]:
    if args.partition == "blocks":
        num_blocks, units = SIZES[args.size].layers, len(UNITS[args.units])
        behind = 2 if has_sliced_layers(args) else 1
        return equal_block_bounds(num_blocks, args.pp * args.chunks, units, behind)
    if args.partition[0] in "[{":
        given: list[int] | dict[str, Any] = json.loads(args.partition)
        return given
    return str(args.partition)


def merge(base: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """`base` with what `changes` says, mapping by mapping."""
    merged = dict(base)
    for key, value in changes.items():
        inner = merged.get(key)
        merged[key] = merge(inner, value) if isinstance(inner, Mapping) and isinstance(value, Mapping) else value
    return merged


def pipeline_figures(program: Program, timeline: Timeline) -> dict[str, Any]:
    """The bubble as measured and as simulated for the same instruction times, and what 1F1B would make of them.

    Times in seconds, of the pipeline alone: from its first instruction to the end of its last. instruction_ms: the median
    of each kind on each chunk.
    """
    cost = measured_cost(timeline)
    simulated = simulate(program, cost)
    ops = [op for op in Op if op in COMPUTE_OPS]
    medians = {op.value: [cost(Instruction(op, c, 0)) * 1e3 for c in range(program.num_chunks)] for op in ops}
    return {
        "bubble": round(timeline.bubble, 4),
        "simulated_bubble": round(simulated.bubble, 4),
        "pipeline_s": round(timeline.makespan, 4),
        "simulated_s": round(simulated.makespan, 4),
        "simulated_1f1b_s": round(as_one_f_one_b(program, cost).makespan, 4),
        "instruction_ms": {op: [round(ms, 3) for ms in row] for op, row in medians.items() if any(row)},
    }


def as_one_f_one_b(program: Program, cost: Cost) -> Timeline:
    """1F1B, simulated, of stages that hold equally many consecutive chunks of the program, at the same cost a chunk."""
    per_stage = program.num_chunks // program.num_ranks

    def of_chunk(op: Op, chunk: int) -> float:
        if op is Op.FORWARD:
            return cost(Instruction(op, chunk, 0))
        halves = [cost(Instruction(half, chunk, 0)) for half in (Op.BACKWARD_INPUT, Op.BACKWARD_WEIGHT)]
        return sum(halves) if any(halves) else cost(Instruction(Op.BACKWARD, chunk, 0))

    def of_stage(i: Instruction) -> float:
        if i.op not in COMPUTE_OPS:
            return 0.0
        return sum(of_chunk(i.op, c) for c in range(i.chunk * per_stage, (i.chunk + 1) * per_stage))

    return simulate(one_f_one_b(program.num_ranks, program.num_micro_batches), of_stage)


def from_all_ranks(value: float) -> list[float]:
    """Every rank's value, rounded. Collective."""
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, round(value, 2))
    return values


def make_result(args: argparse.Namespace, measured: Measured, extra: Mapping[str, Any]) -> dict[str, Any]:
    """The line of a case, with the keys that the peers' lines have, and more. Collective."""
    size, world = SIZES[args.size], dist.get_world_size()
    tokens = args.micro_batch * args.micro_batches * args.dp * size.seq
    times = sorted(measured.times)
    step_s = times[len(times) // 2]  # as the peers take it: of an even number the longer of the two in the middle
    chunks = f" chunks{args.chunks}" if args.chunks > 1 else ""
    layout = f"pp{args.pp} tp{args.tp} dp{args.dp} zero{args.zero} {args.schedule}{chunks}"
    return {
        "name": f"parallel3d {layout} m{args.micro_batches} mb{args.micro_batch}",
        "step_s": round(step_s, 4),
        "min_s": round(times[0], 4),
        "max_s": round(times[-1], 4),
        "in_a_row_s": measured.in_a_row_s and round(measured.in_a_row_s, 5),
        "tok_s": round(tokens / step_s),
        "mfu": round(model_flops_utilization(size, tokens, step_s, world), 4),
        "peak_gib": from_all_ranks(measured.peak_gib),
        "reserved_gib": from_all_ranks(measured.reserved_gib),
        # Of the step that is the last of cases which have no plan to make.
        "loss": [round(measured.losses[args.warmup + args.steps - 1], 4)],
        "losses": [round(loss, 4) for loss in measured.losses],
        "times_s": [round(t, 4) for t in measured.times],
        **extra,
    }


def sliced_decoder(size: Size) -> DecoderConfig:
    """Return the same decoder of tensor-parallel layers: query, key, value and gate, up are separate linears."""
    return DecoderConfig(
        vocab_size=size.vocab,
        hidden_size=size.hidden,
        ffn_size=size.ffn,
        num_layers=size.layers,
        num_heads=size.heads,
        max_positions=size.seq,
    )


def has_sliced_layers(args: argparse.Namespace) -> bool:
    """Return whether a case uses the tensor-parallel layers of parallel3d.models."""
    return args.tp > 1 or bool(args.sliced_layers)


def layer_specs(args: argparse.Namespace) -> list[LayerSpec]:
    """The decoder of a case: of examples/train_llama.py's layers, or of those that slice themselves."""
    size = SIZES[args.size]
    if has_sliced_layers(args):
        return decoder(sliced_decoder(size), units=args.units)
    return decoder_layers(size, args.units)


def loss_of(args: argparse.Namespace) -> Callable[[Any, Any], Any]:
    """The loss function that goes with the layers."""
    return causal_lm_loss if has_sliced_layers(args) else loss_fn


def build(args: argparse.Namespace) -> Engine:
    """The engine of a case. Collective."""
    parallel3d.init_distributed()
    world = dist.get_world_size()
    if args.pp * args.tp * args.dp != world:
        needed = args.pp * args.tp * args.dp
        raise SystemExit(f"pp {args.pp} x tp {args.tp} x dp {args.dp} needs {needed} processes, not {world}")
    config = make_config(args, torch.cuda.is_available())
    inputs, labels = fixed_batch(SIZES[args.size], args.micro_batch, 1, seed=0)[0]
    model = PipelineModule(
        layer_specs(args),
        loss_fn=loss_of(args),
        seed_layers=True,
        config=config,
        sample_input=inputs,  # for partition "flops" and "profile"
        sample_labels=labels,
    )
    engine, *_ = parallel3d.initialize(model=model, config=config)
    return engine


def main() -> None:
    """Train, measure, print."""
    args = parse_arguments()
    warnings.filterwarnings("error", r"kernels\.")  # what was asked for is measured, or nothing
    start = time.perf_counter()
    engine = build(args)
    replica = engine.grid.get_data_parallel_rank()
    batch = fixed_batch(SIZES[args.size], args.micro_batch, args.micro_batches, seed=replica)
    data = forever([(x.to(engine.device), y.to(engine.device)) for x, y in batch])
    extra: dict[str, Any] = {"setup_s": round(time.perf_counter() - start, 2)}
    planning = []
    while args.schedule == "auto" and engine.schedule_plan is None:
        planning.append(engine.train_batch(data))
    measured = measure(
        lambda: engine.train_batch(data), args.warmup, args.steps, planning, engine.module.groups.mapped_bytes
    )
    if args.roofline:
        seq = SIZES[args.size].seq
        tokens = args.micro_batch * args.micro_batches * seq
        flops = [tokens * number for number in flops_per_token_of(engine.module, seq)]
        extra["roofline"] = roofline_figures(partial(engine.train_batch, data), *flops)
    if args.details:
        engine.reports.memory_report()
    if args.pp > 1 or args.details:
        timelines = []
        for _ in range(PROFILED):
            engine.reports.profile_next_batch()
            engine.train_batch(data)
            timelines.append(engine.reports.timeline())
        extra.update(pipeline_figures(*sorted(timelines, key=lambda one: one[1].makespan)[PROFILED // 2]))
    if (plan := engine.schedule_plan) is not None:
        promised = {"bubble": round(plan.bubble, 4), "pipeline_s": round(plan.makespan - plan.exposed, 4)}
        promised["exposed_s"] = round(plan.exposed, 4)
        transfer_ms = round(plan.measured.transfer * 1e3, 3)
        extra["plan"] = {"name": plan.name, **promised, "transfer_ms": transfer_ms}
    result = make_result(args, measured, extra)
    if engine.global_rank == 0:
        print("RESULT " + json.dumps(result), flush=True)
    parallel3d.comm.destroy()


if __name__ == "__main__":
    main()
