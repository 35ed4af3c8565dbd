"""`featviz layers`: its JSON and its table."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
from conftest import Run
from torch import nn
from torchvision import models


@pytest.fixture(scope="module")
def resnet() -> nn.Module:
    with torch.device("meta"):
        return models.resnet18()


def test_layers_as_json_lists_every_module(featviz: Run, resnet: nn.Module) -> None:
    """Index, name, type, parameters, shape and calls agree with the model's own
    modules."""
    outcome = featviz(
        "layers", "resnet18", "--weights", "none", "--layers", "Conv2d", "--json"
    )
    assert outcome.code == 0
    table = json.loads(outcome.out)
    rows = table["layers"]
    modules = list(resnet.named_modules())
    columns = ("index", "name", "type", "parameters", "selected")
    assert [tuple(row[column] for column in columns) for row in rows] == [
        (
            n,
            name,
            type(m).__name__,
            sum(map(torch.numel, m.parameters())),
            type(m) is nn.Conv2d,
        )
        for n, (name, m) in enumerate(modules)
    ]
    assert table["total_parameters"] == 11689512

    seen: dict[str, list[list[int]]] = {name: [] for name, _ in modules}
    for name, module in modules:
        module.register_forward_hook(
            lambda m, args, output, name=name: seen[name].append(list(output.shape))
        )
    with torch.no_grad():
        resnet.eval()(torch.zeros(1, 3, 224, 224, device="meta"))
    assert {row["name"]: row["output_shape"] for row in rows} == {
        n: s[0] for n, s in seen.items()
    }
    assert {row["name"]: row["calls"] for row in rows} == {
        n: len(s) for n, s in seen.items()
    }


def test_the_table_has_a_line_for_each_module(featviz: Run, resnet: nn.Module) -> None:
    """Piped into grep, every name stands whole on its line, whatever the terminal's
    width."""
    outcome = featviz(
        "layers", "resnet18", "--weights", "none", "--layers", "layer3.*.conv?", "-q"
    )
    lines = outcome.out.splitlines()
    footer = lines.pop()
    names = [name for name, _ in resnet.named_modules() if name]
    cells = [line.split() for line in lines]
    assert [name for name in names if not any(name in line for line in cells)] == []
    chosen = [line[1] for line in cells if line and line[0] == "*"]
    assert chosen == [
        name for name in names if re.fullmatch(r"layer3\..*\.conv.", name)
    ]
    assert footer == "68 modules; * 4 taken by the selectors"


def test_layers_of_a_model_that_cannot_be_run(featviz: Run, tmp_path: Path) -> None:
    """The modules are listed without shapes and calls, with a warning that says why."""
    path = tmp_path / "odd.pth"
    torch.save(nn.Sequential(nn.Conv2d(3, 2, 1), nn.Linear(5, 2)), path)
    outcome = featviz("layers", path, "--layers", "Linear", "--json")
    rows = json.loads(outcome.out)["layers"]
    assert [row["type"] for row in rows] == ["Sequential", "Conv2d", "Linear"]
    assert [row["selected"] for row in rows] == [False, False, True]
    assert all(
        row[key] is None for row in rows for key in ("output_shape", "calls", "macs")
    )
    assert re.search(
        r"^warning: no shapes: the model failed in 1 \(Linear\)", outcome.err, re.M
    )
