"""What `featviz diff` compares with what: layers and images of one side, and refused
pairs."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from rundirs import Drawn, summed_anew, write_run

from .changed_network import CLI, documented

CONV = Drawn("conv", index=1, type="Conv2d")
RELU = Drawn("relu", index=2)
CHANGED = replace(CONV, stats=CONV.numbers + np.float32([0, 0, 1, 0, 0, 0]))
BOTH = {"a.png": [CONV], "b.png": [CONV]}


def edited(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))


def test_added_and_removed_layers_and_images(featviz: CLI, tmp_path: Path) -> None:
    """What only one side has is a difference, with its reason; --ignore-added excuses
    NEW's."""
    less = write_run(tmp_path / "less", {"a.png": [CONV]})
    larger = write_run(tmp_path / "more", {"a.png": [CONV, RELU], "b.png": [CONV]})
    code, document = documented(featviz, less, larger)
    added = document["only_in_new"]
    assert code == 4
    assert document["images"] == ["a.png"]
    assert added["images"] == {"b.png": "not there"}
    assert [(row["layer"], row["reason"]) for row in added["layers"]] == [
        ("relu", "not there")
    ]
    assert document["only_in_base"] == {"images": {}, "layers": []}
    junit = tmp_path / "d.xml"
    assert featviz("diff", less, larger, "--ignore-added", "--junit", junit).code == 0
    assert 'failures="0"' in junit.read_text()
    done = featviz("diff", larger, less, "--ignore-added")
    assert done.code == 4
    assert "only in BASE: image b.png (not there)" in done.out
    edited(less / "a.png" / "manifest.json", '"never_ran": []', '"never_ran": ["relu"]')
    assert "layer relu output (never ran)" in featviz("diff", larger, less).out


def test_a_failed_image_is_missing_with_its_reason(
    featviz: CLI, tmp_path: Path
) -> None:
    """An image that failed in NEW only is told with what was said of it."""
    base = write_run(tmp_path / "base", BOTH)
    new = write_run(tmp_path / "new", {"a.png": [CONV]}, {"b.png": "it is truncated"})
    done = featviz("diff", base, new)
    assert done.code == 4
    assert "only in BASE: image b.png (failed: it is truncated)" in done.out
    assert featviz("diff", new, new).code == 0


def test_other_options_are_refused(featviz: CLI, tmp_path: Path) -> None:
    """Another preprocessing or scale, with the words of both."""
    base = write_run(tmp_path / "base", BOTH)
    for name, record, words in (
        ("one", {"preprocessing": "grey"}, "cannot be compared: the preprocessing is"),
        (
            "two",
            {"options": {"normalize": "layer"}},
            "scale mode is 'map' in BASE and 'layer' in",
        ),
    ):
        done = featviz("diff", base, write_run(tmp_path / name, BOTH, **record))
        assert (done.code, done.out) == (1, "")
        assert words in done.err


def other_pixels(folder: Path) -> None:
    with Image.open(folder / "input.png") as seen:
        pixels = np.asarray(seen).copy()
    pixels[3, 4] ^= 2
    Image.fromarray(pixels).save(folder / "input.png")
    summed_anew(folder)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            lambda p: edited(p / "manifest.json", "0" * 64, "1" * 64),
            "b.png is another file in NEW (its sha256 differs)",
        ),
        (
            lambda p: edited(p / "manifest.json", "[1, 3, 20, 24]", "[1, 4, 20, 24]"),
            "the input made of b.png is 1×3×20×24 in BASE and 1×4×20×24 in NEW",
        ),
        (
            other_pixels,
            "what the model saw of b.png (input.png) has other pixels in NEW",
        ),
    ],
)
def test_another_image_or_input_is_refused(
    featviz: CLI, tmp_path: Path, change: Callable[[Path], object], words: str
) -> None:
    """Another file of that name, and what the model saw of the same: it is named."""
    base, new = (write_run(tmp_path / name, BOTH) for name in ("base", "new"))
    change(new / "b.png")
    done = featviz("diff", base, new)
    assert done.code == 1
    assert words in done.err
    assert "a.png" not in done.err


def test_runs_without_a_common_image_or_layer_are_refused(
    featviz: CLI, tmp_path: Path
) -> None:
    """There is nothing to compare, which is not the same as equal."""
    runs = {"a": {"a.png": [CONV]}, "b": {"b.png": [CONV]}, "c": {"a.png": [RELU]}}
    base, renamed, relus = (
        write_run(tmp_path / name, images) for name, images in runs.items()
    )
    for pair, message in (
        ((base, renamed), "no image is in both runs: BASE has a.png, NEW has b.png"),
        ((base, relus), "no layer is in both runs: BASE has conv, NEW has relu"),
    ):
        done = featviz("diff", *pair)
        assert done.code == 1
        assert message in done.err


def test_incomplete_images_are_named(featviz: CLI, tmp_path: Path) -> None:
    """An image without a manifest is not compared, and nobody overlooks it."""
    base, new = (write_run(tmp_path / name, BOTH) for name in ("base", "new"))
    (new / "b.png" / "manifest.json").unlink()
    done = featviz("diff", base, new)
    assert done.code == 4
    assert "warning: NEW: b.png is incomplete (it has no manifest.json)" in done.err
    assert "only in BASE: image b.png (incomplete)" in done.out
    _, document = documented(featviz, base, new)
    assert document["incomplete"] == {"base": [], "new": ["b.png"]}


def halved(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: 200 if path.suffix == ".npy" else 60])


TENSOR = "001_conv/output.npy"
BROKEN: list[tuple[str, Callable[[Path], object], str]] = [
    (TENSOR, halved, " cannot be read: it is no array as numpy writes it"),
    (
        "stats.npz",
        lambda path: np.savez(path, other=np.zeros((99, 6), np.float32)),
        " cannot be read: it has no conv|output|0|",
    ),
    ("input.png", Path.unlink, " is missing"),
    ("input.png", halved, " cannot be read: "),
    (
        "manifest.json",
        lambda p: p.write_text("{"),
        ": cannot be read: it is no JSON: Expecting",
    ),
    (
        "manifest.json",
        lambda p: edited(p, f'"tensor": "{TENSOR}"', '"tensor": "../../secret.npy"'),
        (
            ': captures[0].tensor is "../../secret.npy", expected a file inside the'
            " image's folder"
        ),
    ),
]


@pytest.mark.parametrize(("file", "spoil", "message"), BROKEN)
def test_a_broken_image_is_left_out_and_the_others_are_compared(
    featviz: CLI,
    tmp_path: Path,
    file: str,
    spoil: Callable[[Path], object],
    message: str,
) -> None:
    """With one line that says what is wrong with which file."""
    kept = replace(CHANGED, more={"tensor": TENSOR})
    base, new = (
        write_run(tmp_path / name, {"a.png": [drawn], "b.png": [drawn]})
        for name, drawn in (
            ("base", replace(CONV, more={"tensor": TENSOR})),
            ("new", kept),
        )
    )
    for run in (base, new):
        for image in ("a.png", "b.png"):
            values = np.full((1, 6, 4, 5), run is new, np.float32)
            np.save(run / image / TENSOR, values)
            summed_anew(run / image)
    spoil(new / "a.png" / file)
    if file != "manifest.json":
        summed_anew(new / "a.png")
    done = featviz("diff", base, new)
    assert done.code == 4
    assert f"warning: NEW: a.png is incomplete (a.png/{file}{message}" in done.err
    assert "only in BASE: image a.png (incomplete)" in done.out
    assert " of 1 image compared" in done.out
    assert json.loads(featviz("diff", base, new, "--json").out)["layers"][0]["by"] == [
        "tensors"
    ]


def test_pixels_tell_what_statistics_do_not(featviz: CLI, tmp_path: Path) -> None:
    """Values that have moved leave a map's statistics as they are."""
    runs = [
        write_run(tmp_path / str(n), {"a.png": [Drawn("x", shade=n)]}) for n in (20, 60)
    ]
    code, document = documented(featviz, *runs)
    assert code == 4
    assert document["layers"][0]["by"] == ["statistics and pixels"]
