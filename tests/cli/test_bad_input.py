"""Bad input: one clear line, the exit code, and nothing on stdout or on disk."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
from conftest import Run
from runs import complete, refused
from torch import nn


def test_a_corrupt_image_in_a_folder_leaves_the_others_complete(
    featviz: Run, nets: str, folder: Path, out: Path
) -> None:
    """Exit 3; the image is named on stderr and in run.json, and has no folder. Alone,
    exit 1."""
    outcome = featviz("run", f"{nets}:grey", folder, "--out", out, "--layers", "Conv2d")
    assert outcome.code == 3
    assert re.search(r"^error: b\.png cannot be read", outcome.err, re.M)
    assert "Traceback" not in outcome.err
    text = (out / "run.json").read_text()
    run = json.loads(text)
    assert [failure["image"] for failure in run["failures"]] == ["b.png"]
    assert str(folder) not in text
    assert run["images"] == {"total": 3, "complete": ["a.png", "c.png"], "missing": []}
    assert complete(out) == ["a.png", "c.png"]
    assert not (out / "b.png").exists()
    alone = (
        "run",
        f"{nets}:grey",
        folder / "b.png",
        "--layers",
        "Conv2d",
        "--out",
        out / "alone",
    )
    refused(featviz(*alone, "-q"), 1, "b.png cannot be read")
    assert complete(out / "alone") == []


def test_run_json_has_no_absolute_path_of_the_model(
    featviz: Run, nets: str, picture: Path, tmp_path: Path, out: Path
) -> None:
    """A factory given by its file, as MODEL or as --arch, is recorded without its
    folder."""
    module = nn.Sequential(nn.Conv2d(1, 2, 3), nn.ReLU())
    torch.save(module.state_dict(), tmp_path / "weights.pth")
    for model in (
        [f"{nets}:grey"],
        [tmp_path / "weights.pth", "--arch", f"{nets}:grey"],
    ):
        outcome = featviz(
            "run", *model, picture, "--layers", "ReLU", "--out", out, "--overwrite"
        )
        assert outcome.code == 0, outcome.err
        assert str(tmp_path) not in (out / "run.json").read_text()


@pytest.mark.parametrize("several", [True, False])
def test_a_model_that_raises_is_named_with_the_module(
    several: bool, featviz: Run, nets: str, folder: Path, out: Path
) -> None:
    """Exit 3 among others, 1 alone; the line names the module in which it failed."""
    (folder / "b.png").unlink()
    source = folder if several else folder / "c.png"
    outcome = featviz(
        "run", f"{nets}:picky", source, "--out", out, "--layers", "Conv2d", "-q"
    )
    refused(
        outcome,
        3 if several else 1,
        "c.png: the model failed in 1.1 (Picky): no picture may be 13 wide",
    )
    assert complete(out) == (["a.png"] if several else [])


def test_an_output_below_a_file_names_it(
    featviz: Run, tiny_file: Path, picture: Path
) -> None:
    """A parent that is a file is the system's error, with the path."""
    outcome = featviz("run", tiny_file, picture, "--out", picture / "x", "-q")
    refused(outcome, 1, "picture.png", "cannot be written: Not a directory")
