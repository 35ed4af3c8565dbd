"""A file format is one record: every command writes, knows and reads each of the table."""

from __future__ import annotations

import base64
import io
import json
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch
from conftest import Run
from drawn_maps import drawn, noise
from PIL import Image
from runs import make_photos
from torch import nn

from featviz import cli
from featviz.drawing.picture import encode, to_image
from featviz.records import FORMATS, PictureFormat

NEAR = 8
"""Grey levels by which the pixels of a format with losses may miss those of the PNG, on
average."""


class Written(NamedTuple):
    """A run whose pictures have a format."""

    format: PictureFormat
    command: list[str]
    """What wrote it."""
    out: Path

    @property
    def picture(self) -> Path:
        return self.out / "00.png" / "001_0" / f"output.{self.format.name}"


def write(folder: Path, format: PictureFormat) -> Written:
    """Run the network of a folder on its photo."""
    out = folder / format.name
    command = ["run", str(folder / "net.pth"), str(folder / "photos")]
    command += ["--layers", "0", "--cmap", "viridis", "-q"]
    command += ["--format", format.name, "--out", str(out)]
    assert cli.guarded(command) == 0
    return Written(format, command, out)


@pytest.fixture(scope="module")
def png(tmp_path_factory: pytest.TempPathFactory) -> Written:
    """A run of a convolution on a photo, whose picture is a PNG."""
    folder = tmp_path_factory.mktemp("formats")
    torch.manual_seed(0)
    torch.save(nn.Sequential(nn.Conv2d(3, 4, 3)), folder / "net.pth")
    make_photos(folder / "photos", 1, size=(24, 20))
    return write(folder, FORMATS["png"])


@pytest.fixture(scope="module", params=FORMATS.values(), ids=FORMATS)
def written(request: pytest.FixtureRequest, png: Written) -> Written:
    """The same run in each format."""
    if request.param is png.format:
        return png
    return write(png.out.parent, request.param)


@pytest.mark.slow
def test_run_writes_every_format(written: Written, png: Written) -> None:
    """The manifest names the file, whose pixels are those of the PNG or near them."""
    manifest = json.loads((written.out / "00.png" / "manifest.json").read_text())
    (row,) = manifest["captures"]
    assert row["file"] == f"001_0/output.{written.format.name}"
    with Image.open(written.picture) as opened:
        assert opened.format == written.format.pillow
        assert opened.get_format_mimetype() == written.format.mime
        pixels = np.asarray(opened.convert("RGB")).astype(int)
    expected = np.asarray(Image.open(png.picture).convert("RGB"))
    assert pixels.shape == expected.shape
    is_exact = "lossless" in written.format.description
    assert np.abs(pixels - expected).mean() < (1e-9 if is_exact else NEAR)


@pytest.mark.slow
def test_reports_and_sheets_read_every_format(written: Written, featviz: Run) -> None:
    """A page of one file holds the picture's bytes."""
    page = written.out / "report.html"
    assert featviz("report", written.out, "--single-file").code == 0
    data = base64.b64encode(written.picture.read_bytes()).decode()
    assert f"data:{written.format.mime};base64,{data}" in page.read_text()
    done = featviz("sheet", written.out, "--layers", "0", "--out", "sheet.png")
    assert done.code == 0


@pytest.mark.slow
def test_diff_compares_every_format(
    written: Written,
    png: Written,
    featviz: Run,
) -> None:
    """By pixels where the format keeps levels, and by statistics in any case."""
    done = featviz("diff", png.out, written.out, "--json")
    assert done.code == 0
    (layer,) = json.loads(done.out)["layers"]
    compared = "statistics and pixels" if written.format.levels else "statistics"
    assert layer["by"] == [compared]


@pytest.mark.slow
def test_a_run_in_every_format_is_resumed_and_replaced(
    written: Written,
    featviz: Run,
) -> None:
    """--resume leaves its bytes alone, and --overwrite knows the folder as its own."""
    before = written.picture.read_bytes()
    assert featviz(*written.command, "--resume").code == 0
    assert written.picture.read_bytes() == before
    assert featviz(*written.command, "--overwrite").code == 0


@pytest.mark.parametrize("format", FORMATS)
def test_a_picture_may_say_much_of_itself(format: str) -> None:
    """More than the comment of a JPEG holds, which is cut, in any script."""
    picture = drawn(noise(1, 2, 6, 6))
    file = io.BytesIO()
    encode(picture, file, format, {"Layer": "conv1", "Channels": "猫" * 30_000})
    shown = Image.open(file)
    shown.load()
    assert shown.size == to_image(picture).size
    if format == "jpg":
        assert shown.info["comment"].startswith("Layer: conv1; Channels: 猫".encode())


def test_a_pillow_without_a_format_is_told_before_anything_is_written(
    featviz: Run,
    tiny_file: Path,
    picture: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One line says what is missing, and what helps."""
    Image.init()
    monkeypatch.delitem(Image.SAVE, "WEBP", raising=False)
    done = featviz("run", tiny_file, picture, "--format", "webp", "--out", "out")
    assert done.code == 2
    assert not Path("out").exists()
    assert "--format webp: Pillow" in done.err
    assert "choose another format" in done.err
