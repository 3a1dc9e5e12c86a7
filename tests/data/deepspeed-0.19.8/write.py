"""Write the checkpoints next to this file, by DeepSpeed 0.19.8 on CPUs: `DS_ACCELERATOR=cpu python write.py [NAME ...]`.

Each directory holds what DeepSpeed saved after two steps, and expected.safetensors: the weights, masters and moments as
DeepSpeed's own functions return them, whole and under the names of the module.
"""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path
from typing import Any

import deepspeed
import torch
from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state
from models import STEPS, Halves, Net, groups, layers, samples
from safetensors.torch import save_file
from torch import Tensor, multiprocessing, nn

HERE = Path(__file__).parent
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # it would be compiled, for faster all-reduces


# Dim along which each parameter of Halves is sharded.
DIMS = {"up.weight": 0, "up.bias": 0, "down.weight": 1}


def config(**more: Any) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": 0.0,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 0.01, "warmup_num_steps": 10}},
        **more,
    }


BF16 = {"bf16": {"enabled": True}}
FP32_SUMS = {"data_types": {"grad_accum_dtype": "fp32"}}
CASES: dict[str, tuple[int, dict[str, Any]]] = {
    "zero0-fp32": (1, {}),
    "zero0-bf16": (1, BF16),
    "zero0-fused-bf16": (1, BF16),
    "zero1-bf16": (2, {**BF16, **FP32_SUMS, "zero_optimization": {"stage": 1}}),
    "zero2-bf16": (2, {**BF16, "zero_optimization": {"stage": 2}}),
    "zero2-round-robin": (2, {**BF16, "zero_optimization": {"stage": 2, "round_robin_gradients": True}}),
    "zero2-aligned": (2, {**BF16, "zero_optimization": {"stage": 2, "parameter_alignment": True}}),
    "zero3-bf16": (2, {**BF16, "zero_optimization": {"stage": 3, "sub_group_size": 5}}),
    "pipe-zero0-fp32": (2, {"pipe": True}),
    "pipe-zero1-bf16": (4, {**BF16, "zero_optimization": {"stage": 1}, "pipe": True, "tied": True}),
}


SPECS = [
    {"patterns": [r".*up\.weight$"], "partition_type": "column"},
    {"patterns": [r".*down\.weight$"], "partition_type": "row"},
]
TENSOR_PARALLEL = {"autotp_size": 2, "partition_config": {"use_default_specs": False, "layer_specs": SPECS}}
CASES["tp2-zero1-bf16"] = (4, {**BF16, "zero_optimization": {"stage": 1}, "tensor_parallel": TENSOR_PARALLEL})


def run(rank: int, case: str, port: int) -> None:
    world, settings = CASES[case]
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port)
    )
    torch.set_num_threads(1)
    deepspeed.init_distributed(dist_backend="gloo")
    settings = dict(settings)
    is_pipe, tied = settings.pop("pipe", False), settings.pop("tied", False)
    torch.manual_seed(7)
    if is_pipe:
        model = PipelineModule(
            layers(tied, LayerSpec, TiedLayerSpec),
            num_stages=2,
            loss_fn=nn.functional.mse_loss,
            partition_method="uniform",
        )
    elif "tensor_parallel" in settings:
        model = Halves()
    else:
        model = Net(frozen=case != "zero0-fp32")  # nothing there tells which parameters are frozen
    optimizer = torch.optim.AdamW(groups(model), lr=0.01)
    if "fused" in case:  # what it does with its own FusedAdam, which is compiled for CUDA: masters are flat
        sys.modules["deepspeed.runtime.engine"].FusedAdam = torch.optim.AdamW
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config(**settings))
    dtype = torch.bfloat16 if "bf16" in settings else torch.float32
    for step in range(STEPS):
        if is_pipe:
            replica = engine.grid.get_data_parallel_rank()
            engine.train_batch(iter([samples(step, replica, dtype)]))
        else:
            replica = rank // 2 if "tensor_parallel" in settings else rank
            engine.backward(engine(*samples(step, replica, dtype)))
            engine.step()
    directory = HERE / case
    engine.save_checkpoint(str(directory), client_state={"epoch": 3})
    if not {"round", "fused"} & set(case.split("-")):  # the numbers of those are those of zero2-bf16 and zero0-bf16
        torch.save(whole(engine), directory / f"expected-{rank}.pt")
    torch.distributed.barrier()
    if rank == 0:
        finish(directory, 2 if "tensor_parallel" in settings else world)


def whole(engine: Any) -> dict[str, Tensor]:
    """Return "master/NAME" and "STATE/NAME" of the trained parameters of this rank, and "model/NAME" of everything."""
    found: dict[str, Tensor] = {}
    optimizer = engine.optimizer
    if hasattr(
        optimizer, "_hp_optimizer_states_linked"
    ):  # which DeepSpeed does before torch's AdamW has made its state
        optimizer._hp_optimizer_states_linked = False
        optimizer._lazy_init_hp_params_optimizer_state()
    for name, parameter in engine.module.named_parameters():
        if hasattr(parameter, "ds_id"):
            with deepspeed.zero.GatheredParameters([parameter]):
                found[f"model/{name}"] = parameter.detach().clone()
        else:
            found[f"model/{name}"] = parameter.detach().clone()
        if not parameter.requires_grad:
            continue
        if hasattr(parameter, "_hp_mapping") or hasattr(parameter, "ds_id"):
            found[f"master/{name}"] = safe_get_full_fp32_param(parameter)
            moments = {key: safe_get_full_optimizer_state(parameter, key) for key in ("exp_avg", "exp_avg_sq")}
        else:
            master = parameter
            if hasattr(optimizer, "fp16_groups"):
                pairs = zip(optimizer.fp16_groups, optimizer.fp32_groups, strict=True)
                master = next(m for ps, ms in pairs for p, m in zip(ps, ms, strict=True) if p is parameter)
                found[f"master/{name}"] = master.detach().clone()
            inner = optimizer.optimizer if hasattr(optimizer, "fp16_groups") else optimizer
            moments = {key: inner.state[master][key] for key in ("exp_avg", "exp_avg_sq")}
        found |= {f"optimizer/{key}/{name}": value.clone() for key, value in moments.items()}
    return found | {f"model/{name}": buffer.clone() for name, buffer in engine.module.named_buffers()}


def finish(directory: Path, world: int) -> None:
    """Join what the ranks expect, and keep no more of the directory than its checkpoint."""
    expected: dict[str, Tensor] = {}
    for rank in range(world):
        file = directory / f"expected-{rank}.pt"
        if file.exists():
            own = torch.load(file)
            for name in own.keys() & expected.keys() if directory.name.startswith("tp") else ():
                if (dim := DIMS.get(name.split("/")[-1])) is not None:
                    own[name] = torch.cat([expected[name], own[name]], dim)
            expected |= own
    for file in directory.glob("expected-*.pt"):
        file.unlink()
    if expected:
        save_file({name: tensor.contiguous() for name, tensor in expected.items()}, directory / "expected.safetensors")
    for script in directory.glob("*.py"):
        script.unlink()


if __name__ == "__main__":
    for number, name in enumerate(sys.argv[1:] or CASES):
        shutil.rmtree(HERE / name, ignore_errors=True)
        multiprocessing.start_processes(run, (name, 29611 + number), CASES[name][0], start_method="fork")
