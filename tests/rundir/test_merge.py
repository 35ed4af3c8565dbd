"""`featviz merge`: parts of a run become what one run would have written."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from conftest import Run
from rundirs import Drawn, write_run
from runs import make_photos, refused, run_json, tree

from featviz.errors import CompareError, StoreError, UsageError
from featviz.rundir import verify as story
from featviz.rundir.write import RunDirectory

DrawPart = Callable[..., Path]


@pytest.fixture
def photos(tmp_path: Path) -> list[Path]:
    """Five pictures, two in a folder of their own."""
    paths = []
    for name, path in zip(
        ("a.png", "b.png", "inner/c.png", "inner/d.png", "z.png"),
        sorted(make_photos(tmp_path / "photos", 5).iterdir()),
        strict=True,
    ):
        target = tmp_path / "photos" / name
        target.parent.mkdir(exist_ok=True)
        paths.append(path.rename(target))
    return paths


@pytest.fixture
def draw_part(
    featviz: Run, tiny_file: Path, tmp_path: Path, drawn_once: Path
) -> DrawPart:
    """A run of the tiny model on some images in a folder; each is drawn once."""

    def draw_part(name: str, images: Sequence[Path], *options: str) -> Path:
        digest = hashlib.sha256(str(options).encode())
        for image in images:
            digest.update(image.name.encode() + image.read_bytes())
        out = drawn_once / f"part-{digest.hexdigest()}"
        if not out.exists():
            base = ("--size", "32", "--layers", "Conv2d,ReLU", "--tensors", "npy")
            done = featviz("run", tiny_file, *images, *base, "--out", out, *options)
            assert done.code in (0, 3), done.err
        return shutil.copytree(out, tmp_path / name)

    return draw_part


@pytest.fixture
def halves(draw_part: DrawPart, photos: list[Path]) -> tuple[Path, Path]:
    """The run in two parts."""
    return draw_part("first", photos[:2]), draw_part("second", photos[2:])


@pytest.fixture
def merged(tmp_path: Path) -> Path:
    """Where the result comes."""
    return tmp_path / "merged"


@pytest.mark.medium
def test_parts_become_the_unsplit_run(
    featviz: Run, draw_part: DrawPart, photos: list[Path], merged: Path
) -> None:
    """Every file, run.json among them, is that of one run, to the byte: the images of a
    folder may be in parts of any lengths and order, some in two of them."""
    slices = (slice(3, 5), slice(0, 3), slice(2, 3))
    runs = [draw_part(f"run-{n}", photos[images]) for n, images in enumerate(slices)]
    before = [tree(run) for run in runs]
    done = featviz("merge", *runs, "--out", merged)
    assert (done.code, done.out) == (0, "")
    assert tree(merged) == tree(draw_part("unsplit", photos))
    assert [tree(run) for run in runs] == before


@pytest.mark.medium
def test_parts_of_other_runs_are_refused(
    featviz: Run, draw_part: DrawPart, photos: list[Path], merged: Path
) -> None:
    """The message names what differs; nothing is written."""
    first = draw_part("first", photos[:2])
    second = draw_part("second", photos[2:], "--normalize", "layer")
    refused(
        featviz("merge", first, second, "--out", merged),
        1,
        "are not parts of one run",
        "there --normalize auto, here --normalize layer",
    )
    assert not merged.exists()


@pytest.mark.medium
def test_an_image_that_differs_between_parts_is_refused(
    featviz: Run, draw_part: DrawPart, photos: list[Path], merged: Path
) -> None:
    """Its manifests tell."""
    first = draw_part("first", photos[:3])
    second = draw_part("second", photos[2:])
    manifest = second / "c.png" / "manifest.json"
    changed = manifest.read_text().replace('"nonfinite": 0', '"nonfinite": 1')
    manifest.write_text(changed)
    done = featviz("merge", first, second, "--out", merged)
    refused(done, 1, "c.png is not the same in ")
    assert not merged.exists()


@pytest.mark.medium
def test_a_corrupt_picture_is_not_passed_on(
    featviz: Run, halves: tuple[Path, Path], merged: Path
) -> None:
    """A flipped bit, of which the size says nothing: the file is named with the digest
    that it has and the one that it had, and nothing is written."""
    path = halves[1] / "d.png" / "001_0" / "output.png"
    data = bytearray(path.read_bytes())
    written = hashlib.sha256(data).hexdigest()[:12]
    data[len(data) // 2] ^= 1
    changed = hashlib.sha256(data).hexdigest()[:12]
    path.write_bytes(data)
    done = featviz("merge", *halves, "--out", merged)
    digests = f"has SHA-256 {changed}…, not {written}…"
    refused(done, 1, f"d.png/001_0/output.png {digests}")
    assert not merged.exists()


@pytest.mark.medium
def test_what_one_part_lacks_is_taken_from_another(
    featviz: Run, draw_part: DrawPart, photos: list[Path], merged: Path
) -> None:
    """What is incomplete in one part may be complete in another; a part that was drawn
    again after a repair mends what has failed."""
    unsplit = draw_part("unsplit", photos)
    good = photos[4].read_bytes()
    photos[4].write_bytes(b"broken")
    first = draw_part("first", photos[:3])
    second = draw_part("second", photos[2:])
    photos[4].write_bytes(good)
    repaired = draw_part("repaired", photos[4:])
    (first / "c.png" / "manifest.json").unlink()
    done = featviz("merge", first, second, repaired, "--out", merged)
    assert done.code == 0
    assert "incomplete" not in done.err
    assert tree(merged) == tree(unsplit)


@pytest.mark.medium
def test_an_image_that_is_no_input_any_more_counts(
    featviz: Run, halves: tuple[Path, Path], merged: Path
) -> None:
    """A part that has more images than inputs takes nothing from the total."""
    first, _ = halves
    record = run_json(first)
    record["images"]["total"] = 1
    (first / "run.json").write_text(json.dumps(record))
    featviz("merge", *halves, "--out", merged)
    assert run_json(merged)["images"]["total"] == 5
    assert len(run_json(merged)["images"]["complete"]) == 5


@pytest.fixture
def parts(tmp_path: Path) -> list[Path]:
    """Two of one image each, which have one input more that they do not name."""
    roots = []
    for name in ("a-b/x.png", "a/x.png"):
        images = {"total": 2, "complete": [name]}
        root = tmp_path / name[:-6]
        roots.append(write_run(root, {name: [Drawn("relu")]}, images=images))
    return roots


def test_images_stand_folder_by_folder(parts: list[Path], merged: Path) -> None:
    """As those of one run over all of them."""
    assert story.merge(parts, merged)["images"] == ["a/x.png", "a-b/x.png"]


def test_a_part_has_one_name(parts: list[Path], merged: Path, tmp_path: Path) -> None:
    """A link to it is no other part."""
    link = tmp_path / "link"
    link.symlink_to(parts[0])
    with pytest.raises(UsageError, match=f"^{parts[0]} and {link} are one folder"):
        story.merge([*parts, link], merged)


def test_every_part_is_of_the_first_run(
    parts: list[Path], merged: Path, tmp_path: Path
) -> None:
    """Not the second one alone is asked."""
    other = write_run(tmp_path / "other", {"c.png": [Drawn("relu")]}, device="cuda")
    with pytest.raises(CompareError, match="other are not parts of one run"):
        story.merge([*parts, other], merged)


def test_a_result_that_cannot_be_written_is_refused_first(
    parts: list[Path], merged: Path
) -> None:
    """To read the parts may take long."""
    (parts[0] / "run.json").unlink()
    merged.mkdir()
    (merged / "thesis.tex").touch()
    with pytest.raises(StoreError, match="is not empty and holds no run"):
        story.merge(parts, merged)


def test_inputs_that_no_part_names_count(parts: list[Path], merged: Path) -> None:
    """They are missing."""
    assert story.merge(parts, merged)["total"] == 4


@pytest.mark.medium
def test_of_two_errors_that_of_the_first_part_is_told(
    featviz: Run, draw_part: DrawPart, photos: list[Path], merged: Path
) -> None:
    """An image that failed in both parts is one failure."""
    photos[4].write_bytes(b"broken")
    first = draw_part("first", [photos[0], photos[4]])
    photos[4].write_bytes(photos[1].read_bytes()[:60])
    second = draw_part("second", [photos[1], photos[4]])
    assert featviz("merge", first, second, "--out", merged).code == 3
    assert run_json(merged)["failures"] == run_json(first)["failures"]
    assert run_json(merged)["failures"] != run_json(second)["failures"]


@pytest.mark.medium
def test_incomplete_images_are_named_and_left_out(
    featviz: Run, halves: tuple[Path, Path], merged: Path
) -> None:
    """Their files do not come into the result, and the exit code says that some are
    missing."""
    first, second = halves
    (first / "a.png" / "manifest.json").unlink()
    (second / "z.png" / ".output.png.part").write_bytes(b"half")
    done = featviz("merge", first, second, "--out", merged, "--json")
    assert done.code == 3
    assert "a.png is incomplete" in done.err
    expected = {
        "total": 5,
        "incomplete": ["a.png"],
        "images": ["b.png", "c.png", "d.png", "z.png"],
    }
    assert expected.items() <= json.loads(done.out).items()
    assert not (merged / "a.png").exists()
    assert list(merged.rglob(".*")) == []


@pytest.mark.medium
def test_the_result_appears_at_once_or_not_at_all(
    halves: tuple[Path, Path],
    draw_part: DrawPart,
    photos: list[Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A failure at the end leaves no folder, and an earlier result as it was."""
    earlier = draw_part("merged", photos[:1])
    before = tree(tmp_path)

    def fail(self: RunDirectory, content: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(RunDirectory, "write_run", fail)
    with pytest.raises(KeyboardInterrupt):
        story.merge(halves, earlier, overwrite=True)
    assert tree(tmp_path) == before


def test_a_part_is_never_written_into(featviz: Run, halves: tuple[Path, Path]) -> None:
    """--out inside a part is a usage error."""
    refused(featviz("merge", *halves, "--out", halves[0] / "inside"), 2, "")


def test_a_part_is_named_once(
    featviz: Run, halves: tuple[Path, Path], merged: Path
) -> None:
    """Two that are one folder are refused."""
    first, _ = halves
    done = featviz("merge", first, first, "--out", merged)
    assert "are one folder" in done.err


def test_parts_are_runs(featviz: Run, tmp_path: Path, merged: Path) -> None:
    """A folder without one is refused, and at least one is needed."""
    (tmp_path / "other").mkdir()
    refused(featviz("merge", tmp_path / "other", "--out", merged), 1)
    assert featviz("merge").code == 2
