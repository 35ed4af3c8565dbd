"""Checkpoints as Ultralytics writes them, of models built from its own configurations."""

from __future__ import annotations

import importlib
import os
import tempfile
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from featviz.models.requirements import import_ultralytics

os.environ.setdefault("YOLO_CONFIG_DIR", tempfile.mkdtemp(prefix="ultralytics-"))
try:
    ultralytics: Any = import_ultralytics("ultralytics")
except ImportError:
    reason = "ultralytics is not installed (extra featviz[test-ecosystem])"
    pytest.skip(reason, allow_module_level=True)
get_cfg = importlib.import_module("ultralytics.cfg").get_cfg


def built(name: str) -> nn.Module:
    """A model of Ultralytics with random weights, in eval mode; parameters and running
    statistics are numbers that half precision holds."""
    torch.manual_seed(0)
    model: nn.Module = ultralytics.YOLO(f"{name}.yaml").model.eval()
    for part in model.modules():
        if isinstance(part, nn.BatchNorm2d):
            part.running_mean.normal_(std=0.1)
            part.running_var.uniform_(0.5, 2)
    return model.half().float()


def save(model: nn.Module, path: Path, key: str = "model", **more: Any) -> Path:
    """What the trainer writes at the end of a training, with `last.pt`'s keys."""
    half = deepcopy(model).half()
    content = {
        "epoch": -1,
        "best_fitness": None,
        "model": None,
        "ema": None,
        "updates": None,
        "optimizer": None,
        "train_args": {**vars(get_cfg()), "imgsz": 640},
        "train_metrics": {},
        "train_results": {"epoch": [1]},
        "date": "2026-01-01",
        "version": "8.4.0",
        "git": {},
    }
    torch.save({**content, key: half, **more}, path)
    return path
