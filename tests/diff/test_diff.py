"""`featviz diff`: equal runs, one changed weight, tolerances, NaN, statistics instead
of pixels."""

from __future__ import annotations

import os
from pathlib import Path

import forked
import numpy as np
import pytest
import torch
from rundirs import Drawn, write_run
from torch import nn

from .changed_network import (
    CHANGED,
    CLI,
    Run,
    documented,
    layer_of,
    nan_bias,
    one_weight,
)


@pytest.mark.parametrize("kept", [(), ("--tensors", "npy")], ids=["pixels", "tensors"])
def test_one_changed_weight_is_found_where_it_is(
    featviz: CLI, run: Run, kept: tuple[str, ...]
) -> None:
    """The first layer that diverges is the changed one, in the one channel of that
    weight."""
    base = run("base", *kept)
    new = run("new", *kept, change=one_weight)
    code, document = documented(featviz, base, new)
    assert code == 4
    first = document["first_divergence"]
    assert (first["layer"], first["type"]) == ("2", "Conv2d")
    assert [layer["layer"] for layer in document["layers"] if layer["differing"]] == [
        "2",
        "3",
        "4",
    ]
    changed = layer_of(document, "2")
    assert changed["most_changed"] == [CHANGED]
    assert changed["differing"] == 2  # that channel, in both images
    assert changed["by"] == ["tensors" if kept else "statistics and pixels"]
    done = featviz("diff", base, new)
    assert done.out.splitlines()[1].split()[:3] == ["2", "Conv2d", "output"]
    assert done.out.splitlines()[-1].endswith("first at 2 (Conv2d)")


def test_numbers_of_kept_tensors(featviz: CLI, run: Run) -> None:
    """Absolute, relative and cosine of each channel are what numpy and torch make of
    the files."""
    base = run("base", "--tensors", "npy")
    new = run("new", "--tensors", "npy", change=one_weight)
    _, document = documented(featviz, base, new)
    for name, index in (("2", 3), ("4", 5)):
        absolute = []
        relative = []
        cosine = []
        for image in ("a.png", "b.png"):
            file = f"{image}/{index:03d}_{name}/output.npy"
            b, n = (np.load(root / file)[0].astype(np.float64) for root in (base, new))
            scale = max(abs(b).max(), abs(n).max())
            size = np.maximum(abs(b), abs(n)) + scale
            absolute.append(abs(n - b).max((1, 2)))
            relative.append((abs(n - b) / size).max((1, 2)))
            flat = [torch.from_numpy(v).flatten(1) for v in (b, n)]
            cosine.append(nn.functional.cosine_similarity(*flat, dim=1).numpy())
        channels = layer_of(document, name)["channels"]
        np.testing.assert_allclose(
            channels["absolute"], np.max(absolute, 0), rtol=1e-12
        )
        np.testing.assert_allclose(channels["relative"], np.max(relative, 0), rtol=1e-6)
        np.testing.assert_allclose(channels["cosine"], np.min(cosine, 0), rtol=1e-12)


def test_tolerance_is_a_share_of_value_and_layer(featviz: CLI, run: Run) -> None:
    """Just above the largest relative difference runs are equal, just below they are
    not."""
    pair = (
        run("base", "--tensors", "npy"),
        run("new", "--tensors", "npy", change=one_weight),
    )
    _, document = documented(featviz, *pair)
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
    runs = []
    convs = (nn.Conv2d(3, 64, 3), nn.Conv2d(64, 64, 3), nn.Conv2d(64, 64, 3))
    torch.save(nn.Sequential(*convs), tmp_path / "wide.pth")
    command = [
        str(tmp_path / "wide.pth"),
        str(photos / "a.png"),
        "-q",
        "--tensors",
        "npy",
    ]
    command += ["--size", "32", "--layers", "Conv2d", "--out"]
    for threads, onednn in ((1, True), (2, False)):
        out = tmp_path / f"{threads}-{onednn}"
        printed = tmp_path / f"{out.name}-said"
        how = (threads, onednn, *command, str(out))
        assert (
            forked.fork(printed, run_with, *how, OMP_NUM_THREADS=threads).ended().code
            == 0
        )
        runs.append(out)
    done = featviz("diff", *runs)
    assert (done.code, done.out[:5]) == (0, "equal")
    assert featviz("diff", *runs, "--tolerance", "0").code == 4


@pytest.mark.slow
@pytest.mark.parametrize("kept", [(), ("--tensors", "npy")], ids=["pixels", "tensors"])
def test_nan_equals_nan_and_nothing_else(
    featviz: CLI, run: Run, kept: tuple[str, ...]
) -> None:
    """NaN on both sides is no difference; on one side it is, whatever the tolerance."""
    plain = run("plain", *kept)
    nan = run("nan", *kept, change=nan_bias)
    again = run("again", *kept, change=nan_bias)
    assert featviz("diff", nan, again, "--tolerance", "0").code == 0
    for pair in ((plain, nan), (nan, plain)):
        code, document = documented(featviz, *pair, "--tolerance", "1")
        assert code == 4
        assert document["first_divergence"]["layer"] == "2"
        assert layer_of(document, "2")["most_changed"] == [CHANGED]
        assert layer_of(document, "2")["channels"]["unlike"][CHANGED] == 32 * 32


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


def test_the_first_layer_is_the_first_that_ran(featviz: CLI, tmp_path: Path) -> None:
    """A block stands before its convolutions in named_modules(), and ran after them."""

    def drawn(by: float) -> list[Drawn]:
        names = ("conv1", 1), ("conv2", 2), ("block", 0)
        moved = [0.0, by, by]
        rows = zip(names, moved, strict=True)
        return [
            Drawn(n, index=at, stats=Drawn("x").numbers + own) for (n, at), own in rows
        ]

    runs = [write_run(tmp_path / str(by), {"a.png": drawn(by)}) for by in (0.0, 0.5)]
    _, document = documented(featviz, *runs)
    layers = [(row["layer"], row["differing"] > 0) for row in document["layers"]]
    assert layers == [("conv1", False), ("conv2", True), ("block", True)]
    assert document["first_divergence"]["layer"] == "conv2"


def test_another_number_of_channels_is_a_difference(
    featviz: CLI, tmp_path: Path
) -> None:
    """A layer of another shape cannot be compared: all its channels differ, with the
    reason."""
    runs = [write_run(tmp_path / str(n), {"a.png": [Drawn("x", n)]}) for n in (6, 7)]
    code, document = documented(featviz, *runs)
    assert code == 4
    assert document["first_divergence"]["layer"] == "x"
    (row,) = document["layers"]
    assert row["reason"] == "shape 1×6×4×5 in BASE, 1×7×4×5 in NEW"
    assert (row["differing"], row["total"]) == (6, 6)
    junit = tmp_path / "d.xml"
    assert featviz("diff", *runs, "--junit", junit).code == 4
    assert "6 of 6 channels differ: shape" in junit.read_text()
