"""`featviz merge`: parts of a run become what one run would have written."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
from conftest import Outcome
from PIL import Image
from runs import tree

from featviz.rundir import verify as story
from featviz.rundir.write import RunDirectory

CLI = Callable[..., Outcome]
Run = Callable[..., Path]


@pytest.fixture
def photos(tmp_path: Path) -> list[Path]:
    """Five pictures, two in a folder of their own."""
    found = []
    for seed, name in enumerate(
        ("a.png", "b.png", "inner/c.png", "inner/d.png", "z.png")
    ):
        path = tmp_path / "photos" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        pixels = np.random.default_rng(seed).integers(0, 256, (20, 24, 3), np.uint8)
        Image.fromarray(pixels).save(path)
        found.append(path)
    return found


@pytest.fixture
def run(featviz: CLI, tiny_file: Path, tmp_path: Path, drawn_once: Path) -> Run:
    """A run of the tiny model on some images; each is drawn once."""

    def make(
        name: str, images: Sequence[Path], *options: object, code: int = 0
    ) -> Path:
        shown = [(image.name, image.read_bytes()) for image in images]
        out = drawn_once.with_name(f"part-{hash((*shown, *options))}")
        if not out.exists():
            base = ("--size", "32", "--layers", "Conv2d,ReLU", "--tensors", "npy", "-q")
            done = featviz("run", tiny_file, *images, *base, "--out", out, *options)
            assert done.code == code, done.err
        return shutil.copytree(out, tmp_path / name)

    return make


def test_parts_become_the_unsplit_run(
    featviz: CLI, run: Run, photos: list[Path], tmp_path: Path
) -> None:
    """Every file, run.json among them, to the byte: a folder's images in parts of any
    lengths and order, some in two of them."""
    whole = run("whole", photos)
    made = [
        run(f"part{part}", [photos[int(n)] for n in part])
        for part in ("34", "012", "2")
    ]
    before = [tree(part) for part in made]
    done = featviz("merge", *made, "--out", tmp_path / "merged")
    assert (done.code, done.out) == (0, "")
    assert tree(tmp_path / "merged") == tree(whole)
    assert [tree(part) for part in made] == before


def test_parts_of_other_runs_are_refused(
    featviz: CLI, run: Run, photos: list[Path], tmp_path: Path
) -> None:
    """The message names what differs; nothing is written."""
    one = run("one", photos[:2])
    two = run("two", photos[2:], "--normalize", "layer")
    done = featviz("merge", one, two, "--out", tmp_path / "merged")
    assert done.code == 1
    assert "are not parts of one run" in done.err
    assert "there --normalize auto, here --normalize layer" in done.err
    assert not (tmp_path / "merged").exists()


def test_an_image_in_several_parts(
    featviz: CLI, run: Run, photos: list[Path], tmp_path: Path
) -> None:
    """It is refused where its manifests are not the same."""
    one, two = run("one", photos[:3]), run("two", photos[2:])
    manifest = two / "c.png" / "manifest.json"
    manifest.write_text(
        manifest.read_text().replace('"nonfinite": 0', '"nonfinite": 1')
    )
    done = featviz("merge", one, two, "--out", tmp_path / "other")
    assert done.code == 1
    assert "c.png is not the same in " in done.err
    assert not (tmp_path / "other").exists()


def test_a_corrupt_picture_is_not_passed_on(
    featviz: CLI, run: Run, photos: list[Path], tmp_path: Path
) -> None:
    """A flipped bit, of which the size says nothing: the file is named, and nothing is
    written."""
    parts = [run("one", photos[:2]), run("two", photos[2:])]
    path = parts[1] / "d.png" / "001_0" / "output.png"
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    done = featviz("merge", *parts, "--out", tmp_path / "merged")
    assert done.code == 1 and "d.png/001_0/output.png has SHA-256" in done.err
    assert not (tmp_path / "merged").exists()


def test_what_one_part_lacks_is_taken_from_another(
    featviz: CLI, run: Run, photos: list[Path], tmp_path: Path
) -> None:
    """What has failed in one part, or is incomplete there; a part that was made again
    after a repair mends the whole."""
    whole, good = run("whole", photos), photos[4].read_bytes()
    photos[4].write_bytes(b"broken")
    parts = [run("one", photos[0:3]), run("two", photos[2:], code=3)]
    photos[4].write_bytes(good)
    parts.append(run("again", photos[4:]))
    (parts[0] / "c.png" / "manifest.json").unlink()
    done = featviz("merge", *parts, "--out", tmp_path / "merged")
    assert done.code == 0 and "incomplete" not in done.err
    assert tree(tmp_path / "merged") == tree(whole)


def test_incomplete_images_are_named_and_left_out(
    featviz: CLI, run: Run, photos: list[Path], tmp_path: Path
) -> None:
    """Their files do not come into the result, and the exit code says that some are
    missing."""
    parts = [run("one", photos[:2]), run("two", photos[2:])]
    (parts[0] / "a.png" / "manifest.json").unlink()
    (parts[1] / "z.png" / ".output.png.part").write_bytes(b"half")
    done = featviz("merge", *parts, "--out", tmp_path / "merged", "--json")
    assert done.code == 3
    assert "a.png is incomplete" in done.err
    document = json.loads(done.out)
    assert (document["total"], document["incomplete"]) == (5, ["a.png"])
    assert document["images"] == ["b.png", "c.png", "d.png", "z.png"]
    assert not (tmp_path / "merged" / "a.png").exists()
    assert not list((tmp_path / "merged").rglob(".*"))


def test_the_result_appears_whole_or_not_at_all(
    run: Run, photos: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A failure at the end leaves no folder, and an earlier result as it was."""
    parts = [run("one", photos[:2]), run("two", photos[2:])]
    earlier = run("merged", photos[:1])
    before, names = tree(earlier), sorted(path.name for path in tmp_path.iterdir())

    def fail(self: RunDirectory, content: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(RunDirectory, "write_run", fail)
    with pytest.raises(KeyboardInterrupt):
        story.merge(parts, earlier, overwrite=True)
    assert tree(earlier) == before
    assert sorted(path.name for path in tmp_path.iterdir()) == names


def test_the_output_folder(
    featviz: CLI, run: Run, photos: list[Path], tmp_path: Path
) -> None:
    """A part is never written into, named twice, or taken from what is no run."""
    parts = [run("one", photos[:2]), run("two", photos[2:])]
    assert featviz("merge", *parts, "--out", parts[0] / "inside").code == 2
    done = featviz("merge", parts[0], parts[0], "--out", tmp_path / "merged")
    assert "are one folder" in done.err
    (tmp_path / "other").mkdir()
    assert featviz("merge", tmp_path / "other", "--out", tmp_path / "new").code == 1
    assert featviz("merge").code == 2
