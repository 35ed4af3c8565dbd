"""Why a tensor has its layout: the first that fits, with its reason."""

from __future__ import annotations

import logging

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import featviz as fv
from featviz.hooks.capture import forward
from featviz.hooks.layers import list_layers
from featviz.layout.tracing.guess import decide
from featviz.layout.tracing.hints import HintBook
from featviz.records import CaptureSite, Hints, Trace

SQUARE = Hints(input_size=(64, 64))
ROWS = Trace(grid=(1, 4, 4), axes=(1,), positions=np.arange(16))
SHUFFLED = Trace(grid=(1, 4, 4), axes=(1,), positions=np.arange(16)[::-1].copy())
NOWHERE = Hints(input_size=(64, 64), trace=Trace())
WEIGHTS = Hints(trace=Trace(is_weights=True))
IN_PIECES = "it holds each position of a map once, in pieces"
BY_ROWS = "its values lie in the image row by row"
A_GRID = "its tokens make a grid of 4 × 4 of the input"


@pytest.mark.parametrize(
    ("shape", "hints", "layout", "reason"),
    [
        ([1, 8], SQUARE, "vector", "it has one or two axes"),
        ([1, 8, 4, 4], Hints(override="nhwc"), "nhwc", "--tensor-layout says so"),
        ([1, 8, 4, 4], Hints(channels="first"), "nchw", "its layer has channels first"),
        ([1, 16, 8], SQUARE, "tokens", A_GRID),
        ([1, 15, 8], SQUARE, "sequence", "its rows make no grid of the input"),
        ([1, 16, 8], Hints(trace=ROWS), "tokens", BY_ROWS),
        ([1, 16, 8], Hints(trace=SHUFFLED), "windows", IN_PIECES),
        ([1, 16, 8], NOWHERE, "sequence", "its rows lie nowhere in the image"),
        ([1, 2, 16, 16], WEIGHTS, "attention", "a softmax inside an attention made it"),
    ],
)
def test_each_layout_has_its_reason(
    shape: list[int],
    hints: Hints,
    layout: str,
    reason: str,
) -> None:
    """What the user says goes before what was traced, and that before what the shape
    suggests."""
    decision = decide(shape, hints)
    assert decision.arrangement.layout == layout
    assert decision.reason == reason


@pytest.mark.medium
def test_verbose_runs_say_the_layout_and_its_reason(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Each tensor has one line, once."""
    caplog.set_level(logging.DEBUG, "featviz")
    model = nn.Sequential(nn.Conv2d(3, 4, 1), nn.Flatten())
    fv.run(model, torch.rand(2, 3, 8, 8), "0,1", preset="none")
    prefixes = ("0 output", "1 output")
    lines = [line for line in caplog.messages if line.startswith(prefixes)]
    assert lines == [
        "0 output [1, 4, 8, 8]: nchw, since its layer has channels first",
        "1 output [1, 256]: vector, since it has one or two axes",
    ]


def test_the_receptive_field_of_a_position() -> None:
    """Two convolutions of 3 × 3, the second with stride 2: 5 × 5 pixels, cut at the
    border."""
    model = nn.Sequential(
        nn.Conv2d(3, 4, 3, padding=1),
        nn.Conv2d(4, 2, 3, stride=2, padding=1),
    )
    image = torch.zeros(1, 3, 16, 16)
    layer = list_layers(model)[2]
    site = CaptureSite(layer, "output", 0, "")
    book = HintBook(model, image.shape)
    assert book.receptive_field(site) is None  # nothing has been followed yet
    with book.traced(model, [layer], fields=True):
        forward(model, [image])
    field = book.receptive_field(site)
    assert field is not None
    assert field.box(3, 2) == (2, 4, 7, 9)
    assert field.box(0, 0) == (0, 0, 3, 3)
    assert field.largest == (5, 5)


class Adjacency(nn.Module):
    """Multiplies a map by a sparse matrix that is made of it, and changed in place."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 1, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv(x)
        matrix = x[0, 0].to_sparse().mul_(2)
        return (matrix @ x[0, 0])[None, None]


def test_no_receptive_field_behind_a_sparse_tensor() -> None:
    """A sparse tensor has no storage to follow: nobody knows what its product sees."""
    model = Adjacency()
    image = torch.rand(1, 1, 8, 8)
    layers = list_layers(model)
    book = HintBook(model, image.shape)
    with torch.no_grad(), book.traced(model, layers, fields=True):
        forward(model, [image])
    of_product, of_conv = (CaptureSite(layer, "output", 0, "") for layer in layers)
    assert book.receptive_field(of_product) is None
    field = book.receptive_field(of_conv)
    assert field is not None
    assert field.box(4, 4) == (3, 3, 6, 6)
