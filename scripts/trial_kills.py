"""Kill featviz at random moments, let it go on, and compare with what nobody has
disturbed.

    python scripts/trial_kills.py                                # 100 kills, 30 double starts
    python scripts/trial_kills.py --kills 12 --double-starts 3 --seed 18

Commands run in processes that are forked from this one, which has imported torch: a
trial takes a second. The seed is printed. Exit code 1 where anything differs; then the
folder of the trial stays. Needs the package tensorboard, and a system that forks."""

from __future__ import annotations

import argparse
import atexit
import gc
import os
import random
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import nn

from featviz import cli, report
from featviz.cli import report as report_command
from featviz.cli import run as run_command
from featviz.drawing import loops, tensorboard
from featviz.errors import StoreError
from featviz.run import dry_run
from featviz.run import run as pipeline
from featviz.rundir.image import read_image
from featviz.rundir.ownership import EVENTS
from featviz.rundir.read import image_folders
from featviz.rundir.verify import faults_of

IMPORTED = (pipeline, report, report_command, run_command, loops, dry_run)
"""What the forked processes would import first."""

SIGNALS = (signal.SIGKILL, signal.SIGTERM, signal.SIGHUP)
IMAGES = 10
LONGEST = 120
"""Seconds after which a process counts as one that hangs."""

Tree = dict[str, bytes]


def start(arguments: list[object], log: Path, **variables: object) -> int:
    """Begin `featviz ARGUMENTS` in a forked process, whose number this returns."""
    pid = os.fork()
    if pid:
        return pid
    code = 70
    # what is called at this process's end, not at that of the first one
    atexit._clear()
    try:
        os.environ.update({name: str(value) for name, value in variables.items()})
        out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(out, 1)
        os.dup2(out, 2)
        sys.argv = ["featviz", *map(str, arguments)]
        cli.main()
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 1
    except BaseException:
        traceback.print_exc()
    finally:
        with suppress(OSError, ValueError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def ended(pid: int) -> int:
    """Wait for a process; its exit code, or minus the signal that ended it."""
    limit = time.monotonic() + LONGEST
    while time.monotonic() < limit:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.002)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    raise AssertionError(f"a process hung for {LONGEST} s")


def send(pid: int, number: int) -> None:
    """Send a signal to a process that has not been waited for."""
    os.kill(pid, number)


def tree(folder: Path) -> Tree:
    """Every file of a folder, with its bytes."""
    paths = [path for path in sorted(folder.rglob("*")) if path.is_file()]
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in paths}


@dataclass
class Room:
    """A folder for one trial, and what is the same in all trials."""

    base: list[object]
    """`run MODEL IMAGES` with its options."""
    folder: Path
    dice: random.Random
    durations: dict[str, float]
    """Seconds that each kind takes undisturbed."""
    expected: dict[str, Tree] = field(default_factory=dict)
    posts: list[tuple[int, str]] = field(default_factory=list)
    number: int = signal.SIGKILL
    """The signal of this trial."""
    codes: list[int] = field(default_factory=list)
    """Exit codes of the processes that were killed."""
    kinds: Counter[str] = field(default_factory=Counter)
    """How often each kind of process of `side_by_side` was killed."""

    @property
    def out(self) -> Path:
        """Where the run is."""
        return self.folder / "out"

    def do(self, *arguments: object) -> None:
        """Run a command that nothing disturbs."""
        code = ended(start(list(arguments), self.folder / "log"))
        assert code == 0, f"exit code {code} of {arguments}"

    def kill(self, kind: str, *arguments: object) -> None:
        """Begin a command, and end it by the trial's signal at a random moment."""
        pid = start(list(arguments), self.folder / "log")
        time.sleep(self.dice.random() * self.durations[kind])
        send(pid, self.number)
        self.codes.append(ended(pid))
        assert self.codes[-1] in (0, 130, -self.number), f"exit code {self.codes[-1]}"

    def check_complete_images(self, root: Path) -> None:
        """What has a manifest is whole, at any moment."""
        for way, lacks in image_folders(root) if root.is_dir() else ():
            if lacks is None:
                faults = list(faults_of(read_image(root, way)))
                assert not faults, f"{way}: {faults}"

    def check(self, found: Tree, name: str = "run") -> None:
        """Whether a tree is as it is undisturbed, and nothing hidden is left beside it."""
        wanted = self.expected[name]
        differing = [n for n in sorted(found | wanted) if found.get(n) != wanted.get(n)]
        assert not differing, f"{len(differing)} files differ: {differing[:3]}"
        hidden = [
            path.name for path in self.folder.iterdir() if path.name.startswith(".")
        ]
        assert not hidden, f"left behind: {hidden}"


def new_run(room: Room) -> None:
    """`run`, then --resume."""
    room.kill("run", *room.base, "--out", room.out)
    room.check_complete_images(room.out)
    room.do(*room.base, "--out", room.out, "--resume")
    room.check(tree(room.out))


def resumed(room: Room) -> None:
    """--resume is killed as well, twice."""
    room.kill("run", *room.base, "--out", room.out)
    for _ in range(2):
        room.kill("run", *room.base, "--out", room.out, "--resume")
        room.check_complete_images(room.out)
    room.do(*room.base, "--out", room.out, "--resume")
    room.check(tree(room.out))


def replaced(room: Room) -> None:
    """--overwrite: until the new run is there, whole or stopped by a signal, the
    earlier one is."""
    room.do(*room.base, "--cmap", "viridis", "--out", room.out)
    room.kill("run", *room.base, "--out", room.out, "--overwrite")
    found = {
        name: data for name, data in tree(room.out).items() if name != ".featviz.lock"
    }
    moved = not room.out.exists() and any(room.folder.glob(".out.*.old"))
    if not moved and found != room.expected["other"]:
        room.check_complete_images(room.out)
    room.do(*room.base, "--out", room.out, "--overwrite")
    room.check(tree(room.out))


def reported(room: Room) -> None:
    """`report`, then once more; the run stays as it is."""
    shutil.copytree(room.folder.parent / "out", room.out)
    pages = room.folder / "pages"
    room.kill("report", "report", room.out, "--out", pages)
    room.do("report", room.out, "--out", pages)
    room.check(tree(pages), "report")
    room.check(tree(room.out))


def posted(room: Room) -> None:
    """--tensorboard, then --resume: no picture is there twice, and those of two images
    at most are missing, which were complete and not yet posted."""
    board = ["--tensorboard", room.folder / "board"]
    room.kill("tensorboard", *room.base, "--out", room.out, *board)
    room.do(*room.base, "--out", room.out, "--resume", *board)
    room.check(tree(room.out))
    found, posts = shown(room.folder / "board" / "out"), set(room.posts)
    images = {step for step, tag in posts - set(found) if not tag.startswith("kernel")}
    assert len(set(found)) == len(found) and posts >= set(found), (
        "pictures are there twice"
    )
    assert len(images) <= 2, f"the images {sorted(images)} are not posted"


def shown(folder: Path) -> list[tuple[int, str]]:
    """Step and tag of each picture in a folder of events."""
    from tensorboard.backend.event_processing.event_file_loader import EventFileLoader

    loaded = [
        event
        for path in folder.glob(f"{EVENTS}*")
        for event in EventFileLoader(str(path)).Load()
    ]
    values = [(event.step, value) for event in loaded for value in event.summary.value]
    kept = [
        (step, value.tag)
        for step, value in values
        if value.metadata.plugin_data.plugin_name == "images"
    ]
    return sorted(kept)


def one_of_three(room: Room) -> None:
    """One of three shards: the others end by themselves, then --resume in one."""
    arguments = [*room.base, "--out", room.out]
    three = {"WORLD_SIZE": 3}
    pids = [
        start(arguments, room.folder / "log", **three, RANK=rank) for rank in range(3)
    ]
    time.sleep(room.dice.random() * room.durations["three"])
    send(room.dice.choice(pids), room.number)
    codes = [ended(pid) for pid in pids]
    room.codes += codes
    assert set(codes) <= {0, 130, -room.number} and codes.count(0) >= 2, (
        f"exit codes {codes}"
    )
    room.check_complete_images(room.out)
    room.do(*room.base, "--out", room.out, "--resume")
    room.check(tree(room.out))


def side_by_side(room: Room) -> None:
    """A run with three worker processes, of which one dies, or the command itself:
    none of them stays behind."""
    arguments = [*room.base, "--jobs", "3", "--out", room.out]
    command = start(arguments, room.folder / "log")
    time.sleep(room.dice.random() * room.durations["run"])
    workers = children(command)
    number = room.number
    if workers and room.dice.random() < 0.5:
        number = signal.SIGKILL
        with suppress(ProcessLookupError):  # it has just ended by itself
            send(room.dice.choice(workers), number)
        room.kinds["worker"] += 1
    else:
        send(command, number)
        room.kinds["command with workers" if workers else "command"] += 1
    room.codes.append(ended(command))
    assert room.codes[-1] in (0, 130, -number), f"exit code {room.codes[-1]}"
    # a worker notices at its next image that nobody listens any more
    limit = time.monotonic() + LONGEST
    while any(map(is_alive, workers)):
        assert time.monotonic() < limit, f"still at work: {workers}"
        time.sleep(0.01)
    room.check_complete_images(room.out)
    room.do(*arguments, "--resume")
    room.check(tree(room.out))


def children(pid: int) -> list[int]:
    """The processes that a process has forked and not yet waited for (Linux)."""
    return [
        int(n) for n in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    ]


def is_alive(pid: int) -> bool:
    """Whether a process, which need not be a child of this one, is still at work."""
    try:
        status = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return status.rpartition(")")[2].split()[0] != "Z"


KILLED: tuple[Callable[[Room], None], ...] = (
    new_run,
    resumed,
    replaced,
    reported,
    posted,
    one_of_three,
)
if sys.platform == "linux":  # elsewhere one process draws all images
    KILLED = (*KILLED, side_by_side)


def started_twice(room: Room) -> None:
    """A second --resume at a random moment, some of the first ones killed meanwhile."""
    arguments = [*room.base, "--out", room.out, "--resume"]
    one = start(arguments, room.folder / "log")
    time.sleep(0.8 * room.dice.random() * room.durations["run"])
    other = start(arguments, room.folder / "refused")
    if room.dice.random() < 0.4:
        send(one, signal.SIGKILL)
    codes = [ended(one), ended(other)]
    room.codes.append(codes[1])
    assert tuple(codes) in {(0, 0), (0, 1), (-9, 0), (-9, 1)}, f"exit codes {codes}"
    said = (room.folder / "refused").read_text()
    assert codes[1] == 0 or f"is being written by process {one} on " in said, said
    room.check_complete_images(room.out)
    room.do(*arguments)
    room.check(tree(room.out))


def undisturbed(folder: Path) -> Room:
    """The trees to compare with, and how long each kind takes."""
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.ReLU()
    )
    torch.save(net.eval(), folder / "net.pth")
    (folder / "photos").mkdir()
    for index in range(IMAGES):
        pixels = np.random.default_rng(index).integers(0, 256, (48, 48, 3), np.uint8)
        Image.fromarray(pixels).save(folder / "photos" / f"{index:02d}.png")
    options = [
        "--layers",
        "Conv2d,ReLU",
        "--size",
        "48",
        "--preset",
        "none",
        "--jobs",
        "1",
    ]
    base = ["run", folder / "net.pth", folder / "photos", *options]
    room = Room(base, folder, random.Random(0), {})
    board = ["--tensorboard", folder / "board"]
    commands: dict[str, list[object]] = {
        "other": [*base, "--cmap", "viridis", "--out", folder / "other"],
        "run": [*base, "--out", folder / "whole"],
        "tensorboard": [*base, "--out", folder / "out", *board],
        "report": ["report", folder / "out", "--out", folder / "pages"],
    }
    for kind, arguments in commands.items():
        began = time.monotonic()
        room.do(*arguments)
        room.durations[kind] = 0.9 * (time.monotonic() - began)
    room.durations["three"] = 1.5 * room.durations["run"]
    places = {"run": "whole", "other": "other", "report": "pages"}
    room.expected = {name: tree(folder / place) for name, place in places.items()}
    room.posts = shown(folder / "board" / "out")
    return room


def attempt(
    plan: Room, trial: Callable[[Room], None], name: str, seed: str
) -> str | None:
    """One trial in a folder of its own, which goes if all is well; else what differs."""
    dice = random.Random(seed)
    room = Room(
        plan.base, plan.folder / name, dice, plan.durations, plan.expected, plan.posts
    )
    room.number = dice.choice(SIGNALS)
    room.folder.mkdir()
    try:
        trial(room)
    except (AssertionError, OSError, StoreError) as error:
        what = signal.Signals(room.number).name
        return (
            f"{name} ({trial.__name__}, {what}, seed {seed}): {error}; see"
            f" {room.folder}"
        )
    finally:
        plan.codes += room.codes
        plan.kinds += room.kinds
    shutil.rmtree(room.folder)
    return None


def tried(
    plan: Room, trials: list[Callable[[Room], None]], what: str, seed: int
) -> int:
    """Do trials one after the other, say how they went, and return how many differ."""
    began, plan.codes = time.monotonic(), []
    wrong = []
    for number, trial in enumerate(trials):
        found = attempt(plan, trial, f"{what}{number:03d}", f"{seed}/{what}/{number}")
        if found is not None:
            wrong.append(found)
            print(found, flush=True)
    codes = ", ".join(
        f"{count} × {code}" for code, count in sorted(Counter(plan.codes).items())
    )
    kinds = ", ".join(
        f"{n} {name}" for name, n in Counter(t.__name__ for t in trials).items()
    )
    seconds = time.monotonic() - began
    print(f"{len(trials)} {what} ({kinds}): {len(wrong)} differences, {seconds:.0f} s")
    print(f"  exit codes: {codes}", flush=True)
    if plan.kinds:
        print(f"  killed side by side: {dict(plan.kinds)}", flush=True)
        plan.kinds = Counter()
    return len(wrong)


def main() -> int:
    """Read the options, do the trials; 1 where anything differs."""
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--double-starts", type=int, default=30)
    parser.add_argument("--seed", type=int, default=18)
    given = parser.parse_args()
    torch.set_num_threads(1)
    tensorboard.check_installed()
    # and the loops, which take a while to import
    import_module("featviz.drawing.deflate")
    gc.freeze()
    atexit.register(gc.unfreeze)  # else libraries of torch report leaks at the end
    folder = Path(tempfile.mkdtemp(prefix="featviz-trial-"))
    print(f"seed {given.seed}, in {folder}", flush=True)
    plan = undisturbed(folder)
    kills = [KILLED[number % len(KILLED)] for number in range(given.kills)]
    wrong = tried(plan, kills, "kills", given.seed)
    wrong += tried(
        plan, [started_twice] * given.double_starts, "double starts", given.seed
    )
    if not wrong:
        shutil.rmtree(folder)
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
