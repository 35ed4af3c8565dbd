"""Several threads: one module goes through them one at a time, copies of it side by
side."""

from __future__ import annotations

import copy
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from typing import NamedTuple

import numpy as np
import pytest
import torch
from torch import nn

import featviz as fv
from featviz.api.keywords import alone_with

from .drawn import AS_IT_IS


class Seen(NamedTuple):
    """What a run captured."""

    layers: list[str]
    means: list[float]
    """Of each layer's tensor."""


def run_on_grey(module: nn.Module, number: int) -> Seen:
    """Run on a picture of one grey, which the number decides."""
    picture = np.full((8, 8, 3), 3 * number, np.uint8)
    result = fv.run(module, picture, "Identity", tensors=True, **AS_IT_IS)
    layers = [maps.layer for maps in result.captures]
    means = [float(maps.tensor.mean()) for maps in result.captures]
    return Seen(layers, means)


def are_unhooked_and_training(module: nn.Module) -> bool:
    """Whether a module has no hook left, and trains as before."""
    for part in module.modules():
        if part._forward_hooks or part._forward_pre_hooks or not part.training:
            return False
    return True


@pytest.mark.medium
@pytest.mark.parametrize(
    ("count", "copies"),
    [pytest.param(12, False, marks=pytest.mark.slow), (4, False), (4, True)],
)
def test_runs_on_four_threads_do_not_mix(count: int, copies: bool) -> None:
    """Each has the tensors of its own picture, every layer once, and the module is as
    before."""
    module = nn.Sequential(*(nn.Identity() for _ in range(4))).train()
    modules = [module] * count
    if copies:
        modules = [copy.deepcopy(module) for _ in range(count)]

    with ThreadPoolExecutor(4) as pool:
        results = list(pool.map(run_on_grey, modules, range(count)))

    for number, seen in enumerate(results):
        assert seen.layers == ["0", "1", "2", "3"]
        assert seen.means == pytest.approx([3 * number / 255] * 4, abs=1e-6)
    assert all(map(are_unhooked_and_training, modules))


def test_captures_in_two_threads_wait_for_each_other() -> None:
    """The second block begins when the first has ended; in one thread blocks nest."""
    module = nn.Sequential(nn.Identity())
    begin = Barrier(2)

    def capture(value: float) -> list[float]:
        begin.wait()
        with fv.capture(module, "Identity") as maps, fv.capture(module) as inner:
            for _ in range(50):
                module(torch.full((1, 1, 2, 2), value))
        assert len(inner["0"]) == 50
        return [float(tensor.mean()) for tensor in maps["0"]]

    with ThreadPoolExecutor(2) as pool:
        values = list(pool.map(capture, [1.0, 2.0]))

    assert values == [[1.0] * 50, [2.0] * 50]


@pytest.mark.medium
def test_a_compiled_module_waits_for_its_original() -> None:
    """Both are one module, which one thread at a time may hook."""
    module = nn.Sequential(nn.Identity())
    compiled = torch.compile(module, backend="eager")

    def enter() -> bool:
        with alone_with(compiled):
            return True

    with ThreadPoolExecutor(1) as pool:
        with alone_with(module):
            second = pool.submit(enter)
            with pytest.raises(TimeoutError):
                second.result(0.2)
        assert second.result(10)
