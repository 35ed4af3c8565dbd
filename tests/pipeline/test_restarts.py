"""What becomes of a run when one of its processes dies."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import forked
import pytest
import torch
from conftest import Outcome
from runs import check_whole, complete, make_photos, packed_tree, run_json, tree
from teams import SLOW, torchrun
from torch.distributed import HashStore

from featviz import pipeline
from featviz.errors import StoreError
from featviz.models.load import ModelOptions
from featviz.pipeline.options import RunOptions
from featviz.pipeline.processes import World
from featviz.records import DrawOptions, ImageResult

Run = Callable[..., Outcome]


@pytest.fixture
def base(tmp_path: Path) -> list[object]:
    """A run of 24 images through a slow model, one of which cannot be read."""
    photos = make_photos(tmp_path / "photos", 24)
    (photos / "02.png").write_bytes(b"no picture")
    (tmp_path / "slow.py").write_text(SLOW)
    model = f"{tmp_path / 'slow.py'}:Slow"
    return ["run", model, photos, "--layers", "Conv2d", "--size", "16"]


@pytest.fixture
def single(base: list[object], featviz: Run, tmp_path: Path) -> Path:
    """The same run in one process, with as many threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    assert featviz(*base, "--out", tmp_path / "single").code == 3
    torch.set_num_threads(before)
    return tmp_path / "single"


@pytest.mark.slow
def test_started_again_a_team_goes_on(
    base: list[object], single: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`torchrun --max-restarts`: a process is killed, and without --resume the tree becomes that of
    one run; images of before the death are kept."""
    for name, value in {"PAUSE": "0.1", "DIE_RANK": "1", "DIE_AT": "5"}.items():
        monkeypatch.setenv(name, value)
    with torchrun(*base, "--out", tmp_path / "out", restarts=1) as process:
        err = process.communicate()[1]
    assert "were complete before" in err and "local_rank: 1" in err, err
    assert tree(tmp_path / "out") == tree(single)
    assert not list(tmp_path.glob(".*"))


class Attempts:
    """What torchrun starts again, here in this process: each attempt knows what the ones before
    have noted for it."""

    def __init__(self, model: Path, photos: Path) -> None:
        self.model, self.photos, self.lasting = model, photos, HashStore()

    def __call__(self, dies_at: str | None = None, **options: object) -> list[str]:
        """One attempt; the names of the images that it has kept."""
        kept = []

        def seen(image: ImageResult, total: int) -> None:
            if image.image == dies_at:
                raise StoreError("died")
            kept.extend([image.image] if image.kept else [])

        drawn = RunOptions(layers="Conv2d,ReLU", **options)  # type: ignore[arg-type]
        team = World(0, 1, HashStore(), self.lasting)
        model = ModelOptions(str(self.model))
        pipeline.run(model, [str(self.photos)], drawn, seen, team=team)
        return kept


@pytest.fixture
def attempts(tiny_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Attempts:
    """Of a run of six images; torchrun would start it again twice."""
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "2")
    return Attempts(tiny_file, make_photos(tmp_path / "photos", 6))


@pytest.mark.slow
def test_what_is_to_replace_a_run_goes_on_where_it_was(attempts: Attempts, tmp_path: Path) -> None:
    """--overwrite: until the second attempt is through the earlier run stays, and then a third one
    finds all of its images."""
    out = tmp_path / "out"
    attempts(out=out)
    whole, attempts.lasting = tree(out), HashStore()
    with pytest.raises(StoreError, match="died"):
        attempts("01.png", out=out, overwrite=True, draw=DrawOptions(cmap="viridis"))
    assert tree(out) == whole
    again = {"out": out, "overwrite": True, "draw": DrawOptions(cmap="viridis")}
    assert {"00.png", "01.png"} <= set(attempts(**again))
    assert attempts(**again) == [f"0{n}.png" for n in range(6)]
    attempts.lasting = HashStore()
    assert attempts(**{**again, "out": tmp_path / "new"}) == []
    assert tree(out) == tree(tmp_path / "new") != whole and not list(tmp_path.glob(".*"))


def test_an_archive_is_packed_when_nobody_starts_the_team_again(
    attempts: Attempts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Until then its folder stays; the last attempt packs what there is, whole or not."""
    attempts(archive=tmp_path / "whole.zip")
    attempts.lasting = HashStore()
    archive = tmp_path / "x.zip"
    with pytest.raises(StoreError, match="died"):
        attempts("01.png", archive=archive)
    assert not archive.exists()
    assert {"00.png", "01.png"} <= set(attempts(archive=archive))
    assert packed_tree(archive) == packed_tree(tmp_path / "whole.zip")
    attempts.lasting = HashStore()
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "2")
    with pytest.raises(StoreError, match="died"):
        attempts("01.png", archive=tmp_path / "last.zip")
    assert "run.json" in packed_tree(tmp_path / "last.zip")


def test_a_refusal_is_one_after_a_restart_too(attempts: Attempts, tmp_path: Path) -> None:
    """Another job's run in the folder: what has begun nothing goes on with nothing."""
    attempts(out=tmp_path / "out")
    attempts.lasting = HashStore()
    for _ in range(2):
        with pytest.raises(StoreError, match="holds the same run, 6 images complete"):
            attempts(out=tmp_path / "out")


@pytest.mark.slow
@pytest.mark.parametrize("dies", [0, 2])
def test_the_others_do_the_work_of_one_that_is_killed(
    dies: int, featviz: Run, base: list[object], single: Path, tmp_path: Path
) -> None:
    """Of four without torchrun: the three end with exit code 1 and one line; run.json tells what is
    complete, what has failed, and that no more than what the dead one had taken is missing (all
    that is left, where it kept the store); --resume makes the tree of one run."""
    out = tmp_path / "out"
    variables = {"PAUSE": "0.1", "DIE_RANK": str(dies), "DIE_AT": "3"}
    team = forked.team(tmp_path / "said", *base, "--out", out, count=4, variables=variables)
    done = forked.ended(team)
    assert done.pop(dies).code == -9 and [outcome.code for outcome in done] == [1, 1, 1], done
    living = [outcome.err for outcome in done]
    assert all(err.count("error: another process of this run has ended") == 1 for err in living)
    assert not any("Traceback" in err for err in living)
    check_whole(out)
    images, failures = run_json(out)["images"], run_json(out)["failures"]
    assert images["complete"] == complete(out)
    assert len(images["complete"]) + len(images["missing"]) + len(failures) == 24
    if dies:
        assert len(images["missing"]) <= 3 and len(failures) == ("02.png" not in images["missing"])
    assert featviz(*base, "--out", out, "--resume").code == 3
    assert tree(out) == tree(single)
