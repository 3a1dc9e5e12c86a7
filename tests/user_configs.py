"""Users' configurations, as files and with what their scripts fill in for "auto"."""

from __future__ import annotations

from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent / "data" / "configs"

AUTO: dict[str, dict[str, Any]] = {
    "auto_dict_stage2.json": {
        "optimizer.params.lr": 1e-3,
        "scheduler.params": {"warmup_min_lr": 0, "warmup_num_steps": 100},
        "bf16.enabled": False,
        "gradient_clipping": 1.0,
    },
    "zero2_adamw_cosine_wandb.json": {},
    "zero2_offload_comments.json": {},
    "zero3_offload_auto_bf16.json": {
        "optimizer": {"params": {"lr": 2e-5, "eps": 1e-8, "weight_decay": 0.01}},
        "scheduler": {"params": {"warmup_num_steps": 10, "total_num_steps": 1000}},
    },
    "zero3_offload_fp16.json": {},
}
