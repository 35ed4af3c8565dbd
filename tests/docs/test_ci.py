"""The CI files in docs/ci: their featviz commands run as they stand, and gate what they
say."""

from __future__ import annotations

import re
import shlex
import shutil
from pathlib import Path

import pytest
import torch
from conftest import ROOT, Run
from runs import complete, make_photos, tree
from torch import nn

FILES = sorted((ROOT / "docs" / "ci").glob("*.yml"))
GATED = [ROOT / "docs" / "ci" / name for name in ("github.yml", "gitlab.yml")]


def commands(path: Path) -> list[list[str]]:
    """The featviz commands of a CI file, in order."""
    pattern = r"^\s*(?:- |run: )?featviz (.+)$"
    lines = re.findall(pattern, path.read_text(), re.MULTILINE)
    return [shlex.split(line) for line in lines]


def make_model(path: Path, seed: int = 0, value: float | None = None) -> None:
    """Two channels, both alive on noise; or one of them with a value of its own as
    weights."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Conv2d(3, 2, 3), nn.ReLU())
    nn.init.constant_(model[0].bias, 1.0)
    if value is not None:
        nn.init.constant_(model[0].weight[0], value)
    path.parent.mkdir(exist_ok=True)
    torch.save(model, path)


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What the files expect: a model, images, and a checkout of the base branch."""
    make_photos(tmp_path / "fixtures", 4, (32, 32))
    make_model(tmp_path / "model.pth")
    shutil.copytree(tmp_path, tmp_path / "base")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_the_files_are_found() -> None:
    """Each has commands, and together they use these."""
    used = {arguments[0] for path in FILES for arguments in commands(path)}
    assert used == {"run", "audit", "diff", "report", "merge"}
    assert len(FILES) == 3
    assert [len(commands(path)) for path in GATED] == [5, 5]


@pytest.mark.slow
@pytest.mark.parametrize("path", GATED, ids=lambda path: path.stem)
def test_a_branch_that_changes_nothing_passes(
    path: Path, featviz: Run, repository: Path
) -> None:
    """All commands end with 0, and what the artifacts name is there."""
    for arguments in commands(path):
        done = featviz(*arguments)
        assert done.code == 0, (arguments, done.err)
    for name in ("report.html", "maps", "audit", "diff", "audit.xml", "diff.xml"):
        assert name in path.read_text()
        assert (repository / name).exists()
    assert len(complete(repository / "maps")) == 4


@pytest.mark.slow
def test_a_branch_that_changes_the_model_is_held(
    featviz: Run, repository: Path
) -> None:
    """Weights of NaN break the audit; the rest still runs."""
    make_model(repository / "model.pth", value=float("nan"))
    done = {name: featviz(name, *rest).code for name, *rest in commands(GATED[0])}
    assert done == {"run": 0, "audit": 4, "diff": 0, "report": 0}
    assert (repository / "report.html").is_file()


@pytest.mark.slow
def test_a_new_training_passes_and_a_missing_layer_does_not(
    featviz: Run, repository: Path
) -> None:
    """Other weights change all maps, which is no fault; a layer less is one."""
    make_model(repository / "model.pth", seed=1)
    steps = commands(GATED[0])
    done = {name: featviz(name, *rest) for name, *rest in steps}
    assert [step.code for step in done.values()] == [0, 0, 0, 0]
    assert "2 of 2 channels differ" in done["diff"].out
    deeper = nn.Sequential(nn.Conv2d(3, 2, 3), nn.ReLU(), nn.Conv2d(2, 2, 3))
    torch.save(deeper, repository / "base" / "model.pth")
    _, _, draw_base, compare, _ = steps
    assert featviz(*draw_base, "--overwrite").code == 0
    missing = featviz(*compare, "--overwrite")
    assert missing.code == 4
    assert "only in BASE: layer 2" in missing.out


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_featviz_is_installed_from_the_clone(path: Path) -> None:
    """Each job that calls featviz installs the submodule, and fetches it first: the name on
    PyPI is not ours."""
    text = path.read_text()
    installs = re.findall(r"pip install (\S+)", text)
    assert set(installs) == {"torch", "./tools/featviz"}
    fetched = len(re.findall(r"submodules: true|GIT_SUBMODULE_STRATEGY", text))
    assert fetched == installs.count("./tools/featviz")


@pytest.mark.slow
def test_a_matrix_gives_what_one_job_gives(featviz: Run, repository: Path) -> None:
    """The shards of all jobs, joined, are the tree of a single run."""
    shard, join, report = commands(ROOT / "docs" / "ci" / "github-matrix.yml")
    line = " ".join(shard)
    for index in "1234":
        done = featviz(*line.replace("${{ matrix.part }}", index).split())
        assert done.code == 0, done.err
    assert featviz(*join).code == 0
    single = ("run", "model.pth", "fixtures", "--layers", "Conv2d", "--out", "single")
    assert featviz(*single).code == 0
    assert tree(repository / "maps") == tree(repository / "single")
    assert featviz(*report).code == 0
