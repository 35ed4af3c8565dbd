"""The table of docs/models.md on checkpoints of Ultralytics, each row run."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from conftest import SCENES, Outcome
from PIL import Image
from torch import nn

from .model_tables import Row, check_row, rows
from .ultralytics_files import NAMES, built, save

TITLE = "Ultralytics"


def classifier() -> nn.Module:
    """YOLO11n-cls with names, and classes that are not all alike."""
    model = built("yolo11n-cls")
    model.names = {number: f"thing {number}" for number in range(1000)}
    with torch.no_grad():
        model.get_submodule("model.10.linear").weight.mul_(64)  # type: ignore[operator, union-attr]
    return model


@pytest.fixture(scope="module")
def things(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the rows name, in one folder: models with random weights, as Ultralytics saves them."""
    root = tmp_path_factory.mktemp("things")
    Image.open(SCENES / "landscape.jpg").convert("RGB").resize((120, 90)).save(root / "photo.jpg")
    for name in (*NAMES, "yolo11n-pose", "yolo11n-obb"):
        save(classifier() if name == "yolo11n-cls" else built(name), root / f"{name}.pt")
    save(built("yolo11n"), root / "last.pt", "ema")
    save(built("yolo11n").fuse(verbose=False), root / "fused.pt")  # type: ignore[operator]
    model = built("yolo11n")
    model.criterion = importlib.import_module("ultralytics.utils.loss").BboxLoss(16)
    save(model, root / "epoch3.pt")
    return root


def _case(row: Row) -> object:
    """A network of the size that people have takes more than a second."""
    marks = [pytest.mark.slow] if row.command.startswith("run yolo11n") else []
    return pytest.param(row, marks=marks, id=f"{row.command} ({row.having})")


@pytest.mark.parametrize("row", map(_case, rows(TITLE, 14)))
def test_each_row_is_true(
    row: Row,
    things: Path,
    tmp_path: Path,
    featviz: Callable[..., Outcome],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What works draws pictures; what does not ends with the words of the table."""
    monkeypatch.chdir(things)
    if "without the package" in row.having:
        for name in [name for name in sys.modules if name.partition(".")[0] == "ultralytics"]:
            monkeypatch.setitem(sys.modules, name, None)
    check_row(row, tmp_path / "out", featviz)


def test_the_classes_of_a_classifier_are_those_of_its_own_shares(
    things: Path, tmp_path: Path, featviz: Callable[..., Outcome]
) -> None:
    """The five likeliest, by name, with the shares that the model itself gives for the picture."""
    out = tmp_path / "out"
    line = featviz("run", things / "yolo11n-cls.pt", things / "photo.jpg", "--out", out).err
    seen = Image.open(out / "photo.jpg" / "input.png").convert("RGB")
    pixels = torch.tensor(list(seen.tobytes())).reshape(1, *seen.size[::-1], 3) / 255
    with torch.no_grad():
        shares = classifier()(pixels.permute(0, 3, 1, 2))[0][0]
    best = int(shares.argmax())
    assert 0.01 < shares[best] < 0.9
    assert f"photo.jpg: thing {best} {float(shares[best]):.1%}".replace("%", " %") in line
