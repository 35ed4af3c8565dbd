"""`featviz layers`: its JSON and its table."""

from __future__ import annotations

import fnmatch
import json
import re
from collections import defaultdict
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import Run
from torch import nn
from torchvision import models

pytestmark = pytest.mark.medium


@pytest.fixture(scope="module")
def resnet() -> nn.Module:
    """ResNet-18 without values."""
    with torch.device("meta"):
        return models.resnet18().eval()


@pytest.fixture
def listed(featviz: Run) -> dict[str, Any]:
    """What `layers --json` says of it."""
    options = ("--weights", "none", "--layers", "Conv2d", "--json")
    done = featviz("layers", "resnet18", *options)
    assert done.code == 0
    document: dict[str, Any] = json.loads(done.out)
    return document


def test_layers_as_json_lists_every_module(
    listed: dict[str, Any], resnet: nn.Module
) -> None:
    """Index, name, type and parameters are those of the model's own modules, and what
    the selectors take is marked."""
    assert listed["total_parameters"] == 11689512
    expected = []
    for index, (name, module) in enumerate(resnet.named_modules()):
        row = {
            "index": index,
            "name": name,
            "type": type(module).__name__,
            "parameters": sum(map(torch.numel, module.parameters())),
            "selected": type(module) is nn.Conv2d,
        }
        expected.append(row)
    rows = listed["layers"]
    columns = expected[0].keys()
    assert [{name: row[name] for name in columns} for row in rows] == expected


def test_layers_as_json_has_shapes_and_calls(
    listed: dict[str, Any], resnet: nn.Module
) -> None:
    """The first output's shape and the count of calls are those that hooks see."""
    shapes: dict[str, list[list[int]]] = defaultdict(list)

    def note(name: str, module: nn.Module, inputs: Any, output: torch.Tensor) -> None:
        shapes[name].append(list(output.shape))

    for name, module in resnet.named_modules():
        module.register_forward_hook(partial(note, name))
    with torch.no_grad():
        resnet(torch.zeros(1, 3, 224, 224, device="meta"))

    seen = {
        row["name"]: (row["output_shape"], row["calls"]) for row in listed["layers"]
    }
    assert seen == {name: (calls[0], len(calls)) for name, calls in shapes.items()}


def test_the_table_has_a_line_for_each_module(featviz: Run, resnet: nn.Module) -> None:
    """Piped into grep, every name stands whole on its line, whatever the terminal's
    width; a star marks what is taken."""
    options = ("--weights", "none", "--layers", "layer3.*.conv?", "-q")
    table = featviz("layers", "resnet18", *options).out

    names = [name for name, _ in resnet.named_modules() if name]
    assert set(table.split()).issuperset(names)
    selected = re.findall(r"^\* +(\S+)", table, re.MULTILINE)
    assert selected == fnmatch.filter(names, "layer3.*.conv?")
    assert table.endswith("\n68 modules; * 4 taken by the selectors\n")


def test_layers_of_a_model_that_cannot_be_run(featviz: Run) -> None:
    """The modules are listed without shapes and calls, with a warning that says why."""
    model = nn.Sequential(nn.Conv2d(3, 2, 1), nn.Linear(5, 2))
    torch.save(model, "odd.pth")

    done = featviz("layers", "odd.pth", "--layers", "Linear", "--json")

    rows = json.loads(done.out)["layers"]
    assert [row["type"] for row in rows] == ["Sequential", "Conv2d", "Linear"]
    assert [row["selected"] for row in rows] == [False, False, True]
    counted = [(row["output_shape"], row["calls"], row["macs"]) for row in rows]
    assert counted == [(None, None, None)] * 3
    assert "warning: no shapes: the model failed in 1 (Linear)" in done.err


SHARED = """
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = self.b = self.c = nn.Conv2d(3, 3, 1)

    def forward(self, x):
        return self.c(self.a(x))
"""


def test_a_shared_module_has_one_line_with_all_its_names(featviz: Run) -> None:
    """The first name comes first."""
    Path("shared.py").write_text(SHARED)
    done = featviz("layers", "shared.py:Net", "-q")
    assert " a (also b, c)  Conv2d " in done.out
