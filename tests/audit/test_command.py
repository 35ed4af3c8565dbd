"""`featviz audit`: tables, files, pictures of suspects, and bad values."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import ROOT, Run
from matplotlib import colormaps
from PIL import Image
from torch import nn

from featviz.audit.chart import ZeroShares, apoz_chart
from featviz.audit.gates import FINDINGS, parse_gate

from .audited import COLOURS, PLANTED, filled, solid


def planted_call(way: str) -> list[str]:
    return [f"{PLANTED}:make", "--model-arg", f"way={way}", *COLOURS]


def test_command_prints_a_table_and_writes_the_files(
    featviz: Run, noise: Path, tmp_path: Path
) -> None:
    """A row for each layer and the total on stdout; findings, statistics and pictures
    in --out."""
    out = tmp_path / "out"
    done = featviz("audit", *planted_call("shared"), noise, "--out", out)
    assert done.code == 0, done.err
    lines = done.out.splitlines()
    columns = "layer type channels APoZ dead constant saturated nonfinite"
    assert lines[0].split() == columns.split()
    assert lines[1].split()[:3] == ["act", "ReLU6", "8"]
    assert lines[1].split()[4:] == list("1111")
    assert lines[3].split()[0] == "total"
    assert lines[3].split()[3:] == list("2322")
    assert "6 images seen; another set of images may give other findings" in done.err
    content = json.loads((out / "audit.json").read_text())
    assert content["schema_version"] == 1
    assert content["model"]["name"] == "planted.py:make"
    assert sorted(path.name for path in out.iterdir()) == [
        "apoz.png",
        "audit.json",
        "channels.npz",
        "suspects",
    ]
    assert str(tmp_path) not in (out / "audit.json").read_text()


def test_suspects_are_drawn_with_the_images_that_excite_them_most(
    featviz: Run, tmp_path: Path
) -> None:
    """The row of a saturated channel shows the four darkest of six images, best first."""
    folder = tmp_path / "reds"
    folder.mkdir()
    for value in (40, 250, 120, 200, 80, 160):
        solid(folder / f"{value:03d}.png", (value, 0, 0))
    weights = torch.tensor([[-1.0, 0, 0], [-1, 0, 0]])  # 0 is sound
    conv = filled(nn.Conv2d(3, 2, 1), weights, [0.0, 9.0])
    torch.save(nn.Sequential(conv, nn.Sigmoid()), tmp_path / "m.pth")
    out = tmp_path / "out"
    done = featviz(
        "audit",
        tmp_path / "m.pth",
        folder,
        "--out",
        out,
        *COLOURS,
        "--saturated-at",
        0.5,
    )
    assert done.code == 0, done.err
    (drawn,) = json.loads((out / "audit.json").read_text())["drawn"]
    assert drawn == {
        "layer": "1",
        "shown": "1",
        "channels": [1],
        "suspects": 1,
        "file": "suspects/1.png",
        "rows": [44, 113],
    }
    pixels = np.asarray(Image.open(out / drawn["file"]))
    reds = [v for v in (40, 80, 120, 160) if (pixels == (v, 0, 0)).all(-1).sum() > 2000]
    assert reds == [40, 80, 120, 160]
    assert not (pixels == (200, 0, 0)).all(-1).any()
    columns = [
        int(np.argwhere((pixels == (v, 0, 0)).all(-1))[:, 1].min()) for v in reds
    ]
    assert columns == sorted(columns)
    # the colour key of matplotlib's viridis
    label = pixels[44:, : columns[0]].reshape(-1, 3)
    ends = colormaps["viridis"]([0.0, 0.5, 1.0], bytes=True)[:, :3].astype(int)
    assert all(np.abs(label - end).max(1).min() <= 4 for end in ends)


def test_a_broken_image_is_named_and_the_others_count(
    featviz: Run, noise: Path, tmp_path: Path
) -> None:
    """Exit code 3; with all broken 1, and nothing is written."""
    (noise / "bad.png").write_bytes(b"no image")
    out = tmp_path / "out"
    done = featviz("audit", *planted_call("shared"), noise, "--out", out)
    assert done.code == 3
    assert "error: bad.png is no image" in done.err
    assert "6 images seen" in done.err
    done = featviz(
        "audit", *planted_call("shared"), noise / "bad.png", "--out", tmp_path / "none"
    )
    assert done.code == 1
    assert "no image of 1 went through" in done.err
    assert not (tmp_path / "none").exists()


def test_prune_out_and_verify(featviz: Run, noise: Path, tmp_path: Path) -> None:
    """prune.json is {layer: [channels]}, and leaving them out changes nothing; with
    --json, stdout has audit.json but for its files."""
    prune = tmp_path / "prune.json"
    out = tmp_path / "out"
    call = ["audit", *planted_call("in place"), noise, "--out", out]
    done = featviz(
        *call, "--prune-out", prune, "--prove", "--json", "--max-suspects", 2
    )
    assert done.code == 0
    written = json.loads((out / "audit.json").read_text())
    drawn = written.pop("drawn")
    _ = written.pop("files")
    assert json.loads(done.out) == written
    assert sum(len(row["channels"]) for row in drawn) == 2
    assert {row["suspects"] for row in drawn} == {4}
    assert json.loads(prune.read_text()) == {"conv1": [0], "conv2": [6]}
    assert (
        "without the 2 channels that can be cut out the output changes by 0 at most"
        in done.err
    )


def test_every_finding_is_documented_and_has_a_gate(featviz: Run) -> None:
    """A finding is one record: the help names it, docs/audit.md says what it means, and
    a gate can be on it."""
    help_text = featviz("audit", "--help").out
    docs = (ROOT / "docs/audit.md").read_text("utf-8")
    for name, finding in FINDINGS.items():
        assert name in help_text
        assert f"| `{name}` | " in docs
        assert parse_gate(f"{name}>0").finding == name
        assert set(finding.yields_to) < set(FINDINGS) - {name}
    assert sorted(finding.severity for finding in FINDINGS.values()) == list(
        range(len(FINDINGS))
    )


def test_bars_are_as_long_as_the_shares() -> None:
    """Of five inches the share of zeros is blue, but for the share of dead channels, in
    red."""
    shares = [
        ZeroShares("a", 0.5, 0.1),
        ZeroShares("b", 0.0, 0.0),
        ZeroShares("c", 0.9, 0.3),
    ]
    pixels = apoz_chart(shares, "title")
    for color, lengths in (
        ((192, 57, 43), (0.1, 0, 0.3)),
        ((107, 140, 174), (0.4, 0, 0.6)),
    ):
        # how many pixels of each row have the colour
        found = (pixels == color).all(2).sum(1)
        bars = [found[35 + 12 + 24 * row] for row in range(3)]
        assert bars == pytest.approx([500 * length for length in lengths], abs=3)
