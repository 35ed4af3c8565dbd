"""Several threads: one module goes through them one at a time, copies of it side by
side."""

from __future__ import annotations

import copy
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

import numpy as np
import pytest
import torch
from torch import nn

import featviz as fv
from featviz.api.keywords import alone_with

from .drawn import AS_IT_IS


def picture(number: int) -> np.ndarray:
    """A picture of one grey."""
    return np.full((8, 8, 3), 3 * number, np.uint8)


def means(module: nn.Module, number: int) -> tuple[list[str], list[float]]:
    """The layers of the captures of a run on a picture, and the mean of each tensor."""
    captures = fv.run(
        module, picture(number), "Identity", tensors=True, **AS_IT_IS
    ).captures
    tensors = [maps.tensor for maps in captures]
    return [maps.layer for maps in captures], [
        float(t.mean()) for t in tensors if t is not None
    ]


@pytest.mark.parametrize(
    ("count", "copies"),
    [pytest.param(30, False, marks=pytest.mark.slow), (4, False), (4, True)],
)
def test_thirty_runs_on_four_threads_do_not_mix(count: int, copies: bool) -> None:
    """Each has the tensors of its own picture, every layer once, and the module is as
    before."""
    module = nn.Sequential(*(nn.Identity() for _ in range(4))).train()
    modules = [copy.deepcopy(module) if copies else module for _ in range(count)]
    with ThreadPoolExecutor(4) as pool:
        results = list(pool.map(means, modules, range(count)))
    for number, (layers, values) in enumerate(results):
        assert layers == [str(n) for n in range(4)]
        assert values == pytest.approx([3 * number / 255] * 4, abs=1e-6)
    hooks = [
        one._forward_hooks or one._forward_pre_hooks
        for m in modules
        for one in m.modules()
    ]
    assert not any(hooks)
    assert all(one.training for m in modules for one in m.modules())


def test_captures_in_two_threads_wait_for_each_other() -> None:
    """The second block begins when the first has ended; in one thread blocks nest."""
    module = nn.Sequential(nn.Identity())
    begin = Barrier(2)

    def captured(value: float) -> list[float]:
        begin.wait()
        with fv.capture(module, "Identity") as maps, fv.capture(module) as inner:
            for _ in range(50):
                module(torch.full((1, 1, 2, 2), value))
        assert len(inner["0"]) == 50
        return [float(tensor.mean()) for tensor in maps["0"]]

    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(captured, [1.0, 2.0])) == [[1.0] * 50, [2.0] * 50]


def test_a_compiled_module_waits_for_its_original() -> None:
    """Both are one module, which one thread at a time may hook."""
    module = nn.Sequential(nn.Identity())
    compiled = torch.compile(module, backend="eager")

    def entered() -> bool:
        with alone_with(compiled):
            return True

    with ThreadPoolExecutor(1) as pool:
        with alone_with(module):
            second = pool.submit(entered)
            with pytest.raises(TimeoutError):
                second.result(0.2)
        assert second.result(10)
