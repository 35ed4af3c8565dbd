"""What torch.autograd.grad says of an out-of-place copy of a model, for the tests of
gradients."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from featviz.images.decode import decode
from featviz.models.load import adopt
from featviz.options import InputOptions
from featviz.records import Sample
from featviz.rundir.schema import read_json

Tensors = dict[tuple[str, str], Tensor]
"""By layer and file stem: ("conv1", "grad-input.call1.0")."""


def inputs(size: int, channels: int = 3) -> dict[str, Any]:
    """Preprocessing to a square of this size, around zero."""
    return {
        "size": size,
        "crop": size,
        "mean": (0.45,) * channels,
        "std": (0.23,) * channels,
        "input_channels": channels,
    }


def input_of(model: nn.Module, image: Path, options: Mapping[str, Any]) -> Tensor:
    """The tensor that featviz makes of an image."""
    preprocess = adopt(model, InputOptions(**options)).preprocess
    return preprocess.tensor(decode(Sample("x", (image,)))[0][0])


class Weighted(nn.Module):
    """A model with a randomly weighted sum of its output at the end: [1, 1]."""

    def __init__(self, model: nn.Module, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.model = model
        generator = torch.Generator().manual_seed(7)
        self.weighting = torch.randn(shape, generator=generator)

    def forward(self, x: Tensor) -> Tensor:
        return (self.model(x) * self.weighting).sum().view(1, 1)


def saved(folder: Path) -> Tensors:
    """The raw tensors that a run kept of an image."""
    tensors: Tensors = {}
    for row in read_json(folder / "manifest.json")["captures"]:
        path = folder / row["tensor"]
        stem = path.name.removesuffix(".npy")
        tensors[row["layer"], stem] = torch.from_numpy(np.load(path))
    return tensors


class Kept(NamedTuple):
    """A tensor that passed a module."""

    name: str
    """Of the module."""
    stem: str
    """`output`, `input.call1.0`."""
    tensor: Tensor
    value: Tensor
    """A copy, which no later operation in place reaches."""


class Watched:
    """A copy of a model, each of whose modules hands on a copy of its output: no later
    operation in place reaches what is kept of it."""

    def __init__(self, model: nn.Module) -> None:
        self.kept: list[Kept] = []
        self.model = copy.deepcopy(model).eval()
        self._counts: Counter[tuple[str, str]] = Counter()
        for name, module in self.model.named_modules():
            if hasattr(module, "inplace"):
                module.inplace = False
            enter = partial(self._enter, name)
            module.register_forward_pre_hook(enter, with_kwargs=True)
            module.register_forward_hook(partial(self._leave, name))

    def _keep(self, name: str, put: str, items: dict[str, Tensor]) -> None:
        call = self._counts[name, put]
        self._counts[name, put] += 1
        for key, tensor in items.items():
            stem = put + (f".call{call}" if call else "") + (f".{key}" if key else "")
            self.kept.append(Kept(name, stem, tensor, tensor.detach().clone()))

    def _enter(self, name: str, module: nn.Module, args: Any, kwargs: Any) -> None:
        items = dict(_tensors({**dict(enumerate(args)), **kwargs}))
        # a single argument needs no name
        if len({key.partition(".")[0] for key in items}) == 1:
            items = {key.partition(".")[2]: tensor for key, tensor in items.items()}
        self._keep(name, "input", items)

    def _leave(self, name: str, module: nn.Module, args: Any, output: Any) -> Any:
        self._keep(name, "output", dict(_tensors(output)))
        return output.clone() if isinstance(output, Tensor) else output


def autograd(
    model: nn.Module,
    image: Tensor,
    target: Callable[[Any], Tensor] = lambda out: out.sum(),
) -> Tensors:
    """Values and gradients of every call of every module, without any hook on a tensor."""
    watched = Watched(model)
    with torch.enable_grad():
        number = target(watched.model(image.clone().requires_grad_().clone()))
    tensors = {(kept.name, kept.stem): kept.value for kept in watched.kept}
    differentiable = [kept for kept in watched.kept if kept.tensor.requires_grad]
    gradients = torch.autograd.grad(
        number, [kept.tensor for kept in differentiable], allow_unused=True
    )
    for kept, gradient in zip(differentiable, gradients, strict=True):
        if gradient is not None:
            stem = kept.stem.replace("input", "grad-input").replace("output", "grad")
            tensors[kept.name, stem] = gradient
    return tensors


def _tensors(value: Any, path: str = "") -> Iterator[tuple[str, Tensor]]:
    if isinstance(value, Tensor):
        yield path, value
    elif isinstance(value, (dict, list, tuple)):
        items = value.items() if isinstance(value, dict) else enumerate(value)
        for key, item in items:
            yield from _tensors(item, f"{path}.{key}".lstrip("."))


def assert_close(got: Tensor, want: Tensor, what: object = "") -> None:
    """Within 1e-4 of the largest value."""
    assert got.shape == want.shape, what
    assert (got - want).abs().max() <= 1e-4 * want.abs().max() + 1e-12, what


def assert_all_close(got: Tensors, want: Tensors) -> None:
    """Every tensor of the oracle is there, and close."""
    assert not sorted(set(want) - set(got))[:5]
    for key, tensor in want.items():
        assert_close(got[key], tensor, key)
