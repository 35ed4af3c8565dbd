"""Models and layers of the Python API: modules, paths and selectors."""

from __future__ import annotations

import copy
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

import featviz as fv
from featviz.errors import UsageError

from .drawn import AS_IT_IS, drawn


@pytest.mark.medium
@pytest.mark.parametrize(
    ("layers", "names"),
    [
        (("Conv2d", nn.ReLU), ["0", "1"]),
        (["Conv2d,ReLU", "!1"], ["0"]),
        (nn.modules.conv._ConvNd, ["0"]),
    ],
)
def test_layers_are_text_classes_or_lists(
    layers: Any, names: list[str], tiny: nn.Module, picture: Path, tmp_path: Path
) -> None:
    """They select the same in `run` and in `capture`."""
    (image,) = drawn(tiny, picture, tmp_path / "out", layers)
    assert [capture.layer for capture in image.captures] == names
    with fv.capture(tiny, layers) as maps:
        tiny(torch.zeros(1, 3, 8, 8))
    assert list(maps) == names


def test_a_module_in_training_mode_runs_in_eval_mode(picture: Path) -> None:
    """Its maps are those of running statistics and without dropout, as the page says;
    afterwards it trains on."""
    model = nn.Sequential(nn.BatchNorm2d(3), nn.Dropout(0.5)).train()
    result = fv.run(model, picture, "Dropout", tensors=True, **AS_IT_IS)
    assert model.training
    with Image.open(picture) as opened:
        pixels = opened.convert("RGB").resize((24, 20), Image.Resampling.BILINEAR)
    values = torch.from_numpy(np.array(pixels)).permute(2, 0, 1)[None] / 255
    expected = copy.deepcopy(model).eval()(values)
    torch.testing.assert_close(result.captures[0].tensor, expected, atol=1e-5, rtol=0)


NO_LAYERS = "neither text nor a class of modules"
NO_MODEL = "neither a MODEL string nor a module"
SCRIPT = "TorchScript, which takes no hooks.*export that with torch.export"


@pytest.mark.parametrize(
    ("model", "layers", "of_run", "of_capture"),
    [
        (nn.Module.eval, 5, NO_LAYERS, NO_LAYERS),
        (nn.Module.eval, [int], NO_LAYERS, NO_LAYERS),
        (nn.Module.eval, [], "holds no selector", "holds no selector"),
        (
            nn.Module.eval,
            "Conv3d",
            "no layer matches .*Conv3d",
            "no layer matches .*Conv3d",
        ),
        (lambda tiny: 5, None, NO_MODEL, "not a module"),
        (lambda tiny: nn.Conv2d, None, NO_MODEL, "not a module"),
        (torch.jit.script, "Conv2d", SCRIPT, SCRIPT),
    ],
)
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_what_is_no_model_and_what_selects_no_layers(
    model: Any,
    layers: Any,
    of_run: str,
    of_capture: str,
    tiny: nn.Module,
    picture: Path,
) -> None:
    """The error says what does, and what a model without hooks can be made into."""
    candidate = model(tiny)
    with pytest.raises(UsageError) as caught:
        fv.run(candidate, picture, layers)
    assert re.search(of_run, f"{caught.value.message} {caught.value.hint}")
    with pytest.raises(UsageError) as caught:
        fv.capture(candidate, layers).__enter__()
    assert re.search(of_capture, f"{caught.value.message} {caught.value.hint}")


@pytest.mark.medium
def test_a_path_is_a_model(tiny_file: Path, picture: Path, tmp_path: Path) -> None:
    """It may be a Path as well as text, and a device is one of torch."""
    assert drawn(tiny_file, picture, tmp_path / "out", device=torch.device("cpu"))
