"""Bad input: one clear line, the exit code, and nothing on stdout or on disk."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from conftest import Run
from runs import complete, refused, run_json
from torch import nn


@pytest.fixture
def grey(nets: str, out: Path) -> tuple[object, ...]:
    """The arguments of a run of the grey network, without its images."""
    return ("run", f"{nets}:grey", "--layers", "Conv2d", "--out", out)


@pytest.mark.medium
def test_a_corrupt_image_in_a_folder_leaves_the_others_complete(
    featviz: Run, grey: tuple[object, ...], folder: Path, out: Path
) -> None:
    """The command exits with 3, and names the image on stderr; it has no folder."""
    done = featviz(*grey, folder)
    refused(done, 3, "error: b.png cannot be read")
    assert complete(out) == ["a.png", "c.png"]
    assert not (out / "b.png").exists()


@pytest.mark.medium
def test_run_json_names_a_corrupt_image(
    featviz: Run, grey: tuple[object, ...], folder: Path, out: Path
) -> None:
    """It lists the failure and what is complete, without the folder's path."""
    featviz(*grey, folder, "-q")
    record = run_json(out)
    assert [failure["image"] for failure in record["failures"]] == ["b.png"]
    images = {"total": 3, "complete": ["a.png", "c.png"], "missing": []}
    assert record["images"] == images
    assert str(folder) not in (out / "run.json").read_text()


@pytest.mark.medium
def test_a_corrupt_image_alone_is_a_failure(
    featviz: Run, grey: tuple[object, ...], folder: Path, out: Path
) -> None:
    """The command exits with 1, and nothing is complete."""
    done = featviz(*grey, folder / "b.png", "-q")
    refused(done, 1, "b.png cannot be read")
    assert complete(out) == []


@pytest.mark.medium
@pytest.mark.parametrize("has_weights", [False, True])
def test_run_json_has_no_absolute_path_of_the_model(
    has_weights: bool, featviz: Run, nets: str, picture: Path, out: Path
) -> None:
    """A factory given by its file, as MODEL or as --arch, is recorded without its
    folder."""
    model = [f"{nets}:grey"]
    if has_weights:
        module = nn.Sequential(nn.Conv2d(1, 2, 3), nn.ReLU())
        torch.save(module.state_dict(), "weights.pth")
        model = ["weights.pth", "--arch", f"{nets}:grey"]
    done = featviz("run", *model, picture, "--layers", "ReLU", "--out", out)
    assert done.code == 0, done.err
    assert str(out.parent) not in (out / "run.json").read_text()


@pytest.mark.medium
@pytest.mark.parametrize(
    ("images", "code", "finished"), [("folder", 3, ["a.png"]), ("folder/c.png", 1, [])]
)
def test_a_model_that_raises_is_named_with_the_module(
    images: str,
    code: int,
    finished: list[str],
    featviz: Run,
    nets: str,
    folder: Path,
    out: Path,
) -> None:
    """It exits with 3 among others, with 1 alone; the line names the module in which it
    failed."""
    (folder / "b.png").unlink()
    model = f"{nets}:picky"
    done = featviz("run", model, images, "--out", out, "--layers", "Conv2d", "-q")
    message = "c.png: the model failed in 1.1 (Picky): no picture may be 13 wide"
    refused(done, code, message)
    assert complete(out) == finished


def test_an_output_below_a_file_names_it(
    featviz: Run, tiny_file: Path, picture: Path
) -> None:
    """A parent that is a file is the system's error, with the path."""
    outcome = featviz("run", tiny_file, picture, "--out", picture / "x", "-q")
    refused(outcome, 1, "picture.png", "cannot be written: Not a directory")


@pytest.mark.medium
@pytest.mark.parametrize(
    ("argument", "code", "message"),
    [
        ("'no licence'", 1, "error: code of the model ended the program: no licence\n"),
        ("", 1, "error: code of the model ended the program: None\n"),
        ("7", 7, ""),
    ],
)
def test_code_of_a_model_that_ends_the_program(
    argument: str,
    code: int,
    message: str,
    featviz: Run,
    picture: Path,
    tmp_path: Path,
    out: Path,
) -> None:
    """Its text is an error, and nothing is complete."""
    (tmp_path / "ends.py").write_text(
        f"""
import sys
from torch import nn

class Net(nn.Conv2d):
    def forward(self, image):
        sys.exit({argument})

def net():
    return Net(3, 2, 1)
"""
    )
    done = featviz("run", f"{tmp_path / 'ends.py'}:net", picture, "-q", "--out", out)
    assert done.code == code
    assert done.err == message
    assert complete(out) == []


@pytest.mark.parametrize("arguments", [["report"], ["run", "--config"]])
def test_a_name_that_no_system_takes(arguments: list[str], featviz: Run) -> None:
    """It is a usage error of one line."""
    name = "x" * 300
    done = featviz(*arguments, name)
    assert done.code == 2
    assert done.err == f"error: {name}: File name too long\n"
