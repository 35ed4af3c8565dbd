"""`featviz audit`: tables, files, pictures of suspects, several models, and bad values."""

from __future__ import annotations

import json
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import DIGITS, DIGITS_MODEL
from matplotlib import colormaps
from PIL import Image
from torch import nn

from featviz.audit import output
from featviz.images.group import natural_key
from featviz.records import gates
from featviz.records.findings import FINDINGS

from .audited import COLOURS, PLANTED, Run, kill, names_in, solid


def planted_call(way: str) -> list[str]:
    return [f"{PLANTED}:make", "--model-arg", f"way={way}", *COLOURS]


def test_command_prints_a_table_and_writes_the_files(
    featviz: Run, noise: Path, tmp_path: Path
) -> None:
    """A row for each layer and the total on stdout; findings, statistics and pictures in --out."""
    out = tmp_path / "out"
    done = featviz("audit", *planted_call("shared"), noise, "--out", out)
    assert done.code == 0, done.err
    lines = done.out.splitlines()
    assert lines[0].split() == [
        "layer", "type", "channels", "APoZ", "dead", "constant", "saturated", "nonfinite",
    ]  # fmt: skip
    assert lines[1].split()[:3] == ["act", "ReLU6", "8"] and lines[1].split()[4:] == list("1111")
    assert lines[3].split()[0] == "total" and lines[3].split()[3:] == list("2322")
    assert "6 images seen; the verdicts hold for these images" in done.err
    content = json.loads((out / "audit.json").read_text())
    assert content["schema_version"] == 1 and content["model"]["name"] == "planted.py:make"
    assert names_in(out) == ["apoz.png", "audit.json", "channels.npz", "suspects"]
    assert str(tmp_path) not in (out / "audit.json").read_text()


def test_json_on_stdout_is_the_file(featviz: Run, noise: Path, tmp_path: Path) -> None:
    """One document, the same findings."""
    out = tmp_path / "out"
    done = featviz("audit", *planted_call("shared"), noise, "--out", out, "--json")
    printed, written = json.loads(done.out), json.loads((out / "audit.json").read_text())
    assert printed == {key: value for key, value in written.items() if key != "drawn"}


@pytest.mark.slow
def test_the_same_command_writes_the_same_bytes(featviz: Run, noise: Path, tmp_path: Path) -> None:
    """Twice, into two folders: every file is equal."""
    trees = []
    for name in ("a", "b"):
        featviz("audit", *planted_call("shared"), noise, "--out", tmp_path / name, "-q")
        files = sorted(p for p in (tmp_path / name).rglob("*") if p.is_file())
        trees.append({str(p.relative_to(tmp_path / name)): p.read_bytes() for p in files})
    assert trees[0] == trees[1] and len(trees[0]) == 7


def test_suspects_are_drawn_with_the_images_that_excite_them_most(
    featviz: Run, tmp_path: Path
) -> None:
    """The row of a saturated channel shows the four brightest of six images, best first."""
    folder = tmp_path / "reds"
    folder.mkdir()
    for value in (40, 250, 120, 200, 80, 160):
        solid(folder / f"{value:03d}.png", (value, 0, 0))
    model = nn.Sequential(nn.Conv2d(3, 2, 1), nn.Sigmoid())
    with torch.no_grad():  # channel 0 is sound, and excited most by the darkest
        model[0].weight.copy_(torch.tensor([[-1.0, 0, 0], [1, 0, 0]])[:, :, None, None])
        model[0].bias.copy_(torch.tensor([0.0, 7.0]))
    torch.save(model, tmp_path / "m.pth")
    out = tmp_path / "out"
    done = featviz(
        "audit", tmp_path / "m.pth", folder, "--out", out, *COLOURS, "--saturated-at", 0.5
    )
    assert done.code == 0, done.err
    (drawn,) = json.loads((out / "audit.json").read_text())["drawn"]
    assert drawn == {
        "layer": "1", "shown": "1", "channels": [1], "suspects": 1, "file": "suspects/1.png",
        "rows": [44, 113],
    }  # fmt: skip
    pixels = np.asarray(Image.open(out / drawn["file"]))
    reds = [v for v in (250, 200, 160, 120) if (pixels == (v, 0, 0)).all(-1).sum() > 2000]
    assert reds == [250, 200, 160, 120]
    assert not (pixels == (80, 0, 0)).all(-1).any()
    columns = [int(np.argwhere((pixels == (v, 0, 0)).all(-1))[:, 1].min()) for v in reds]
    assert columns == sorted(columns)
    label = pixels[44:, : columns[0]].reshape(-1, 3)  # the colour key of matplotlib's viridis
    ends = colormaps["viridis"]([0.0, 0.5, 1.0], bytes=True)[:, :3].astype(int)
    assert all(np.abs(label - end).max(1).min() <= 4 for end in ends)


@pytest.mark.slow
def test_the_number_of_suspects_is_limited_and_said(
    featviz: Run, noise: Path, tmp_path: Path
) -> None:
    """--max-suspects 2 draws two, and says of how many; 0 draws none."""
    out = tmp_path / "out"
    call = ["audit", *planted_call("shared"), noise, "--out", out, "--overwrite"]
    assert featviz(*call, "--max-suspects", 2).code == 0
    drawn = json.loads((out / "audit.json").read_text())["drawn"]
    assert sum(len(row["channels"]) for row in drawn) == 2
    assert {row["suspects"] for row in drawn} == {4}
    assert featviz(*call, "--max-suspects", 0).code == 0
    assert not (out / "suspects").exists()


def test_a_broken_image_is_named_and_the_others_count(
    featviz: Run, noise: Path, tmp_path: Path
) -> None:
    """Exit code 3; with all broken 1, and nothing is written."""
    (noise / "bad.png").write_bytes(b"no image")
    out = tmp_path / "out"
    done = featviz("audit", *planted_call("shared"), noise, "--out", out)
    assert done.code == 3 and "error: bad.png is no image" in done.err
    assert "6 images seen" in done.err
    done = featviz("audit", *planted_call("shared"), noise / "bad.png", "--out", tmp_path / "none")
    assert done.code == 1 and "no image of 1 went through" in done.err
    assert not (tmp_path / "none").exists()


@pytest.mark.slow
def test_the_output_folder_is_not_taken_from_others(
    featviz: Run, noise: Path, tmp_path: Path
) -> None:
    """Something else is refused whatever is asked; an audit only without --overwrite."""
    call = ["audit", *planted_call("shared"), noise, "--out"]
    other = tmp_path / "other"
    other.mkdir()
    (other / "thesis.txt").write_text("mine")
    done = featviz(*call, other, "--overwrite")
    assert done.code == 1 and "holds no audit of featviz" in done.err
    assert (other / "thesis.txt").read_text() == "mine"
    assert featviz(*call, tmp_path / "out").code == 0
    done = featviz(*call, tmp_path / "out")
    assert done.code == 1 and "--overwrite replaces it" in done.err
    (tmp_path / "out" / "mine.txt").write_text("mine")
    done = featviz(*call, tmp_path / "out", "--overwrite")
    assert done.code == 1 and "holds files that featviz did not write: mine.txt" in done.err
    (tmp_path / "out" / "mine.txt").unlink()
    assert featviz(*call, tmp_path / "out", "--overwrite").code == 0


@pytest.mark.slow
def test_interrupted_it_leaves_the_old_results(
    featviz: Run, noise: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C in the middle of writing: 130, what was there is there, and nothing lies beside it."""
    out = tmp_path / "out"
    call = ["audit", *planted_call("shared"), noise, "--out", out]
    assert featviz(*call).code == 0
    before = {p: p.read_bytes() for p in out.rglob("*") if p.is_file()}

    def interrupt(*args: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(output, "apoz_chart", interrupt)
    assert featviz(*call, "--overwrite").code == 130
    assert {p: p.read_bytes() for p in out.rglob("*") if p.is_file()} == before
    assert names_in(tmp_path) == ["noise", "out"]


def test_prune_out_and_verify(featviz: Run, noise: Path, tmp_path: Path) -> None:
    """prune.json is {layer: [channels]}, and leaving them out changes nothing."""
    prune = tmp_path / "prune.json"
    done = featviz(
        "audit", *planted_call("in place"), noise, "--out", tmp_path / "out",
        "--prune-out", prune, "--verify",
    )  # fmt: skip
    assert done.code == 0
    assert json.loads(prune.read_text()) == {"conv1": [0], "conv2": [6]}
    assert "without the 2 channels that can be cut out the output changes by 0 at most" in done.err


@pytest.mark.slow
def test_several_models_share_a_table(featviz: Run, noise: Path, tmp_path: Path) -> None:
    """A glob in natural order and --model: a column for each, and a folder of its own."""
    torch.manual_seed(0)
    for epoch, dead in ((2, []), (10, [0]), (1, [0, 2])):
        model = nn.Sequential(nn.Conv2d(3, 4, 1), nn.ReLU())
        with torch.no_grad():
            model[0].bias.fill_(3.0)
        kill(model[0], dead)
        torch.save(model, tmp_path / f"epoch_{epoch}.pth")
    out = tmp_path / "out"
    done = featviz(
        "audit", tmp_path / "epoch_*.pth", noise, "--model", tmp_path / "epoch_2.pth",
        "--out", out, *COLOURS,
    )  # fmt: skip
    assert done.code == 0, done.err
    header, row, *totals = done.out.splitlines()
    assert header.split() == [
        "layer", "epoch_1.pth", "epoch_2.pth", "epoch_10.pth", "epoch_2.pth", "(2)",
    ]  # fmt: skip
    assert row.split() == ["1", "2", "dead", "0", "1", "dead", "0"]
    assert totals[0].split()[:6] == ["total", "dead", "2", "of", "4", "(50.0%)"]
    names = ["00_epoch_1.pth", "01_epoch_2.pth", "02_epoch_10.pth", "03_epoch_2.pth (2)"]
    assert names_in(out) == [*names, "models.json", "models.png"]
    rows = json.loads((out / "models.json").read_text())["models"]
    assert [row["findings"]["dead"] for row in rows] == [2, 0, 1, 0]
    assert Image.open(out / "models.png").size[0] > 300


def test_no_model_matches_a_glob(featviz: Run, noise: Path, tmp_path: Path) -> None:
    """A usage error that names the pattern; --prune-out with several models, too."""
    done = featviz("audit", tmp_path / "no_*.pth", noise)
    assert done.code == 2 and "no model file matches" in done.err
    done = featviz(
        "audit", *planted_call("shared"), noise, "--model", "resnet18", "--prune-out", "x.json"
    )
    assert done.code == 2 and "--prune-out is for one model" in done.err


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("--batch-size", 0, "--batch-size 0 is below 1"),
        ("--eps", -1, "--eps -1 is below 0"),
        ("--eps", "nan", "--eps nan is below 0"),
        ("--saturated-at", 1.5, "--saturated-at 1.5 is not between 0 and 1"),
        ("--redundant-at", 0, "--redundant-at 0 is not between 0 and 1"),
        ("--max-suspects", -1, "--max-suspects -1 is below 0"),
        ("--background", "nope", "is no colour"),
    ],
)
def test_bad_values(
    option: str, value: object, message: str, featviz: Run, noise: Path, tmp_path: Path
) -> None:
    """Refused before any work, with the value."""
    done = featviz("audit", *planted_call("shared"), noise, option, value, "--out", tmp_path / "o")
    assert done.code == 2 and message in done.err


def test_natural_order() -> None:
    """Numbers by their value, not letter by letter."""
    names = ["e_10", "e_9", "e_1b2", "e_1b10", "10", "9", "a"]
    assert sorted(names, key=natural_key) == ["9", "10", "a", "e_1b2", "e_1b10", "e_9", "e_10"]


@pytest.mark.slow
def test_config_supplies_models_and_gates(featviz: Run, noise: Path, tmp_path: Path) -> None:
    """Lists in a TOML file stand for repeated options; a MODEL on the command line wins."""
    torch.save(nn.Sequential(nn.Conv2d(3, 4, 1), nn.ReLU()), tmp_path / "m.pth")
    config = tmp_path / "c.toml"
    config.write_text(
        f'images = ["{noise}"]\nsize = "12x10"\nmean = [0, 0, 0]\nstd = [1, 1, 1]\n'
        f'[audit]\nmodel = ["{tmp_path}/m.pth"]\nfail-on = ["dead>90%", "nonfinite>0"]\n'
    )
    done = featviz("audit", "--config", config, "--out", tmp_path / "a")
    assert done.code == 0, done.err
    assert (tmp_path / "a" / "audit.json").is_file()
    done = featviz("audit", "--config", config, f"{PLANTED}:make", "--out", tmp_path / "b")
    assert done.code == 4 and "gate nonfinite>0 is broken" in done.err
    assert (tmp_path / "b" / "audit.json").is_file()


@pytest.mark.slow
def test_digits_demonstration(featviz: Run, tmp_path: Path) -> None:
    """The shipped network has no dead channel on its own samples; one that is killed is found,
    made by its convolution, and not missed."""
    done = featviz("audit", DIGITS_MODEL, DIGITS, "--out", tmp_path / "a", "--verify", "--json")
    assert done.code == 0 and json.loads(done.out)["total"]["findings"]["dead"] == 0
    model = torch.load(DIGITS_MODEL, weights_only=False)
    kill(model[3], [7, 30])
    torch.save(model, tmp_path / "killed.pth")
    done = featviz(
        "audit", tmp_path / "killed.pth", DIGITS, "--out", tmp_path / "b", "--verify", "--json"
    )
    content = json.loads(done.out)
    assert content["prune"] == {"3": [7, 30]}
    assert content["verify"] == {"channels": 2, "images": 20, "largest_change": 0.0}


def test_control_characters_in_names_are_escaped_in_charts(tmp_path: Path) -> None:
    """matplotlib has no glyph for them, and would warn of each."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert output.apoz_chart([("a\x1b[1m\n", 0.5, 0.0)], "title").startswith(b"\x89PNG")
        assert output.dead_chart(["m\x07.pth"], {"dead": [0.5]}).startswith(b"\x89PNG")


def test_every_finding_is_in_the_help_and_has_a_gate(featviz: Run) -> None:
    """A finding is one record: its definition is in the help, and its example is a gate on it."""
    words = " ".join(featviz("audit", "--help-all").out.split())
    for name, finding in FINDINGS.items():
        assert f"{name} {finding.definition}" in words
        assert gates.parse(finding.gate).finding == name
        assert set(finding.yields_to) < set(FINDINGS) - {name}
    assert sorted(finding.severity for finding in FINDINGS.values()) == list(range(len(FINDINGS)))
