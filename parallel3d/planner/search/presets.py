"""Sizes of the models that `p3d plan` knows by name, from models.yaml."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

PRESETS: Mapping[str, Mapping[str, Any]] = yaml.safe_load(
    Path(__file__).with_name("models.yaml").read_text(encoding="utf-8")
)["models"]
