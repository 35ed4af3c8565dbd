"""Quantised models of PyTorch beside their float twins."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
from torch import nn

import featviz


@pytest.fixture
def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 32), nn.ReLU()
    ).eval()


def compared(network: nn.Module, quantised: nn.Module) -> dict[str, float]:
    """The SQNR in dB of each layer."""
    image = torch.rand(3, 8, 8)
    result = featviz.diff(network, quantised, image, "*", size=8)
    assert not result.only_in_base.lines
    return {layer.label: layer.sqnr for layer in result.layers}


@pytest.mark.medium
def test_linear_layers_of_int8(network: nn.Module) -> None:
    """Layers before the first quantised one are equal, that one has noise."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        quantised = torch.ao.quantization.quantize_dynamic(
            copy.deepcopy(network), {nn.Linear}
        )
    sqnr = compared(network, quantised)
    assert sqnr["1"] == float("inf")
    assert 20 < sqnr["3"] < 80


@pytest.mark.medium
def test_static_quantised_modules(network: nn.Module) -> None:
    """Quantised tensors are compared as the numbers that they stand for."""
    ao = torch.ao.quantization
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        wrapped = ao.QuantWrapper(copy.deepcopy(network)).eval()
        wrapped.qconfig = ao.get_default_qconfig(torch.backends.quantized.engine)
        prepared = ao.prepare(wrapped)
        # as the preprocessing makes them: other values would saturate
        prepared((torch.rand(8, 3, 8, 8) - 0.45) / 0.226)
        quantised = ao.convert(prepared)
        sqnr = compared(wrapped, quantised)
    assert 15 < sqnr["module.0"] < 60


def test_torchao_weights_of_int8(network: nn.Module) -> None:
    """Weights that are a class of torchao's own."""
    quantization = pytest.importorskip("torchao.quantization")
    quantised = copy.deepcopy(network)
    quantization.quantize_(quantised, quantization.Int8WeightOnlyConfig())
    sqnr = compared(network, quantised)
    assert sqnr["1"] == float("inf")
    assert 20 < sqnr["3"] < 80
