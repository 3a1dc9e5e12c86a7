"""What `p3d plan` offloads where nothing fits: each step up, and a training by the configuration that it writes."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from layouts import own_iterator

import parallel3d
from parallel3d.cli import main
from parallel3d.models.user_model import load_subject
from parallel3d.pipe import PipelineModule
from parallel3d.planner.search.result import PlanResult

SUBJECT = """
import torch
from parallel3d.models import DecoderConfig, causal_lm_loss, decoder
from parallel3d.parity import Subject

CONFIG = DecoderConfig(vocab_size=512, hidden_size=128, ffn_size=512, num_layers=8, num_heads=4, max_positions=16)

def subject():
    def micro_batch(index):
        tokens = torch.randint(512, (1, 17), generator=torch.Generator().manual_seed(index))
        return tokens[:, :-1], tokens[:, 1:]
    zero = {"sub_group_size": 50_000}
    types = {"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "bf16"}}
    return Subject(decoder(CONFIG), micro_batch, causal_lm_loss, {**types, "zero_optimization": zero})
"""
# Memory of the device in MB, and GiB of the host's, if they are limited -> what is offloaded. 2.2 million parameters have
# 16 bytes each; of which 4 stay on the device, or 2 of gradients and two layers' weights.
ON_CPU, ON_DISK = {"device": "cpu"}, {"device": "nvme", "nvme_path": "/local_nvme"}
STATE, BOTH, DISK, ALL_ON_DISK = (
    "optimizer state in host memory",
    "optimizer state and weights in host memory",
    "optimizer state on NVMe, weights in host memory",
    "optimizer state and weights on NVMe",
)
CASES: list[tuple[int, float | None, str, dict[str, Any]]] = [
    (25, None, STATE, {"offload_optimizer": ON_CPU}),
    (11, None, BOTH, {"offload_optimizer": ON_CPU, "offload_param": ON_CPU}),
    (11, 0.008, ALL_ON_DISK, {"offload_optimizer": ON_DISK, "offload_param": ON_DISK}),
]


def train(target: str, configs: list[dict[str, Any]]) -> list[tuple[float, dict[str, tuple[int, int]]]]:
    """Return the second step's loss and the memory report of each configuration."""
    found = []
    for config in configs:
        torch.manual_seed(0)
        subject = load_subject(target, seed=0)
        module = PipelineModule(subject.layers, loss_fn=subject.loss_fn, config=config)
        engine, *_ = parallel3d.initialize(model=module, config=config)
        size = config["train_micro_batch_size_per_gpu"]
        samples = [subject.batch(k, seed=0) for k in range(2)]
        micro_batches = [
            tuple(torch.cat(tensors) for tensors in zip(*samples[k : k + size], strict=True)) for k in range(0, 2, size)
        ]
        data = own_iterator(engine, micro_batches * 2)
        losses = [engine.train_batch(data).item() for _ in range(2)]
        found.append((losses[1], engine.reports.memory_report()[0]))
    return found


def test_a_plan_offloads_no_more_than_it_must_and_its_configuration_trains(run_ranks, tmp_path: Path, capsys) -> None:
    (tmp_path / "train.py").write_text(SUBJECT)
    target, configs, plans = f"{tmp_path / 'train.py'}:subject", [], []
    for memory, host, chosen, offload in CASES:
        gpus = f"gpus: [{{device: cpu, memory: {memory} MB}}], pcie: {{bandwidth: 2 GB/s}}"
        (tmp_path / "cluster.yaml").write_text(f"hosts: [{{{gpus}}}]")
        (tmp_path / "config.json").write_text(json.dumps({"offload": {"host_memory_gib": host}}))
        files = ["--cluster", str(tmp_path / "cluster.yaml"), "--config", str(tmp_path / "config.json")]
        command = ["plan", "--model", target, *files, "--global-batch", "2", "--out", str(tmp_path / "out")]
        assert main(command) == 0
        *lacking, told = [line for line in capsys.readouterr().out.splitlines() if line.startswith("With ")]
        assert told == f"With {chosen}:"
        assert all("a rank lacks" in line for line in lacking)
        assert len(lacking) == [STATE, "", BOTH, DISK, ALL_ON_DISK].index(chosen)
        plans.append(PlanResult.model_validate_json((tmp_path / "out" / "plan.json").read_text()))
        configs.append(json.loads((tmp_path / "out" / "config.json").read_text()))
        zero = configs[-1]["zero_optimization"]
        assert {key: zero[key] for key in zero if key.startswith("offload")} == offload
    for config in configs:
        config["offload"] = {}  # of the host's memory as it is
        for key in ("offload_optimizer", "offload_param"):
            if "nvme_path" in config["zero_optimization"].get(key, {}):
                config["zero_optimization"][key]["nvme_path"] = str(tmp_path)
    [ranks] = run_ranks(1, train, target, configs)
    for (loss, report), plan in zip(ranks, plans, strict=True):
        assert loss == pytest.approx(ranks[0][0], rel=1e-3)
        assert loss < math.log(512)
        [memory] = plan.best[0].memory
        for name, nbytes in (("host", memory.host), ("disk", memory.disk)):
            assert nbytes == pytest.approx(report.get(name, (0, 0))[1], rel=0.01), name
