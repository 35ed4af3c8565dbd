"""A file format is one record: every command writes, knows and reads each of the table."""

from __future__ import annotations

import base64
import json
from pathlib import Path

import numpy as np
import pytest
from conftest import Run
from PIL import Image

from featviz.records import FORMATS, PictureFormat

NEAR = 8
"""Grey levels by which the pixels of a format with losses may miss those of the PNG, on
average."""


@pytest.mark.slow
@pytest.mark.parametrize("format", FORMATS.values(), ids=FORMATS)
def test_every_command_takes_every_format(
    format: PictureFormat, featviz: Run, tmp_path: Path, tiny_file: Path, picture: Path
) -> None:
    """run, --resume, report, sheet, diff and --overwrite work on pictures of each
    format, whose pixels are those of the PNG or near them."""
    base = ("run", tiny_file, picture, "--layers", "0", "--cmap", "viridis", "-q")
    png = tmp_path / "png"
    out = tmp_path / "out"
    assert featviz(*base, "--out", png).code == 0
    command = (*base, "--format", format.name, "--out", out)
    assert featviz(*command).code == 0
    (row,) = json.loads((out / "picture.png" / "manifest.json").read_text())["captures"]
    assert row["file"] == f"001_0/output.{format.name}"
    file = out / "picture.png" / row["file"]
    with Image.open(file) as opened:
        assert (opened.format, opened.get_format_mimetype()) == (
            format.pillow,
            format.mime,
        )
        pixels = np.asarray(opened.convert("RGB")).astype(int)
    with Image.open(png / "picture.png" / "001_0" / "output.png") as opened:
        expected = np.asarray(opened.convert("RGB")).astype(int)
    assert pixels.shape == expected.shape
    assert np.abs(pixels - expected).mean() < (
        1e-9 if "lossless" in format.description else NEAR
    )
    before = file.read_bytes()
    assert featviz(*command, "--resume").code == 0
    assert file.read_bytes() == before
    assert featviz("report", out, "--single-file").code == 0
    inside = f"data:{format.mime};base64,{base64.b64encode(before).decode()}"
    assert inside in (out / "report.html").read_text()
    assert (
        featviz("sheet", out, "--layers", "0", "--out", tmp_path / "sheet.png").code
        == 0
    )
    done = featviz("diff", png, out, "--json")
    assert done.code == 0
    (layer,) = json.loads(done.out)["layers"]
    assert layer["by"] == (
        ["statistics and pixels"] if format.levels else ["statistics"]
    )
    assert featviz(*command, "--overwrite").code == 0


def test_a_pillow_without_a_format_is_told_before_anything_is_written(
    featviz: Run,
    tmp_path: Path,
    tiny_file: Path,
    picture: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One line says what is missing, and what helps."""
    Image.init()
    monkeypatch.delitem(Image.SAVE, "WEBP", raising=False)
    done = featviz(
        "run", tiny_file, picture, "--format", "webp", "--out", tmp_path / "out"
    )
    assert done.code == 2
    assert not (tmp_path / "out").exists()
    assert "--format webp: Pillow" in done.err
    assert "choose another format" in done.err
