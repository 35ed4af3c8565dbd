"""What `featviz diff` compares with what: layers and images of one side, and refused
pairs."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from rundirs import Drawn, summed_anew, write_run
from runs import refused

from featviz.diff.pairing import LayerPair, align
from featviz.records import CaptureKey
from featviz.rundir.read import ReadRun, read_run

from .changed_network import CLI, documented

CONV = Drawn("conv", index=1, type="Conv2d")
RELU = Drawn("relu", index=2)
CHANGED = replace(CONV, stats=CONV.numbers + np.float32([0, 0, 1, 0, 0, 0]))
BOTH = {"a.png": [CONV], "b.png": [CONV]}


def edited(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))


@pytest.fixture
def smaller() -> Path:
    """A run of one image and one layer."""
    return write_run(Path("smaller"), {"a.png": [CONV]})


@pytest.fixture
def larger() -> Path:
    """A run with one more of each."""
    return write_run(Path("larger"), {"a.png": [CONV, RELU], "b.png": [CONV]})


def test_what_only_new_has_is_a_difference(
    featviz: CLI, smaller: Path, larger: Path
) -> None:
    """Its reason is that it is not there in BASE."""
    code, document = documented(featviz, smaller, larger)
    assert code == 4
    assert document["images"] == ["a.png"]
    assert document["only_in_new"]["images"] == {"b.png": "not there"}
    (layer,) = document["only_in_new"]["layers"]
    assert layer["layer"] == "relu"
    assert layer["reason"] == "not there"
    assert document["only_in_base"] == {"images": {}, "layers": []}


def test_what_is_added_may_be_ignored(
    featviz: CLI, smaller: Path, larger: Path
) -> None:
    """JUnit counts no failure then; what NEW lacks is a difference all the same."""
    junit = Path("d.xml")
    assert (
        featviz("diff", smaller, larger, "--ignore-added", "--junit", junit).code == 0
    )
    assert 'failures="0"' in junit.read_text()
    done = featviz("diff", larger, smaller, "--ignore-added")
    assert done.code == 4
    assert "only in BASE: image b.png (not there)" in done.out


def test_a_layer_that_never_ran_is_told(
    featviz: CLI, smaller: Path, larger: Path
) -> None:
    """It is not there since nothing called it."""
    manifest = smaller / "a.png" / "manifest.json"
    edited(manifest, '"never_ran": []', '"never_ran": ["relu"]')
    assert "layer relu output (never ran)" in featviz("diff", larger, smaller).out


def test_the_reason_is_that_of_the_call(
    featviz: CLI, smaller: Path, larger: Path
) -> None:
    """Another call of the layer may have been skipped for another one."""
    rows = []
    for call, reason in ((1, "is None"), (0, "holds no values")):
        row = {"layer": "relu", "type": "ReLU", "index": 1, "kind": "output"}
        rows.append({**row, "call": call, "key": "", "reason": reason})
    edited(
        smaller / "a.png" / "manifest.json",
        '"skipped": []',
        f'"skipped": {json.dumps(rows)}',
    )
    done = featviz("diff", larger, smaller)
    assert "layer relu output (skipped: holds no values)" in done.out


def test_a_run_that_did_not_come_to_its_end_is_warned_of(featviz: CLI) -> None:
    """What it has is compared."""
    base = write_run(Path("base"), BOTH)
    images = {"total": 4, "complete": [*BOTH], "missing": ["c.png", "d.png"]}
    new = write_run(Path("new"), BOTH, images=images)
    done = featviz("diff", base, new)
    assert done.code == 0
    assert "warning: NEW: the run did not come to 2 more images" in done.err


def test_a_failed_image_is_missing_with_its_reason(featviz: CLI) -> None:
    """An image that failed in NEW only is told with what was said of it."""
    base = write_run(Path("base"), BOTH)
    new = write_run(Path("new"), {"a.png": [CONV]}, {"b.png": "it is truncated"})
    done = featviz("diff", base, new)
    assert done.code == 4
    assert "only in BASE: image b.png (failed: it is truncated)" in done.out
    assert featviz("diff", new, new).code == 0


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"preprocessing": "grey"}, "cannot be compared: the preprocessing is"),
        (
            {"options": {"normalize": "layer"}},
            "scale mode is 'map' in BASE and 'layer' in",
        ),
    ],
)
def test_other_options_are_refused(
    record: dict[str, Any], message: str, featviz: CLI
) -> None:
    """Another preprocessing or scale is named for both runs."""
    base = write_run(Path("base"), BOTH)
    new = write_run(Path("new"), BOTH, **record)
    done = featviz("diff", base, new)
    assert done.out == ""
    refused(done, 1, message)


def one_pixel(folder: Path) -> None:
    with Image.open(folder / "input.png") as seen:
        pixels = np.asarray(seen).copy()
    pixels[3, 4] ^= 2
    Image.fromarray(pixels).save(folder / "input.png")
    summed_anew(folder)


@pytest.mark.parametrize(
    ("change", "message"),
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
            one_pixel,
            "what the model saw of b.png (input.png) has other pixels in NEW",
        ),
    ],
)
def test_another_image_or_input_is_refused(
    featviz: CLI, change: Callable[[Path], object], message: str
) -> None:
    """Another file of that name, and what the model saw of the same: it is named."""
    base, new = (write_run(Path(name), BOTH) for name in ("base", "new"))
    change(new / "b.png")
    done = featviz("diff", base, new)
    refused(done, 1, message)
    assert "a.png" not in done.err


def test_an_input_may_be_off_by_one_level(featviz: CLI) -> None:
    """Up or down: resizing varies so much between machines."""
    base, new = (write_run(Path(name), BOTH) for name in ("base", "new"))
    pixels = np.full((20, 24, 3), 100, np.uint8)
    for run, levels in ((base, (100, 100)), (new, (99, 101))):
        pixels[::2], pixels[1::2] = levels
        Image.fromarray(pixels).save(run / "b.png" / "input.png")
        summed_anew(run / "b.png")
    assert featviz("diff", base, new).code == 0


@pytest.mark.parametrize(
    ("images", "message"),
    [
        (
            {"b.png": [CONV]},
            "no image is in both runs: BASE has a.png, NEW has b.png",
        ),
        ({"a.png": [RELU]}, "no layer is in both runs: BASE has conv, NEW has relu"),
        (
            {"a.png": [RELU, replace(RELU, call=1)]},
            "no layer is in both runs: BASE has conv, NEW has relu\n",
        ),
    ],
)
def test_runs_without_a_common_image_or_layer_are_refused(
    images: dict[str, list[Drawn]], message: str, featviz: CLI
) -> None:
    """There is nothing to compare, which is not the same as equal."""
    base = write_run(Path("base"), {"a.png": [CONV]})
    new = write_run(Path("new"), images)
    refused(featviz("diff", base, new), 1, message)


@pytest.mark.medium
def test_incomplete_images_are_named(featviz: CLI) -> None:
    """An image without a manifest is not compared, and nobody overlooks it."""
    base, new = (write_run(Path(name), BOTH) for name in ("base", "new"))
    (new / "b.png" / "manifest.json").unlink()
    done = featviz("diff", base, new)
    assert done.code == 4
    assert "warning: NEW: b.png is incomplete (it has no manifest.json)" in done.err
    assert "only in BASE: image b.png (incomplete)" in done.out
    document = documented(featviz, base, new).document
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


def with_tensors(root: Path, drawn: Drawn, value: float) -> Path:
    """A run of two images with tensors of one value."""
    drawn = replace(drawn, more={"tensor": TENSOR})
    write_run(root, {image: [drawn] for image in BOTH})
    for image in BOTH:
        np.save(root / image / TENSOR, np.full((1, 6, 4, 5), value, np.float32))
        summed_anew(root / image)
    return root


@pytest.mark.parametrize(("file", "spoil", "message"), BROKEN)
def test_a_broken_image_is_left_out_and_the_others_are_compared(
    featviz: CLI,
    file: str,
    spoil: Callable[[Path], object],
    message: str,
) -> None:
    """One line says what is wrong with which file."""
    base = with_tensors(Path("base"), CONV, 0)
    new = with_tensors(Path("new"), CHANGED, 1)
    spoil(new / "a.png" / file)
    if file != "manifest.json":
        summed_anew(new / "a.png")

    done = featviz("diff", base, new)

    assert done.code == 4
    assert f"warning: NEW: a.png is incomplete (a.png/{file}{message}" in done.err
    assert "only in BASE: image a.png (incomplete)" in done.out
    assert " of 1 image compared" in done.out
    swapped = featviz("diff", new, base)
    assert f"warning: BASE: a.png is incomplete (a.png/{file}{message}" in swapped.err
    assert "only in NEW: image a.png (incomplete)" in swapped.out


def test_a_second_call_has_its_number() -> None:
    """It is another tensor than the first of the layer."""
    base = CaptureKey("relu", "output", 0, "")
    pair = LayerPair(base, CaptureKey("Relu_1", "output", 2, ""), "order")
    assert pair.description == "Relu_1.call2 (order)"


def test_pixels_tell_what_statistics_do_not(featviz: CLI) -> None:
    """Values that have moved leave a map's statistics as they are."""
    runs = [write_run(Path(str(n)), {"a.png": [Drawn("x", shade=n)]}) for n in (20, 60)]
    code, document = documented(featviz, *runs)
    assert code == 4
    assert document["layers"][0]["by"] == ["statistics and pixels"]


def test_a_number_that_is_known_of_one_layer_has_a_column(featviz: CLI) -> None:
    """The others leave it empty, as a layer whose tensors were not kept."""
    runs = []
    for name, value, drawn in (("base", 1, CONV), ("new", 1.5, CHANGED)):
        kept = replace(drawn, more={"tensor": TENSOR})
        pictured = replace(RELU, shade=int(20 * value))
        root = write_run(Path(name), {"a.png": [kept, pictured]})
        values = np.full((1, 6, 4, 5), value, np.float32)
        np.save(root / "a.png" / TENSOR, values)
        summed_anew(root / "a.png")
        runs.append(root)
    table = featviz("diff", *runs).out
    assert "SQNR" in table.splitlines()[0]
    assert table.count(" dB") == 1
    assert "6.02 dB" in table


def test_layers_of_another_resolution_are_no_partners() -> None:
    """By the order alone, those of equal shapes are."""
    network = write_run(Path("network"), {"a.png": [CONV]})
    graph = {"a.png": [Drawn("c0", type="Conv", tile=(16, 20))]}
    onnx = write_run(Path("graph"), graph, model={"runtime": "ONNX Runtime"})
    assert align(read_run(network), read_run(onnx)).pairs == {}


def test_the_summary_has_the_largest_difference_of_all_layers(featviz: CLI) -> None:
    """Which need not be that of the first: here 1 beside 1, in a layer up to 6."""
    slightly = replace(CONV, stats=CONV.numbers + np.float32([0, 0, 0.01, 0, 0, 0]))
    largely = replace(RELU, stats=RELU.numbers + np.float32([0, 0, 1, 0, 0, 0]))
    base = write_run(Path("base"), {"a.png": [CONV, RELU]})
    new = write_run(Path("new"), {"a.png": [slightly, largely]})
    done = featviz("diff", base, new, "--max-diff-ratio", 1)
    assert f"by at most {1 / (1 + 6):.3g} relative" in done.out


Named = list[tuple[str, str]]
"""Layers of a model by name and type, in its order."""


def with_layers(name: str, layers: Named, **record: Any) -> ReadRun:
    """The run of a model with these layers, which are all alike."""
    drawn = []
    for index, (layer, type) in enumerate(layers, 1):
        drawn.append(Drawn(layer, index=index, type=type))
    return read_run(write_run(Path(name), {"a.png": drawn}, **record))


CONV_AND_NORM = [("a.conv", "Conv2d"), ("a.norm", "BatchNorm2d")]


@pytest.mark.parametrize(
    ("network", "graph", "pairs"),
    [
        (CONV_AND_NORM, [("a.conv", "Conv")], {"a.norm": ("a.conv", "folded norm")}),
        (
            CONV_AND_NORM,
            [("a.conv", "Conv"), ("a.norm", "BatchNormalization")],
            {"a.conv": ("a.conv", "name"), "a.norm": ("a.norm", "name")},
        ),
        (
            [("a.conv", "Conv2d"), ("b.norm", "BatchNorm2d")],
            [("a.conv", "Conv")],
            {"a.conv": ("a.conv", "name")},
        ),
        (
            [("x", "Conv2d"), ("y", "Conv2d"), ("z", "ReLU")],
            [("c0", "Conv"), ("c1", "Conv"), ("r", "Relu")],
            {"x": ("c0", "order"), "y": ("c1", "order"), "z": ("r", "order")},
        ),
        (
            [("x", "Conv2d"), ("y", "Conv2d")],
            [("c0", "Conv"), ("c1", "Conv"), ("c2", "Conv")],
            {},
        ),
        (
            [("a/fn:add", "fn:add"), ("fn:relu", "fn:relu")],
            [("a/Add", "Add"), ("/Relu", "Relu")],
            {"a/fn:add": ("a/Add", "module path"), "fn:relu": ("/Relu", "module path")},
        ),
        (
            [("a/fn:clamp", "fn:clamp"), ("a/fn:relu6", "fn:relu6")],
            [("a/Clip", "Clip")],
            {"a/fn:relu6": ("a/Clip", "module path")},
        ),
    ],
    ids=[
        "folded",
        "not folded",
        "another module",
        "order",
        "one more",
        "functions",
        "either",
    ],
)
@pytest.mark.parametrize("graph_is_new", [True, False])
def test_layers_of_a_network_have_partners_in_its_graph(
    network: Named,
    graph: Named,
    pairs: dict[str, tuple[str, str]],
    graph_is_new: bool,
) -> None:
    """By the surest rule that fits, whichever of them is BASE; the pair is known by its
    name there."""
    runs = [
        with_layers("network", network),
        with_layers("graph", graph, model={"runtime": "ONNX Runtime"}),
    ]
    if not graph_is_new:
        runs.reverse()
    found = {}
    for pair in align(*runs).pairs.values():
        of_both = (pair.base.layer, pair.new.layer)
        in_network, in_graph = of_both if graph_is_new else reversed(of_both)
        found[in_network] = (in_graph, pair.found_by)
    assert found == pairs
