"""`featviz diff`: equal runs, one changed weight, tolerances, NaN, statistics instead of pixels."""

from __future__ import annotations

import os
from pathlib import Path

import forked
import numpy as np
import pytest
import torch
from torch import nn

from .changed_network import CHANGED, CLI, Run, documented, drawn, layer_of, nan_bias, one_weight


@pytest.mark.parametrize("kept", [(), ("--tensors", "npy")], ids=["pixels", "tensors"])
def test_the_same_run_twice_is_equal(featviz: CLI, run: Run, kept: tuple[str, ...]) -> None:
    """All numbers are zero, under the strictest tolerance."""
    code, document = documented(featviz, run("one", *kept), run("two", *kept), "--tolerance", "0")
    assert (code, document["equal"], document["first_divergence"]) == (0, True, None)
    assert [layer["layer"] for layer in document["layers"]] == ["0", "1", "2", "3", "4"]
    assert document["channels"] == {"differing": 0, "total": 2 * (4 * 8 + 6), "ratio": 0.0}
    assert all(set(layer["channels"]["absolute"]) == {0.0} for layer in document["layers"])
    assert all(set(layer["channels"]["cosine"]) == {1.0} for layer in document["layers"])
    by = "tensors" if kept else "statistics and pixels"
    assert all(layer["by"] == [by] for layer in document["layers"])


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


def test_a_share_of_channels_may_differ(featviz: CLI, run: Run) -> None:
    """--max-diff-ratio takes the share itself, and not a bit less."""
    pair = run("base"), run("new", change=one_weight)
    _, document = documented(featviz, *pair)
    counts = document["channels"]
    assert counts["ratio"] == counts["differing"] / counts["total"]
    assert 0 < counts["differing"] < counts["total"]
    assert featviz("diff", *pair, "--max-diff-ratio", repr(counts["ratio"])).code == 0
    assert featviz("diff", *pair, "--max-diff-ratio", repr(counts["ratio"] - 1e-6)).code == 4


def run_with(threads: int, onednn: bool, *arguments: str) -> None:
    """In a process of its own: `featviz run` with so many threads, on a machine of many cores."""
    os.sched_getaffinity = lambda pid: set(range(16))  # type: ignore[assignment]
    torch.set_num_threads(threads)
    torch.backends.mkldnn.enabled = onednn  # type: ignore[assignment]
    forked.featviz("run", *arguments)


@pytest.mark.slow
@pytest.mark.parametrize("kept", [(), ("--tensors", "npy")], ids=["pixels", "tensors"])
def test_threads_and_libraries_make_no_difference(
    featviz: CLI, photos: Path, tmp_path: Path, kept: tuple[str, ...]
) -> None:
    """One thread, two threads and no oneDNN are equal by default, though not to the bit."""
    runs = []
    command = ["mobilenet_v2", str(photos / "a.png"), "--weights", "none", "-q", *kept]
    command += ["--size", "96", "--layers", "Conv2d,BatchNorm2d,ReLU6,Linear", "--out"]
    for threads, onednn in ((1, True), (2, True), (1, False)):
        out = tmp_path / f"{threads}-{onednn}"
        said = tmp_path / f"{out.name}-said"
        how = (threads, onednn, *command, str(out))
        assert forked.fork(said, run_with, *how, OMP_NUM_THREADS=threads).ended().code == 0
        runs.append(out)
    for other in runs[1:]:
        done = featviz("diff", runs[0], other)
        assert (done.code, done.out[:5]) == (0, "equal")
        assert featviz("diff", runs[0], other, "--tolerance", "0").code == 4


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


@pytest.mark.parametrize("kept", [(), ("--tensors", "npy")], ids=["pixels", "tensors"])
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


def test_nan_beside_a_change(featviz: CLI, run: Run) -> None:
    """A channel that is NaN on both sides does not hide what changed in the others."""

    def both(model: nn.Sequential) -> None:
        nan_bias(model)
        model[2].weight[0, 0, 1, 1] += 0.05

    _, document = documented(featviz, run("nan", change=nan_bias), run("both", change=both))
    assert layer_of(document, "2")["most_changed"] == [0]


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


def test_vectors(featviz: CLI, photos: Path, tmp_path: Path) -> None:
    """The logits of a Linear layer: exact by statistics, the most changed drawn as cells."""
    for name, by in (("base", 0.0), ("new", 0.5)):
        torch.manual_seed(0)
        model = nn.Sequential(nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(12, 40))
        with torch.no_grad():
            model[2].bias[[7, 30]] += torch.tensor([by, -by / 2])
        torch.save(model, tmp_path / "model.pth")
        options = ("--size", "32", "--layers", "Linear", "--out", tmp_path / name, "-q")
        assert featviz("run", tmp_path / "model.pth", photos / "a.png", *options).code == 0
    pair = tmp_path / "base", tmp_path / "new"
    code, document = documented(featviz, *pair, "--out", tmp_path / "maps")
    assert code == 4
    found = document["layers"][0]["channels"]
    np.testing.assert_allclose(np.flatnonzero(found["absolute"]), [7, 30])
    np.testing.assert_allclose(np.array(found["absolute"])[[7, 30]], [0.5, 0.25], atol=1e-6)
    assert found["cosine"] == [None] * 40
    assert document["maps"][0]["channels"] == [7, 30]
    pixels = np.asarray(drawn(tmp_path / "maps")["2 (Linear)"].convert("RGB"))
    width = pixels.shape[1] // 2
    assert (pixels[:, :width, 0] > pixels[:, :width, 2]).all()  # 7 rose: red
    assert (pixels[:, width:, 2] > pixels[:, width:, 0]).all()  # 30 fell: blue
