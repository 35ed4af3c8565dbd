"""Any division of the images gives the same: batches, shards, processes."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import forked
import pytest
from conftest import Outcome
from runs import tree

from featviz.rundir import EXEMPLARS_FILE

from .conftest import PLAIN

Run = Callable[..., Outcome]
LAYERS = ("--layers", "Conv2d,ReLU,Linear", "--top", "4")


def look(featviz: Run, net_file: Path, noise: Path, out: Path, *more: object) -> Path:
    """Exemplars of the network of whole numbers."""
    done = featviz("exemplars", f"{net_file}:make", noise, *LAYERS, *PLAIN, "--out", out, *more)
    assert done.code in (0, 3), done.err
    return out


@pytest.fixture
def shards(featviz: Run, net_file: Path, noise: Path, tmp_path: Path) -> list[Path]:
    """Three parts of the images, one of which is broken."""
    (noise / "dog" / "03.png").write_bytes(b"no picture")
    numbers = (1, 2, 3)
    return [
        look(featviz, net_file, noise, tmp_path / f"p{n}", "--shard", f"{n}/3") for n in numbers
    ]


@pytest.mark.parametrize("more", [(), ("--per-class",), ("--by", "mean")])
def test_batches_of_any_size_give_the_same_bytes(
    more: tuple[str, ...], featviz: Run, net_file: Path, noise: Path, tmp_path: Path
) -> None:
    """1, 4, and more than there are images; every file is equal."""
    sizes = (1, 4, 50)
    trees = [
        tree(look(featviz, net_file, noise, tmp_path / str(n), "--batch-size", n, *more))
        for n in sizes
    ]
    assert trees[0] == trees[1] == trees[2] and len(trees[0]) > 20


def test_merged_shards_are_the_whole(
    featviz: Run, net_file: Path, noise: Path, shards: list[Path], tmp_path: Path
) -> None:
    """In any order: each file is that of one process over all images, byte for byte, and the
    failure is there."""
    one = look(featviz, net_file, noise, tmp_path / "one")
    second, first, third = shards
    done = featviz("merge", first, third, second, "--out", tmp_path / "whole")
    assert done.code == 3, done.err
    assert "exemplars of 12 images" in done.err
    assert tree(tmp_path / "whole") == tree(one)
    done = featviz("merge", *shards, "--out", tmp_path / "whole", "--overwrite", "--json")
    assert json.loads(done.out) == json.loads((one / EXEMPLARS_FILE).read_text())


def test_a_share_without_images_is_a_part_too(
    featviz: Run, net_file: Path, noise: Path, tmp_path: Path
) -> None:
    """More shards than images: the empty ones merge like the others."""
    photos = [noise / "cat" / "01.png", noise / "cat" / "02.png"]
    parts = []
    for n in (1, 2, 3):
        out = tmp_path / f"p{n}"
        done = featviz(
            "exemplars", f"{net_file}:make", *photos, *LAYERS, *PLAIN, "--shard", f"{n}/3",
            "--out", out,
        )  # fmt: skip
        assert done.code == 0, done.err
        parts.append(out)
    featviz("exemplars", f"{net_file}:make", *photos, *LAYERS, *PLAIN, "--out", tmp_path / "one")
    assert featviz("merge", *parts, "--out", tmp_path / "whole").code == 0
    assert tree(tmp_path / "whole") == tree(tmp_path / "one")


@pytest.mark.slow
def test_a_team_finds_what_one_process_does(net_file: Path, noise: Path, tmp_path: Path) -> None:
    """Three processes look at their shares of the images; the first writes the same files, and
    prints the table."""
    base = ["exemplars", f"{net_file}:make", noise, *LAYERS, *PLAIN, "--out"]
    one = forked.command(tmp_path / "alone", *base, tmp_path / "one").ended()
    team = forked.ended(forked.team(tmp_path / "said", *base, tmp_path / "team", count=3))
    assert [done.code for done in (one, *team)] == [0, 0, 0, 0], team
    assert [done.out.count("conv1") for done in (one, *team)] == [2, 2, 0, 0]
    assert tree(tmp_path / "one") == tree(tmp_path / "team")


def edited(part: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change a part's exemplars.json."""
    content = json.loads((part / EXEMPLARS_FILE).read_text())
    change(content)
    (part / EXEMPLARS_FILE).write_text(json.dumps(content))


def test_parts_must_make_a_whole(featviz: Run, shards: list[Path], tmp_path: Path) -> None:
    """A missing part, one that is there twice, one of another model, a whole: each is refused with
    a line that says so, and nothing is written."""
    out = tmp_path / "whole"
    first, second, third = shards
    done = featviz("merge", first, third, "--out", out)
    assert done.code == 2 and "of 3 parts these are missing: 2" in done.err
    done = featviz("merge", first, first, third, "--out", out)
    assert done.code == 2 and "part 1 of 3 is there twice" in done.err
    edited(second, lambda content: content["options"].update(size=[9, 9]))
    done = featviz("merge", *shards, "--out", out)
    assert done.code == 1 and "are not parts of one whole: options differs" in done.err
    edited(second, lambda content: content.update(shard=None))
    done = featviz("merge", *shards, "--out", out)
    assert done.code == 2 and "these exemplars are not parts of one whole" in done.err
    assert not out.exists()


def first_channel(content: dict[str, Any]) -> dict[str, Any]:
    channel: dict[str, Any] = content["layers"][0]["channels"][0]
    return channel


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda c: c["options"].update(by="median"), "neither max nor mean"),
        pytest.param(
            lambda c: c["options"].update(top=10**9),
            "options.top is not 1 to 1000",
            marks=pytest.mark.slow,
        ),
        (lambda c: first_channel(c).update(file="../../secret.png"), "no name of a channel's"),
        pytest.param(
            lambda c: first_channel(c).update(file=None), "has 4 exemplars", marks=pytest.mark.slow
        ),
        pytest.param(
            lambda c: c["layers"][0].update(sheet="/etc/passwd"),
            "no name of a sheet",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            lambda c: c["layers"][0].update(channels=3), "channels", marks=pytest.mark.slow
        ),
        pytest.param(
            lambda c: c.update(schema_version=99), "schema version 99", marks=pytest.mark.slow
        ),
        pytest.param(lambda c: c["images"].update(total=-1), "total", marks=pytest.mark.slow),
    ],
)
def test_a_part_that_somebody_else_wrote(
    change: Callable[[dict[str, Any]], object],
    words: str,
    featviz: Run,
    shards: list[Path],
    tmp_path: Path,
) -> None:
    """What does not fit is one line that names the file, and nothing is written."""
    edited(shards[1], change)
    done = featviz("merge", *shards, "--out", tmp_path / "whole")
    assert done.code == 1 and words in done.err and "p2/exemplars.json" in done.err
    assert "Traceback" not in done.err and not (tmp_path / "whole").exists()


def test_a_picture_that_is_none(featviz: Run, shards: list[Path], tmp_path: Path) -> None:
    """A broken picture, one of another size, and a link to one are refused by name."""
    picture = shards[0] / "001_conv1" / "output" / "c00000.png"
    whole = picture.read_bytes()
    sheet = (shards[0] / "001_conv1" / "output.png").read_bytes()
    for content in (b"no picture", whole[: len(whole) // 2], sheet):
        picture.write_bytes(content)
        done = featviz("merge", *shards, "--out", tmp_path / "whole")
        assert done.code == 1 and "001_conv1/output/c00000.png cannot be read" in done.err
    (tmp_path / "elsewhere.png").write_bytes(whole)
    picture.unlink()
    picture.symlink_to(tmp_path / "elsewhere.png")
    assert featviz("merge", *shards, "--out", tmp_path / "whole").code == 1
    assert not (tmp_path / "whole").exists()
