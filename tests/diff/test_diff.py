"""`featviz diff`: equal runs, one changed weight, tolerances, NaN, statistics instead
of pixels."""

from __future__ import annotations

import os
from pathlib import Path

import forked
import numpy as np
import pytest
import torch
from PIL import Image
from rundirs import Drawn, write_run
from torch import nn

import featviz as fv

from .changed_network import (
    CHANGED,
    CLI,
    IMAGES,
    KEPT,
    Pair,
    Run,
    documented,
    kept_tensors,
    layer_of,
    nan_bias,
    one_weight,
)

pytestmark = pytest.mark.medium


PIXELS_AND_TENSORS = pytest.mark.parametrize(
    ("kept", "by"), [((), "statistics and pixels"), (KEPT, "tensors")]
)


@PIXELS_AND_TENSORS
def test_one_changed_weight_is_found_where_it_is(
    featviz: CLI, run: Run, kept: tuple[str, ...], by: str
) -> None:
    """The first layer that diverges is the changed one, in the one channel of that
    weight."""
    base = run("base", *kept)
    new = run("new", *kept, change=one_weight)

    document = documented(featviz, base, new).document

    assert document["first_divergence"]["layer"] == "2"
    differing = [row["layer"] for row in document["layers"] if row["differing"]]
    assert differing == ["2", "3", "4"]
    changed = layer_of(document, "2")
    assert changed["most_changed"] == [CHANGED]
    assert changed["differing"] == len(IMAGES)  # that channel in each
    assert changed["by"] == [by]


def test_the_table_begins_with_the_first_divergence(featviz: CLI, run: Run) -> None:
    """And the last line names it."""
    done = featviz("diff", run("base"), run("new", change=one_weight))
    assert done.code == 4
    lines = done.out.splitlines()
    assert lines[1].split()[:3] == ["2", "Conv2d", "output"]
    assert lines[-1].endswith("first at layer 2 (Conv2d)")


def channel_numbers(before: np.ndarray, after: np.ndarray) -> dict[str, np.ndarray]:
    """What numpy and torch make of two tensors [C, H, W]."""
    scale = max(abs(before).max(), abs(after).max())
    difference = abs(after - before)
    share = difference / (np.maximum(abs(before), abs(after)) + scale)
    flat = [torch.from_numpy(values).flatten(1) for values in (before, after)]
    cosine = nn.functional.cosine_similarity(*flat, dim=1)
    return {
        "absolute": difference.max((1, 2)),
        "relative": share.max((1, 2)),
        "cosine": cosine.numpy(),
    }


@pytest.mark.parametrize("layer", ["2", "4"])
def test_numbers_of_kept_tensors(featviz: CLI, pair: Pair, layer: str) -> None:
    """A channel has the worst number of all images."""
    tensors = [kept_tensors(pair, image, layer) for image in IMAGES]
    numbers = [channel_numbers(*of_image) for of_image in tensors]

    channels = layer_of(documented(featviz, *pair).document, layer)["channels"]

    for name, worst in (("absolute", max), ("relative", max), ("cosine", min)):
        pairs = zip(*(columns[name] for columns in numbers), strict=True)
        expected = [worst(pair) for pair in pairs]
        np.testing.assert_allclose(channels[name], expected, rtol=1e-6)


def test_tolerance_is_a_share_of_value_and_layer(featviz: CLI, pair: Pair) -> None:
    """Just above the largest relative difference runs are equal, just below they are
    not."""
    document = documented(featviz, *pair).document
    assert document["tolerance"] == 1e-4  # what docs/diff.md says
    worst = max(max(layer["channels"]["relative"]) for layer in document["layers"])
    assert featviz("diff", *pair, "--tolerance", repr(worst * (1 + 1e-9))).code == 0
    assert featviz("diff", *pair, "--tolerance", repr(worst * (1 - 1e-9))).code == 4


def run_with(threads: int, onednn: bool, *arguments: str) -> None:
    """In a process of its own: `featviz run` with so many threads, on a machine of many
    cores."""
    os.sched_getaffinity = lambda pid: set(range(16))  # type: ignore[assignment]
    torch.set_num_threads(threads)
    torch.backends.mkldnn.enabled = onednn  # type: ignore[assignment]
    forked.featviz("run", *arguments)


@pytest.mark.slow
def test_threads_and_libraries_make_no_difference(
    featviz: CLI, photos: Path, tmp_path: Path
) -> None:
    """Two threads without oneDNN are equal to one with it by default, though not to the
    bit."""
    # paths are absolute: a forked process begins in another folder
    convs = (nn.Conv2d(3, 64, 3), nn.Conv2d(64, 64, 3), nn.Conv2d(64, 64, 3))
    model = tmp_path / "wide.pth"
    torch.save(nn.Sequential(*convs), model)
    options = ("-q", *KEPT, "--size", "32", "--layers", "Conv2d", "--out")
    runs = []
    processes = []
    for threads, onednn in ((1, True), (2, False)):
        out = tmp_path / str(threads)
        command = map(str, (model, photos / "a.png", *options, out))
        printed = tmp_path / f"{threads}-printed"
        process = forked.fork(
            printed, run_with, threads, onednn, *command, OMP_NUM_THREADS=threads
        )
        runs.append(out)
        processes.append(process)
    assert [process.code for process in forked.ended(processes)] == [0, 0]

    done = featviz("diff", *runs)

    assert done.code == 0
    assert done.out.startswith("equal")
    assert featviz("diff", *runs, "--tolerance", "0").code == 4


@pytest.mark.slow
@PIXELS_AND_TENSORS
def test_nan_equals_nan(featviz: CLI, run: Run, kept: tuple[str, ...], by: str) -> None:
    """On both sides it is no difference."""
    base = run("base", *kept, change=nan_bias)
    new = run("new", *kept, change=nan_bias)
    assert featviz("diff", base, new, "--tolerance", "0").code == 0


@pytest.mark.slow
@PIXELS_AND_TENSORS
@pytest.mark.parametrize("order", [1, -1], ids=["new", "base"])
def test_nan_equals_nothing_else(
    featviz: CLI, run: Run, kept: tuple[str, ...], by: str, order: int
) -> None:
    """On one side it is a difference, whatever the tolerance."""
    pair = (run("plain", *kept), run("nan", *kept, change=nan_bias))

    code, document = documented(featviz, *pair[::order], "--tolerance", "1")

    assert code == 4
    assert document["first_divergence"]["layer"] == "2"
    changed = layer_of(document, "2")
    assert changed["most_changed"] == [CHANGED]
    assert changed["channels"]["unlike"][CHANGED] == 32 * 32


def test_what_no_picture_shows_is_compared_by_statistics(
    featviz: CLI, run: Run
) -> None:
    """WebP has no levels to read back."""
    webp = ("--format", "webp")
    base = run("base", *webp)
    new = run("new", *webp, change=one_weight)
    code, document = documented(featviz, base, new, "--tolerance", "0")
    changed = layer_of(document, "2")
    assert code == 4
    assert changed["most_changed"] == [CHANGED]
    assert changed["by"] == ["statistics"]
    assert changed["channels"]["cosine"][CHANGED] is None


def test_the_first_layer_is_the_first_that_ran(featviz: CLI) -> None:
    """A block stands before its convolutions in named_modules(), and ran after them."""

    numbers = Drawn("x").numbers
    runs = []
    for change in (0.0, 0.5):
        drawn = [
            Drawn("conv1", index=1, stats=numbers),
            Drawn("conv2", index=2, stats=numbers + change),
            Drawn("block", index=0, stats=numbers + change),
        ]
        runs.append(write_run(Path(str(change)), {"a.png": drawn}))

    document = documented(featviz, *runs).document

    layers = [(row["layer"], row["differing"] > 0) for row in document["layers"]]
    assert layers == [("conv1", False), ("conv2", True), ("block", True)]
    assert document["first_divergence"]["layer"] == "conv2"


ALIVE, DEAD = (0, 2, 1, 1, 0.5, 0), (0, 0, 0, 0, 1, 0)
"""Statistics of a map of a ReLU, in the order of `STAT_COLUMNS`."""


def test_channels_that_died_are_named(featviz: CLI) -> None:
    """Those of an activation that are zero in all images of NEW, and were not in BASE;
    one that is zero in one image lives in the other."""

    def run(name: str, *images: list[tuple[float, ...]]) -> Path:
        drawn = {}
        for number, rows in enumerate(images):
            stats = np.array(rows, np.float32)
            below = stats - np.eye(6, dtype=np.float32)[:1]  # of a convolution
            drawn[f"{number}.png"] = [
                Drawn("relu", 4, stats=stats),
                Drawn("conv", 4, index=2, type="Conv2d", stats=below),
            ]
        return write_run(Path(name), drawn)

    base = run("base", [ALIVE, ALIVE, DEAD, ALIVE], [ALIVE, DEAD, DEAD, ALIVE])
    new = run("new", [ALIVE, DEAD, DEAD, DEAD], [DEAD, DEAD, DEAD, DEAD])
    one = [run(f"one-{n}", [row] * 4) for n, row in enumerate((ALIVE, DEAD))]

    table = featviz("diff", base, new).out
    document = documented(featviz, base, new).document
    of_one = documented(featviz, *one).document

    died = {row["layer"]: row["newly_dead"] for row in document["layers"]}
    assert died == {"relu": [1, 3], "conv": []}
    assert "newly dead" in table.splitlines()[0]
    assert "  1, 3  " in table
    assert layer_of(of_one, "relu")["newly_dead"] == []


def test_another_number_of_channels_is_a_difference(featviz: CLI) -> None:
    """A layer of another shape cannot be compared: all its channels differ, with the
    reason."""
    runs = [write_run(Path(str(n)), {"a.png": [Drawn("x", n)]}) for n in (6, 7)]
    junit = Path("d.xml")

    code, document = documented(featviz, *runs, "--junit", junit)

    assert code == 4
    assert document["first_divergence"]["layer"] == "x"
    (row,) = document["layers"]
    assert row["reason"] == "shape 1×6×4×5 in BASE, 1×7×4×5 in NEW"
    assert row["differing"] == row["total"] == 6
    assert "6 of 6 channels differ: shape" in junit.read_text()


class Twice(nn.Module):
    """One ReLU that runs twice."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = factor
        self.relu = nn.ReLU()

    def forward(self, pixels: torch.Tensor) -> torch.Tensor:
        again: torch.Tensor = self.relu(1 - self.relu(self.factor * pixels))
        return again


def test_a_map_names_its_call(featviz: CLI) -> None:
    """Out of its folder, too: the second call has the same layer."""
    pixels = np.random.default_rng(0).integers(0, 256, (8, 8, 3), "uint8")
    for name, factor in (("base", 1), ("new", 0.5)):
        fv.run(Twice(factor), pixels, "relu", name, preset="none", normalize="layer")

    featviz("diff", "base", "new", "--out", "maps")

    layers = set()
    for path in Path("maps").rglob("*.png"):
        with Image.open(path) as picture:
            layers.add(picture.info["Layer"])
    assert layers == {"relu (ReLU)", "relu (ReLU), output.call1"}
