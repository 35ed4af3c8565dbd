"""`featviz report`: what stands on its pages, and what it refuses."""

from __future__ import annotations

import base64
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from html.parser import HTMLParser
from pathlib import Path
from typing import BinaryIO
from urllib.parse import unquote

import numpy as np
import pytest
from conftest import SCENES, Outcome
from matplotlib import colormaps
from PIL import Image
from rundirs import Drawn, write_image, write_run

from featviz import report
from featviz.errors import StoreError
from featviz.report import ReportOptions, build_report
from featviz.rundir.read import read_run, read_stats
from featviz.rundir.write import RunDirectory, atomic

MIDDLE = colormaps["coolwarm"](127 / 253, bytes=True)
HOSTILE = "<img src=x onerror=alert(1)>.png"
EVIL = '"><script>alert(1)</script>'


class Markup(HTMLParser):
    """Collects what the tests ask of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.inline = ""
        self._inside = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        self._inside = tag if tag in ("script", "style") else self._inside

    def handle_endtag(self, tag: str) -> None:
        self._inside = "" if tag == self._inside else self._inside

    def handle_data(self, data: str) -> None:
        if self._inside:
            self.inline += data
        else:
            self.text += data

    def of(self, name: str) -> list[dict[str, str | None]]:
        """The attributes of all elements of a name."""
        return [attributes for tag, attributes in self.tags if tag == name]


def read(page: Path) -> Markup:
    return Markup(page.read_text("utf-8"))


def pages(root: Path) -> dict[str, Markup]:
    return {path.name: read(path) for path in sorted((root / "report").glob("*.html"))}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Three complete images, one of a hostile name; failures, and one incomplete."""
    dark = np.zeros((6, 6))
    dark[:, 1] = [1, 0, 2, 0, 3, 0]
    dark[[1, 3, 5], 4] = 1
    brighter = dark.copy()
    brighter[3] = [0, 1, 0.5, 0.1, 0.5, 0]
    a = [Drawn("conv1", index=1, type="Conv2d"), Drawn("relu", index=2, stats=dark)]
    b = [Drawn("conv1", index=1, type="Conv2d"), Drawn("relu", index=2, stats=brighter)]
    again = Drawn("relu", index=2, call=1, stats=dark)
    own = {"a.png": [*a, again], "deep/b #1%.png": b, HOSTILE: [*b, Drawn(EVIL, index=3)]}
    out = write_run(tmp_path / "out", own, {"bad.jpg": f"it is truncated {EVIL}"})
    half = RunDirectory(out).image("half.png")
    write_image(RunDirectory(out), "half.png", a)
    (half.path / "manifest.json").unlink()
    return out


def test_every_link_and_picture_exists(root: Path) -> None:
    """Relative, inside the run directory, and nothing is copied."""
    build_report(root, ReportOptions())
    found = pages(root)
    assert len(found) == 1 + 3 + 3
    seen = set()
    for name, page in found.items():
        ids = {attributes["id"] for _, attributes in page.tags if attributes.get("id")}
        targets = [a["href"] for a in page.of("a") + page.of("link")]
        targets += [a["src"] for a in page.of("img") + page.of("script")]
        for target in map(str, targets):
            path, _, fragment = target.partition("#")
            assert not path.startswith(("/", "http", "data:", "file:")), target
            file = root / "report" / unquote(path) if path else root / "report" / name
            assert file.is_file(), (name, target)
            assert not fragment or fragment in ids, (name, target)
            seen.add(file.resolve())
    drawn = {path.resolve() for path in root.rglob("output*.png")}
    assert drawn - seen == {p for p in drawn if "half.png" in p.parts}
    assert not list((root / "report").rglob("*.png"))


def test_no_inline_style_script_or_data(root: Path) -> None:
    """So that a CI host's content security policy has nothing to block but the scripts."""
    build_report(root, ReportOptions())
    for page in pages(root).values():
        assert page.inline.strip() == ""
        for tag, attributes in page.tags:
            assert tag not in ("style", "iframe", "object", "base")
            assert not any(key == "style" or key.startswith("on") for key in attributes)
            assert not any(str(v).startswith(("data:", "javascript:")) for v in attributes.values())
            assert tag != "script" or attributes.get("src")


def test_names_and_messages_are_text(root: Path) -> None:
    """Whatever a file, a layer or an error is called, it appears as it is."""
    build_report(root, ReportOptions())
    found = pages(root)
    assert all(len(page.of("script")) <= 3 for page in found.values())
    assert HOSTILE in found["index.html"].text and EVIL in found["index.html"].text
    assert HOSTILE in found["image-002.html"].text and EVIL in found["layer-002.html"].text
    for page in found.values():
        assert not any("onerror" in attributes for _, attributes in page.tags)


def test_alternative_texts_and_sizes_of_all_pictures(root: Path) -> None:
    """Each says what it is and how large; sizes are those of the files (Pillow)."""
    build_report(root, ReportOptions())
    for page in pages(root).values():
        for image in page.of("img"):
            assert image["src"] == "icon.svg" or image["alt"]
            if image["src"] == "icon.svg":
                continue
            with Image.open(root / "report" / unquote(str(image["src"]))) as picture:
                assert (int(str(image["width"])), int(str(image["height"]))) == picture.size
            assert image["loading"] == "lazy"


def test_all_layers_and_failures_are_named(root: Path) -> None:
    """The run's page has the model, versions, layers, images, failures and what is incomplete."""
    result = build_report(root, ReportOptions())
    text = pages(root)["index.html"].text
    for words in ("resnet18", "torch 2.15.0", "conv1", "relu", "bad.jpg", "it is truncated"):
        assert words in text
    assert "half.png" in text and "incomplete: it has no manifest.json" in text
    assert "3 complete of 4, 1 failed, 1 incomplete" in text
    assert result.incomplete == {"half.png": "it has no manifest.json"}


def test_skipped_and_silent_layers_are_named(tmp_path: Path) -> None:
    """With the reason, and for how many images; on the images' pages too."""
    root = write_run(tmp_path / "out", {"a.png": [Drawn("conv1")]})
    skip = {"layer": "head", "type": "Head", "index": 9, "kind": "output", "call": 0, "key": ""}
    write_image(
        RunDirectory(root), "b.png", [], [{**skip, "reason": "it is a string"}], ["aux.conv"]
    )
    build_report(root, ReportOptions())
    for name in ("index.html", "image-001.html"):
        text = pages(root)[name].text
        assert "head" in text and "it is a string" in text and "aux.conv" in text
        assert "never ran" in text


def test_dark_in_every_image(root: Path) -> None:
    """Channels 1 and 5 are zero in all three images, 3 only in one."""
    build_report(root, ReportOptions())
    page = pages(root)["layer-001.html"].text
    assert "2 channels all zero in every one of 3 images: 1, 5" in " ".join(page.split())
    assert "3 channels all zero in the one image: 1, 3, 5" in " ".join(page.split())
    index = (root / "report" / "index.html").read_text("utf-8")
    row = index.split("<code>relu</code>")[1].split("</tr>")[0]
    assert re.findall(r'class="n">([^<]*)<', row) == ["6", "45.8 %", "5", "0"]


def scripts(root: Path, name: str) -> dict[str, dict[str, object]]:
    """The grids of a page's script."""
    text = (root / "report" / name).read_text("utf-8")
    start, end = "window.FEATVIZ = { grids: ", " };\n"
    assert text.startswith(start) and text.endswith(end)
    grids: dict[str, dict[str, object]] = json.loads(text[len(start) : -len(end)])
    return grids


def test_the_scripts_numbers_are_those_of_stats_npz(root: Path) -> None:
    """Bit for bit, for each grid, by image and by layer."""
    build_report(root, ReportOptions())
    with np.load(root / "a.png" / "stats.npz") as stats:
        wanted = [stats["conv1|output|0|"], stats["relu|output|0|"], stats["relu|output|1|"]]
    grids = scripts(root, "image-000.js")
    assert list(grids) == ["p0-0", "p0-1", "p0-2"]
    for own, numbers in zip(grids.values(), wanted, strict=True):
        found = np.frombuffer(base64.b64decode(str(own["stats"])), "<f4").reshape(-1, 6)
        assert np.array_equal(found, numbers)
    assert scripts(root, "layer-001.js")["p0-2"] == grids["p0-2"]


def test_geometry_of_the_script_is_the_manifests(tmp_path: Path) -> None:
    """nrow, padding, tile, slices and the channels that were drawn."""
    drawn = Drawn("x", maps=9, channels=[2, 5], slices=(2, 7), nrow=3, padding=1, tile=(6, 4))
    root = write_run(tmp_path / "out", {"a.png": [drawn]})
    build_report(root, ReportOptions())
    own = scripts(root, "image-000.js")["p0-0"]
    assert (own["nrow"], own["padding"], own["tile"]) == (3, 1, [6, 4])
    assert (own["slices"], own["channels"], own["maps"]) == (2, [2, 5], 9)
    with Image.open(next(root.rglob("output.png"))) as picture:
        assert own["size"] == list(picture.size)
    text = pages(root)["image-000.html"].text
    assert "2 of 9 (--max-maps)" in text and "2 of 7 for each channel" in text


def test_stats_are_read_as_numpy_reads_them(root: Path) -> None:
    """The quick reader against np.load."""
    path = root / "a.png" / "stats.npz"
    own = read_stats(root, "a.png")
    with np.load(path) as stats:
        assert set(own) == set(stats.files)
        assert all(np.array_equal(own[name], stats[name]) for name in stats.files)


def test_the_same_bytes_again(root: Path) -> None:
    """A second report replaces the first and equals it, in the folder and in one file."""

    def content() -> dict[str, bytes]:
        build_report(root, ReportOptions())
        build_report(root, ReportOptions(single_file=True))
        files = [*(root / "report").iterdir(), root / "report.html"]
        return {path.name: path.read_bytes() for path in files}

    first = content()
    shutil.copy(root / "report" / "image-000.html", root / "report" / "image-999.html")
    assert content() == first
    assert not [path for path in root.iterdir() if path.name.startswith(".")]


def test_what_is_no_report_is_left_alone(root: Path) -> None:
    """A folder with something else in it, and a file, are refused and untouched."""
    mine = root / "report" / "index.html"
    mine.parent.mkdir()
    mine.write_text("<title>mine</title>")
    with pytest.raises(StoreError, match="report is not empty and holds no report") as caught:
        build_report(root, ReportOptions())
    assert "--out" in str(caught.value.hint) and mine.read_text() == "<title>mine</title>"
    (root / "report.html").write_text("mine")
    with pytest.raises(StoreError, match=r"report\.html is there"):
        build_report(root, ReportOptions(single_file=True))


def test_a_failed_report_leaves_the_old_one(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing half-written appears under the final name."""
    build_report(root, ReportOptions())
    before = (root / "report" / "index.html").read_bytes()

    @contextmanager
    def full(path: Path) -> Iterator[BinaryIO]:
        if path.name == "layer-001.html":
            raise StoreError(f"{path} cannot be written: No space left on device")
        with atomic(path) as file:
            yield file

    monkeypatch.setattr(report, "atomic", full)
    with pytest.raises(StoreError, match="No space left on device"):
        build_report(root, ReportOptions())
    assert (root / "report" / "index.html").read_bytes() == before
    assert not [path for path in root.iterdir() if path.name.startswith(".")]


def test_one_file_has_everything_inside(root: Path, tmp_path: Path) -> None:
    """Pictures as data, each once; links lead to its own parts; nothing is fetched."""
    out = tmp_path / "one.html"
    build_report(root, ReportOptions(single_file=True, out=out))
    page = read(out)
    ids = [attributes["id"] for _, attributes in page.tags if attributes.get("id")]
    assert len(ids) == len(set(ids))
    assert all(str(a["href"])[1:] in ids and str(a["href"])[0] == "#" for a in page.of("a"))
    assert not page.of("link") and not any("src" in a for a in page.of("script"))
    inside = [base64.b64decode(str(i["src"]).split(",")[1]) for i in page.of("img") if "src" in i]
    files = [p for p in root.rglob("*.png") if p.is_file() and "half.png" not in p.parts]
    assert sorted(inside) == sorted(path.read_bytes() for path in files)
    for image in page.of("img"):
        assert "src" in image or image["data-same"] in ids


@pytest.mark.slow
def test_one_file_that_would_be_too_large(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Refused with its size, before and after the pictures are read."""
    noise = np.random.default_rng(0).integers(0, 255, (3000, 7000), dtype=np.uint8)
    Image.fromarray(noise).save(root / "a.png" / "input.png")
    manifest = root / "a.png" / "manifest.json"
    before = manifest.read_text()
    manifest.write_text(before.replace("[1, 3, 20, 24]", "[1, 3, 3000, 7000]"))
    with pytest.raises(StoreError, match=r"one file of 28 MB, more than 25 MB"):
        build_report(root, ReportOptions(single_file=True))
    assert not (root / "report.html").exists()
    (root / "a.png" / "input.png").write_bytes((root / "half.png" / "input.png").read_bytes())
    manifest.write_text(before)
    monkeypatch.setattr(report, "LARGEST_SINGLE", 20_000)
    with pytest.raises(StoreError, match=r"more than 0 MB"):
        build_report(root, ReportOptions(single_file=True))


def test_compared_runs_stand_side_by_side(root: Path, tmp_path: Path) -> None:
    """Figures of the same tensor of the same image; both runs are named; the rest is untouched."""
    other = write_run(tmp_path / "new#2", {"a.png": [Drawn("relu", index=7, shade=99)]})
    build_report(root, ReportOptions(compare=other))
    page = pages(root)["image-000.html"]
    sources = [unquote(str(i["src"])) for i in page.of("img") if "output.png" in str(i["src"])]
    assert sources == [
        "../a.png/001_conv1/output.png",
        "../a.png/002_relu/output.png",
        "../../new#2/a.png/007_relu/output.png",
    ]
    assert "new#2" in page.text and "out, compared with new#2" in pages(root)["index.html"].text
    assert "new#2" not in "".join(str(tag) for tag in pages(root)["image-001.html"].tags)


def test_layers_are_in_the_models_order(tmp_path: Path) -> None:
    """By position, also where only a later image has the layer."""
    one, two, three = (Drawn(f"layer{n}", index=n) for n in (1, 2, 10))
    root = write_run(tmp_path / "out", {"a.png": [three], "b.png": [one, two, three]})
    build_report(root, ReportOptions())
    cells = [a["href"] for a in pages(root)["index.html"].of("a") if "layer-" in str(a["href"])]
    assert cells == ["layer-000.html", "layer-001.html", "layer-002.html"]
    titles = [page.text.split("Layer\n")[1].split()[0] for n, page in pages(root).items()
              if n.startswith("layer")]  # fmt: skip
    assert titles == ["layer1", "layer2", "layer10"]


AUDIT = {
    "schema_version": 1,
    "images": {"total": 3, "seen": 3, "failures": []},
    "layers": [
        {
            "layer": "relu",
            "label": "relu",
            "type": "ReLU",
            "channels": 6,
            "findings": {"dead": [1, 5], "constant": [], "nonfinite": []},
        }
    ],
}


def test_a_report_that_cannot_be_moved_brings_the_old_one_back(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The earlier one is gone only when the new one is in its place."""
    build_report(root, ReportOptions())
    moved, real = [], Path.replace

    def stuck(path: Path, target: Path) -> Path:
        moved.append(path.name)
        if path.name.endswith(".part") and target.name == "report":
            raise OSError(1, "Operation not permitted")
        return real(path, target)

    monkeypatch.setattr(Path, "replace", stuck)
    with pytest.raises(StoreError, match="report cannot be written: Operation not permitted"):
        build_report(root, ReportOptions())
    assert "report" in moved and (root / "report" / "index.html").is_file()
    assert not [path for path in root.iterdir() if path.name.startswith(".")]


@pytest.mark.parametrize("where", ["run", "given"])
def test_findings_of_an_audit(root: Path, tmp_path: Path, where: str) -> None:
    """Those of RUN/audit.json, or of the one that is named, folder or file."""
    folder = root if where == "run" else tmp_path / "audit"
    folder.mkdir(exist_ok=True)
    (folder / "audit.json").write_text(json.dumps(AUDIT))
    build_report(root, ReportOptions(audit=None if where == "run" else folder))
    text = " ".join(pages(root)["index.html"].text.split())
    assert "Audit over 3 images" in text and "2 dead 1, 5" in text
    assert "constant" not in text


def test_an_audit_that_is_none(root: Path, tmp_path: Path) -> None:
    """Named, with the remedy."""
    wrong = tmp_path / "audit.json"
    wrong.write_text('{"layers": [{"label": "relu"}]}')
    with pytest.raises(StoreError, match=r"audit\.json is no audit\.json: .*missing"):
        build_report(root, ReportOptions(audit=wrong))


@pytest.mark.parametrize(
    ("normalize", "cmap", "words", "color"),
    [
        ("map", "grey", "all of a map, crossed out: zero everywhere", "#000000"),
        ("map", "grey", "all of a map, with a stroke: constant", "#808080"),
        ("layer", "viridis", "one scale for all maps: the smallest value", "#440154"),
        ("symmetric", "coolwarm", "zero", "#{:02x}{:02x}{:02x}".format(*MIDDLE[:3])),
        ("none", "grey", "1 or more", "#ffffff"),
        ("map", "grey", "NaN or infinite", "#ff00ff"),
    ],
)
def test_the_legend_says_what_colours_mean(
    tmp_path: Path, normalize: str, cmap: str, words: str, color: str
) -> None:
    """By scale and colormap; the colours are matplotlib's."""
    options = {"normalize": normalize, "cmap": cmap}
    drawn = Drawn("x", more={"normalize": normalize})
    root = write_run(tmp_path / "out", {"a.png": [drawn]}, options=options)
    build_report(root, ReportOptions())
    for name in ("image-000.html", "layer-000.html"):
        text = (root / "report" / name).read_text("utf-8")
        assert f'fill="{color}"/></svg>{words}</li>' in text.replace("&#39;", "'")


def test_images_and_layers_may_be_deep_and_many(tmp_path: Path) -> None:
    """Folders in folders; what begins with a dot is none; the order is run.json's."""
    names = ["z.png", "a/b/c.png", "a/d.png"]
    root = write_run(tmp_path / "out", {name: [Drawn("x")] for name in names})
    (root / ".report.1.part" / "x").mkdir(parents=True)
    assert list(read_run(root).images) == names


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda p: (p / "stats.npz").write_bytes(b"PK"), "a.png/stats.npz has 2 bytes, too few"),
        (lambda p: (p / "stats.npz").unlink(), "a.png/stats.npz is missing"),
        (lambda p: (p / "manifest.json").write_text("{"), "a.png/manifest.json: cannot be read"),
        (
            lambda p: (p / "manifest.json").write_text('{"schema_version": 1}'),
            "a.png/manifest.json: image is missing",
        ),
        (
            lambda p: (p / "001_conv1" / "output.png").unlink(),
            "a.png/001_conv1/output.png is missing",
        ),
        (lambda p: (p / "input.png").write_bytes(b""), "a.png/input.png cannot be read: it is no"),
        (lambda p: p.rename(p.parent.with_name("gone")), "its folder is missing"),
    ],
)
def test_a_damaged_image_is_named_and_the_others_are_shown(
    root: Path, damage: Callable[[Path], object], words: str
) -> None:
    """One image does not take the report with it."""
    damage(root / "a.png")
    build_report(root, ReportOptions())
    text = pages(root)["index.html"].text
    assert "2 complete of 4" in text
    reason = read_run(root).left_out["a.png"]
    assert reason in text
    assert words in reason


def test_an_interrupted_run_says_what_was_not_reached(tmp_path: Path) -> None:
    """run.json names how many there were to be."""
    images = {"total": 7, "complete": ["a.png"]}
    root = write_run(tmp_path / "out", {"a.png": [Drawn("x")]}, images=images)
    build_report(root, ReportOptions())
    assert "1 complete of 7, 6 not reached" in pages(root)["index.html"].text


def test_a_run_of_failures_alone_has_a_report(tmp_path: Path) -> None:
    """The page that says why."""
    root = write_run(tmp_path / "out", {}, {"a.png": "it is truncated"})
    build_report(root, ReportOptions())
    text = pages(root)["index.html"].text
    assert "0 complete of 1, 1 failed" in text and "it is truncated" in text


def test_what_is_no_run_directory(featviz: Callable[..., Outcome], tmp_path: Path) -> None:
    """Exit 1 with one line: nothing, an empty folder, kernels."""
    outcome = featviz("report", tmp_path / "nothing")
    assert outcome.code == 1 and "is no run directory: it has no run.json" in outcome.err
    kernels = write_run(tmp_path / "kernels", {}, kind="kernels")
    outcome = featviz("report", kernels)
    assert outcome.code == 1 and "holds kernels, not the feature maps of a run" in outcome.err
    strange = write_run(tmp_path / "strange", {}, images={})
    outcome = featviz("report", strange)
    assert outcome.code == 1 and "run.json: images.total is missing" in outcome.err


def test_the_command_line_prints_paths(featviz: Callable[..., Outcome], root: Path) -> None:
    """--json on stdout; without it, one line and the warning on stderr."""
    outcome = featviz("report", root)
    assert outcome.code == 0 and outcome.out == ""
    assert f"report in {root / 'report' / 'index.html'}" in outcome.err
    assert "warning: half.png is incomplete" in outcome.err
    paths = json.loads(featviz("report", root, "--json").out)
    assert paths["page"] == str(root / "report" / "index.html")
    assert sorted(paths["files"]) == sorted(str(p) for p in (root / "report").iterdir())


def test_run_makes_its_report(
    featviz: Callable[..., Outcome], tiny_file: Path, tmp_path: Path
) -> None:
    """`run --report` ends with the gallery of what it drew; numbers are the manifest's."""
    out = tmp_path / "out"
    outcome = featviz(
        "run", tiny_file, SCENES / "spheres.jpg", "--layers", "*", "--size", 24, "--crop", 24,
        "--out", out, "--report",
    )  # fmt: skip
    assert outcome.code == 0 and f"report in {out / 'report' / 'index.html'}" in outcome.err
    text = pages(out)["image-000.html"].text
    manifest = json.loads((out / "spheres.jpg" / "manifest.json").read_text())
    for row in manifest["captures"]:
        assert f"{row['max']:.4g}".replace("-", "−") in text
        assert "×".join(map(str, row["shape"])) in text


def test_reading_a_run_imports_no_torch(root: Path) -> None:
    """In a process of its own, where importing torch is an error."""
    code = (
        "import sys; sys.modules['torch'] = sys.modules['torchvision'] = None\n"
        "from featviz.cli import guarded\n"
        f"assert guarded(['report', {str(root)!r}]) == 0\n"
        f"assert guarded(['sheet', {str(root)!r}, '--layer', 'relu', '--out', "
        f"{str(root / 's.png')!r}]) == 0"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)


def shown_by(
    featviz: Callable[..., Outcome], model: Path, out: Path, *options: object
) -> tuple[str, dict[str, object]]:
    """The text of an image's page, and the script's first grid, of a run with these options."""
    done = featviz(
        "run", model, SCENES / "spheres.jpg", "--layers", "0", "--size", 24, "--crop", 24,
        "--out", out, "--report", *options,
    )  # fmt: skip
    assert done.code == 0, done.err
    return " ".join(pages(out)["image-000.html"].text.split()), scripts(out, "image-000.js")["p0-0"]


@pytest.mark.parametrize(
    ("way", "words"),
    [
        ("pca", "4, as one tile: their principal components 1 to 3 (--reduce pca)"),
        ("mean", "4, as one tile: their mean (--reduce mean)"),
    ],
)
def test_one_tile_of_all_channels_is_called_that(
    featviz: Callable[..., Outcome], tiny_file: Path, tmp_path: Path, way: str, words: str
) -> None:
    """No channel's numbers are its; the numbers that are told are those of all channels."""
    text, grid = shown_by(featviz, tiny_file, tmp_path / "out", "--reduce", way)
    assert f"Maps{words}" in text and ", of all channelsMean" in text
    assert grid["channels"] == [] and "crossed out" not in text
    components = "much of the first principal component" in text
    assert components == (way == "pca") and ("standard deviations" in text) == (way == "pca")
    alt = f"of 4 feature maps of 0, output, of {'spheres.jpg'}"
    assert any(alt in str(i["alt"]) for i in pages(tmp_path / "out")["image-000.html"].of("img"))
    sheet = tmp_path / "sheet.png"
    done = featviz("sheet", tmp_path / "out", "--layer", "0", "--out", sheet, "--json")
    assert done.code == 0 and json.loads(done.out)["channels"] == []
    (drawn,) = tmp_path.rglob("output.png")
    with Image.open(drawn) as one, Image.open(sheet) as all:
        tile = np.asarray(one.convert("RGB"))
        windows = np.lib.stride_tricks.sliding_window_view(np.asarray(all), tile.shape)[:, :, 0]
        assert (windows == tile).all((2, 3, 4)).any()
    done = featviz("sheet", tmp_path / "out", "--layer", "0", "--channels", "0")
    assert done.code == 2 and f"all channels of 0 are one tile ({way})" in done.err


def test_an_overlay_has_no_marks(
    featviz: Callable[..., Outcome], tiny_file: Path, tmp_path: Path
) -> None:
    """Its legend says what the colours over the input are, which are those of --cmap auto."""
    text, grid = shown_by(featviz, tiny_file, tmp_path / "out", "--overlay", "0.6")
    assert "each map by its own range, 60.0 % over the input (--overlay)" in text
    assert "over the input: the smallest value of a map" in text and "crossed out" not in text
    assert grid["over"] is True
    low, high = (colormaps["viridis"](end, bytes=True)[:3] for end in (0.0, 1.0))
    page = (tmp_path / "out" / "report" / "image-000.html").read_text()
    for color in (low, high):
        assert 'fill="#{:02x}{:02x}{:02x}"'.format(*color) in page


def test_the_option_that_left_maps_out_is_named(tmp_path: Path) -> None:
    """--collapse, --max-maps with --pick, or both; who shares a tile; and the order."""
    shared = {"collapsed": {"1": [1, 2, 4]}}
    drawn = [
        Drawn("alike", index=1, channels=[3, 0, 5, 1], nrow=2, more=shared),
        Drawn("picked", index=2, channels=[0, 3], nrow=2),
        Drawn("both", index=3, channels=[1, 5], nrow=2, more=shared),
        Drawn("all", index=4),
    ]
    options = {"pick": "top", "order": "similarity"}
    root = write_run(tmp_path / "out", {"a.png": drawn}, options=options)
    build_report(root, ReportOptions())
    text = " ".join(pages(root)["image-000.html"].text.split())
    assert "Maps4 of 6 (--collapse)Share a tile1 for 1–2, 4Orderby similarity (--order)" in text
    assert "Maps2 of 6 (--max-maps --pick top)Drawn" in text
    assert "Maps2 of 6 (--max-maps --pick top, --collapse)Share a tile" in text
    assert "Maps6Drawn" in text
    assert scripts(root, "image-000.js")["p0-0"]["collapsed"] == {"1": [1, 2, 4]}


def test_an_unknown_colormap_has_no_colours(tmp_path: Path) -> None:
    """A run of a later matplotlib: the legend leaves out what it cannot show."""
    root = write_run(tmp_path / "out", {"a.png": [Drawn("x")]}, options={"cmap": "no such"})
    build_report(root, ReportOptions())
    assert "NaN or infinite" in pages(root)["image-000.html"].text


def test_scripts_hold_no_markup() -> None:
    """What ends a script, or a line of it for some parsers, is escaped; the values stay."""
    from featviz.report.data import _in_script

    text = json.dumps("</script><!--&\u2028\u2029é", ensure_ascii=False)
    assert not set(_in_script(text)) & set("<>&\u2028\u2029")
    assert json.loads(_in_script(text)) == json.loads(text)
