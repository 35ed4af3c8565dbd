"""The cost of models that go on after a module has raised, against torch's count of the whole."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

import featviz as fv


class Broken(nn.Module):
    """Raises, with or without work of its own and of a module inside it done before."""

    def __init__(self, works: bool) -> None:
        super().__init__()
        self.works, self.inner = works, nn.Conv2d(3, 4, 3)
        self.weight = nn.Parameter(torch.zeros(2, 4, 3, 3))

    def forward(self, x: Tensor) -> Tensor:
        if self.works:
            nn.functional.conv2d(self.inner(x), self.weight)
        raise ValueError("not for this input")


class GoesOn(nn.Module):
    """Tries one way, and takes another where that raises."""

    def __init__(self, works: bool) -> None:
        super().__init__()
        self.before, self.tried = nn.Conv2d(3, 3, 3), nn.Sequential(Broken(works))
        self.other = nn.Conv2d(3, 8, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.before(x)
        try:
            return self.tried(x)  # type: ignore[no-any-return]
        except ValueError:
            return self.other(x)  # type: ignore[no-any-return]


@pytest.mark.parametrize("works", [False, True])
def test_no_cost_is_lost_where_a_module_raises(works: bool) -> None:
    """The model's MACs are torch's; each layer that came to its end has its own, and what a failed
    call did itself is its caller's."""
    model = GoesOn(works)
    with torch.no_grad(), FlopCounterMode(display=False) as flops:
        model(torch.zeros(1, 3, 16, 16))
    result = fv.summary(model, size=16)
    rows = {row.name: row for row in result.rows}
    assert result.totals.macs == rows[""].macs == flops.get_total_flops() // 2
    assert sum(row.own_macs for row in rows.values()) == result.totals.macs
    inner, raised = 27 * 4 * 12 * 12, 36 * 2 * 10 * 10
    wanted = {"before": 27 * 3 * 14 * 14, "other": 27 * 8 * 12 * 12}
    if works:
        wanted |= {"tried.0.inner": inner, "": raised}
    assert {name: row.own_macs for name, row in rows.items() if row.own_macs} == wanted
    assert [rows[name].calls for name in ("", "tried", "tried.0", "other")] == [1, 0, 0, 1]


def test_calls_of_shared_modules_are_told_apart_behind_one_that_raised() -> None:
    """A module that stands in two places has the calls of each, where one between them raised."""

    class Shares(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            conv = nn.Conv2d(3, 3, 1)
            self.first, self.tried = nn.Sequential(conv), nn.Sequential(Broken(True))
            self.last = nn.Sequential(conv, nn.Conv2d(3, 2, 1))

        def forward(self, x: Tensor) -> Tensor:
            try:
                return self.tried(self.first(x))  # type: ignore[no-any-return]
            except ValueError:
                return self.last(x)  # type: ignore[no-any-return]

    rows = {row.name: row.macs for row in fv.summary(Shares(), size=16).rows}
    assert (rows["first"], rows["last"]) == (9 * 256, 9 * 256 + 6 * 256)
    assert rows["first.0"] == rows["last.0"] == 9 * 256
    assert rows["last.1"] == 6 * 256
