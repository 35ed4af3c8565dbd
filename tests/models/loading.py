"""Models loaded as the command line loads them, and small files to load; for tests."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple

import pytest
import torch
from hostile_images import saved_bytes
from torch import Tensor, nn
from torchvision import models

from featviz.models.load import LoadedModel, load_model
from featviz.options import InputOptions, ModelOptions

SMALL = "squeezenet1_1"


def load_whole(
    spec: object, inputs: InputOptions | None = None, **options: Any
) -> LoadedModel:
    """A model with what is known of it: its input, its classes, its source."""
    chosen = ModelOptions(str(spec), device="cpu", **options)
    return load_model(chosen, inputs or InputOptions())


def load(spec: object, **options: Any) -> nn.Module:
    return load_whole(spec, **options).module


@contextmanager
def uninitialised() -> Iterator[None]:
    """Models are built without torch.nn.init, which takes longer than all the rest."""
    with pytest.MonkeyPatch.context() as patch:
        for name in dir(nn.init):
            if name.endswith("_") and not name.startswith("_"):
                patch.setattr(nn.init, name, lambda tensor, *args, **options: tensor)
        yield


def nothing_fetched(name: str) -> dict[str, Any]:
    """Options of a torchvision builder so that it downloads nothing and is quick."""
    parameters = inspect.signature(models.get_model_builder(name)).parameters
    options = {"weights": None, "weights_backbone": None, "init_weights": False}
    if not name.endswith(("inception_v3", "googlenet")):
        del options["init_weights"]
    return {key: value for key, value in options.items() if key in parameters}


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


State = dict[str, Tensor]


def state_of(weights: nn.Module | State) -> State:
    return weights.state_dict() if isinstance(weights, nn.Module) else weights


def same_weights(
    actual: nn.Module | State, expected: nn.Module | State, atol: float = 0
) -> bool:
    """Whether tensors have the same names, in the same order, and the same values."""
    state = state_of(actual)
    tensors = state_of(expected)
    return list(state) == list(tensors) and all(
        torch.allclose(state[key], tensor, rtol=0, atol=atol, equal_nan=True)
        for key, tensor in tensors.items()
    )


class ModuleShape(NamedTuple):
    """A module, but for its values."""

    name: str
    type: type[nn.Module]
    attributes: list[str]


def modules_of(module: nn.Module) -> list[ModuleShape]:
    return [
        ModuleShape(name, type(part), sorted(vars(part)))
        for name, part in module.named_modules()
    ]


def same_modules(loaded: nn.Module, module: nn.Module) -> None:
    assert modules_of(loaded) == modules_of(module)
    actual = loaded.state_dict()
    expected = module.state_dict()
    assert list(actual) == list(expected)
    for name, tensor in expected.items():
        assert actual[name].shape == tensor.shape
        assert actual[name].dtype == tensor.dtype


WHOLE = saved_bytes({"weight": torch.zeros(5000)})
OLD = saved_bytes({"weight": torch.zeros(5000)}, _use_new_zipfile_serialization=False)
"""A checkpoint as torch.save writes it, and as it did before torch 1.6."""
