"""What `featviz diff` compares with what: layers and images of one side, and refused pairs."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from rundirs import summed_anew

from .changed_network import CLI, SMALL, Run, documented, one_weight, saved


def test_added_and_removed_layers_and_images(featviz: CLI, run: Run, photos: Path) -> None:
    """What only one side has is a difference; --ignore-added excuses that of NEW."""
    more = run("more")
    convs, one = run("convs", "--layers", "!ReLU"), run("one", images=photos / "a.png")
    for less, layers, images, words in (
        (convs, ["1", "3"], {}, "layer 1 output (not there)"),
        (one, [], {"b.png": "not there"}, "image b.png (not there)"),
    ):
        code, document = documented(featviz, less, more)
        added = document["only_in_new"]
        assert code == 4 and [row["layer"] for row in added["layers"]] == layers
        assert added["images"] == images
        assert document["images"] == [x for x in ("a.png", "b.png") if x not in images]
        assert document["only_in_base"] == {"images": {}, "layers": []}
        assert featviz("diff", less, more, "--ignore-added").code == 0
        done = featviz("diff", more, less, "--ignore-added")
        assert done.code == 4 and f"only in BASE: {words}" in done.out


@pytest.mark.slow
def test_a_failed_image_is_missing_with_its_reason(
    featviz: CLI, run: Run, photos: Path, tmp_path: Path
) -> None:
    """An image that failed in NEW only is told with what was said of it."""
    base = run("base")
    (photos / "b.png").write_bytes(b"\x89PNG\r\n\x1a\n broken")
    model = saved(tmp_path / "model.pth")
    new = tmp_path / "new"
    assert featviz("run", model, photos, *SMALL, "--out", new, "-q").code == 3
    done = featviz("diff", base, new)
    assert done.code == 4
    assert "only in BASE: image b.png (failed: " in done.out
    assert featviz("diff", new, new).code == 0


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (("--mean", "0,0,0", "--std", "1,1,1"), "cannot be compared: the preprocessing is"),
        (("--normalize", "layer"), "the scale mode is 'auto' in BASE and 'layer' in NEW"),
    ],
)
def test_other_options_are_refused(
    featviz: CLI, run: Run, options: tuple[str, ...], reason: str
) -> None:
    """Another preprocessing or scale, with the words of both."""
    done = featviz("diff", run("base"), run("new", *options))
    assert (done.code, done.out) == (1, "") and reason in done.err


@pytest.mark.slow
def test_another_image_of_that_name_is_refused(featviz: CLI, run: Run, photos: Path) -> None:
    """Its sha256 tells, and the message names it."""
    base = run("base")
    shutil.copy(photos / "a.png", photos / "b.png")
    done = featviz("diff", base, run("new"))
    assert done.code == 1 and "a.png" not in done.err
    assert "b.png is another file in NEW" in done.err


def test_another_input_is_refused(featviz: CLI, run: Run, tmp_path: Path) -> None:
    """Of another shape, where the words are the same; or another background under the same file."""
    base, new = run("base"), run("new")
    path = new / "b.png" / "manifest.json"
    path.write_text(path.read_text().replace("[1, 3, 32, 32]", "[1, 4, 32, 32]"))
    words = "the input made of b.png is 1×3×32×32 in BASE and 1×4×32×32 in NEW"
    assert words in featviz("diff", base, new).err
    pixels = np.full((40, 48, 4), 90, np.uint8)
    pixels[:20, :, 3] = 0
    Image.fromarray(pixels).save(tmp_path / "clear.png")
    base = run("white", images=tmp_path / "clear.png")
    new = run("black", "--background", "black", images=tmp_path / "clear.png")
    done = featviz("diff", base, new)
    words = "what the model saw of clear.png (input.png) has other pixels in NEW"
    assert done.code == 1 and words in done.err


@pytest.mark.slow
def test_runs_without_a_common_image_or_layer_are_refused(
    featviz: CLI, run: Run, photos: Path
) -> None:
    """There is nothing to compare, which is not the same as equal."""
    images = [run(name, images=photos / f"{name}.png") for name in "ab"]
    layers = [run("convs", "--layers", "!ReLU"), run("relus", "--layers", "!Conv2d")]
    for pair, words in (
        (images, "no image is in both runs: BASE has a.png, NEW has b.png"),
        (layers, "no layer is in both runs: BASE has 0, 2, 4, NEW has 1, 3"),
    ):
        done = featviz("diff", *pair)
        assert done.code == 1 and words in done.err


@pytest.mark.slow
def test_incomplete_images_are_named(featviz: CLI, run: Run) -> None:
    """An image without a manifest is not compared, and nobody overlooks it."""
    base, new = run("base"), run("new")
    (new / "b.png" / "manifest.json").unlink()
    done = featviz("diff", base, new)
    assert done.code == 4
    assert "warning: NEW: b.png is incomplete (it has no manifest.json)" in done.err
    assert "only in BASE: image b.png (incomplete)" in done.out
    _, document = documented(featviz, base, new)
    assert document["incomplete"] == {"base": [], "new": ["b.png"]}
    shutil.rmtree(new / "b.png")
    assert "b.png is incomplete" in featviz("diff", base, new).err


def halved(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: 200 if path.suffix == ".npy" else 60])


def other_arrays(path: Path) -> None:
    np.savez(path, other=np.zeros((99, 6), np.float32))


def replacing(old: str, new: str) -> Callable[[Path], object]:
    return lambda path: path.write_text(path.read_text().replace(old, new))


TENSOR = "it has 72 bytes, not those of float32"
BROKEN: list[tuple[str, Callable[[Path], object], str]] = [
    ("003_2/output.npy", halved, f" cannot be read: {TENSOR}"),
    ("stats.npz", other_arrays, " cannot be read: it has no 0|output|0|"),
    ("input.png", Path.unlink, " is missing"),
    ("input.png", halved, " cannot be read: "),
    ("manifest.json", lambda p: p.write_text("{"), ": cannot be read: Expecting property name"),
    (
        "manifest.json",
        replacing("003_2/output.npy", "../../secret.npy"),
        ': captures[2].tensor is "../../secret.npy", expected a file inside the image\'s folder',
    ),
]


@pytest.mark.parametrize(
    ("file", "spoil", "words"),
    [*BROKEN[:3], *(pytest.param(*row, marks=pytest.mark.slow) for row in BROKEN[3:])],
)
def test_a_broken_image_is_left_out_and_the_others_are_compared(
    featviz: CLI, run: Run, file: str, spoil: Callable[[Path], object], words: str
) -> None:
    """With one line that says what is wrong with which file."""
    base = run("base", "--tensors", "npy")
    new = run("new", "--tensors", "npy", change=one_weight)
    spoil(new / "a.png" / file)
    summed_anew(new / "a.png")
    done = featviz("diff", base, new)
    assert done.code == 4
    assert f"warning: NEW: a.png is incomplete (a.png/{file}{words}" in done.err
    assert "only in BASE: image a.png (incomplete)" in done.out
    assert " of 1 image compared" in done.out
