"""What torch.autograd.grad says of an out-of-place copy of a model, for the tests of
gradients."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

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
    rows = read_json(folder / "manifest.json")["captures"]
    names = {(row["layer"], row["tensor"]) for row in rows}
    return {
        (layer, Path(name).name.removesuffix(".npy")): torch.from_numpy(
            np.load(folder / name)
        )
        for layer, name in names
    }


def autograd(
    model: nn.Module,
    image: Tensor,
    target: Callable[[Any], Tensor] = lambda out: out.sum(),
) -> Tensors:
    """Values and gradients of every call of every module, without any hook on a tensor.

    Each module hands on a copy of its output, so that no later operation in place
    reaches what is kept of it."""
    twin = copy.deepcopy(model).eval()
    for module in twin.modules():
        if hasattr(module, "inplace"):
            module.inplace = False
    seen: list[tuple[str, str, Tensor, Tensor]] = []
    counts: Counter[tuple[str, str]] = Counter()

    def keep(name: str, kind: str, items: dict[str, Tensor]) -> None:
        call = counts[name, kind]
        counts[name, kind] += 1
        for key, tensor in items.items():
            stem = kind + (f".call{call}" if call else "") + (f".{key}" if key else "")
            seen.append((name, stem, tensor, tensor.detach().clone()))

    def enter(name: str, module: nn.Module, args: Any, kwargs: Any) -> None:
        items = dict(_tensors({**dict(enumerate(args)), **kwargs}))
        # one argument needs no name
        if len({key.partition(".")[0] for key in items}) == 1:
            items = {key.partition(".")[2]: tensor for key, tensor in items.items()}
        keep(name, "input", items)

    def leave(name: str, module: nn.Module, args: Any, output: Any) -> Any:
        keep(name, "output", dict(_tensors(output)))
        return output.clone() if isinstance(output, Tensor) else output

    for name, module in twin.named_modules():
        module.register_forward_pre_hook(partial(enter, name), with_kwargs=True)
        module.register_forward_hook(partial(leave, name))
    with torch.enable_grad():
        value = target(twin(image.clone().requires_grad_().clone()))
    differentiable = [(name, stem, t) for name, stem, t, _ in seen if t.requires_grad]
    gradients = torch.autograd.grad(
        value, [t for *_, t in differentiable], allow_unused=True
    )
    copies = {(name, stem): copied for name, stem, _, copied in seen}
    for (name, stem, _), gradient in zip(differentiable, gradients, strict=True):
        kind, rest = stem.partition("put")[::2]
        if gradient is not None:
            copies[name, ("grad" if kind == "out" else "grad-input") + rest] = gradient
    return copies


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
