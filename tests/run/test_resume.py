"""Going on with a run: what is complete stays, all else is done again, another run is
refused."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import Outcome, Run
from PIL import Image
from runs import SMALL, check_whole, make_photos, run_json, tree
from torch import nn

import featviz as fv
from featviz.rundir.folder import Folder, hidden_name
from featviz.rundir.ownership import look
from featviz.rundir.write import RunDirectory, as_json


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    return make_photos(tmp_path / "photos", 4)


def half(whole: Path, out: Path) -> Path:
    """What a run leaves that was killed in its third image."""
    shutil.copytree(whole, out)
    shutil.rmtree(out / "03.png")
    (out / "02.png" / "manifest.json").unlink()
    (out / "02.png" / "000_0" / "x").mkdir(parents=True)
    (out / "02.png" / "000_0" / hidden_name("output.png")).write_bytes(b"\x89PNG")
    (out / hidden_name("run.json")).write_bytes(b"{")
    run = run_json(whole)
    run["images"] = {
        "total": 4,
        "complete": [],
        "missing": sorted(run["images"]["complete"]),
    }
    (out / "run.json").write_text(json.dumps(run))
    return out


def test_what_is_complete_is_kept_and_the_rest_is_done(
    draw: Run, whole: Path, tmp_path: Path
) -> None:
    """The tree ends equal to an uninterrupted one, and complete images were not
    touched."""
    out = half(whole, tmp_path / "out")
    before = (out / "00.png" / "manifest.json").stat().st_mtime_ns
    done = draw(out, "--resume", "--json")
    assert done.code == 0
    assert "(2 were complete before)" in done.err
    assert tree(out) == tree(whole)
    assert (out / "00.png" / "manifest.json").stat().st_mtime_ns == before
    lines = [json.loads(line) for line in done.out.splitlines()]
    assert [line["image"] for line in lines] == [f"0{n}.png" for n in range(4)]
    assert [line.get("kept") for line in lines] == [True, True, None, None]
    assert lines[0]["prediction"]
    assert set(lines[0]) == {*lines[2], "kept"}
    assert all(
        lines[0][key] == lines[2][key] for key in ("files", "skipped", "never_ran")
    )


@pytest.mark.slow
def test_resume_without_a_run_begins_one(
    draw: Run, whole: Path, tmp_path: Path
) -> None:
    """No folder, an empty one, and one whose run.json was being written: all begin
    anew."""
    for index, files in enumerate([None, [], [hidden_name("run.json")]]):
        out = tmp_path / f"out{index}"
        if files is not None:
            out.mkdir()
            for name in files:
                (out / name).write_text("{")
        assert draw(out, "--resume").code == 0
        assert tree(out) == tree(whole)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ([*SMALL, "--no-marks"], "there none, here --no-marks"),
        ([*SMALL, "--ablate", "0:1"], "there none, here --ablate 0:1"),
    ],
    ids=["marks", "ablate"],
)
def test_other_options_are_refused_by_name(
    change: list[str],
    named: str,
    featviz: Run,
    tiny_file: Path,
    photos: Path,
    whole: Path,
) -> None:
    """The message says which option it is, what it was and what it would be."""
    before = tree(whole)
    done = featviz("run", tiny_file, photos, "--out", whole, "--resume", *change)
    assert done.code == 1
    assert "holds another run; there " in done.err
    assert named in done.err
    assert tree(whole) == before


def factory(tmp_path: Path, value: float) -> str:
    (tmp_path / "net.py").write_text(
        "import torch\nfrom torch import nn\n"
        "def make(width=2):\n"
        "    net = nn.Sequential(nn.Conv2d(3, width, 3), nn.ReLU())\n"
        f"    torch.nn.init.constant_(net[0].weight, {value})\n"
        "    return net\n"
    )
    return f"{tmp_path / 'net.py'}:make"


def test_another_model_is_refused(
    featviz: Run, tiny: nn.Module, tiny_file: Path, photos: Path, tmp_path: Path
) -> None:
    """A file with other weights, a factory that is given other arguments, or that was
    edited."""

    def run(model: object, *more: object, out: str) -> Outcome:
        return featviz(
            "run", model, photos, "--out", tmp_path / out, *SMALL, "--resume", *more
        )

    assert run(tiny_file, out="a").code == 0
    torch.save(nn.Sequential(*tiny), tiny_file)
    torch.nn.init.zeros_(tiny[0].weight)  # type: ignore[index, arg-type]
    torch.save(tiny, tiny_file)
    assert "its model.sha256 is" in run(tiny_file, out="a").err
    assert run(factory(tmp_path, 0.5), out="b").code == 0
    assert run(factory(tmp_path, 0.5), out="b").code == 0
    refused = run(factory(tmp_path, 0.5), "--model-arg", "width=3", out="b")
    assert refused.code == 1
    assert "its model.parameters is" in refused.err
    assert "its model.code_sha256 is" in run(factory(tmp_path, 0.25), out="b").err


def test_from_python(tiny: nn.Module, photos: Path, tmp_path: Path) -> None:
    """featviz.run(resume=True) keeps, and refuses a module with other weights."""
    fv.run(tiny, photos, "Conv2d", tmp_path / "out", size=16)
    again = fv.run(tiny, photos, "Conv2d", tmp_path / "out", size=16, resume=True)
    assert [image.kept for image in again.images] == [True] * 4
    assert [len(image.captures) for image in again.images] == [1] * 4
    torch.nn.init.zeros_(tiny[0].weight)  # type: ignore[index, arg-type]
    with pytest.raises(fv.errors.StoreError, match=r"its model\.parameters is"):
        fv.run(tiny, photos, "Conv2d", tmp_path / "out", size=16, resume=True)


def test_an_image_that_has_changed_is_done_again(
    draw: Run, photos: Path, whole: Path, tmp_path: Path
) -> None:
    """Its sha256 tells; the tree is that of a new run."""
    Image.new("RGB", (30, 20), "red").save(photos / "02.png")
    assert draw(whole, "--resume").code == 0
    assert draw(tmp_path / "new").code == 0
    assert tree(whole) == tree(tmp_path / "new")


def test_failures_are_tried_again_and_keep_the_exit_code(
    draw: Run, photos: Path, tmp_path: Path
) -> None:
    """An image that stays broken ends a resumed run with 3; mended, with 0."""
    good = (photos / "01.png").read_bytes()
    (photos / "01.png").write_bytes(good[:60])
    assert draw(tmp_path / "out").code == 3
    before = tree(tmp_path / "out")
    again = draw(tmp_path / "out", "--resume")
    assert again.code == 3
    assert "error: 01.png " in again.err
    assert tree(tmp_path / "out") == before
    (photos / "01.png").write_bytes(good)
    assert draw(tmp_path / "out", "--resume").code == 0
    assert run_json(tmp_path / "out")["failures"] == []


def test_an_overwrite_that_is_killed_leaves_nothing_that_looks_complete(
    draw: Run, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However far the removal got: no manifest without its files, and --resume makes it
    whole."""
    before = tree(whole)
    unlink = os.unlink
    for count in (1, 5, 12):
        remaining = [count]

        def killed(
            *arguments: Any, remaining: list[int] = remaining, **named: Any
        ) -> None:
            remaining[0] -= 1
            if remaining[0] < 0:
                raise SystemExit(9)
            unlink(*arguments, **named)

        with monkeypatch.context() as patched, pytest.raises(SystemExit):
            patched.setattr(os, "unlink", killed)
            RunDirectory(Folder.open(whole)).clear(look(whole).ours)
        check_whole(whole)
        assert (whole / "run.json").is_file()
        assert draw(whole, "--resume").code == 0
        assert tree(whole) == before


def rewrite(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))


def sealed_anew(folder: Path, **fields: object) -> None:
    """Change fields of a manifest that stays sound and sealed, as `verify` says."""
    content = {**json.loads((folder / "manifest.json").read_text()), **fields}
    del content["sha256"]
    (folder / "manifest.json").write_bytes(as_json(content, sealed=True))


HARMS: dict[str, Callable[[Path], object]] = {
    "cut": lambda folder: (folder / "manifest.json").write_bytes(
        b'{"schema_version": 2'
    ),
    "another run": lambda folder: sealed_anew(folder, fingerprint="0" * 64),
    "outside": lambda f: rewrite(
        f / "manifest.json", "/output.png", "/../../../secret.png"
    ),
    "picture": lambda folder: next(folder.rglob("output.png")).unlink(),
    "short": lambda folder: os.truncate(next(folder.rglob("output.png")), 99),
    "statistics": lambda folder: (folder / "stats.npz").write_bytes(b"PK"),
}
OTHERS = ("cut", "outside", "picture", "statistics")


@pytest.mark.parametrize(
    "harm",
    [
        "another run",
        "short",
        *(pytest.param(n, marks=pytest.mark.slow) for n in OTHERS),
    ],
)
def test_an_image_that_does_not_fit_is_drawn_again(
    harm: str, draw: Run, whole: Path
) -> None:
    """--resume believes a manifest as little as report does, keeps the others, removes
    what it left, and ends in the same tree."""
    before = tree(whole)
    HARMS[harm](whole / "01.png")
    (whole / "01.png" / "004_left" / "output.png").parent.mkdir()
    assert tree(whole) != before
    done = draw(whole, "--resume", "--json")
    kept = [json.loads(line).get("kept") for line in done.out.splitlines()]
    assert done.code == 0
    assert kept == [True, None, True, True]
    assert tree(whole) == before
    assert not (whole / "01.png" / "004_left").exists()
