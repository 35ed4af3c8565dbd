"""Bad input: one clear line, the exit code, and nothing on stdout or on disk."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from .outcomes import Run, files, images_done, refused


def test_a_hostile_file_is_one_line_with_the_option(
    featviz: Run, picture: Path, tmp_path: Path
) -> None:
    """A checkpoint that would run code is exit 1, with the objects and how to allow them."""

    class Evil:
        def __reduce__(self) -> tuple[Any, ...]:
            return (os.mkdir, (str(tmp_path / "marker"),))

    torch.save(Evil(), tmp_path / "evil.pth")
    outcome = featviz("run", tmp_path / "evil.pth", picture)
    refused(outcome, 1, r"evil\.pth needs \w+\.mkdir.*nothing was executed")
    assert "--trust" in outcome.err.splitlines()[1]
    assert not (tmp_path / "marker").exists()


def test_weights_that_do_not_fit_are_one_line(
    featviz: Run, tiny: nn.Module, nets: str, picture: Path, tmp_path: Path
) -> None:
    """Missing and unexpected keys in exit 1's single line."""
    torch.save(tiny.state_dict(), tmp_path / "weights.pth")
    outcome = featviz("run", tmp_path / "weights.pth", picture, "--arch", f"{nets}:Functional")
    refused(outcome, 1, r"0 of 4 tensors; missing conv\.weight.*; unexpected 0\.weight")


def test_a_corrupt_image_in_a_folder_leaves_the_others_complete(
    featviz: Run, nets: str, folder: Path, out: Path
) -> None:
    """Exit 3; the image is named on stderr and in run.json, and has no folder. Alone, exit 1."""
    outcome = featviz("run", f"{nets}:grey", folder, "--out", out, "--layers", "Conv2d")
    assert outcome.code == 3
    assert re.search(r"^error: b\.png cannot be read", outcome.err, re.M)
    assert "Traceback" not in outcome.err
    text = (out / "run.json").read_text()
    run = json.loads(text)
    assert [failure["image"] for failure in run["failures"]] == ["b.png"] and str(
        folder
    ) not in text
    assert run["images"] == {"total": 3, "complete": ["a.png", "c.png"], "missing": []}
    assert images_done(out) == ["a.png", "c.png"] and not (out / "b.png").exists()
    alone = ("run", f"{nets}:grey", folder / "b.png", "--layers", "Conv2d", "--out", out / "alone")
    refused(featviz(*alone, "-q"), 1, r"b\.png cannot be read")
    assert images_done(out / "alone") == []


def test_run_json_has_no_absolute_path_of_the_model(
    featviz: Run, tiny: nn.Module, nets: str, picture: Path, tmp_path: Path, out: Path
) -> None:
    """A factory given by its file, as MODEL or as --arch, is recorded without its folder."""
    module = nn.Sequential(nn.Conv2d(1, 2, 3), nn.ReLU())
    torch.save(module.state_dict(), tmp_path / "weights.pth")
    for model in ([f"{nets}:grey"], [tmp_path / "weights.pth", "--arch", f"{nets}:grey"]):
        outcome = featviz("run", *model, picture, "--layers", "ReLU", "--out", out, "--overwrite")
        assert outcome.code == 0, outcome.err
        assert str(tmp_path) not in (out / "run.json").read_text()


@pytest.mark.parametrize("several", [True, False])
def test_a_model_that_raises_is_named_with_the_module(
    several: bool, featviz: Run, nets: str, folder: Path, out: Path
) -> None:
    """Exit 3 among others, 1 alone; the line names the module in which it failed."""
    (folder / "b.png").unlink()
    given = folder if several else folder / "c.png"
    outcome = featviz("run", f"{nets}:picky", given, "--out", out, "--layers", "Conv2d", "-q")
    refused(
        outcome,
        3 if several else 1,
        r"c\.png: the model failed in 1\.1 \(Picky\): no picture may be 13 wide",
    )
    assert images_done(out) == (["a.png"] if several else [])


def test_an_output_below_a_file_names_it(featviz: Run, tiny_file: Path, picture: Path) -> None:
    """A parent that is a file is the system's error, with the path."""
    outcome = featviz("run", tiny_file, picture, "--out", picture / "x", "-q")
    refused(outcome, 1, r"picture\.png.* cannot be written: Not a directory")


def test_another_run_is_refused_and_overwritten_only_when_told(
    featviz: Run, tiny_file: Path, picture: Path, out: Path
) -> None:
    """--out with a run in it: exit 1 and untouched; with --overwrite as if it were new."""
    base = ("run", tiny_file, picture, "--out", out, "-q")
    assert featviz(*base, "--layers", "Conv2d").code == 0
    before = files(out)
    refused(featviz(*base, "--layers", "ReLU"), 1, "holds another run")
    assert files(out) == before
    assert featviz(*base, "--layers", "ReLU", "--overwrite").code == 0
    written = {name for name in files(out) if name.endswith("output.png")}
    assert written == {"picture.png/002_1/output.png"}


def test_an_index_that_is_not_there_says_which_are(
    featviz: Run, tiny_file: Path, picture: Path
) -> None:
    """In an error, and in the warning of one selector beside others; a range as well."""
    outcome = featviz("run", tiny_file, picture, "--layers", "*#99", "-q")
    refused(outcome, 2, "no layer matches --layers")
    assert re.search(r"hint: \* has #0 to #\d; types here", outcome.err), outcome.err
    outcome = featviz("run", tiny_file, picture, "--layers", "ReLU,Conv2d#7:", "--dry-run")
    assert "selector 'Conv2d#7:' matches no layer; Conv2d has #0\n" in outcome.err


def test_a_relu_that_is_a_function_is_told(featviz: Run, nets: str, picture: Path) -> None:
    """--layers ReLU on a model without such modules says which function it calls, how often."""
    outcome = featviz("run", f"{nets}:Functional", picture, "--layers", "ReLU", "-q")
    refused(outcome, 2, "no layer matches --layers 'ReLU'")
    assert "the model calls the function relu 3 times" in outcome.err


@pytest.mark.parametrize("command", ["run", "look"])
@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("# Notes\nnaïve\n".encode(), "is no image that featviz reads: it looks like text"),
        (("x" * 63 + "ü").encode(), "is no image that featviz reads: it looks like text"),
        (b"\x00\x01\x02 no text", "is no image that Pillow can read"),
    ],
)
def test_a_file_that_is_no_image_is_named_once_with_what_is_read(
    command: str, content: bytes, words: str, featviz: Run, tiny_file: Path, tmp_path: Path
) -> None:
    """With the kinds of images and arrays, and how other arguments are given."""
    notes = tmp_path / "notes.md"
    notes.write_bytes(content)
    done = featviz(command, tiny_file, notes, "--out", tmp_path / "out.png", "-q")
    assert done.code == 1
    said, hint = done.err.splitlines()
    assert said == f"error: notes.md {words}"
    assert hint.startswith("hint: give an image (PNG, JPEG, GIF, ")
    assert hint.endswith(
        "or an array (.npy, .npz, .pt); --forward-arg passes other arguments of the model"
    )
