"""Small models, pictures and ways to run the command line, for all tests."""

from __future__ import annotations

import atexit
import functools
import gc
import hashlib
import logging
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from PIL import Image
from platformdirs import user_cache_dir
from runs import SMALL, make_photos
from torch import nn

from featviz import cli
from featviz.run import workers

# as in the background of a script
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

ROOT = Path(__file__).parent.parent
SCENES = ROOT / "sample_images" / "scenes"
DIGITS = ROOT / "sample_images" / "digits"
DIGITS_MODEL = ROOT / "configs" / "digits_cnn.pth"

os.environ.setdefault("NUMBA_CACHE_DIR", user_cache_dir("featviz", appauthor=False))
"""Commands that get a home folder of their own need not compile the loops over values
anew."""

_MEMORY = Path("/dev/shm")
"""Linux's file system in memory."""


def _write_into_memory() -> None:
    """Have temporary folders made in memory, where it has room: tests make and remove
    tens of thousands of small files, which took a disk a third of their time."""
    if "TMPDIR" in os.environ or not os.access(_MEMORY, os.W_OK):
        return
    # compiled code is loaded from temporary folders, too
    may_execute = not os.statvfs(_MEMORY).f_flag & os.ST_NOEXEC
    if may_execute and shutil.disk_usage(_MEMORY).free > 4 * 2**30:
        os.environ["TMPDIR"] = str(_MEMORY)
        tempfile.tempdir = None  # it is looked up anew


_write_into_memory()

torch.set_num_threads(int(os.environ.setdefault("OMP_NUM_THREADS", "1")))
"""Of two workers on two cores each would wait for the other's threads; here and in
commands."""


def _seed_the_processor_alone() -> None:
    """torch notes each seed for accelerators that may be used later, with the stack of
    the call, which takes longer than a small network."""
    for device in (torch.cuda, torch.xpu, torch.mtia):
        if not device.is_available():
            device.manual_seed_all = lambda seed: None


_seed_the_processor_alone()

msgspec.structs.fields = functools.cache(msgspec.structs.fields)
"""A command asks for the fields of its options once or twice, and these tests run
thousands of commands."""

_version_of = metadata.version


@functools.cache
def _version_on(search_path: tuple[str, ...], package: str) -> str:
    return _version_of(package)


metadata.version = lambda package: _version_on(tuple(sys.path), package)
"""A run notes the versions of torch and torchvision, which are parsed anew each time."""


def _let_torch_propagate() -> None:
    """pytest puts its handlers on each logger that does not propagate, six times a test,
    and torch has more than fifty of them; what they log reaches these handlers on the
    root, too."""
    for logger in logging.root.manager.loggerDict.values():
        if isinstance(logger, logging.Logger):
            logger.propagate = True


_let_torch_propagate()


def pytest_make_parametrize_id(val: object, argname: str) -> str | None:
    """Bytes give no names: archives hold the time, and all processes must call a test
    the same."""
    return argname if isinstance(val, bytes) else None


LONGEST = {
    "test_budget.py",
    "test_cold_start.py",
    "test_portable.py",
    "test_trial.py",
    "test_workers.py",
}
"""Files with a test of five seconds."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """They come first: at the end one worker would wait for the other."""
    items.sort(key=lambda item: item.path.name not in LONGEST)


# else libraries of torch report leaks at the end
atexit.register(gc.unfreeze)
# a report would have what is imported searched again
gc.unfreeze = lambda: None


@pytest.fixture(scope="module", autouse=True)
def _libraries_are_no_garbage() -> None:
    """The collector leaves alone what is imported by now, half a million objects: it took
    an eighth of the time of these tests. Nor do forked processes copy what it would look
    at."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _all_as_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A test begins in a folder of its own, and leaves the process as it was. One fixture
    does it all: thousands of tests wait for it."""
    # what a clone holds (`featviz-audit`, say) is beside no test
    monkeypatch.chdir(tmp_path)
    # the folder of somebody's network stays on the search path while the process lives:
    # each import and each look for a version would go through those of all tests
    monkeypatch.setattr(sys, "path", list(sys.path))
    # Ultralytics replaces these at its import, and its own `open` says more of a broken
    # image than Pillow's
    monkeypatch.setattr(Image, "open", Image.open)
    monkeypatch.setattr(torch, "save", torch.save)
    # a fork of this process takes longer than some small images
    monkeypatch.setattr(workers, "usable_cores", lambda: 1)
    yield
    # a command line run in this process logs to the stderr of its own test only
    logger = logging.getLogger("featviz")
    logger.handlers = []
    logger.propagate = True
    if logger.level != logging.NOTSET:  # else all loggers forget what they are to log
        logger.setLevel(logging.NOTSET)


@dataclass(frozen=True)
class Outcome:
    """What a command line gave."""

    code: int
    out: str
    err: str


Run = Callable[..., Outcome]
"""Runs a command line: the fixture `featviz`."""


@pytest.fixture
def featviz(capfd: pytest.CaptureFixture[str]) -> Run:
    """Run a command line in this process, through the error boundary; captures the
    streams."""

    def invoke(*arguments: object) -> Outcome:
        capfd.readouterr()
        code = cli.guarded([str(argument) for argument in arguments])
        streams = capfd.readouterr()
        return Outcome(code, streams.out, streams.err)

    return invoke


@pytest.fixture
def shell() -> Run:
    """Run `python -m featviz.cli`-like commands in a process of their own."""

    def invoke(
        *arguments: object, stdin: bytes = b"", cwd: Path | None = None
    ) -> Outcome:
        code = "from featviz.cli import main; main()"
        done = subprocess.run(
            [sys.executable, "-c", code, *map(str, arguments)],
            input=stdin,
            capture_output=True,
            cwd=cwd,
            env={**os.environ, "COLUMNS": "200"},
            check=False,
        )
        return Outcome(done.returncode, done.stdout.decode(), done.stderr.decode())

    return invoke


@pytest.fixture
def tiny() -> nn.Module:
    """Convolution, in-place ReLU, pooling, linear: three channels in, five classes out."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 4, 3, padding=1),
        nn.ReLU(inplace=True),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(4, 5),
    ).eval()


@pytest.fixture
def tiny_file(tiny: nn.Module, tmp_path: Path) -> Path:
    """The tiny model, saved whole."""
    path = tmp_path / "tiny.pth"
    torch.save(tiny, path)
    return path


@pytest.fixture
def picture(tmp_path: Path) -> Path:
    """A small RGB picture with structure, 24 × 20."""
    y, x = np.mgrid[0:20, 0:24]
    pixels = np.stack([x * 10, y * 12, (x + y) * 5], axis=-1).astype(np.uint8)
    path = tmp_path / "picture.png"
    Image.fromarray(pixels).save(path)
    return path


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    """A folder of two pictures."""
    return make_photos(tmp_path / "photos", 2)


@pytest.fixture
def draw(featviz: Callable[..., Outcome], tiny_file: Path, photos: Path) -> Run:
    """`featviz run` of the tiny model on the photos into a folder, with more options."""
    return lambda out, *more: featviz(
        "run", tiny_file, photos, *SMALL, "--out", out, *more
    )


@pytest.fixture(scope="session")
def drawn_once(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of runs that tests copy: nothing in a run directory tells when and where
    it was drawn."""
    return tmp_path_factory.mktemp("drawn")


@pytest.fixture
def drawn(draw: Run, tiny_file: Path, photos: Path, drawn_once: Path) -> Path:
    """A run of the tiny model on the photos, to be copied; drawn once for all tests with
    these photos."""
    digest = hashlib.sha256(tiny_file.read_bytes())
    for path in sorted(photos.rglob("*.png")):
        digest.update(path.relative_to(photos).as_posix().encode())
        digest.update(path.read_bytes())
    run = drawn_once / digest.hexdigest()
    if not run.exists():
        assert draw(run).code == 0
    return run


@pytest.fixture
def ran(drawn: Path, tmp_path: Path) -> Path:
    """The directory of a run of the tiny model on two pictures."""
    return shutil.copytree(drawn, tmp_path / "out")


@pytest.fixture
def undisturbed(drawn: Path, tmp_path: Path) -> Path:
    """A run that was not interrupted."""
    return shutil.copytree(drawn, tmp_path / "undisturbed")


@pytest.fixture
def two_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two worker processes divide the images of a command, as on a machine of two cores;
    without this they do where `--jobs` says so."""
    monkeypatch.setattr(workers, "usable_cores", lambda: 2)


@pytest.fixture
def one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Images are drawn in this process, where a test can look on."""
    monkeypatch.setattr(workers, "can_fork", lambda: False)


@pytest.fixture
def at_image(
    one_process: None, monkeypatch: pytest.MonkeyPatch
) -> Callable[[str, Callable[[], object]], None]:
    """Have something happen once, before an image goes through the model, in this
    process."""
    from featviz.run.draw import Drawing, DrawnJob, ImageWriter

    events: dict[str, Callable[[], object]] = {}
    real = Drawing.show

    def show(self: Drawing, jobs: Sequence[DrawnJob]) -> ImageWriter:
        events.pop(jobs[0].sample.name, lambda: None)()
        return real(self, jobs)

    monkeypatch.setattr(Drawing, "show", show)
    return events.__setitem__


@pytest.fixture
def messages(caplog: pytest.LogCaptureFixture) -> Iterator[pytest.LogCaptureFixture]:
    """What featviz logs, also after a command line has set the logger up for itself."""
    logger = logging.getLogger("featviz")
    before = logger.propagate
    logger.propagate = True
    yield caplog
    logger.propagate = before


@pytest.fixture(scope="module")
def ray_cluster() -> Iterator[None]:
    """Ray on this machine; tests in this process draw with one thread, as its actors
    do. All tests take this one: a process that has known a Ray with tokens gives a Ray
    without them no answers.

    It asks for nothing beyond this machine: no home to keep a token in, no other
    address, little shared memory. Where it does not start all the same (no loopback,
    say), the tests skip with what it said."""
    ray = pytest.importorskip("ray", reason="featviz.ray needs Ray")
    threads = torch.get_num_threads()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_AUTH_MODE", "disabled")
        with tempfile.TemporaryDirectory(prefix="ray") as folder:
            try:
                ray.init(
                    "local",
                    num_cpus=2,
                    object_store_memory=100 * 2**20,
                    include_dashboard=False,
                    log_to_driver=False,
                    configure_logging=False,
                    _node_ip_address="127.0.0.1",
                    _temp_dir=folder,
                )
            except Exception as error:
                ray.shutdown()
                pytest.skip(
                    f"Ray does not start on this machine: {type(error).__name__}:"
                    f" {error}"
                )
            torch.set_num_threads(1)
            yield
            ray.shutdown()
            torch.set_num_threads(threads)
