"""Auxiliary heads, neighbours and large models; more is in test_weights.py."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torchvision import models

from featviz.errors import LoadError
from featviz.models import identify
from featviz.models.files.state_dict import stripped_forms, unwrap
from featviz.models.load import ModelOptions, load_model
from featviz.models.preprocess import InputOptions


@pytest.mark.parametrize("prefix", ["", "module.model."])
@pytest.mark.parametrize("name", ["resnet152", "efficientnet_v2_l", "maskrcnn_resnet50_fpn_v2"])
@pytest.mark.slow
def test_large_models_are_identified_behind_prefixes(name: str, prefix: str) -> None:
    """Unwrapping, reading the index and comparing find the very architecture."""
    backbone = {"weights_backbone": None} if "rcnn" in name else {}
    with torch.device("meta"):
        tensors = models.get_model(name, weights=None, **backbone).state_dict()
    content = {"state_dict": {f"{prefix}{key}": value for key, value in tensors.items()}}
    known = identify.identify_forms(stripped_forms(unwrap(content)))
    assert known.name == name


def _file(name: str, folder: Path, **options: Any) -> Path:
    with torch.device("meta"):
        module = models.get_model(name, weights=None, **options)
    tensors = {k: torch.zeros(v.shape, dtype=v.dtype) for k, v in module.state_dict().items()}
    torch.save(tensors, folder / "w.pth")
    return folder / "w.pth"


_BACKBONE = {"weights_backbone": None}
_INIT = {"init_weights": False}


@pytest.mark.parametrize(
    ("name", "options", "told"),
    [
        ("deeplabv3_mobilenet_v3_large", {**_BACKBONE, "aux_loss": True}, {"aux_loss": True}),
        ("lraspp_mobilenet_v3_large", _BACKBONE, {}),
        ("googlenet", {**_INIT, "aux_logits": False}, {"aux_logits": False}),
        ("googlenet", {**_INIT, "aux_logits": True}, {}),
        pytest.param(
            "fcn_resnet50",
            {**_BACKBONE, "aux_loss": True},
            {"aux_loss": True},
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "deeplabv3_resnet50",
            {**_BACKBONE, "aux_loss": True},
            {"aux_loss": True},
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "inception_v3",
            {**_INIT, "aux_logits": False},
            {"aux_logits": False},
            marks=pytest.mark.slow,
        ),
    ],
)
def test_auxiliary_heads_are_read_from_the_file(
    name: str, options: dict[str, Any], told: dict[str, bool], tmp_path: Path
) -> None:
    """A file with other auxiliary heads than the builder makes, and other classes, loads."""
    path = _file(name, tmp_path, num_classes=7, **options)
    loaded = load_model(ModelOptions(str(path), device="cpu"), InputOptions())
    assert loaded.source["arch"] == name
    assert loaded.source["num_classes"] == 7
    assert {k: v for k, v in loaded.source.items() if k.startswith("aux")} == told
    assert set(loaded.module.state_dict()) == set(torch.load(path))


def test_auxiliary_heads_are_said() -> None:
    """The line that identifies a file says what the builder is told."""
    with torch.device("meta"):
        tensors = models.get_model(
            "deeplabv3_mobilenet_v3_large", weights=None, weights_backbone=None, aux_loss=True
        ).state_dict()
    known = identify.identify_forms(stripped_forms(unwrap(dict(tensors))))
    assert known.words.startswith(
        "it is deeplabv3_mobilenet_v3_large with 21 classes with its auxiliary head"
    )


def test_no_neighbour_is_named_below_a_third(tmp_path: Path) -> None:
    """One tensor of a hundred is no likeness: no name, and no advice to load it in part."""
    with torch.device("meta"):
        weights = models.resnet18().state_dict()
    few = {k: torch.zeros(v.shape) for k, v in [*weights.items()][:12]}
    torch.save(few, tmp_path / "few.pth")
    for partial in (False, True):
        with pytest.raises(LoadError) as caught:
            options = ModelOptions(str(tmp_path / "few.pth"), partial=partial)
            load_model(options, InputOptions())
        assert caught.value.message.endswith("of an architecture that torchvision has not")
        assert "--partial" not in str(caught.value.hint)
