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
from pixels import assert_same_pixels
from runs import tree
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import featviz as fv
from featviz.errors import FeatvizError, StoreError, UsageError
from featviz.rundir.folder import hidden_name
from featviz.rundir.read import read_run
from featviz.rundir.studies import check_series, read_steps
from featviz.rundir.verify import verify

from .training import SHOWN, digits, moody_network, network, same, train

pytestmark = pytest.mark.medium


LAYERS = "Conv2d,ReLU"


@pytest.fixture
def series(tmp_path: Path) -> Path:
    """The folder that a watcher writes a series into."""
    return tmp_path / "series"


def watch(model: nn.Module, series: Path, steps: int, **options: Any) -> None:
    """Train while a watcher draws every second step."""
    with fv.Watcher(model, SHOWN, LAYERS, 2, series, **options) as watcher:
        train(model, steps, watcher.step)


def steps_of(series: Path) -> list[int]:
    """The steps that a series has."""
    return list(read_steps(series))


def names_in(folder: Path) -> list[str]:
    """The names of all that lies in a folder, hidden or not."""
    return sorted(path.name for path in folder.iterdir())


def test_a_series_has_a_whole_run_for_each_step(series: Path) -> None:
    """A run is drawn before the first step, at each multiple of `every` and at the last
    step; verify finds nothing wrong, and nothing half done is left."""
    watch(network(), series, 3)

    steps = read_steps(series)
    assert list(steps) == [0, 2, 3]
    for step, path in steps.items():
        run = read_run(path)
        assert len(run.images) == 2
        assert run.record["model"]["step"] == step
    assert not any(run["faults"] for run in verify(list(steps.values())))
    assert not list(series.glob(".*"))


def test_a_step_shows_the_weights_of_that_step(series: Path, tmp_path: Path) -> None:
    """The last step has the pictures and numbers of `featviz.run` after the training,
    and differs from the first."""
    model = network()
    watch(model, series, 2)

    plain = fv.run(model, SHOWN, LAYERS, tmp_path / "plain")

    first = series / "step-000000"
    last = series / "step-000002"
    for image in plain.images:
        for maps in image.captures:
            assert_same_pixels(last / image.folder / maps.row.file, maps.image)
    assert fv.diff(last, plain).equal
    assert not fv.diff(first, last).equal


def compiled(model: nn.Module) -> Any:
    """The model behind torch.compile."""
    return torch.compile(model, backend="eager")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("wrap", "cast"),
    [
        pytest.param(lambda model: model, True, id="autocast"),
        pytest.param(compiled, False, id="compiled"),
    ],
)
def test_the_training_is_as_if_nobody_watched(
    series: Path, wrap: Callable[[nn.Module], nn.Module], cast: bool
) -> None:
    """Weights, running means, gradients, modes, flags, hooks and random numbers are
    equal, bit by bit."""
    alone = train(wrap(moody_network()), 4, cast=cast)
    model = wrap(moody_network())

    with fv.Watcher(model, SHOWN, LAYERS, 2, series) as watcher:
        watched = train(model, 4, watcher.step, cast=cast)

    assert same(alone, watched)
    captures = read_run(series / "step-000004").images["00-5.png"].captures
    layers = [row.layer for row in captures.values()]
    assert layers == ["0.0", "0.2", "1", "3"]


class Breakable(nn.Module):
    """The moody network, which fails in eval mode once it is broken."""

    def __init__(self) -> None:
        super().__init__()
        self.inside = moody_network()
        self.is_broken = False

    def forward(self, x: Tensor) -> Tensor:
        """The scores."""
        scores: Tensor = self.inside(x)
        if self.is_broken and not self.training:
            raise ValueError("out of order")
        return scores


def test_a_failing_forward_pass_leaves_the_model_as_it_was(
    series: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A step that cannot be drawn is a warning, and the training goes on to the same
    weights."""
    alone = train(Breakable(), 4)
    model = Breakable()

    with fv.Watcher(model, SHOWN, "Conv2d", 2, series) as watcher:
        model.is_broken = True
        watched = train(model, 4, watcher.step)

    assert same(alone, watched)
    assert steps_of(series) == [0]
    assert "step 2 is not drawn: no image went through" in caplog.text
    assert names_in(series) == ["step-000000"]


def train_in_a_team(folder: str) -> None:
    """Train unwatched, then watched, as one process of two; print whether the weights
    are the same, which steps were written, and whether there is a folder."""
    torch.distributed.init_process_group("gloo")
    series = Path(folder, str(torch.distributed.get_rank()))
    alone = train(DistributedDataParallel(moody_network()), 4)
    model = DistributedDataParallel(moody_network())
    paths: list[Path | None] = []

    with fv.Watcher(model, SHOWN, "Conv2d", 2, series) as watcher:
        watched = train(model, 4, lambda: paths.append(watcher.step()))

    names = [path and path.name for path in paths]
    print(same(alone, watched), names, series.exists(), flush=True)
    torch.distributed.destroy_process_group()


@pytest.mark.slow
def test_of_two_processes_the_first_writes(tmp_path: Path) -> None:
    """The other one trains on, writes nothing, and both have the weights of an
    unwatched run."""
    variables = forked.meeting(2)
    folder = str(tmp_path)
    team = []
    for rank in range(2):
        streams = tmp_path / f"streams{rank}"
        process = forked.fork(streams, train_in_a_team, folder, **variables, RANK=rank)
        team.append(process)

    first, second = forked.ended(team)

    written = "[None, 'step-000002', None, 'step-000004']"
    assert first.out == f"True {written} True\n", first.err
    assert second.out == "True [None, None, None, None] False\n", second.err


def findings_of(audit: Any) -> dict[str, dict[str, list[int]]]:
    """The findings of an audit, by layer."""
    return {row["label"]: row["findings"] for row in audit["layers"]}


def test_health_is_the_audits_finding(series: Path) -> None:
    """A convolution whose channel a ReLU never lets through is dead, one of NaN is not
    finite; `featviz.audit` says the same."""
    model = network()
    with torch.no_grad():
        model[0].weight[1] = 0.0
        model[0].bias[1] = -1.0

    with fv.Watcher(model, SHOWN, LAYERS, 1, series) as watcher:
        with torch.no_grad():
            model[3].bias[2] = float("nan")
        watcher.step()

    first, last = (
        findings_of(json.loads((path / "audit.json").read_text()))
        for path in read_steps(series).values()
    )
    assert 1 in first["0"]["dead"]
    assert 1 in first["1"]["dead"]
    assert first["3"]["nonfinite"] == []
    assert last["3"]["nonfinite"] == [2]
    audited = findings_of(fv.audit(model, SHOWN, "0,1").document)
    assert audited == {layer: last[layer] for layer in ("0", "1")}


def test_health_is_of_the_layers_that_are_drawn(series: Path) -> None:
    """Their names may hold what means something else in a pattern."""
    parts = {"c+": nn.Conv2d(1, 4, 3), "cc": nn.Conv2d(4, 4, 3)}
    net = Net(
        lambda self, x: self.parts["cc"](self.parts["c+"](x)),
        parts=nn.ModuleDict(parts),
    )

    with fv.Watcher(net, SHOWN, "*c+", 1, series, size=12):
        pass

    (step,) = read_steps(series).values()
    audit = json.loads((step / "audit.json").read_text())
    assert list(findings_of(audit)) == ["parts.c+"]


def test_functions_have_no_health(
    series: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Of functions alone no audit is written, which a warning says once."""
    net = Net(lambda self, x: torch.relu(self.conv(x)), conv=nn.Conv2d(1, 4, 3))

    with fv.Watcher(net, SHOWN, "fn:relu", 1, series, size=12) as watcher:
        watcher.step()

    steps = read_steps(series).values()
    assert [len(read_run(step).images) for step in steps] == [2, 2]
    warning = "are judged of modules, and all layers are functions: fn:relu"
    assert caplog.text.count(warning) == 1
    assert not list(series.rglob("audit.json"))


def test_tensorboard_has_training_steps(series: Path, tmp_path: Path) -> None:
    """TensorBoard's own reader finds a picture and the count of dead channels at each
    step, in one file of events."""
    event_accumulator = pytest.importorskip(
        "tensorboard.backend.event_processing.event_accumulator"
    )
    board = tmp_path / "board"

    watch(network(), series, 2, tensorboard=board)

    assert len(names_in(board)) == 1
    events = event_accumulator.EventAccumulator(str(board)).Reload()
    pictures = events.Images("output/0/00-5.png")
    assert [event.step for event in pictures] == [0, 2]
    dead_channels = events.Scalars("dead_channels/1")
    assert [event.step for event in dead_channels] == [0, 2]
    audit = json.loads((series / "step-000002" / "audit.json").read_text())
    assert dead_channels[-1].value == len(findings_of(audit)["1"]["dead"])


def test_calls_of_one_layer_have_curves_of_their_own(
    series: Path, tmp_path: Path
) -> None:
    """In TensorBoard each is called as in audit.json."""
    event_accumulator = pytest.importorskip(
        "tensorboard.backend.event_processing.event_accumulator"
    )
    torch.manual_seed(0)
    twice = Net(
        lambda self, x: self.relu(self.conv(self.relu(x - 2))),
        conv=nn.Conv2d(1, 2, 3),
        relu=nn.ReLU(),
    )
    board = tmp_path / "board"
    options = {"preset": "none", "tensorboard": board}

    with fv.Watcher(twice, SHOWN, "ReLU", 1, series, **options) as watcher:
        watcher.step()

    events = event_accumulator.EventAccumulator(str(board)).Reload()
    audit = json.loads((series / "step-000000" / "audit.json").read_text())
    findings = findings_of(audit)
    assert list(findings) == ["relu", "relu.call1"]
    for label, channels in findings.items():
        values = [event.value for event in events.Scalars(f"dead_channels/{label}")]
        assert values[-1] == len(channels["dead"])
    # the input minus two is nowhere above zero
    assert findings["relu"]["dead"] == [0]


class TestResuming:
    """A second process goes on with the series of a first."""

    @pytest.fixture
    def resumed(self, series: Path) -> Callable[..., fv.Watcher]:
        """A watcher of the ReLUs that goes on with a series of six steps."""
        watch(network(), series, 6)

        def resume(**options: Any) -> fv.Watcher:
            model = network()
            return fv.Watcher(model, SHOWN, "ReLU", 2, series, resume=True, **options)

        return resume

    def test_from_a_checkpoint(
        self, resumed: Callable[..., fv.Watcher], series: Path
    ) -> None:
        """Steps behind the checkpoint go when the first new one is written; the others
        stay."""
        earlier = series / "step-000002"
        before = (earlier / "run.json").stat().st_mtime_ns

        with resumed(start=3) as watcher:
            assert steps_of(series) == [0, 2, 4, 6]
            written = watcher.step()

        assert written == series / "step-000004"
        assert steps_of(series) == [0, 2, 4]
        assert (earlier / "run.json").stat().st_mtime_ns == before
        assert read_run(written).record["layers"] == ["1", "4", "7"]

    def test_from_a_step_that_nobody_says(
        self, resumed: Callable[..., fv.Watcher]
    ) -> None:
        """A watcher that is not told where the training goes on is not made."""
        with pytest.raises(UsageError, match="nobody says from which step"):
            resumed()


def test_a_series_is_not_overwritten_by_chance(series: Path) -> None:
    """Another series is refused with the option that continues it; `overwrite` replaces
    it, unless it has a file that featviz did not write."""
    watch(network(), series, 2)
    with pytest.raises(StoreError, match="holds a series up to step 2") as refused:
        watch(network(), series, 1)
    assert "resume=True" in str(refused.value.hint)

    note = series / "step-000002" / "notes.txt"
    note.write_text("mine")
    with pytest.raises(StoreError, match=r"did not write: notes\.txt"):
        watch(network(), series, 1, overwrite=True)
    assert note.read_text() == "mine"
    assert steps_of(series) == [0, 2]

    note.unlink()
    watch(network(), series, 1, overwrite=True)
    assert steps_of(series) == [0, 1]


@pytest.mark.parametrize("options", [{}, {"overwrite": True}, {"resume": True}])
def test_a_folder_without_a_series_is_refused(
    options: dict[str, Any], tmp_path: Path
) -> None:
    """Whatever option is set, somebody's own folder stays as it is."""
    folder = tmp_path / "mine"
    folder.mkdir()
    (folder / "thesis.tex").write_text("")

    with pytest.raises(StoreError, match=r"holds no series: thesis\.tex"):
        watch(network(), folder, 1, **options)

    assert names_in(folder) == ["thesis.tex"]


@pytest.mark.parametrize("board", ["", "tb", "tb/run"])
def test_a_series_may_begin_around_its_events(board: str, tmp_path: Path) -> None:
    """TensorBoard made their folder first, which may be that of the series."""
    events = tmp_path / board
    events.mkdir(parents=True, exist_ok=True)
    (events / "events.out.tfevents.1.host").write_bytes(b"")
    (tmp_path / hidden_name("step-000000")).mkdir()
    assert check_series(tmp_path, overwrite=False, resume=False, board=events) == []


def test_a_file_is_no_folder_of_a_series(tmp_path: Path) -> None:
    """It is refused before the training."""
    path = tmp_path / "mine"
    path.write_text("")
    with pytest.raises(StoreError, match="mine is a file, not a folder"):
        watch(network(), path, 1)


def test_an_earlier_series_stays_until_a_step_is_written(
    series: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A full disk at the first step is an error, and nothing of the earlier series is
    gone."""
    watch(network(), series, 2)
    before = tree(series)

    def fail(self: Any, content: Any) -> None:
        raise StoreError("no space left on device")

    monkeypatch.setattr("featviz.rundir.write.RunDirectory.write_run", fail)
    with pytest.raises(StoreError, match="no space left"):
        watch(network(), series, 1, overwrite=True)

    assert tree(series) == before


class FullyShardedDataParallel(nn.Module):
    """A module by the name of torch's own class, whose layers one process cannot run."""


@pytest.mark.parametrize(
    ("options", "message"),
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
    series: Path, options: dict[str, Any], message: str
) -> None:
    """The error has the value and what it takes; nothing is written."""
    good: dict[str, Any] = {"model": network(), "images": SHOWN, "out": series}
    with pytest.raises(FeatvizError, match=message):
        fv.Watcher(**{**good, **options})
    assert not series.exists()


@pytest.mark.parametrize("number", [2.0, "two", torch.tensor(2.0), True, -1])
def test_a_step_that_is_no_whole_number_is_refused(number: Any, series: Path) -> None:
    """The error is one line, and the training can go on."""
    with fv.Watcher(network(), SHOWN, "ReLU", 10, series) as watcher:
        with pytest.raises(UsageError, match=r"^step=.+: expected an integer ≥ 0"):
            watcher.step(number)
        watcher.step(1)
    assert watcher.steps == [0, 1]


def test_steps_may_be_skipped(series: Path) -> None:
    """The first number at or behind each multiple of `every` is drawn, once, also at the
    end; integers of numpy and torch are numbers, and none comes behind a later one."""
    numbers: list[Any] = [7, np.int64(12), torch.tensor(12), 19, 45, 50, 50]
    with fv.Watcher(network(), SHOWN, "ReLU", np.int64(10), series) as watcher:
        written = [watcher.step(number) for number in numbers]
        with pytest.raises(UsageError, match="step 3 comes behind step 50"):
            watcher.step(3)

    names = [path and path.name[-2:] for path in written]
    assert names == [None, "12", None, None, "45", "50", None]
    assert watcher.steps == [0, 12, 45, 50]
    assert {type(step) for step in watcher.steps} == {int}


def means_of(run_directory: Path) -> np.ndarray:
    """The means of the first layer's channels, of the first image."""
    stats = read_run(run_directory).images["00-5.png"].stats()
    first = next(iter(stats.values()))
    return first[:, 2]


def test_the_last_step_is_drawn_with_the_weights_at_the_end(series: Path) -> None:
    """A bias that grows by one after the last call of `step` moves the means by one."""
    model = network()
    with fv.Watcher(model, SHOWN, "Conv2d", 10, series) as watcher:
        watcher.step(3)
        with torch.no_grad():
            model[0].bias += 1

    assert watcher.steps == steps_of(series) == [0, 3]
    first, last = (means_of(path) for path in read_steps(series).values())
    np.testing.assert_allclose(last - first, 1, atol=1e-4)


def test_a_closed_watcher_writes_nothing(series: Path) -> None:
    """It may be closed twice, and later steps are only counted."""
    with fv.Watcher(network(), SHOWN, "Conv2d", 10, series) as watcher:
        watcher.step(3)
    watcher.close()

    assert watcher.step(20) is None

    assert steps_of(series) == [0, 3]
    assert repr(watcher) == f"<Watcher of {series}: step 20, 2 written>"


def open_below(folder: Path) -> list[Path]:
    """The files in a folder that this process has open."""
    opened = [path.resolve() for path in Path("/proc/self/fd").iterdir()]
    return [path for path in opened if path.is_relative_to(folder)]


@pytest.mark.medium
@pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="looks in /proc")
def test_a_closed_watcher_keeps_nothing(
    series: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Images in memory were in files until it ended, and events were written."""
    pytest.importorskip("tensorboard")
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(temporary))
    image = digits()[0][0]

    board = tmp_path / "board"

    with fv.Watcher(
        network(), image, "Conv2d", 2, series, tensorboard=board
    ) as watcher:
        assert list(temporary.iterdir())
        assert open_below(board)

    assert watcher.steps == [0]
    assert not list(temporary.iterdir())
    assert not open_below(board)


def test_an_image_that_fails_costs_no_step(series: Path, tmp_path: Path) -> None:
    """The others are drawn."""
    broken = tmp_path / "broken.png"
    broken.write_bytes(b"")
    with fv.Watcher(network(), [*SHOWN, broken], "Conv2d", 1, series) as watcher:
        watcher.step()
    assert steps_of(series) == [0, 1]
    assert list(read_run(series / "step-000001").failures) == ["broken.png"]


def test_to_go_on_without_a_series_is_to_begin(series: Path) -> None:
    """There is no step to be named."""
    watch(network(), series, 1, resume=True)
    assert steps_of(series) == [0, 1]


def test_the_last_step_of_a_training_that_fails_is_not_drawn(series: Path) -> None:
    """What is there stays."""
    watcher = fv.Watcher(network(), SHOWN, "Conv2d", 2, series)
    with pytest.raises(ZeroDivisionError), watcher:
        watcher.step()
        raise ZeroDivisionError
    assert steps_of(series) == [0]


def test_a_transform_feeds_the_model(series: Path) -> None:
    """The caller's own transform feeds it, and is gone while the model is trained."""
    model = network().bfloat16()
    pixels = digits()[0].bfloat16()

    def feed(image: Any) -> Tensor:
        return pixels[0]

    with fv.Watcher(model, SHOWN, "Conv2d", 1, series, transform=feed) as watcher:
        assert all(not module._forward_pre_hooks for module in model.modules())
        watcher.step()

    stats = read_run(series / "step-000001").images["00-5.png"].stats()
    maxima = next(iter(stats.values()))[:, 1]
    expected = model[0](pixels[:1]).float().amax((0, 2, 3))
    np.testing.assert_allclose(maxima, expected.detach(), rtol=1e-5)
