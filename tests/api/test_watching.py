"""A model is watched while it is trained: what is written, and that the training is as
without."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import forked
import numpy as np
import pytest
import torch
from networks import Net
from PIL import Image
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import featviz as fv
from featviz.errors import FeatvizError, StoreError, UsageError
from featviz.rundir.read import read_run
from featviz.rundir.studies import read_steps
from featviz.rundir.verify import verify

from .training import SHOWN, digits, moody_network, network, same, train


def watch(
    model: nn.Module, out: Path, steps: int, every: int = 2, **options: Any
) -> list[Any]:
    """Train while a watcher looks at all convolutions and ReLUs."""
    with fv.Watcher(model, SHOWN, "Conv2d,ReLU", every, out, **options) as watcher:
        return train(model, steps, watcher.step)


def test_a_series_has_a_whole_run_for_each_step(tmp_path: Path) -> None:
    """Before the first step, at each multiple of `every`, and at the last step; verify
    finds nothing wrong."""
    watch(network(), tmp_path / "s", 3)
    steps = read_steps(tmp_path / "s")
    assert list(steps) == [0, 2, 3]
    for step, path in steps.items():
        run = read_run(path)
        assert len(run.images) == 2
        assert not run.left_out
        assert run.record["model"]["step"] == step
    assert not any(run["faults"] for run in verify(list(steps.values())))
    assert [
        path.name for path in (tmp_path / "s").iterdir() if path.name[0] == "."
    ] == []


def test_a_step_shows_the_weights_of_that_step(tmp_path: Path) -> None:
    """Its pictures and numbers are those of `featviz.run` on a copy made then, and of
    torch."""
    model = network()
    watch(model, tmp_path / "s", 4)
    plain = fv.run(model, SHOWN, "Conv2d,ReLU", tmp_path / "plain")
    for image in plain.images:
        for maps in image.captures:
            seen = tmp_path / "s" / "step-000004" / image.folder / maps.row.file
            assert np.array_equal(np.asarray(Image.open(seen)), np.asarray(maps.image))
    difference = fv.diff(tmp_path / "s" / "step-000000", tmp_path / "s" / "step-000004")
    assert not difference.equal
    assert fv.diff(tmp_path / "s" / "step-000004", plain).equal


@pytest.mark.slow
@pytest.mark.parametrize(
    ("wrap", "cast"),
    [
        (lambda model: model, True),
        (lambda model: torch.compile(model, backend="eager"), False),
    ],
)
def test_the_training_is_as_if_nobody_watched(
    tmp_path: Path, wrap: Callable[[nn.Module], nn.Module], cast: bool
) -> None:
    """Weights, running means, gradients, modes, flags, hooks and random numbers, bit by
    bit."""
    alone = train(wrap(moody_network()), 6, cast=cast)
    model = wrap(moody_network())
    with fv.Watcher(model, SHOWN, "Conv2d,ReLU", 2, tmp_path / "s") as watcher:
        watched = train(model, 6, watcher.step, cast=cast)
    assert same(alone, watched)
    rows = read_run(tmp_path / "s" / "step-000006").images["00-5.png"].captures.values()
    assert [row.layer for row in rows] == ["0.0", "0.2", "1", "3"]


def test_a_failing_forward_pass_leaves_the_model_as_it_was(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A step that cannot be drawn is a warning, and the training goes on to the same
    weights."""

    broken: list[bool] = []

    def way(self: Any, x: torch.Tensor) -> Any:
        out = self.inside(x)
        if broken and not self.training:
            raise ValueError("out of order")
        return out

    alone = train(Net(way, inside=moody_network()), 4)
    model = Net(way, inside=moody_network())
    with fv.Watcher(model, SHOWN, "Conv2d", 2, tmp_path / "s") as watcher:
        broken.append(True)
        watched = train(model, 4, watcher.step)
    assert same(alone, watched)
    assert list(read_steps(tmp_path / "s")) == [0]
    assert "step 2 is not drawn: no image went through" in caplog.text
    assert sorted(path.name for path in (tmp_path / "s").iterdir()) == ["step-000000"]


def one_of_two(out: str) -> None:
    """What each process of a team does: trains unwatched, then watched, and tells how
    it went."""
    torch.distributed.init_process_group("gloo")
    rank = torch.distributed.get_rank()
    alone = train(DistributedDataParallel(moody_network()), 4)
    model = DistributedDataParallel(moody_network())
    paths = []
    with fv.Watcher(model, SHOWN, "Conv2d", 2, Path(out) / str(rank)) as watcher:
        watched = train(model, 4, lambda: paths.append(watcher.step()))
    steps = [path and path.name for path in paths]
    print(same(alone, watched), steps, (Path(out) / str(rank)).exists(), flush=True)
    torch.distributed.destroy_process_group()


@pytest.mark.slow
def test_of_two_processes_the_first_writes(tmp_path: Path) -> None:
    """The other one trains on, writes nothing, and both have the weights of an
    unwatched run."""
    common = forked.meeting(2)
    team = [
        forked.fork(
            tmp_path / f"said{rank}", one_of_two, str(tmp_path), **common, RANK=rank
        )
        for rank in range(2)
    ]
    first, second = forked.ended(team)
    assert first.out == "True [None, 'step-000002', None, 'step-000004'] True\n", (
        first.err
    )
    assert second.out == "True [None, None, None, None] False\n", second.err


def test_health_is_the_audits_finding(tmp_path: Path) -> None:
    """A convolution whose channel a ReLU never lets through is dead, one of NaN is not
    finite."""
    model = network()
    with torch.no_grad():
        model[0].weight[1], model[0].bias[1] = 0.0, -1.0  # type: ignore[index, union-attr, operator]
    with fv.Watcher(model, SHOWN, "Conv2d,ReLU", 1, tmp_path / "s") as watcher:
        with torch.no_grad():
            model[3].bias[2] = float("nan")  # type: ignore[index, union-attr, operator]
        watcher.step()
    audits = [
        json.loads((p / "audit.json").read_text())
        for p in read_steps(tmp_path / "s").values()
    ]
    findings = [
        {row["label"]: row["findings"] for row in audit["layers"]} for audit in audits
    ]
    assert 1 in findings[0]["0"]["dead"]
    assert 1 in findings[0]["1"]["dead"]
    assert [row["3"]["nonfinite"] for row in findings] == [[], [2]]
    same_audit = fv.audit(model, SHOWN, "0,1").document
    rows = {row["label"]: row["findings"] for row in same_audit["layers"]}
    assert rows["0"] == findings[1]["0"]
    assert rows["1"] == findings[1]["1"]


def test_functions_have_no_health(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Of functions alone no audit is written, which a warning says once."""
    net = Net(lambda self, x: torch.relu(self.conv(x)), conv=nn.Conv2d(1, 4, 3))
    with fv.Watcher(net, SHOWN, "fn:relu", 1, tmp_path / "s", size=12) as watcher:
        watcher.step()
    steps = read_steps(tmp_path / "s").values()
    assert [len(read_run(step).images) for step in steps] == [2, 2]
    said = "are judged of modules, and all layers are functions: fn:relu"
    assert caplog.text.count(said) == 1
    assert not list((tmp_path / "s").rglob("audit.json"))


def test_tensorboard_has_training_steps(tmp_path: Path) -> None:
    """TensorBoard's own reader finds a picture, a histogram and dead channels at each
    step."""
    event_accumulator = pytest.importorskip(
        "tensorboard.backend.event_processing.event_accumulator"
    )
    watch(network(), tmp_path / "s", 4, tensorboard=tmp_path / "tb")
    read = event_accumulator.EventAccumulator(str(tmp_path / "tb")).Reload()
    tags = read.Tags()
    assert "output/0/00-5.png" in tags["images"]
    assert "dead_channels/1" in tags["scalars"]
    assert [event.step for event in read.Images("output/0/00-5.png")] == [0, 2, 4]
    assert [event.step for event in read.Scalars("dead_channels/1")] == [0, 2, 4]
    assert len(list((tmp_path / "tb").iterdir())) == 1
    audit = json.loads((tmp_path / "s" / "step-000004" / "audit.json").read_text())
    dead = next(
        len(row["findings"]["dead"]) for row in audit["layers"] if row["label"] == "1"
    )
    assert read.Scalars("dead_channels/1")[-1].value == dead


def test_a_second_process_goes_on_from_a_checkpoint(tmp_path: Path) -> None:
    """Steps behind the checkpoint go when the first new one is written; the others
    stay."""
    watch(network(), tmp_path / "s", 6)
    kept = (tmp_path / "s" / "step-000002" / "run.json").stat().st_mtime_ns
    model = network()
    nobody = pytest.raises(UsageError, match="nobody says from which step")
    with (
        fv.Watcher(network(), SHOWN, "ReLU", 2, tmp_path / "s", resume=True) as watcher,
        nobody,
    ):
        watcher.step()
    with fv.Watcher(
        model, SHOWN, "ReLU", 2, tmp_path / "s", resume=True, start=3
    ) as watcher:
        assert list(read_steps(tmp_path / "s")) == [0, 2, 4, 6]
        assert watcher.step().name == "step-000004"  # type: ignore[union-attr]
    assert list(read_steps(tmp_path / "s")) == [0, 2, 4]
    assert (tmp_path / "s" / "step-000002" / "run.json").stat().st_mtime_ns == kept
    assert read_run(tmp_path / "s" / "step-000004").record["layers"] == ["1", "4", "7"]


def test_a_taken_folder_is_refused(tmp_path: Path) -> None:
    """Another series, a run, and anything else; `overwrite` replaces a series only."""
    watch(network(), tmp_path / "s", 4)
    with pytest.raises(StoreError, match="holds a series up to step 4") as caught:
        watch(network(), tmp_path / "s", 2)
    assert "resume=True" in str(caught.value.hint)
    note = tmp_path / "s" / "step-000004" / "notes.txt"
    note.write_text("mine")
    with pytest.raises(StoreError, match=r"did not write: notes\.txt"):
        watch(network(), tmp_path / "s", 2, overwrite=True)
    assert note.read_text() == "mine"
    assert list(read_steps(tmp_path / "s")) == [0, 2, 4]
    note.unlink()
    watch(network(), tmp_path / "s", 1, overwrite=True)
    assert list(read_steps(tmp_path / "s")) == [0, 1]
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").write_text("")
    for options in ({}, {"overwrite": True}, {"resume": True}):
        with pytest.raises(StoreError, match=r"holds no series: thesis\.tex"):
            watch(network(), tmp_path / "mine", 1, **options)
    assert [path.name for path in (tmp_path / "mine").iterdir()] == ["thesis.tex"]


def test_an_earlier_series_stays_until_a_step_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A full disk at the first step is an error, and nothing of the earlier series is
    gone."""
    watch(network(), tmp_path / "s", 4)
    before = {p: p.read_bytes() for p in (tmp_path / "s").rglob("*") if p.is_file()}

    def full(self: Any, content: Any) -> None:
        raise StoreError("no space left on device")

    monkeypatch.setattr("featviz.rundir.write.RunDirectory.write_run", full)
    with pytest.raises(StoreError, match="no space left"):
        watch(network(), tmp_path / "s", 2, overwrite=True)
    assert before == {
        p: p.read_bytes() for p in (tmp_path / "s").rglob("*") if p.is_file()
    }


class FullyShardedDataParallel(nn.Module):
    """What torch's own class is called, whose parts one process cannot run."""


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"every": 0}, "every=0: expected an integer ≥ 1"),
        (
            {"overwrite": True, "resume": True},
            "resume and overwrite exclude each other",
        ),
        ({"cmapp": "x"}, "cmapp"),
        ({"layers": "Conv9d"}, "no layer matches .*'Conv9d'"),
        ({"images": []}, "there are no images"),
        ({"images": {"x": torch.zeros(1, 1, 28, 28)}}, "no tensors by the names"),
        ({"model": 3}, "'int', not a module"),
        (
            {"model": nn.Sequential(FullyShardedDataParallel())},
            r"divided among processes \(FSDP\)",
        ),
    ],
)
def test_bad_values_are_refused_before_the_training(
    tmp_path: Path, given: dict[str, Any], words: str
) -> None:
    """With the value and what it takes; nothing is written."""
    options: dict[str, Any] = {
        "model": network(),
        "images": SHOWN,
        "out": tmp_path / "s",
        **given,
    }
    with pytest.raises(FeatvizError, match=words):
        fv.Watcher(**options)
    assert not (tmp_path / "s").exists()


def test_numbers_of_steps_are_whole(tmp_path: Path) -> None:
    """numpy's and torch's integers are taken; other values are refused in one line, and
    the training can go on. The first number at or behind each multiple is drawn,
    once."""
    with fv.Watcher(network(), SHOWN, "ReLU", np.int64(10), tmp_path / "s") as watcher:
        for number in (2.0, "two", torch.tensor(2.0), True, -1):
            with pytest.raises(UsageError, match=r"^step=.+: expected an integer ≥ 0"):
                watcher.step(number)  # type: ignore[arg-type]
        numbers = (7, np.int64(12), torch.tensor(12), 19, 45, 50)
        written = [watcher.step(number) for number in numbers]  # type: ignore[arg-type]
        with pytest.raises(UsageError, match="step 3 comes behind step 50"):
            watcher.step(3)
    assert watcher.steps == [0, 12, 45, 50]
    assert {type(step) for step in watcher.steps} == {int}
    assert [path and path.name[-2:] for path in written] == [
        None,
        "12",
        None,
        None,
        "45",
        "50",
    ]


def test_the_last_step_is_drawn_once(tmp_path: Path) -> None:
    """With the weights at the end; not where it was due, where nothing was trained, or
    again. A closed watcher writes nothing."""
    model = network()
    with fv.Watcher(model, SHOWN, "Conv2d", 10, tmp_path / "s") as watcher:
        watcher.step(3)
        with torch.no_grad():
            model[0].bias += 1  # type: ignore[operator]
    watcher.close()
    assert watcher.steps == list(read_steps(tmp_path / "s")) == [0, 3]
    assert watcher.step(20) is None
    assert list(read_steps(tmp_path / "s")) == [0, 3]
    assert repr(watcher) == f"<Watcher of {tmp_path / 's'}: step 20, 2 written>"
    first, last = (
        read_run(path).images["00-5.png"]
        for path in read_steps(tmp_path / "s").values()
    )
    means = [next(iter(image.stats().values()))[:, 2] for image in (first, last)]
    assert np.allclose(means[1] - means[0], 1, atol=1e-4)


def test_the_last_step_of_a_training_that_fails_is_not_drawn(tmp_path: Path) -> None:
    """What is there stays."""
    with (
        pytest.raises(ZeroDivisionError),
        fv.Watcher(network(), SHOWN, "Conv2d", 2, tmp_path / "s") as watcher,
    ):
        watcher.step()
        raise ZeroDivisionError
    assert list(read_steps(tmp_path / "s")) == [0]


def test_a_transform_feeds_the_model(tmp_path: Path) -> None:
    """The caller's own transform feeds it, and is gone while the model is trained."""
    model = network().bfloat16()
    pixels = digits()[0].bfloat16()

    def fed(image: Any) -> torch.Tensor:
        return pixels[0]

    with fv.Watcher(
        model, SHOWN, "Conv2d", 1, tmp_path / "s", transform=fed
    ) as watcher:
        assert all(not module._forward_pre_hooks for module in model.modules())
        watcher.step()
    stats = read_run(tmp_path / "s" / "step-000001").images["00-5.png"].stats()
    expected = model[0](pixels[:1]).float().amax((0, 2, 3)).detach().numpy()
    assert np.allclose(next(iter(stats.values()))[:, 1], expected)
