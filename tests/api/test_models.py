"""Models and layers of the Python API: modules, paths and selectors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import featviz as fv
from featviz.errors import UsageError

from .drawn import AS_IT_IS, drawn


@pytest.mark.parametrize(
    ("layers", "names"),
    [
        (nn.Conv2d, ["0"]),
        ([nn.Conv2d, nn.ReLU], ["0", "1"]),
        (["0", "1"], ["0", "1"]),
        (("Conv2d", nn.ReLU), ["0", "1"]),
        (["Conv2d,ReLU", "!1"], ["0"]),
        (nn.modules.conv._ConvNd, ["0"]),
    ],
)
def test_layers_are_text_classes_or_lists(
    layers: Any, names: list[str], tiny: nn.Module, picture: Path, tmp_path: Path
) -> None:
    """In `run` as in `capture`."""
    (image,) = drawn(tiny, picture, tmp_path / "out", layers)
    assert [capture.layer for capture in image.captures] == names
    with fv.capture(tiny, layers) as maps:
        tiny(torch.zeros(1, 3, 8, 8))
    assert list(maps) == names


@pytest.mark.parametrize("layers", [5, [5], int, torch.relu, nn.ReLU()])
def test_what_selects_no_layers(layers: Any, tiny: nn.Module, picture: Path) -> None:
    """One line says what does."""
    for attempt in (
        lambda: fv.run(tiny, picture, layers),
        lambda: fv.capture(tiny, layers).__enter__(),
    ):
        with pytest.raises(UsageError, match="which is neither text nor a class of modules"):
            attempt()
    with pytest.raises(UsageError, match="holds no selector"):
        fv.capture(tiny, []).__enter__()


@pytest.mark.parametrize(
    "make", [torch.jit.script, lambda m: torch.jit.trace(m, torch.rand(1, 3, 8, 8))]
)
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_torchscript_ends_in_one_line(make: Any, tiny: nn.Module, picture: Path) -> None:
    """Its layers take no hooks; the hint says what does."""
    scripted = make(tiny)
    for attempt in (
        lambda: fv.run(scripted, picture),
        lambda: fv.capture(scripted, "Conv2d").__enter__(),
    ):
        with pytest.raises(UsageError, match="TorchScript, which takes no hooks") as caught:
            attempt()
        assert "torch.export" in str(caught.value.hint)


@pytest.mark.parametrize("model", [5, None, nn.Conv2d])
def test_what_is_no_model(model: Any, picture: Path) -> None:
    """Neither a MODEL string nor a module."""
    with pytest.raises(UsageError, match="neither a MODEL string nor a module"):
        fv.run(model, picture)
    with pytest.raises(UsageError, match="not a module"):
        fv.capture(model, "Conv2d").__enter__()


def test_an_exported_program_is_sent_to_unflatten(tiny: nn.Module, picture: Path) -> None:
    """torch.export's own object is no module, and one call makes it one."""
    program = torch.export.export(tiny, (torch.zeros(1, 3, 8, 8),))
    with pytest.raises(UsageError, match="'ExportedProgram'") as caught:
        fv.run(program, picture)  # type: ignore[arg-type]
    assert "torch.export.unflatten" in str(caught.value.hint)


def test_a_path_is_a_model(tiny_file: Path, picture: Path, tmp_path: Path) -> None:
    """Path as well as str; a device as torch has it."""
    options = {"device": torch.device("cpu"), **AS_IT_IS}
    result = fv.run(tiny_file, picture, nn.Conv2d, tmp_path / "out", **options)
    assert result.exit_code == 0
