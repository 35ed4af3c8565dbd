"""`featviz audit`: tables, files, pictures of suspects, and bad values."""

from __future__ import annotations

import json
import re
from collections import OrderedDict
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from conftest import ROOT, Run
from matplotlib import colormaps
from networks import Net
from PIL import Image
from runs import tree
from torch import Tensor, nn

from featviz.audit.chart import ZeroShares, apoz_chart
from featviz.audit.gates import FINDINGS, parse_gate
from featviz.audit.output import audit_table
from featviz.run import workers

from .audited import COLOURS, PLANTED, column, document, filled, read_audit, solid
from .planted import Planted


def planted_call(way: str) -> list[str]:
    return [f"{PLANTED}:make", "--model-arg", f"way={way}", *COLOURS]


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "out"


@pytest.mark.medium
def test_command_prints_a_table(featviz: Run, noise: Path, out: Path) -> None:
    """A row for each layer and the total on stdout; on stderr, how many images it holds
    for."""
    done = featviz("audit", *planted_call("shared"), noise, "--out", out)
    assert done.code == 0, done.err
    lines = [" ".join(line.split()) for line in done.out.splitlines()]
    assert lines[0] == "layer type channels APoZ dead constant saturated nonfinite"
    assert re.fullmatch(r"act ReLU6 8 \S+ 1 1 1 1", lines[1])
    assert re.fullmatch(r"total 16 \S+ 2 3 2 2", lines[3])
    assert "6 images seen; another set of images may give other findings" in done.err


@pytest.mark.medium
def test_command_writes_the_files(featviz: Run, noise: Path, out: Path) -> None:
    """Findings, statistics and pictures in --out, without a path of this machine."""
    featviz("audit", *planted_call("shared"), noise, "--out", out)
    content = read_audit(out)
    names = sorted(path.name for path in out.iterdir())
    assert names == ["apoz.png", "audit.json", "channels.npz", "suspects"]
    assert content["schema_version"] == 1
    assert content["model"]["name"] == "planted.py:make"
    assert str(out.parent) not in (out / "audit.json").read_text()


REDS = (40, 80, 120, 160, 200, 250)


class Suspects(NamedTuple):
    """What an audit drew of one layer."""

    record: dict[str, Any]
    """Of audit.json."""
    pixels: np.ndarray
    """uint8 [H, W, 3]."""

    def red(self, value: int) -> np.ndarray:
        """Where the picture has this red: (y, x) of each pixel, [pixels, 2]."""
        return np.argwhere((self.pixels == (value, 0, 0)).all(-1))


@pytest.fixture
def suspects(featviz: Run, tmp_path: Path, out: Path) -> Suspects:
    """Of a sigmoid whose channel 1 is saturated, for images of six reds."""
    folder = tmp_path / "reds"
    folder.mkdir()
    for value in REDS:
        solid(folder / f"{value:03d}.png", (value, 0, 0))
    weights = torch.tensor([[-1.0, 0, 0], [-1, 0, 0]])
    conv = filled(nn.Conv2d(3, 2, 1), weights, [0.0, 9.0])
    model = tmp_path / "m.pth"
    torch.save(nn.Sequential(conv, nn.Sigmoid()), model)
    options = ["--out", out, *COLOURS, "--saturated-at", 0.5]
    assert featviz("audit", model, folder, *options).code == 0
    (record,) = read_audit(out)["drawn"]
    return Suspects(record, np.asarray(Image.open(out / record["file"])))


@pytest.mark.medium
def test_suspects_are_recorded(suspects: Suspects) -> None:
    """audit.json says which channels a picture shows, and where the tiles are."""
    (suspect,) = suspects.record.pop("channels")
    images = suspect.pop("images")
    assert suspects.record == {
        "layer": "1",
        "shown": "1",
        "suspects": 1,
        "file": "suspects/1.png",
    }
    assert (suspect["channel"], suspect["finding"]) == (1, "saturated")
    assert [image["image"] for image in images] == [
        f"{red:03d}.png" for red in REDS[:4]
    ]
    for image, red in zip(images, REDS, strict=False):
        left, top, width, height = image["tile"]
        tile = suspects.pixels[top : top + height, left : left + width]
        assert (tile == (red, 0, 0)).all()


@pytest.mark.medium
def test_suspects_are_drawn_with_the_images_that_excite_them_most(
    suspects: Suspects,
) -> None:
    """The row of a saturated channel shows the four darkest of six images, best first."""
    shown = [value for value in REDS if len(suspects.red(value)) > 2000]
    first_columns = [suspects.red(value)[:, 1].min() for value in shown]
    assert shown == [40, 80, 120, 160]
    assert first_columns == sorted(first_columns)
    assert not len(suspects.red(200))


@pytest.mark.medium
def test_suspects_have_the_colour_key_of_matplotlibs_viridis(
    suspects: Suspects,
) -> None:
    """Its ends and its middle stand left of the images."""
    images = suspects.red(40)[:, 1].min()
    label = suspects.pixels[44:, :images].reshape(-1, 3)
    for end in colormaps["viridis"]([0.0, 0.5, 1.0], bytes=True)[:, :3].astype(int):
        assert np.abs(label - end).max(1).min() <= 4


def spans_of_tiles(line: np.ndarray) -> list[np.ndarray]:
    """Where a line of pixels [W, 3] shows tiles on white paper, each wider than 40."""
    inked = np.flatnonzero((line != 255).any(1))
    spans = np.split(inked, np.flatnonzero(np.diff(inked) > 1) + 1)
    return [span for span in spans if len(span) > 40]


RAMPS = {"a": [255] * 6 + [0, 32, 64, 96], "b": [0, 20, 100] + [255] * 7}
"""The red of ten columns of two pictures."""


def save_ramps(folder: Path) -> Path:
    """The pictures of RAMPS, in a new folder."""
    folder.mkdir()
    for name, reds in RAMPS.items():
        pixels = np.zeros((12, 10, 3), np.uint8)
        pixels[..., 0] = reds
        Image.fromarray(pixels).save(folder / f"{name}.png")
    return folder


def columns_of(tile: np.ndarray) -> np.ndarray:
    """The middles of the ten columns that a line of a tile shows."""
    return tile[((np.arange(10) + 0.5) * len(tile) / 10).astype(int)]


@pytest.mark.medium
def test_suspects_show_their_maps_in_viridis(
    featviz: Run, tmp_path: Path, out: Path
) -> None:
    """From the least to the largest value of the channel in all its images, each map
    right of its image, of equal ones the first; so do the ends of the key."""
    folder = save_ramps(tmp_path / "ramps")
    conv = filled(nn.Conv2d(3, 1, 1), torch.tensor([[4.0, 0, 0]]), [-1.0])
    torch.save(nn.Sequential(conv, nn.Hardtanh()), "m.pth")
    options = ["--out", out, *COLOURS, "--saturated-at", 0.5]
    assert featviz("audit", "m.pth", folder, *options).code == 0
    (record,) = read_audit(out)["drawn"]
    picture = np.asarray(Image.open(out / record["file"]).convert("RGB")).astype(int)

    top = record["channels"][0]["images"][0]["tile"][1]
    line = picture[top + 20]
    spans = spans_of_tiles(line)
    columns = [columns_of(line[span]) for span in spans]
    assert len(columns) == 4
    for number, name in enumerate("ab"):
        image, heat = columns[2 * number : 2 * number + 2]
        assert image[:, 0].tolist() == RAMPS[name]
        shares = (np.clip(np.array(RAMPS[name]) / 255 * 4 - 1, -1, 1) + 1) / 2
        expected = colormaps["viridis"](shares, bytes=True)[:, :3].astype(int)
        assert np.abs(heat - expected).max() <= 4
    ends = colormaps["viridis"]([0.0, 1.0], bytes=True)[:, :3].astype(int)
    label = picture[top:, : spans[0][0]]
    is_end = np.abs(label[..., None, :] - ends).max(-1) <= 4
    dark, bright = is_end.any(0).T
    assert dark.nonzero()[0].max() < bright.nonzero()[0].min()


@pytest.mark.medium
def test_a_broken_image_is_named_and_the_others_count(
    featviz: Run, noise: Path, out: Path
) -> None:
    """Exit code 3."""
    (noise / "bad.png").write_bytes(b"no image")
    done = featviz("audit", *planted_call("shared"), noise, "--out", out)
    assert done.code == 3
    assert "error: bad.png is no image" in done.err
    assert "6 images seen" in done.err


def test_without_a_whole_image_nothing_is_written(
    featviz: Run, tmp_path: Path, out: Path
) -> None:
    """Exit code 1."""
    broken = [tmp_path / name for name in ("bad.png", "worse.png")]
    for path in broken:
        path.write_bytes(b"no image")
    done = featviz("audit", *planted_call("shared"), *broken, "--out", out)
    assert done.code == 1
    assert "no image of 2 went through: bad.png" in done.err
    assert not out.exists()


@pytest.mark.medium
def test_pruned_channels_are_written_and_proved(
    featviz: Run, noise: Path, tmp_path: Path, out: Path
) -> None:
    """prune.json is {layer: [channels]}, and leaving them out changes nothing; with
    --json, stdout has audit.json but for its files. The second convolution is of one
    group here: channels can be cut out of what it reads."""
    prune = tmp_path / "prune.json"
    call = ["audit", *planted_call("one group"), noise, "--out", out, "--json"]
    done = featviz(*call, "--prune-out", prune, "--prove", "--max-suspects", 1)
    assert done.code == 0
    written = read_audit(out)
    printed = json.loads(done.out)
    assert {**printed, "drawn": written["drawn"], "files": written["files"]} == written
    assert {"drawn", "files"}.isdisjoint(printed)
    assert json.loads(prune.read_text()) == {"conv1": [0]}
    assert "without the 1 channel that can be cut out the output changes" in done.err
    assert "by 0 at most" in done.err


@pytest.mark.medium
def test_no_more_suspects_are_drawn_than_allowed(noise: Path, tmp_path: Path) -> None:
    """Two channels of all layers; how many there are is recorded."""
    drawn = document(Planted("in place"), noise, tmp_path, max_suspects=2)["drawn"]
    assert sum(len(row["channels"]) for row in drawn) == 2
    assert {row["suspects"] for row in drawn} == {4}


@pytest.mark.parametrize("name", FINDINGS)
def test_every_finding_is_documented_and_has_a_gate(name: str, featviz: Run) -> None:
    """A finding is one record: the help names it, docs/audit.md says what it means, and
    a gate can be on it."""
    docs = (ROOT / "docs/audit.md").read_text("utf-8")
    assert name in featviz("audit", "--help").out
    assert f"| `{name}` | " in docs
    assert parse_gate(f"{name}>0").finding == name
    assert set(FINDINGS[name].yields_to) < set(FINDINGS) - {name}


def test_findings_have_an_order() -> None:
    """No two are equally severe."""
    ranks = sorted(finding.rank for finding in FINDINGS.values())
    assert ranks == list(range(len(FINDINGS)))


@pytest.mark.parametrize(
    ("color", "lengths"),
    [((192, 57, 43), [0.1, 0, 0.3]), ((107, 140, 174), [0.4, 0, 0.6])],
    ids=["dead", "zero"],
)
def test_bars_are_as_long_as_the_shares(
    color: tuple[int, int, int], lengths: list[float]
) -> None:
    """Of five inches the share of zeros is blue, but for the share of dead channels, in
    red."""
    shares = [
        ZeroShares("a", 0.5, 0.1),
        ZeroShares("b", 0.0, 0.0),
        ZeroShares("c", 0.9, 0.3),
    ]
    pixels = apoz_chart(shares, "title")
    colored_in_row = (pixels == color).all(2).sum(1)
    bars = colored_in_row[[47, 71, 95]]
    assert bars / 500 == pytest.approx(lengths, abs=0.006)


def test_the_legend_of_the_chart_begins_with_the_zeros() -> None:
    """As the words beside its squares do."""
    legend = apoz_chart([ZeroShares("a", 0.5, 0.1)], "title")[-30:]
    starts = []
    for color in ((107, 140, 174), (192, 57, 43)):
        _, columns = np.nonzero((legend == color).all(2))
        starts.append(columns.min())
    assert starts[1] - starts[0] == 90


@pytest.mark.medium
@pytest.mark.parametrize("cores", [2, 5])
def test_worker_processes_count_what_one_process_counts(
    featviz: Run,
    noise: Path,
    out: Path,
    cores: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The same files and words, with an image that cannot be read among the others."""
    (noise / "3b.png").write_bytes(b"no image")
    outcomes = []
    trees = []
    for count in (1, cores):
        monkeypatch.setattr(workers, "usable_cores", lambda count=count: count)
        command = ["audit", *planted_call("shared"), noise, "--out", out]
        outcomes.append(featviz(*command, "--overwrite"))
        trees.append(tree(out))
    assert outcomes[0].code == 3
    assert outcomes[0] == outcomes[1]
    assert trees[0] == trees[1]


DEADLY = """
import os
import signal

from torch import nn


class Deadly(nn.Sequential):
    def forward(self, images):
        if images.min() > 0.9:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().forward(images)


def make():
    return Deadly(nn.Conv2d(3, 4, 1), nn.ReLU())
"""
"""A network whose process dies where an image is white."""


@pytest.mark.medium
@pytest.mark.skipif(not workers.can_fork(), reason="workers are forked on Linux alone")
def test_an_image_whose_worker_dies_is_named_and_the_others_count(
    featviz: Run, noise: Path, out: Path, two_cores: None
) -> None:
    """The exit code is 3."""
    Path("net.py").write_text(DEADLY)
    Image.new("RGB", (10, 12), "white").save(noise / "4.png")
    done = featviz("audit", "net.py:make", noise, *COLOURS, "--out", out)
    assert done.code == 3, done.err
    images = read_audit(out)["images"]
    assert images["seen"] == 5
    (failure,) = images["failures"]
    assert failure["image"] == "4.png"
    assert "its worker process ended by signal 9 (SIGKILL), twice" in failure["error"]


def test_a_bar_has_the_name_of_the_first_layer_that_is_judged_there(
    noise: Path, tmp_path: Path
) -> None:
    """A convolution and the ReLU behind it are one bar; the picture is as wide as the
    name in front of it."""
    name = "the_convolution_before"
    net = nn.Sequential(OrderedDict([(name, nn.Conv2d(3, 4, 1)), ("relu", nn.ReLU())]))
    document(net, noise, tmp_path, layers=f"{name},relu")
    with Image.open(tmp_path / "audit" / "apoz.png") as picture:
        assert picture.width == round(100 * (0.3 + 0.07 * len(name) + 5 + 0.3))


@pytest.mark.parametrize(
    ("count", "last"),
    [
        (12, "dead in r11: channels 0-1"),
        (13, "dead in 1 more layer"),
        (20, "dead in 8 more layers"),
    ],
)
def test_of_many_layers_with_dead_channels_twelve_are_named(
    count: int, last: str
) -> None:
    """The others are counted; audit.json has all."""
    rows = []
    for number in range(count):
        row = {"label": f"r{number}", "type": "ReLU", "channels": 4, "apoz": 0.5}
        rows.append({**row, "findings": {"dead": [0, 1]}})
    total = {"channels": 4 * count, "apoz": 0.5, "findings": {"dead": 2 * count}}
    footer = audit_table({"layers": rows, "total": total}).footer
    assert footer[0] == "dead in r0: channels 0-1"
    assert footer[-1] == last
    assert len(footer) == min(count, 13)


@pytest.mark.parametrize("class_tokens", [0, 1])
def test_tokens_of_suspects_are_drawn_as_a_square(
    class_tokens: int, noise: Path, tmp_path: Path
) -> None:
    """Without the class token, as wide and as high as the image beside it."""

    def way(self: Any, x: Tensor) -> Tensor:
        tokens = self.patches(x).flatten(2).mT
        return self.fc(torch.cat([tokens[:, :class_tokens], tokens], 1)).mean(1)

    net = Net(way, patches=nn.Conv2d(3, 5, 3, (3, 2)), fc=nn.Linear(5, 4))
    with torch.no_grad():
        net.fc.weight[2] = 0
    document(net, noise, tmp_path, layers="fc", max_suspects=4)

    with Image.open(tmp_path / "audit" / "suspects" / "fc.png") as picture:
        pixels = np.asarray(picture.convert("RGB"))
    # the map of the first image: 16 tokens of one colour, in 88 × 88 pixels
    painted = (pixels[44:132, 254:342] != pixels[0, 0]).any(axis=2)
    assert painted.all()


def test_the_class_token_of_a_suspect_is_no_place(noise: Path, tmp_path: Path) -> None:
    """The first place is that of the token behind it, here the brightest of sixteen."""

    def way(self: Any, x: Tensor) -> Tensor:
        tokens = torch.arange(17.0)
        tokens[0] = 99
        tokens = tokens.reshape(1, 17, 1).expand(len(x), 17, 1)
        return self.relu(self.fc(tokens)).mean(1)

    net = Net(way, fc=nn.Linear(1, 2, bias=False), relu=nn.ReLU())
    net.fc.weight.data = torch.tensor([[-1.0], [1.0]])
    document(net, noise, tmp_path, layers="relu", max_suspects=4)

    (file,) = (tmp_path / "audit" / "suspects").iterdir()
    with Image.open(file) as picture:
        pixels = np.asarray(picture.convert("L")).astype(int)
    # the middle of each of 4 × 4 places in 88 × 88 pixels
    brightness = pixels[55:132:22, 265:342:22].flatten()
    assert len(brightness) == 16
    assert (np.diff(brightness) < 0).all()


@pytest.mark.medium
def test_the_worst_suspect_is_drawn_first(noise: Path, tmp_path: Path) -> None:
    """Of one of each finding, what is not finite; what is constant comes behind dead and
    saturated."""
    content = document(Planted("shared"), noise, tmp_path, max_suspects=1)
    (sheet,) = content["drawn"]
    findings = column(content, "findings")[sheet["layer"]]
    assert len(findings["dead"]) == len(findings["saturated"]) == 1
    drawn = [suspect["channel"] for suspect in sheet["channels"]]
    assert drawn == findings["nonfinite"]
