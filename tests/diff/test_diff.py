"""`featviz diff`: equal runs, one changed weight, tolerances, NaN, statistics instead of pixels."""

from __future__ import annotations

import os
from pathlib import Path

import forked
import numpy as np
import pytest
import torch
from torch import nn

from .changed_network import CHANGED, CLI, Run, documented, layer_of, nan_bias, one_weight


@pytest.mark.parametrize("kept", [(), ("--tensors", "npy")], ids=["pixels", "tensors"])
def test_one_changed_weight_is_found_where_it_is(
    featviz: CLI, run: Run, kept: tuple[str, ...]
) -> None:
    """The first layer that diverges is the changed one, in the one channel of that weight."""
    base, new = run("base", *kept), run("new", *kept, change=one_weight)
    code, document = documented(featviz, base, new)
    assert code == 4
    first = document["first_divergence"]
    assert (first["layer"], first["type"]) == ("2", "Conv2d")
    assert [layer["layer"] for layer in document["layers"] if layer["differing"]] == ["2", "3", "4"]
    changed = layer_of(document, "2")
    assert changed["most_changed"] == [CHANGED]
    assert changed["differing"] == 2  # that channel, in both images
    assert changed["by"] == ["tensors" if kept else "statistics and pixels"]
    done = featviz("diff", base, new)
    assert done.out.splitlines()[1].split()[:3] == ["2", "Conv2d", "output"]
    assert done.out.splitlines()[-1].endswith("first at 2 (Conv2d)")


def test_numbers_of_kept_tensors(featviz: CLI, run: Run) -> None:
    """Absolute, relative and cosine of each channel are what numpy and torch make of the files."""
    base = run("base", "--tensors", "npy")
    new = run("new", "--tensors", "npy", change=one_weight)
    _, document = documented(featviz, base, new)
    for name, index in (("2", 3), ("4", 5)):
        absolute, relative, cosine = [], [], []
        for image in ("a.png", "b.png"):
            file = f"{image}/{index:03d}_{name}/output.npy"
            b, n = (np.load(root / file)[0].astype(np.float64) for root in (base, new))
            scale = max(abs(b).max(), abs(n).max())
            size = np.maximum(abs(b), abs(n)) + scale
            absolute.append(abs(n - b).max((1, 2)))
            relative.append((abs(n - b) / size).max((1, 2)))
            flat = [torch.from_numpy(v).flatten(1) for v in (b, n)]
            cosine.append(nn.functional.cosine_similarity(*flat, dim=1).numpy())
        found = layer_of(document, name)["channels"]
        np.testing.assert_allclose(found["absolute"], np.max(absolute, 0), rtol=1e-12)
        np.testing.assert_allclose(found["relative"], np.max(relative, 0), rtol=1e-6)
        np.testing.assert_allclose(found["cosine"], np.min(cosine, 0), rtol=1e-12)


def test_tolerance_is_a_share_of_value_and_layer(featviz: CLI, run: Run) -> None:
    """Just above the largest relative difference runs are equal, just below they are not."""
    pair = run("base", "--tensors", "npy"), run("new", "--tensors", "npy", change=one_weight)
    _, document = documented(featviz, *pair)
    worst = max(max(layer["channels"]["relative"]) for layer in document["layers"])
    assert featviz("diff", *pair, "--tolerance", repr(worst * (1 + 1e-9))).code == 0
    assert featviz("diff", *pair, "--tolerance", repr(worst * (1 - 1e-9))).code == 4


def run_with(threads: int, onednn: bool, *arguments: str) -> None:
    """In a process of its own: `featviz run` with so many threads, on a machine of many cores."""
    os.sched_getaffinity = lambda pid: set(range(16))  # type: ignore[assignment]
    torch.set_num_threads(threads)
    torch.backends.mkldnn.enabled = onednn  # type: ignore[assignment]
    forked.featviz("run", *arguments)


@pytest.mark.slow
def test_threads_and_libraries_make_no_difference(
    featviz: CLI, photos: Path, tmp_path: Path
) -> None:
    """Two threads without oneDNN are equal to one with it by default, though not to the bit."""
    runs = []
    command = ["mobilenet_v2", str(photos / "a.png"), "--weights", "none", "-q", "--tensors", "npy"]
    command += ["--size", "64", "--layers", "Conv2d#::8,ReLU6#::8,Linear", "--out"]
    for threads, onednn in ((1, True), (2, False)):
        out = tmp_path / f"{threads}-{onednn}"
        said = tmp_path / f"{out.name}-said"
        how = (threads, onednn, *command, str(out))
        assert forked.fork(said, run_with, *how, OMP_NUM_THREADS=threads).ended().code == 0
        runs.append(out)
    done = featviz("diff", *runs)
    assert (done.code, done.out[:5]) == (0, "equal")
    assert featviz("diff", *runs, "--tolerance", "0").code == 4


SHARED_RELU = """
import torch
from networks import Net
from torch import nn

def make(change=0.0):
    torch.manual_seed(0)
    parts = nn.ReLU(inplace=True), nn.Conv2d(3, 4, 3), nn.Conv2d(4, 4, 3)
    parts[2].weight.data[1, 1, 1, 1] += change
    way = lambda self, x: self.relu(self.conv2(self.relu(self.conv1(x))))
    return Net(way, **dict(zip(("relu", "conv1", "conv2"), parts)))
"""


@pytest.mark.slow
def test_the_first_layer_is_the_first_that_ran(featviz: CLI, photos: Path, tmp_path: Path) -> None:
    """A block and its shared ReLU stand before the changed convolution in named_modules(), and
    ran after it."""
    (tmp_path / "net.py").write_text(SHARED_RELU)
    for name, change in (("base", "0.0"), ("new", "0.1")):
        done = featviz(
            "run", f"{tmp_path / 'net.py'}:make", photos, "--size", "32", "--layers", "*",
            "--model-arg", f"change={change}", "--out", tmp_path / name, "-q",
        )  # fmt: skip
        assert done.code == 0, done.err
    _, document = documented(featviz, tmp_path / "base", tmp_path / "new")
    found = [
        (row["layer"] or row["type"], row["call"], row["differing"] > 0)
        for row in document["layers"]
    ]
    assert found == [
        ("conv1", 0, False), ("relu", 0, False), ("conv2", 0, True), ("relu", 1, True),
        ("Net", 0, True),
    ]  # fmt: skip
    assert document["first_divergence"]["layer"] == "conv2"


@pytest.mark.parametrize(
    "kept",
    [(), pytest.param(("--tensors", "npy"), marks=pytest.mark.slow)],
    ids=["pixels", "tensors"],
)
def test_nan_equals_nan_and_nothing_else(featviz: CLI, run: Run, kept: tuple[str, ...]) -> None:
    """NaN on both sides is no difference; on one side it is, whatever the tolerance."""
    plain, nan = run("plain", *kept), run("nan", *kept, change=nan_bias)
    again = run("again", *kept, change=nan_bias)
    assert featviz("diff", nan, again, "--tolerance", "0").code == 0
    for pair in ((plain, nan), (nan, plain)):
        code, document = documented(featviz, *pair, "--tolerance", "1")
        assert code == 4
        assert document["first_divergence"]["layer"] == "2"
        assert layer_of(document, "2")["most_changed"] == [CHANGED]
        assert layer_of(document, "2")["channels"]["unlike"][CHANGED] == 32 * 32


@pytest.mark.slow
def test_labels_are_no_difference(featviz: CLI, run: Run) -> None:
    """Of a palette: a run with labels on its tiles is equal to the same without."""
    cmap = ("--cmap", "viridis")
    code, document = documented(featviz, run("plain", *cmap), run("labels", "--labels", *cmap))
    assert (code, document["equal"]) == (0, True)


def test_another_number_of_channels_is_a_difference(
    featviz: CLI, run: Run, photos: Path, tmp_path: Path
) -> None:
    """A layer of another shape cannot be compared: all its channels differ, with the reason."""

    def wider(model: nn.Sequential) -> None:
        model[4] = nn.Conv2d(8, 7, 3, stride=2)

    code, document = documented(featviz, run("base"), run("new", change=wider))
    assert code == 4
    last = layer_of(document, "4")
    assert last["reason"] == "shape 1×6×15×15 in BASE, 1×7×15×15 in NEW"
    assert (last["differing"], last["total"]) == (12, 12)
    assert document["first_divergence"]["layer"] == "4"


@pytest.mark.slow
@pytest.mark.parametrize("options", [("--format", "webp"), ("--max-maps", "2")])
def test_what_no_picture_shows_is_compared_by_statistics(
    options: tuple[str, ...], featviz: CLI, run: Run
) -> None:
    """WebP has no levels to read back, and of maps that were left out there is no picture."""
    base, new = run("base", *options), run("new", *options, change=one_weight)
    code, document = documented(featviz, base, new, "--tolerance", "0")
    changed = layer_of(document, "2")
    assert code == 4 and changed["most_changed"] == [CHANGED]
    assert changed["channels"]["cosine"][CHANGED] is None
    assert "webp" not in options or changed["by"] == ["statistics"]


@pytest.mark.slow
def test_usage(featviz: CLI, run: Run, tmp_path: Path) -> None:
    """Bad values are usage errors, a folder without a run is none."""
    base = run("base")
    assert featviz("diff", base, tmp_path / "nowhere").code == 2
    done = featviz("diff", base, base, "--tolerance", "-1")
    assert "tolerance=-1: expected a number from 0 to 1" in done.err
    assert featviz("diff", base, base, "--max-diff-ratio", "2").code == 2
    (tmp_path / "empty").mkdir()
    featviz("kernels", tmp_path / "model.pth", "--out", tmp_path / "kernels")
    for name, words in (
        ("empty", "empty is no run directory: it has no run.json"),
        ("kernels", "holds kernels, not the feature maps of a run"),
    ):
        done = featviz("diff", base, tmp_path / name)
        assert done.code == 1 and words in done.err
