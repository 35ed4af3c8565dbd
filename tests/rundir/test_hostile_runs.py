"""Run directories from somebody who means harm: every command that reads them names what does not
fit, leaves that image out, and shows nothing that lies outside."""

from __future__ import annotations

import base64
import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import Outcome
from damaged_runs import (
    AUDITS,
    FIELDS,
    FILES,
    GRIDS,
    RECORDS,
    TENSORS,
    linked,
    manifest,
    named_twice,
    npy,
    raw,
)
from PIL import Image
from rundirs import without_sums, write_run

from featviz.rundir import read

CLI = Callable[..., Outcome]
SECRET = (251, 3, 77)
"""The colour of a picture that no command may show."""
WORDS = "the-secret-of-the-host"


@pytest.fixture
def places(tmp_path: Path) -> tuple[Path, Path]:
    """A run of two images, another like it, and secrets beside them."""
    drawn = dict.fromkeys(("cat.jpg", "dog.jpg"), GRIDS)
    width, height = GRIDS[0].plan.width, GRIDS[0].plan.height
    Image.new("RGB", (width, height), SECRET).save(tmp_path / "secret.png")
    (tmp_path / "secret.txt").write_text(WORDS)
    np.save(tmp_path / "secret.npy", np.frombuffer(WORDS.encode(), np.uint8))
    (tmp_path / "secret").mkdir()
    Image.new("RGB", (width, height), SECRET).save(tmp_path / "secret" / "output.png")
    root, good = write_run(tmp_path / "run", drawn), write_run(tmp_path / "good", drawn)
    for name in drawn:  # whoever makes a hostile run can leave checksums out
        without_sums(root / name)
        without_sums(good / name)
    return root, good


def outcomes(featviz: CLI, root: Path, good: Path) -> dict[str, Outcome]:
    """All commands that read a run directory."""
    out = root.parent / "written"
    out.mkdir()
    commands: dict[str, tuple[object, ...]] = {
        "report": ("report", root, "--out", out / "report"),
        "single": ("report", root, "--single-file", "--out", out / "report.html"),
        "compare": ("report", good, "--compare", root, "--out", out / "compared"),
        "sheet": ("sheet", root, "--layer", "conv1", "--out", out / "sheet.png"),
        "diff": ("diff", good, root, "--html", out / "diff.html"),
        "merge": ("merge", root, "--out", out / "merged"),
    }
    return {name: featviz(*arguments) for name, arguments in commands.items()}


def check_nothing_leaked(folder: Path, said: dict[str, Outcome]) -> None:
    """No secret in what was written or printed, no link to one, no traceback, nothing forged."""
    secrets = [(folder / name).read_bytes() for name in ("secret.png", "secret.txt", "secret.npy")]
    hidden = [*secrets, *map(base64.b64encode, secrets)]
    for path in (folder / "written").rglob("*"):
        assert not path.is_symlink(), path
        content = path.read_bytes() if path.is_file() else b""
        assert not any(secret in content for secret in hidden), path
        if path.suffix == ".html":
            targets = re.findall(rb'(?:src|href)="([^"]*)"', content)
            assert not [t for t in targets if b"secret" in t or b"passwd" in t], path
            assert b"<script>alert" not in content
        if path.suffix == ".png":
            assert SECRET not in {color for _, color in colors(path)}, path
    for name, done in said.items():
        assert "Traceback" not in done.err, (name, done.err)
        assert done.err.count("error: ") == (done.code == 1), (name, done.err)


def colors(path: Path) -> list[Any]:
    with Image.open(path) as opened:
        return opened.convert("RGB").getcolors(2**24) or []


@pytest.mark.slow
@pytest.mark.parametrize("name", [*FIELDS, *FILES])
def test_what_does_not_fit_is_named_and_left_out(
    featviz: CLI, places: tuple[Path, Path], name: str
) -> None:
    """The other image is shown by all commands; merge alone refuses."""
    root, good = places
    if name in FIELDS:
        at, value, words = FIELDS[name]
        manifest(at, value)(root)
    else:
        attack, words = FILES[name]
        attack(root)
    said = outcomes(featviz, root, good)
    check_nothing_leaked(root.parent, said)
    codes = {"report": 0, "single": 0, "compare": 0, "sheet": 0, "diff": 4, "merge": 1}
    assert {n: done.code for n, done in said.items()} == codes, said
    for command in ("report", "single", "sheet", "diff"):
        assert "cat.jpg" in said[command].err and words in said[command].err, said[command].err
    assert words in said["merge"].err and not (root.parent / "written" / "merged").exists()
    page = (root.parent / "written" / "report" / "index.html").read_text()
    assert "dog.jpg" in page and "1 complete of 2, 1 incomplete" in page


@pytest.mark.parametrize("name", RECORDS)
def test_a_run_json_that_does_not_fit_refuses_the_run(
    featviz: CLI, places: tuple[Path, Path], name: str
) -> None:
    """With one line that names the field, its value and what was expected."""
    root, good = places
    attack, words = RECORDS[name]
    attack(root)
    said = outcomes(featviz, root, good)
    check_nothing_leaked(root.parent, said)
    for command, done in said.items():
        assert done.code == 1 and words in done.err, (command, done)


def test_a_link_for_an_image_is_not_followed(featviz: CLI, places: tuple[Path, Path]) -> None:
    """Not even to an image that is whole; a loop of links ends."""
    root, good = places
    linked("cat.jpg", "good/cat.jpg")(root)
    (root / "again").symlink_to(root)
    said = outcomes(featviz, root, good)
    check_nothing_leaked(root.parent, said)
    assert "its folder is a symbolic link, which is not followed" in said["report"].err
    assert said["merge"].code == 3 and not (root.parent / "written/merged/cat.jpg").exists()


def test_an_image_that_is_there_twice(places: tuple[Path, Path]) -> None:
    """Neither hides the other: the second is named."""
    root, _ = places
    named_twice(root)
    run = read.read_run(root)
    assert run.images["dog.jpg"].folder == "aaa.jpg"
    assert run.left_out["dog.jpg"].endswith(
        'image.path is "dog.jpg", expected another than in aaa.jpg'
    )


def test_deep_folders_end(places: tuple[Path, Path]) -> None:
    """However deep they are, no recursion does; what is not looked at is no image."""
    root, _ = places
    deep = root
    for _n in range(150):
        deep = deep / "d"
    deep.mkdir(parents=True)
    (deep / "manifest.json").write_text("{}")
    assert list(read.read_run(root).images) == ["cat.jpg", "dog.jpg"]


def test_a_link_that_takes_a_pictures_place_is_not_merged(
    featviz: CLI, places: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the reading and the linking: what was open is what is merged."""
    root, _ = places
    path = root / "cat.jpg" / "001_conv1" / "output.png"
    real, before = os.link, path.read_bytes()

    def late(source: Path, target: Path, **options: Any) -> None:
        if Path(source) == path:
            path.unlink()
            path.symlink_to(root.parent / "secret.png")
        real(source, target, **options)

    monkeypatch.setattr(os, "link", late)
    assert featviz("merge", root, "--out", root.parent / "merged").code == 0
    merged = root.parent / "merged" / "cat.jpg" / "001_conv1" / "output.png"
    assert not merged.is_symlink() and merged.read_bytes() == before


@pytest.mark.parametrize("name", AUDITS)
@pytest.mark.parametrize("given", [True, False])
def test_an_audit_that_does_not_fit(
    featviz: CLI, places: tuple[Path, Path], name: str, given: bool
) -> None:
    """The run's own or one that is named: one line."""
    root, _ = places
    content, words = AUDITS[name]
    path = root.parent / "audit.json" if given else root / "audit.json"
    path.write_text(json.dumps(content))
    done = featviz("report", root, *(("--audit", path) if given else ()))
    assert done.code == 1 and "is no audit.json: " in done.err and words in done.err


def test_an_audit_behind_a_link_is_refused(featviz: CLI, places: tuple[Path, Path]) -> None:
    """What lies in the run may not point out of it."""
    root, _ = places
    (root / "audit.json").symlink_to(root.parent / "secret.txt")
    done = featviz("report", root)
    assert done.code == 1 and "is a symbolic link" in done.err and WORDS not in done.err


@pytest.mark.parametrize("name", TENSORS)
def test_a_tensor_that_is_none_leaves_its_image_out(
    featviz: CLI, places: tuple[Path, Path], name: str
) -> None:
    """It is neither unpickled nor evaluated, and named by diff, which alone reads it."""
    root, good = places
    for where in (root, good):
        manifest("captures.0.tensor", "001_conv1/output.npy")(where)
        raw("001_conv1/output.npy", npy(np.zeros((1, 6, 4, 5), "<f4")))(where)
    assert featviz("diff", good, root).code == 0
    raw("001_conv1/output.npy", TENSORS[name])(root)
    done = featviz("diff", good, root)
    assert done.code == 4 and "only in BASE: image cat.jpg (incomplete)" in done.out
    assert "cat.jpg/001_conv1/output.npy cannot be read: " in done.err
