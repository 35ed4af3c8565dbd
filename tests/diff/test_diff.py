"""`featviz diff`: equal runs, one changed weight, refused pairs, and the documents."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
import torch
from conftest import Outcome
from matplotlib import colormaps
from PIL import Image
from torch import nn

from featviz.rundir.read import read_run
from featviz.rundir.schema import Place

Run = Callable[..., Path]
CLI = Callable[..., Outcome]

CHANGED = 5
"""The output channel of the middle convolution whose weight the tests change."""
SMALL = ("--size", "40", "--crop", "32", "--layers", "Conv2d,ReLU")


def network() -> nn.Sequential:
    """Three convolutions with ReLUs; the second ReLU works in place."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(8, 8, 3, padding=1),
        nn.ReLU(inplace=True),
        nn.Conv2d(8, 6, 3, stride=2),
    ).eval()


def saved(path: Path, change: Callable[[nn.Sequential], None] = lambda model: None) -> Path:
    """The network in a file, after a change."""
    model = network()
    with torch.no_grad():
        change(model)
    torch.save(model, path)
    return path


def one_weight(model: nn.Sequential, by: float = 0.02) -> None:
    """Change one of the 576 weights of the middle convolution."""
    model[2].weight[CHANGED, 3, 1, 1] += by


def nan_bias(model: nn.Sequential) -> None:
    """Make one channel of the middle convolution NaN."""
    model[2].bias[CHANGED] = float("nan")


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    """A folder with two pictures, 48 × 40."""
    folder = tmp_path / "photos"
    folder.mkdir()
    for seed, name in enumerate(("a.png", "b.png")):
        pixels = np.random.default_rng(seed).integers(0, 256, (40, 48, 3), np.uint8)
        Image.fromarray(pixels).resize((48, 40)).save(folder / name)
    return folder


@pytest.fixture
def run(featviz: CLI, photos: Path, tmp_path: Path) -> Run:
    """Run a changed network on the pictures; gives the run directory."""

    def make(
        name: str,
        *options: object,
        change: Callable[[nn.Sequential], None] = lambda model: None,
        images: Path = photos,
    ) -> Path:
        model = saved(tmp_path / "model.pth", change)
        out = tmp_path / name
        done = featviz("run", model, images, *SMALL, "--out", out, "-q", *options)
        assert done.code == 0, done.err
        return out

    return make


def documented(featviz: CLI, *arguments: object) -> tuple[int, dict[str, Any]]:
    """The exit code and the JSON document, which must be strict JSON."""

    def refuse(text: str) -> None:
        raise AssertionError(f"{text} is no JSON")

    done = featviz("diff", *arguments, "--json")
    return done.code, json.loads(done.out, parse_constant=refuse)


def layer_of(document: dict[str, Any], name: str) -> dict[str, Any]:
    """A layer of the document."""
    return next(layer for layer in document["layers"] if layer["layer"] == name)


@pytest.mark.parametrize("kept", [(), ("--tensors", "npy")], ids=["pixels", "tensors"])
def test_the_same_run_twice_is_equal(featviz: CLI, run: Run, kept: tuple[str, ...]) -> None:
    """All numbers are zero, under the strictest tolerance."""
    code, document = documented(featviz, run("one", *kept), run("two", *kept), "--tolerance", "0")
    assert code == 0
    assert document["equal"] is True
    assert document["first_divergence"] is None
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
    assert document["first_divergence"]["layer"] == "2"
    assert document["first_divergence"]["type"] == "Conv2d"
    assert [layer["layer"] for layer in document["layers"] if layer["differing"]] == ["2", "3", "4"]
    changed = layer_of(document, "2")
    assert changed["most_changed"] == [CHANGED]
    assert changed["differing"] == 2  # that channel, in both images
    assert changed["by"] == ["tensors" if kept else "statistics and pixels"]
    done = featviz("diff", base, new)
    assert done.code == 4
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


def test_numbers_of_pixels_are_near_those_of_tensors(featviz: CLI, run: Run) -> None:
    """Without kept tensors a difference is never told larger, and at most a level smaller."""
    kept = [run("base", "--tensors", "npy"), run("new", "--tensors", "npy", change=one_weight)]
    plain = [run("base2"), run("new2", change=one_weight)]
    (_, by_tensors), (_, by_pixels) = (documented(featviz, *pair) for pair in (kept, plain))
    level = 2 * read_range(kept[0], "2") / 255
    for name in ("2", "3"):
        exact, found = (
            np.array(layer_of(d, name)["channels"]["absolute"]) for d in (by_tensors, by_pixels)
        )
        assert (found <= exact + 1e-6).all()
        assert (found >= exact - level).all()
        assert found[CHANGED] > 0


def read_range(root: Path, layer: str) -> float:
    """The largest span of a channel's map in a layer."""
    stats = [
        image.stats()[Place(layer, "output", 0, "").stats_key]
        for image in read_run(root).images.values()
    ]
    return float(max((own[:, 1] - own[:, 0]).max() for own in stats))


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


THREADS = """
import os, sys, torch
os.sched_getaffinity = lambda pid: set(range(16))
torch.set_num_threads(int(sys.argv[1]))
torch.backends.mkldnn.enabled = sys.argv[2] == "onednn"
from featviz.cli import guarded
sys.exit(guarded(sys.argv[3:]))
"""


@pytest.mark.slow
@pytest.mark.parametrize("kept", [(), ("--tensors", "npy")], ids=["pixels", "tensors"])
def test_threads_and_libraries_make_no_difference(
    featviz: CLI, photos: Path, tmp_path: Path, kept: tuple[str, ...]
) -> None:
    """One thread, two threads and no oneDNN are equal by default, though not to the bit."""
    runs = []
    for threads, library in (("1", "onednn"), ("2", "onednn"), ("1", "none")):
        out = tmp_path / f"{threads}-{library}"
        command = ["run", "mobilenet_v2", photos / "a.png", "--weights", "none", "-q", *kept]
        command += ["--layers", "Conv2d,BatchNorm2d,ReLU6,Linear", "--out", out]
        script = [sys.executable, "-c", THREADS, threads, library, *map(str, command)]
        subprocess.run(script, check=True, env={**os.environ, "OMP_NUM_THREADS": threads})
        runs.append(out)
    for other in runs[1:]:
        done = featviz("diff", runs[0], other)
        assert (done.code, done.out[:5]) == (0, "equal")
        assert featviz("diff", runs[0], other, "--tolerance", "0").code == 4


SHARED_RELU = """
import torch
from torch import nn

class Block(nn.Module):
    def __init__(self, change):
        super().__init__()
        torch.manual_seed(0)
        self.relu = nn.ReLU(inplace=True)
        self.conv1 = nn.Conv2d(3, 4, 3)
        self.conv2 = nn.Conv2d(4, 4, 3)
        with torch.no_grad():
            self.conv2.weight[1, 1, 1, 1] += change

    def forward(self, x):
        return self.relu(self.conv2(self.relu(self.conv1(x))))

def make(change=0.0):
    return Block(change)
"""


def test_the_first_layer_is_the_first_that_ran(featviz: CLI, photos: Path, tmp_path: Path) -> None:
    """A block and its shared ReLU stand before the changed convolution in named_modules(), and
    differ as well; they ran after it."""
    (tmp_path / "net.py").write_text(SHARED_RELU)
    for name, change in (("base", "0.0"), ("new", "0.1")):
        done = featviz(
            "run", f"{tmp_path / 'net.py'}:make", photos, "--size", "32", "--layers", "*",
            "--model-arg", f"change={change}", "--out", tmp_path / name, "-q",
        )  # fmt: skip
        assert done.code == 0, done.err
    _, document = documented(featviz, tmp_path / "base", tmp_path / "new")
    differing = [(row["layer"], row["call"]) for row in document["layers"] if row["differing"]]
    assert differing == [("conv2", 0), ("relu", 1), ("", 0)]
    assert document["first_divergence"]["layer"] == "conv2"


def test_added_and_removed_layers(featviz: CLI, run: Run) -> None:
    """A layer that only one side has is a difference; --ignore-added excuses those of NEW."""
    less, more = run("less", "--layers", "!ReLU"), run("more")
    code, document = documented(featviz, less, more)
    assert code == 4
    assert [row["layer"] for row in document["only_in_new"]["layers"]] == ["1", "3"]
    assert document["only_in_base"] == {"images": {}, "layers": []}
    assert featviz("diff", less, more, "--ignore-added").code == 0
    done = featviz("diff", more, less, "--ignore-added")
    assert done.code == 4
    assert "only in BASE: layer 1 output (not there)" in done.out


def test_added_and_removed_images(featviz: CLI, run: Run, photos: Path) -> None:
    """The same for images, whose fate in the other run is told."""
    both, one = run("both"), run("one", images=photos / "a.png")
    code, document = documented(featviz, one, both)
    assert code == 4
    assert document["images"] == ["a.png"]
    assert document["only_in_new"]["images"] == {"b.png": "not there"}
    assert featviz("diff", one, both, "--ignore-added").code == 0
    assert featviz("diff", both, one, "--ignore-added").code == 4


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


def test_webp_is_compared_by_statistics(featviz: CLI, run: Run) -> None:
    """What is no PNG has no levels to read back; the document says what was compared."""
    base = run("base", "--format", "webp")
    new = run("new", "--format", "webp", change=one_weight)
    _, document = documented(featviz, base, new)
    assert layer_of(document, "2")["by"] == ["statistics"]
    assert layer_of(document, "2")["most_changed"] == [CHANGED]
    assert layer_of(document, "2")["channels"]["cosine"][CHANGED] is None


def test_maps_that_were_left_out_are_compared_by_statistics(featviz: CLI, run: Run) -> None:
    """With --max-maps the pictures lack the changed channel; its statistics do not."""
    base = run("base", "--max-maps", "2")
    new = run("new", "--max-maps", "2", change=one_weight)
    code, document = documented(featviz, base, new, "--tolerance", "0")
    assert code == 4
    assert layer_of(document, "2")["most_changed"] == [CHANGED]


def test_other_preprocessing_is_refused(featviz: CLI, run: Run) -> None:
    """With the words of both."""
    done = featviz("diff", run("base"), run("new", "--mean", "0,0,0", "--std", "1,1,1"))
    assert done.code == 1
    assert "cannot be compared: the preprocessing is" in done.err
    assert done.out == ""


def test_another_scale_is_refused(featviz: CLI, run: Run) -> None:
    """With both scale modes."""
    done = featviz("diff", run("base"), run("new", "--normalize", "layer"))
    assert done.code == 1
    assert "the scale mode is 'auto' in BASE and 'layer' in NEW" in done.err


def test_another_image_of_that_name_is_refused(featviz: CLI, run: Run, photos: Path) -> None:
    """Its sha256 tells, and the message names it."""
    base = run("base")
    shutil.copy(photos / "a.png", photos / "b.png")
    done = featviz("diff", base, run("new"))
    assert done.code == 1
    assert "b.png is another file in NEW" in done.err
    assert "a.png" not in done.err


def test_another_input_shape_is_refused(featviz: CLI, run: Run) -> None:
    """Where the words are the same, the shapes in the manifests tell."""
    base, new = run("base"), run("new")
    path = new / "b.png" / "manifest.json"
    path.write_text(path.read_text().replace("[1, 3, 32, 32]", "[1, 4, 32, 32]"))
    done = featviz("diff", base, new)
    assert done.code == 1
    assert "the input made of b.png is 1×3×32×32 in BASE and 1×4×32×32 in NEW" in done.err


def test_other_pixels_are_refused(featviz: CLI, run: Run, tmp_path: Path) -> None:
    """One file, one shape, one preprocessing, but another background under its transparency."""
    pixels = np.full((40, 48, 4), 90, np.uint8)
    pixels[:20, :, 3] = 0
    Image.fromarray(pixels).save(tmp_path / "clear.png")
    base = run("base", images=tmp_path / "clear.png")
    new = run("new", "--background", "black", images=tmp_path / "clear.png")
    done = featviz("diff", base, new)
    assert done.code == 1
    assert "what the model saw of clear.png (input.png) has other pixels in NEW" in done.err


def test_runs_without_a_common_image_or_layer_are_refused(
    featviz: CLI, run: Run, photos: Path
) -> None:
    """There is nothing to compare, which is not the same as equal."""
    a, b = (run(name, images=photos / f"{name}.png") for name in "ab")
    done = featviz("diff", a, b)
    assert done.code == 1
    assert "no image is in both runs: BASE has a.png, NEW has b.png" in done.err
    convs, relus = run("convs", "--layers", "!ReLU"), run("relus", "--layers", "!Conv2d")
    done = featviz("diff", convs, relus)
    assert done.code == 1
    assert "no layer is in both runs: BASE has 0, 2, 4, NEW has 1, 3" in done.err


def test_usage(featviz: CLI, run: Run, tmp_path: Path) -> None:
    """Bad values are usage errors, a folder without a run is none."""
    base = run("base")
    assert featviz("diff", base, tmp_path / "nowhere").code == 2
    assert "--tolerance -1 is outside 0..1" in featviz("diff", base, base, "--tolerance", "-1").err
    assert featviz("diff", base, base, "--max-diff-ratio", "2").code == 2
    (tmp_path / "empty").mkdir()
    done = featviz("diff", base, tmp_path / "empty")
    assert done.code == 1
    assert "empty is no run directory: it has no run.json" in done.err
    featviz("kernels", tmp_path / "model.pth", "--out", tmp_path / "kernels")
    done = featviz("diff", base, tmp_path / "kernels")
    assert done.code == 1
    assert "holds kernels, not the feature maps of a run" in done.err


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


def broken(root: Path, what: str) -> str:
    """Break something in a run; gives what the message must say."""
    folder = root / "a.png"
    manifest = folder / "manifest.json"
    if what == "tensor":
        path = folder / "003_2" / "output.npy"
        path.write_bytes(path.read_bytes()[:200])
        return "a.png/003_2/output.npy cannot be read: it has 72 bytes, not those of float32"
    if what == "statistics":
        np.savez(folder / "stats.npz", other=np.zeros((99, 6), np.float32))
        return "a.png/stats.npz cannot be read: it has no 0|output|0|"
    if what == "archive":
        (folder / "stats.npz").write_bytes(b"no zip" * 200)
        return "a.png/stats.npz cannot be read: File is not a zip file"
    if what == "input":
        (folder / "input.png").unlink()
        return "a.png/input.png is missing"
    if what == "pixels":
        (folder / "input.png").write_bytes((folder / "input.png").read_bytes()[:60])
        return "a.png/input.png cannot be read: "
    if what == "picture":
        (folder / "003_2" / "output.png").unlink()
        return "a.png/003_2/output.png is missing"
    if what == "json":
        manifest.write_text("{")
        return "a.png/manifest.json: cannot be read: Expecting property name"
    if what == "entry":
        manifest.write_text(manifest.read_text().replace('"captures"', '"other"'))
        return "a.png/manifest.json: captures is missing"
    manifest.write_text(manifest.read_text().replace("003_2/output.npy", "../../secret.npy"))
    return (
        'a.png/manifest.json: captures[2].tensor is "../../secret.npy", expected a file inside '
        "the image's folder"
    )


@pytest.mark.parametrize(
    "what",
    ["tensor", "statistics", "archive", "input", "pixels", "picture", "json", "entry", "outside"],
)
def test_a_broken_image_is_left_out_and_the_others_are_compared(
    featviz: CLI, run: Run, what: str
) -> None:
    """With one line that says what is wrong with which file."""
    base = run("base", "--tensors", "npy")
    new = run("new", "--tensors", "npy", change=one_weight)
    said = broken(new, what)
    done = featviz("diff", base, new)
    assert done.code == 4
    assert f"warning: NEW: a.png is incomplete ({said}" in done.err
    assert "only in BASE: image a.png (incomplete)" in done.out
    assert " of 1 image compared" in done.out


class Page(HTMLParser):
    """Collects the links, the tags and the text of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.links: list[str] = []
        self.tags: set[str] = set()
        self.attributes: set[str] = set()
        self.words: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.attributes |= {name for name, _ in attrs}
        self.links += [value or "" for name, value in attrs if name in ("src", "href")]

    def handle_data(self, data: str) -> None:
        self.words.append(data)


HOSTILE = "<img src=x onerror=alert(1)> & 'b'.png"
LOST = "<u onclick=alert(2)>.png"


def test_the_page(featviz: CLI, run: Run, photos: Path, tmp_path: Path) -> None:
    """No script, no inline style, escaped names, and links that lead to files beside it."""
    from urllib.parse import unquote

    (photos / "b.png").rename(photos / HOSTILE)
    (photos / "a.png").rename(photos / LOST)
    base, new = run("base", images=photos / HOSTILE), run("<i>new", change=one_weight)
    html = tmp_path / "pages" / "a diff#1.html"
    done = featviz("diff", base, new, "--html", html)
    assert done.code == 4
    page = Page(html.read_text("utf-8"))
    assert not page.tags & {"script", "style", "iframe"}
    plain = {"lang", "charset", "name", "content", "rel", "href", "src", "alt", "class", "scope"}
    assert page.attributes <= plain
    assert len(page.links) == 4  # the style sheet and three layers
    assert not any(set(link) & set(" #") for link in page.links)
    for link in page.links:
        assert (html.parent / unquote(link)).is_file(), link
    text = "".join(page.words)
    assert HOSTILE in text
    assert "first at 2 (Conv2d)" in text
    assert f"image {LOST} (not there)" in text
    assert str(new) in text


def drawn(folder: Path) -> dict[str, Image.Image]:
    """The difference maps of a folder, by layer."""
    found = {}
    for path in sorted(folder.glob("*.png")):
        with Image.open(path) as image:
            image.load()
            found[image.text["Layer"]] = image  # type: ignore[attr-defined]
    return found


def test_difference_maps(featviz: CLI, run: Run, tmp_path: Path) -> None:
    """Each pixel has the colour of its signed difference, on one scale for all pictures."""
    base = run("base", "--tensors", "npy")
    new = run("new", "--tensors", "npy", change=one_weight)
    _, document = documented(featviz, base, new, "--out", tmp_path / "maps")
    pictures = drawn(tmp_path / "maps")
    assert list(pictures) == ["2 (Conv2d)", "3 (ReLU)", "4 (Conv2d)"]
    limits = {one["limit"] for one in document["maps"]}
    assert len(limits) == 1
    limit = limits.pop()
    worst = max(max(layer["channels"]["relative"]) for layer in document["layers"])
    assert limit == pytest.approx(worst)
    colors = colormaps["coolwarm"](np.linspace(0, 1, 254), bytes=True)[:, :3]
    for one in document["maps"]:
        file = f"{one['image']}/{int(one['label']) + 1:03d}_{one['label']}/output.npy"
        b, n = (np.load(root / file)[0].astype(np.float64) for root in (base, new))
        signed = (n - b) / (np.maximum(abs(b), abs(n)) + max(abs(b).max(), abs(n).max()))
        assert one["source"] == "kept tensors"
        picture = pictures[f"{one['label']} ({'ReLU' if one['label'] == '3' else 'Conv2d'})"]
        assert picture.text["Channels"] == ",".join(map(str, one["channels"]))  # type: ignore[attr-defined]
        tile = tile_of(np.asarray(picture.convert("RGB")), one, signed.shape[1:])
        levels = np.floor((signed[one["channels"][0]] / limit + 1) / 2 * 253 + 0.5).astype(int)
        np.testing.assert_array_equal(tile, colors[levels])
    assert document["maps"][0]["channels"] == [CHANGED]


def tile_of(pixels: np.ndarray, one: dict[str, Any], size: tuple[int, ...]) -> np.ndarray:
    """The first map of a picture, at its own size: 96 pixels are enough, padding is 2."""
    factor = -(-96 // max(size))
    at = 0 if len(one["channels"]) == 1 else 2
    return pixels[at : at + size[0] * factor : factor, at : at + size[1] * factor : factor]


def test_maps_from_pixels_say_so(featviz: CLI, run: Run, tmp_path: Path) -> None:
    """In the document and in the picture's text; their signs are those of the tensors."""
    base, new = run("base"), run("new", change=one_weight)
    kept = run("base2", "--tensors", "npy"), run("new2", "--tensors", "npy", change=one_weight)
    _, document = documented(featviz, base, new, "--out", tmp_path / "maps")
    assert featviz("diff", *kept, "--out", tmp_path / "exact").code == 4
    assert {one["source"] for one in document["maps"]} == {"pixels"}
    first, other = (drawn(tmp_path / name)["2 (Conv2d)"] for name in ("maps", "exact"))
    assert first.text["Source"] == "pixels"  # type: ignore[attr-defined]
    signs, true = (np.sign(np.asarray(p).astype(int) - 127) for p in (first, other))
    assert first.size == other.size
    assert (signs != 0).mean() > 0.1
    assert ((signs == 0) | (signs == true)).all()


def test_what_is_not_finite_on_one_side_is_magenta(featviz: CLI, run: Run, tmp_path: Path) -> None:
    """All of the channel that became NaN."""
    featviz("diff", run("base"), run("new", change=nan_bias), "--out", tmp_path / "maps")
    picture = drawn(tmp_path / "maps")["2 (Conv2d)"]
    assert picture.text["Channels"] == str(CHANGED)  # type: ignore[attr-defined]
    assert (np.asarray(picture.convert("RGB")) == (255, 0, 255)).all()


def test_the_folder_of_the_maps(featviz: CLI, run: Run, tmp_path: Path) -> None:
    """An earlier result is replaced whole; a folder of something else is refused before work."""
    base, new = run("base"), run("new", change=one_weight)
    maps, html = tmp_path / "d-maps", tmp_path / "d.html"
    featviz("diff", base, new, "--html", html)
    assert len(list(maps.glob("*.png"))) == 3
    written = json.loads((maps / "diff.json").read_text("utf-8"))
    assert written == documented(featviz, base, new, "--html", html)[1]
    assert featviz("diff", base, base, "--html", html).code == 0
    assert [path.name for path in sorted(maps.iterdir())] == ["diff.json", "style.css"]
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("words")
    done = featviz("diff", base, new, "--out", tmp_path / "mine")
    assert done.code == 1
    assert "is not empty and holds no diff of featviz" in done.err
    assert (tmp_path / "mine" / "thesis.txt").read_text() == "words"


def test_the_same_diff_writes_the_same_bytes(featviz: CLI, run: Run, tmp_path: Path) -> None:
    """Nothing of when is in the documents."""
    base, new = run("base"), run("new", change=one_weight)
    found = []
    for _ in range(2):
        files = ("--html", tmp_path / "d.html", "--junit", tmp_path / "d.xml")
        featviz("diff", base, new, *files)
        written = [
            tmp_path / "d.html",
            tmp_path / "d.xml",
            *sorted((tmp_path / "d-maps").iterdir()),
        ]
        found.append([path.read_bytes() for path in written])
    assert found[0] == found[1]
    assert len(found[0]) == 2 + 2 + 3


def test_junit(featviz: CLI, run: Run, tmp_path: Path) -> None:
    """A case for each layer; those that differ fail, unless so many channels may differ."""
    pair, path = (run("base"), run("new", change=one_weight)), tmp_path / "d.xml"
    assert featviz("diff", *pair, "--junit", path).code == 4
    suite = ElementTree.parse(path).getroot()[0]
    failed = [case.get("name") for case in suite if case.find("failure") is not None]
    assert failed == ["2 output", "3 output", "4 output"]
    assert (suite.get("tests"), suite.get("failures")) == ("7", "3")
    assert featviz("diff", *pair, "--junit", path, "--max-diff-ratio", "1").code == 0
    assert ElementTree.parse(path).getroot()[0].get("failures") == "0"


def test_junit_of_what_is_lost(featviz: CLI, run: Run, tmp_path: Path) -> None:
    """A removed layer fails a case of its own; an added one that is ignored does not."""
    less, more, path = run("less", "--layers", "!ReLU"), run("more"), tmp_path / "d.xml"
    featviz("diff", more, less, "--junit", path)
    failures = ElementTree.parse(path).getroot().findall(".//testcase[failure]")
    assert [case.get("name") for case in failures] == ["only in BASE"]
    assert "layer 1 output (not there)" in str(failures[0][0].text)
    featviz("diff", less, more, "--junit", path, "--ignore-added")
    assert ElementTree.parse(path).getroot()[0].get("failures") == "0"


@pytest.mark.slow
def test_no_torch(run: Run, tmp_path: Path) -> None:
    """diff and merge read run directories on machines that have no torch."""
    base, new = run("base"), run("new", change=one_weight)
    code = (
        "import sys; sys.modules['torch'] = None; sys.modules['torchvision'] = None\n"
        "from featviz.cli import guarded; sys.exit(guarded(sys.argv[1:]))"
    )
    for arguments, expected in (
        (["diff", base, new, "--html", tmp_path / "d.html"], 4),
        (["merge", base, "--out", tmp_path / "merged"], 0),
    ):
        done = subprocess.run([sys.executable, "-c", code, *map(str, arguments)], check=False)
        assert done.returncode == expected


@pytest.mark.slow
def test_fifty_images_of_twenty_layers(featviz: CLI, tmp_path: Path) -> None:
    """A thousand tensors are compared, from pixels and kept ones, and one weight is found."""
    folder = tmp_path / "many"
    folder.mkdir()
    for seed in range(50):
        pixels = np.random.default_rng(seed).integers(0, 256, (32, 32, 3), np.uint8)
        Image.fromarray(pixels).save(folder / f"{seed:02d}.png")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 32, 3, padding=1))
    for _ in range(19):
        model.append(nn.Conv2d(32, 32, 3, padding=1))
    for name, by in (("base", 0.0), ("new", 0.1)):
        with torch.no_grad():
            model[10].weight[3, 3, 1, 1] += by
        torch.save(model, tmp_path / "model.pth")
        done = featviz(
            "run", tmp_path / "model.pth", folder, "--size", "32", "--layers", "Conv2d",
            "--out", tmp_path / name, "--tensors", "npy", "-q",
        )  # fmt: skip
        assert done.code == 0, done.err
    for kept in (True, False):
        if not kept:
            for path in tmp_path.glob("*/*/manifest.json"):
                path.write_text(path.read_text().replace('"tensor"', '"not_kept"'))
        code, document = documented(featviz, tmp_path / "base", tmp_path / "new")
        assert (code, document["first_divergence"]["layer"]) == (4, "10")
        assert layer_of(document, "10")["by"] == ["tensors" if kept else "statistics and pixels"]
        assert document["channels"]["total"] == 50 * 20 * 32


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


@pytest.mark.skipif(sys.platform != "linux", reason="other systems refuse such names")
@pytest.mark.slow
def test_names_that_are_no_text(
    run: Run, photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An image named in bytes that are no UTF-8 is told on stdout and in documents."""
    one = run("one", images=photos / "a.png")
    os.rename(photos / "b.png", os.fsencode(photos) + b"/b\xff.png")  # noqa: PTH104, bytes
    both = run("both")
    monkeypatch.setenv("PYTHONIOENCODING", "utf-8:strict")
    code = "from featviz.cli import main; main()"
    for more in ((), ("--json",), ("--html", tmp_path / "d.html", "--junit", tmp_path / "d.xml")):
        command = [sys.executable, "-c", code, "diff", both, one, *more]
        done = subprocess.run(list(map(str, command)), capture_output=True, check=False)
        assert (done.returncode, done.stderr) == (4, b"")
        assert rb"b\udcff.png" in done.stdout
    assert "b?.png" in (tmp_path / "d.html").read_text("utf-8")
    assert "b\N{REPLACEMENT CHARACTER}.png" in (tmp_path / "d.xml").read_text("utf-8")
