"""Bad input: one clear line, the exit code, and nothing on stdout or on disk."""

from __future__ import annotations

import errno
import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from .outcomes import Run, files, images_done, refused


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["rnu"], 2, "No such command 'rnu'"),
        (["run"], 2, "Missing argument 'MODEL'"),
        (["run", "MODEL"], 2, "Missing argument 'IMAGE'"),
        (["layers"], 2, "Missing argument 'MODEL'"),
        (["run", "resnet81", "PICTURE"], 2, "torchvision has no model 'resnet81'"),
        (["layers", "resnet81"], 2, "torchvision has no model 'resnet81'"),
        (["run", "absent.pth", "PICTURE"], 2, r"no model file 'absent\.pth'"),
        (
            ["run", "PICTURE", "PICTURE"],
            2,
            r"Missing argument 'MODEL': .*picture\.png' is an image",
        ),
        (["run", "MODEL", "absent.jpg"], 2, r"no image 'absent\.jpg'"),
        (["run", "MODEL", "EMPTY"], 2, "no images in folder"),
        (["run", "MODEL", "no*such.png"], 2, r"no image matches 'no\*such\.png'"),
        (["run", "MODEL", "PICTURE", "--nrow", "0"], 2, "--nrow 0 is below 1"),
        (["run", "MODEL", "PICTURE", "--nrow", "x"], 2, ".*'x' is neither a whole number nor auto"),
        (["run", "MODEL", "PICTURE", "--max-maps", "0"], 2, "--max-maps 0 is below 1"),
        (["run", "MODEL", "PICTURE", "--padding", "-1"], 2, "--padding -1 is below 0"),
        (["run", "MODEL", "PICTURE", "--pad-value", "2"], 2, r"--pad-value 2\.0 is outside 0\.\.1"),
        (["run", "MODEL", "PICTURE", "--normalize", "maps"], 2, "--normalize 'maps'"),
        (["run", "MODEL", "PICTURE", "--cmap", "virdis"], 2, "--cmap 'virdis'"),
        (
            ["run", "MODEL", "PICTURE", "--background", "whit"],
            2,
            "--background 'whit' is no colour",
        ),
        (["run", "MODEL", "PICTURE", "--size", "9y9"], 2, ".*'9y9' is no size"),
        (["run", "MODEL", "PICTURE", "--size", "0"], 2, ".*'0' is no size"),
        (["run", "MODEL", "PICTURE", "--mean", "a,b"], 2, ".*'a,b' is not numbers"),
        (["run", "MODEL", "PICTURE", "--channels", "0"], 2, r"--channels 0 is outside 1\.\.4096"),
        (["run", "MODEL", "PICTURE", "--device", "gpu"], 2, "--device 'gpu' is no device"),
        (["run", "MODEL", "PICTURE", "--model-arg", "3"], 2, ".*'3' is not KEY=VALUE"),
        (["run", "MODEL", "PICTURE", "--out", "PICTURE"], 2, r"--out .*picture\.png is the input"),
        (["layers", "NETS:absent"], 2, "there is no 'absent'"),
        (["run", "MODEL", "PICTURE", "--nor"], 2, "No such option.*--nor"),
    ],
)
def test_bad_input_ends_in_one_line(
    arguments: list[str],
    code: int,
    message: str,
    featviz: Run,
    tiny_file: Path,
    picture: Path,
    nets: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An `error:` line, at most a `hint:` line, no traceback, nothing on stdout or on disk."""
    (tmp_path / "empty").mkdir()
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    names = {"MODEL": tiny_file, "PICTURE": picture, "EMPTY": tmp_path / "empty", "NETS": nets}
    for name, path in names.items():
        arguments = [
            a.replace(name, str(path)) if a.isupper() or ":" in a else a for a in arguments
        ]
    refused(featviz(*arguments, "-q"), code, message)
    assert files(tmp_path / "here") == {}


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
    assert "--allow-global" in outcome.err.splitlines()[1]
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
    """Exit 3; the image is named on stderr and in run.json, and has no folder."""
    outcome = featviz("run", f"{nets}:grey", folder, "--out", out, "--layers", "Conv2d")
    assert outcome.code == 3
    assert re.search(r"^error: b\.png cannot be read", outcome.err, re.M)
    assert "Traceback" not in outcome.err
    run = json.loads((out / "run.json").read_text())
    assert [failure["image"] for failure in run["failures"]] == ["b.png"]
    assert run["images"] == {"total": 3, "complete": ["a.png", "c.png"], "missing": []}
    assert images_done(out) == ["a.png", "c.png"] and not (out / "b.png").exists()


@pytest.mark.parametrize("name", ["b.png", "."])
def test_run_json_names_failures_without_absolute_paths(
    name: str, featviz: Run, nets: str, folder: Path, out: Path
) -> None:
    """No absolute path in a run directory, also where an image failed."""
    featviz("run", f"{nets}:grey", folder / name, "--out", out, "--layers", "Conv2d")
    run = (out / "run.json").read_text()
    assert json.loads(run)["failures"]
    assert str(folder) not in run


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


def test_a_single_corrupt_image_is_a_failure(
    featviz: Run, nets: str, folder: Path, out: Path
) -> None:
    """Exit 1 where no image is left; one line names it."""
    arguments = ("run", f"{nets}:grey", folder / "b.png", "--layers", "Conv2d", "--out", out)
    refused(featviz(*arguments, "-q"), 1, r"b\.png cannot be read")
    assert images_done(out) == []


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


def test_an_output_that_cannot_be_made_names_the_path(
    featviz: Run, tiny_file: Path, picture: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No permission: exit 1 with the path and the system's words."""

    def forbidden(self: Path, *args: object, **kwargs: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied", str(self))

    monkeypatch.setattr(Path, "mkdir", forbidden)
    outcome = featviz(
        "run", tiny_file, picture, "--out", tmp_path / "locked", "--layers", "ReLU", "-q"
    )
    refused(outcome, 1, "locked cannot be written: Permission denied")


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


def test_a_folder_that_holds_no_run_is_never_emptied(
    featviz: Run, tiny_file: Path, picture: Path, out: Path
) -> None:
    """--overwrite does not delete what featviz did not write."""
    out.mkdir()
    (out / "thesis.tex").write_text("years of work")
    outcome = featviz("run", tiny_file, picture, "--out", out, "--overwrite", "-q")
    refused(outcome, 1, "is not empty and holds no run of featviz")
    assert (out / "thesis.tex").read_text() == "years of work"


def test_a_misspelt_layer_lists_the_types(featviz: Run, tiny_file: Path, picture: Path) -> None:
    """Exit 2, the nearest name, and each type with its count."""
    outcome = featviz("run", tiny_file, picture, "--layers", "Conv2D", "-q")
    refused(outcome, 2, "no layer matches --layers 'Conv2D'")
    hint = outcome.err.splitlines()[1]
    assert "did you mean Conv2d?" in hint
    assert re.search(r"Conv2d\W+1\b", hint) and re.search(r"Linear\W+1\b", hint)


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
        "or an array (.npy, .npz, .pt); --input passes other arguments of the model"
    )
