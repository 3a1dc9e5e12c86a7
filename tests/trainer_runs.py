"""Trainings by Hugging Face's Trainer on the ranks of one world, as scripts of its users make them."""

from __future__ import annotations

import gc
import json
import os
import socket
import subprocess
import sys
import zipfile
from collections.abc import Sequence
from functools import wraps
from pathlib import Path
from typing import Any

from warm import THEN, run_launcher

from parallel3d.cli.deepspeed import write_wheel

STEPS, SAVED = 4, 2
# What DeepSpeed's WarmupDecayLR with 2 steps of warmup multiplies the rate of each step with; the last is in no step.
RATES = (0.0, 0.0, 1.0, 1.0, 0.5)
NOT_RESUMED = ("rates", "memory", "twice")
_ON_CUDA = "TRAINER_ON_CUDA" in os.environ  # of the ranks
# Of each Trainer's TrainingArguments.
ARGUMENTS: dict[str, Any] = {
    "max_steps": STEPS,
    "learning_rate": 1e-2,
    "logging_steps": 1,
    "save_steps": SAVED,
    "eval_strategy": "steps",
    "eval_steps": SAVED,
    "load_best_model_at_end": True,
    "metric_for_best_model": "eval_loss",
    "report_to": [],
    "use_cpu": not _ON_CUDA,
    "ddp_backend": "nccl" if _ON_CUDA else "gloo",
    "disable_tqdm": True,
    "log_level": "error",
    "seed": 0,
}


def model_directory(directory: Path) -> Path:
    """Save a small Llama with random weights."""
    import torch
    from transformers import AutoModelForCausalLM, LlamaConfig

    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = LlamaConfig(vocab_size=64, num_key_value_heads=2, max_position_embeddings=32, **sizes)
    AutoModelForCausalLM.from_config(config).save_pretrained(directory)
    return directory


def samples() -> list[dict[str, Any]]:
    import torch

    generator = torch.Generator().manual_seed(1)
    rows = torch.randint(0, 64, (64, 16), generator=generator)
    return [{"input_ids": row, "labels": row} for row in rows]


def configuration(zero: dict[str, Any], **more: Any) -> dict[str, Any]:
    """The file that transformers' documentation shows: what the arguments of the training say is "auto"."""
    sizes = dict.fromkeys(("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"), "auto")
    buckets = ("reduce_bucket_size", "stage3_prefetch_bucket_size", "stage3_param_persistence_threshold")
    zero = {**dict.fromkeys(buckets, "auto"), **zero}
    half = {name: {"enabled": "auto"} for name in ("bf16", "fp16")}
    return {"zero_optimization": zero, **sizes, "gradient_clipping": "auto", **half, **more}


def forget_state() -> None:
    """Let this process begin another training: accelerate and transformers keep the last one's settings."""
    from accelerate.state import AcceleratorState, GradientState, PartialState
    from transformers.integrations.deepspeed import unset_hf_deepspeed_config

    AcceleratorState._reset_state(True)
    GradientState._reset_state()
    PartialState._reset_state()
    unset_hf_deepspeed_config()


def environment_of(directory: Path) -> dict[str, str]:
    """Return the environment of ranks on the CPU, where deepspeed is what `p3d deepspeed install` installs."""
    with zipfile.ZipFile(write_wheel(directory)) as wheel:
        wheel.extractall(directory / "site")
    model_directory(directory / "model")
    given = filter(None, [os.environ.get("PYTHONPATH")])
    paths = os.pathsep.join([str(directory / "site"), *map(str, Path(__file__).parents[:2]), *given])
    return {
        **os.environ,
        "PYTHONPATH": paths,
        "GLOO_SOCKET_IFNAME": "lo",
        "HF_HUB_OFFLINE": "1",
        "CUDA_VISIBLE_DEVICES": "",
    }


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port


# (a launcher's words, the configurations, main's other arguments)
Job = tuple[Sequence[str], dict[str, Any], Sequence[str]]


def run_jobs(directory: Path, module: str, *jobs: Job, cuda: bool = False) -> list[dict[str, Any]]:
    """Run main(model, directory, file, configurations, *others) of a module on each launcher's ranks, one after the other.

    Return what each has written into its file.
    """
    script, environment = str(Path(__file__).parent / f"{module}.py"), environment_of(directory)
    files = [directory / f"found{k}.json" for k in range(len(jobs))]
    commands = [
        [*launcher, script, str(directory / "model"), str(directory), str(file), json.dumps(configs), *others]
        for file, (launcher, configs, others) in zip(files, jobs, strict=True)
    ]
    if cuda:  # by processes of their own: a fork can't use CUDA after imports have looked for it
        environment |= {"TRAINER_ON_CUDA": "1", "CUDA_VISIBLE_DEVICES": "0,1"}
        for command in commands:
            started = [sys.executable, "-m", *command]
            job = subprocess.run(started, env=environment, capture_output=True, text=True, timeout=600, check=False)
            assert job.returncode == 0, job.stderr
    else:
        imports = "warm_transformers", "transformers.trainer"
        first, *others = commands
        words = [*first, *(word for command in others for word in (THEN, *command))]
        run_launcher(directory, *words, imports=imports, environment=environment, timeout=600)
    return [json.loads(file.read_text()) for file in files]


def torchrun(world: int) -> Sequence[str]:
    """Return the words of a launcher of ranks on the CPU, or each on a GPU."""
    return "torch.distributed.run", "--standalone", "--nproc_per_node", str(world)


def run_job(
    directory: Path, module: str, configs: dict[str, Any], world: int = 2, cuda: bool = False
) -> dict[str, Any]:
    """Train on some ranks of torchrun's."""
    return run_jobs(directory, module, (torchrun(world), configs, ()), cuda=cuda)[0]


def accelerate_launch(directory: Path, deepspeed: dict[str, Any]) -> Sequence[str]:
    """Return the words of `accelerate launch` of 2 ranks, with a configuration that is in a file."""
    (directory / "deepspeed.json").write_text(json.dumps(deepspeed))
    settings = {
        "compute_environment": "LOCAL_MACHINE",
        "distributed_type": "DEEPSPEED",
        "deepspeed_config": {"deepspeed_config_file": str(directory / "deepspeed.json"), "zero3_init_flag": False},
        "num_machines": 1,
        "num_processes": 2,
        "machine_rank": 0,
        "main_process_port": _free_port(),
    }
    (directory / "accelerate.json").write_text(json.dumps(settings))
    return "accelerate.commands.launch", "--config_file", str(directory / "accelerate.json")


def with_adapters(model: Any) -> Any:
    """Freeze the model, and add adapters to train."""
    import torch
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(3)
    return get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"))


def with_little_memory(model: Any) -> Any:
    """Let the model train on micro-batches of 2 rows at most."""
    import torch

    forward = model.forward

    @wraps(forward)
    def limited(*args: Any, **kwargs: Any) -> Any:
        if model.training and len(kwargs["input_ids"]) > 2:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB.")
        return forward(*args, **kwargs)

    model.forward = limited
    return model


def num_engine_states() -> int:
    """Return how many engines of this process hold gradients, masters and optimizer state."""
    from parallel3d.engine.update import WeightUpdate

    gc.collect()
    return sum(type(found) is WeightUpdate for found in gc.get_objects())


def train(model: Path, out: Path, config: dict[str, Any] | None, kind: str, resumes: bool = False) -> dict[str, Any]:
    """Train as with `TrainingArguments(deepspeed=config)`; None for DDP. Return what the log and the best model say.

    kind: "adapters", of a frozen model; "rates", of DeepSpeed's schedule, also with DDP; "memory", which lacks at first;
    "twice", to train a second time; or another word.
    """
    import torch
    from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

    class WithRates(Trainer):
        def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
            self.lr_scheduler = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda step: RATES[step])
            return self.lr_scheduler

    forget_state()
    before = num_engine_states()
    rows = samples()
    shards = (config or {}).get("tensor_parallel", {}).get("autotp_size", 1)
    arguments = TrainingArguments(
        str(out),
        per_device_train_batch_size=3 if kind == "memory" else 2,
        auto_find_batch_size=kind == "memory",
        gradient_accumulation_steps=4 * shards // int(os.environ["WORLD_SIZE"]),
        deepspeed=config,
        **ARGUMENTS,
    )
    own = AutoModelForCausalLM.from_pretrained(model)
    changes = {"adapters": with_adapters, "memory": with_little_memory}
    own = changes[kind](own) if kind in changes else own
    trainer_class = WithRates if kind == "rates" and config is None else Trainer
    trainer = trainer_class(model=own, args=arguments, train_dataset=rows, eval_dataset=rows[:8])
    trainer.train(resume_from_checkpoint=str(out / f"checkpoint-{SAVED}") if resumes else None)
    if kind == "twice":
        trainer.model_wrapped, trainer.optimizer = trainer.model, None
        trainer.train()
    log = trainer.state.log_history
    trainer.save_model(str(out / "saved"))
    return {
        "loss": [entry["loss"] for entry in log if "loss" in entry],
        "norm": [float(entry["grad_norm"]) for entry in log if "grad_norm" in entry],
        "rate": [entry["learning_rate"] for entry in log if "learning_rate" in entry],
        "eval": [entry["eval_loss"] for entry in log if "eval_loss" in entry],
        "best": trainer.evaluate()["eval_loss"],
        "states": [num_engine_states() - before] if config is not None else [],
    }


def main(model: str, out: str, found_file: str, configs: str, *not_resumed: str) -> None:
    """Train with each configuration of a JSON mapping, resume each but some, and write what happened. Collective.

    Only two ranks train from the start; others resume what these have saved, with the same samples a step.
    """
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    found = {}
    for name, config in json.loads(configs).items():
        directory, kind = Path(out) / name, name.partition(",")[0]
        if os.environ["WORLD_SIZE"] == "2":
            found[name] = train(Path(model), directory, config, kind)
        if kind not in NOT_RESUMED and name not in not_resumed:
            found[f"{name}, resumed"] = train(Path(model), directory, config, kind, resumes=True)
    if os.environ["RANK"] == "0":
        Path(found_file).write_text(json.dumps(found))
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
