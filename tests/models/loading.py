"""Models loaded as the command line loads them, and small files to load; for tests."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import pytest
import torch
from hostile_images import saved_bytes
from torch import Tensor, nn
from torchvision import models

from featviz.models.load import load_model
from featviz.options import InputOptions, ModelOptions

SMALL = "squeezenet1_1"


def load(spec: object, **options: Any) -> nn.Module:
    return load_model(
        ModelOptions(str(spec), device="cpu", **options), InputOptions()
    ).module


@contextmanager
def uninitialised() -> Iterator[None]:
    """Models are built without torch.nn.init, which takes longer than all the rest."""
    names = [
        name for name in dir(nn.init) if name.endswith("_") and not name.startswith("_")
    ]
    with pytest.MonkeyPatch.context() as patch:
        for name in names:
            patch.setattr(nn.init, name, lambda tensor, *args, **options: tensor)
        yield


def nothing_fetched(name: str) -> dict[str, Any]:
    """Options of a torchvision builder so that it downloads nothing and is quick."""
    parameters = inspect.signature(models.get_model_builder(name)).parameters
    options = {
        key: None for key in ("weights", "weights_backbone") if key in parameters
    }
    own_start = name.endswith(("inception_v3", "googlenet"))
    return {**options, **({"init_weights": False} if own_start else {})}


def on_meta(name: str) -> AbstractContextManager[Any]:
    """The device meta, but for the two families that copy out of it."""
    copies = "regnet" in name or "raft" in name
    return nullcontext() if copies else torch.device("meta")


def skeleton(name: str) -> nn.Module:
    """A torchvision model without the cost of its initialisation: each tensor has its
    number."""
    with uninitialised():
        module = models.get_model(name, weights=None)
    for number, tensor in enumerate(module.state_dict().values()):
        tensor.fill_(number % 251)
    return module


def same_weights(one: nn.Module, other: nn.Module | dict[str, Tensor]) -> bool:
    a = one.state_dict()
    b = other.state_dict() if isinstance(other, nn.Module) else other
    return list(a) == list(b) and all(torch.equal(a[key], b[key]) for key in a)


def same_modules(loaded: nn.Module, module: nn.Module) -> None:
    assert [(n, type(m), sorted(vars(m))) for n, m in loaded.named_modules()] == [
        (n, type(m), sorted(vars(m))) for n, m in module.named_modules()
    ]
    assert {k: (v.shape, v.dtype) for k, v in loaded.state_dict().items()} == {
        k: (v.shape, v.dtype) for k, v in module.state_dict().items()
    }


WHOLE = saved_bytes({"weight": torch.zeros(5000)})
OLD = saved_bytes({"weight": torch.zeros(5000)}, _use_new_zipfile_serialization=False)
"""A checkpoint as torch.save writes it, and as it did before torch 1.6."""
