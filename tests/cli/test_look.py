"""`featviz look`: messages, exit codes and streams."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from conftest import DIGITS, DIGITS_MODEL, Run

SEVEN = DIGITS / "05-7.png"
LOOK = ("look", DIGITS_MODEL, SEVEN)


@pytest.mark.medium
def test_it_writes_one_picture_here(featviz: Run, tmp_path: Path) -> None:
    """It is named after model and image; prediction and file stand on stderr, nothing on
    stdout."""
    done = featviz(*LOOK)
    assert done.code == 0
    assert done.out == ""
    assert [path.name for path in tmp_path.iterdir()] == ["look-digits_cnn-05-7.png"]
    assert "05-7.png: class 7 > 99.9 %, class 1 < 0.1 %" in done.err
    assert done.err.endswith("4 layers in look-digits_cnn-05-7.png\n")


@pytest.mark.medium
def test_json_is_one_document(featviz: Run) -> None:
    """It has the layers, channels and prediction."""
    done = featviz(*LOOK, "--json", "--maps", "3", "--layers", "ReLU#0,Linear")
    document = json.loads(done.out)
    assert [row["layer"] for row in document["layers"]] == ["1", "10"]
    assert [len(row["channels"]) for row in document["layers"]] == [3, 3]
    assert document["layers"][1]["channels"][0] == 7
    assert document["prediction"][0]["index"] == 7
    assert Path(document["file"]).exists()


@pytest.mark.parametrize(
    ("options", "code", "message"),
    [
        (
            ["--out", "page.jpg"],
            2,
            "--out page.jpg: look writes PNG\nhint: --out page.png",
        ),
        (["--layers", "Conv3d"], 2, "no layer matches --layers 'Conv3d'"),
        (["--out", str(SEVEN), "--overwrite"], 2, "is the input"),
        (["--size", "2"], 1, "the model failed in"),
    ],
)
def test_refusals(
    featviz: Run, tmp_path: Path, options: list[str], code: int, message: str
) -> None:
    """The error is one line with its remedy, the exit codes are those of run, and
    nothing is written."""
    done = featviz(*LOOK, *options)
    assert done.code == code
    assert message in done.err
    assert "Traceback" not in done.err
    assert not list(tmp_path.iterdir())
