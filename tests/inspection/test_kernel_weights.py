"""Which weights `featviz kernels` draws: those that a forward pass would use."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, prune, spectral_norm, weight_norm

from featviz.drawing import filters

from .drawn_kernels import NETS, close, weights


def effective(module: nn.Module) -> torch.Tensor:
    return filters.read_filters(module.eval()).data[:, :, 0]


def seen_by_forward(module: nn.Module) -> torch.Tensor:
    """The weight that a forward pass uses, found by its answer to impulses."""
    module.eval()
    inputs = torch.eye(18).reshape(18, 2, 3, 3)
    with torch.no_grad():
        return module(inputs)[:, :, 0, 0].T.reshape(-1, 2, 3, 3)


@pytest.mark.parametrize(
    "wrap",
    [
        parametrizations.weight_norm,
        parametrizations.spectral_norm,
        pytest.param(weight_norm, marks=pytest.mark.filterwarnings("ignore::FutureWarning")),
        spectral_norm,
        lambda module: prune.random_unstructured(module, "weight", 0.5),
    ],
    ids=["weight_norm", "spectral_norm", "old weight_norm", "old spectral_norm", "pruned"],
)
def test_kernels_are_the_effective_ones(wrap: Callable[[nn.Module], nn.Module]) -> None:
    """Normalised or pruned weights as a forward pass would use them, also just after loading."""
    module, other = (wrap(nn.Conv2d(2, 4, 3, bias=False)) for _ in range(2))
    module.load_state_dict(other.state_dict())
    with torch.no_grad():
        found = effective(module)
    assert torch.allclose(found, seen_by_forward(module), atol=1e-6)
    assert torch.allclose(found, seen_by_forward(other), atol=1e-6)


def test_reading_a_model_in_training_mode_changes_nothing(drawn: Any) -> None:
    """Spectral norm iterates at each reading in training mode; kernels are those of eval mode."""
    scope: dict[str, Any] = {}
    exec(NETS, scope)
    torch.manual_seed(0)
    weight = scope["spectral"]().eval()[0].weight.detach()
    row = drawn("spectral").rows["0"]
    assert (row["min"], row["max"]) == (float(weight.min()), float(weight.max()))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_kernels_of_any_precision(dtype: torch.dtype) -> None:
    """Half, bfloat16 and double are drawn as float32."""
    module = nn.Conv2d(3, 4, 3).to(dtype)
    assert torch.equal(filters.read_filters(module).data[:, :, 0], module.weight.float())


def test_half_precision_models_are_drawn(drawn: Any) -> None:
    """Both layers, one in half and one in bfloat16."""
    found = drawn("half")
    assert set(found.rows) == {"0", "1"} and all(np.ptp(found.tiles(n)) > 100 for n in "01")


def test_values_that_are_not_finite_are_magenta(drawn: Any) -> None:
    """One NaN in a colour kernel and one infinity in a grey one; the rest is drawn as ever."""
    found = drawn("spoilt", "--scale", 1)
    clean = drawn("colour", "--scale", 1).tiles("first")
    first, magenta = found.tiles("first"), (255, 0, 255)
    where = (first == magenta).all(-1)
    assert np.argwhere(where).tolist() == [[2, 0, 3]]
    assert close(first[~where], clean[~where])
    second = np.asarray(found.image("second").convert("RGB"))
    assert (second == magenta).all(-1).sum() == 1
    assert [found.rows[n]["nonfinite"] for n in ("first", "second")] == [1, 1]
    assert "first holds 1 NaN or infinite weights" in found.done.err


def test_statistics_are_the_weights(drawn: Any) -> None:
    """stats.npz, per output channel over all inputs, and the manifest's overall ones."""
    found = drawn("colour")
    with np.load(found.out / "stats.npz") as arrays:
        for layer, weight in weights("colour").items():
            values = weight.flatten(1).numpy().astype(np.float64)
            expected = [values.min(1), values.max(1), values.mean(1), values.std(1)]
            table = arrays[f"{layer}|kernel|0|"]
            assert np.allclose(table[:, :4], np.stack(expected, 1), atol=1e-6)
            row = found.rows[layer]
            assert [row["min"], row["max"], row["mean"], row["std"]] == pytest.approx(
                [values.min(), values.max(), values.mean(), values.std()], abs=1e-6
            )
