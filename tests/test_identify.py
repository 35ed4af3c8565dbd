"""How long identification takes; what it finds is tested in test_weights.py."""

from __future__ import annotations

import time

import pytest
import torch
from torchvision import models

from featviz.models import identify
from featviz.models.unwrap import stripped_forms, unwrap


@pytest.mark.parametrize("prefix", ["", "module.model."])
@pytest.mark.parametrize("name", ["resnet152", "efficientnet_v2_l", "maskrcnn_resnet50_fpn_v2"])
@pytest.mark.slow
def test_identification_takes_at_most_0_3_seconds(name: str, prefix: str) -> None:
    """Unwrapping, reading the index and comparing, as in a fresh process; the best of five."""
    backbone = {"weights_backbone": None} if "rcnn" in name else {}
    with torch.device("meta"):
        tensors = models.get_model(name, weights=None, **backbone).state_dict()
    content = {"state_dict": {f"{prefix}{key}": value for key, value in tensors.items()}}
    seconds = []
    for _ in range(5):
        identify._index.cache_clear()
        started = time.perf_counter()
        known = identify.identify_forms(stripped_forms(unwrap(content)))
        seconds.append(time.perf_counter() - started)
    assert known.name == name
    assert min(seconds) <= 0.3
