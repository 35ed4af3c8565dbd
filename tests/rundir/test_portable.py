"""A system without descriptors of folders, flock and POSIX's signals, as Windows is."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
NOT_EVERYWHERE = {
    "os": [
        "O_NOFOLLOW",
        "O_NONBLOCK",
        "O_DIRECTORY",
        "O_CLOEXEC",
        "O_SYNC",
        "O_DSYNC",
        "nice",
        "fork",
        "forkpty",
        "getuid",
        "geteuid",
        "getgid",
        "getegid",
        "getgroups",
        "chown",
        "fchown",
        "lchown",
        "fchmod",
        "fchdir",
        "chroot",
        "mkfifo",
        "mknod",
        "link",
        "sched_getaffinity",
        "sched_setaffinity",
        "statvfs",
        "fstatvfs",
        "sysconf",
        "uname",
        "killpg",
        "getpgid",
        "setsid",
        "WNOHANG",
        "WIFEXITED",
        "wait",
        "pread",
        "pwrite",
        "register_at_fork",
        "getloadavg",
        "openpty",
        "ttyname",
        "sync",
        "fdatasync",
        "lockf",
    ],
    "signal": [
        "SIGHUP",
        "SIGKILL",
        "SIGALRM",
        "SIGUSR1",
        "SIGUSR2",
        "SIGPIPE",
        "SIGCHLD",
        "SIGQUIT",
        "alarm",
        "setitimer",
        "pthread_kill",
        "pthread_sigmask",
        "sigwait",
        "siginterrupt",
    ],
    "fcntl": ["flock", "lockf", "fcntl", "LOCK_EX", "LOCK_NB", "LOCK_UN", "LOCK_SH"],
}
"""Names of POSIX alone that Python leaves out on Windows."""

COMMANDS = """
import importlib, json, os, sys
import multiprocessing.pool, numba, numpy, PIL.Image, platformdirs, torch  # which ask by themselves
for module, names in json.loads(sys.argv[1]).items():
    loaded = importlib.import_module(module)
    for name in names:
        vars(loaded).pop(name, None)
os.supports_dir_fd.clear()
os.supports_fd.discard(os.scandir)
from featviz import cli
codes = []
for command in json.loads(sys.argv[2]):
    codes.append(cli.guarded(command))
    print(command[0], "ended with", codes[-1], file=sys.stderr)
from featviz import files
assert not files.BY_DESCRIPTOR
print(json.dumps(codes))
"""


DIGITS = REPOSITORY / "sample_images" / "digits"
MODEL = REPOSITORY / "configs" / "digits_cnn.pth"


@pytest.fixture
def commands(tmp_path: Path) -> list[list[object]]:
    """A run, and what one does with it."""
    out = tmp_path / "maps"
    pictures = sorted(DIGITS.iterdir())[:3]
    run = ["run", MODEL, *pictures, "--layers", "Conv2d,ReLU", "--out", out]
    return [
        run,
        ["report", out],
        ["report", out],
        [*run, "--resume"],
        ["verify", out],
        [*run, "--overwrite", "--cmap", "viridis"],
        ["diff", out, out, "--out", tmp_path / "difference"],
        ["sheet", out, "--layers", "0", "--out", tmp_path / "sheet.png"],
        ["look", MODEL, pictures[0], "--out", tmp_path / "look.png"],
    ]


@pytest.mark.slow
def test_all_works_without_what_windows_lacks(
    commands: list[list[object]], tmp_path: Path
) -> None:
    """A run, its report twice, `--resume`, `--overwrite` and readers end as elsewhere,
    and nothing is left beside them."""
    arguments = [json.dumps(NOT_EVERYWHERE), json.dumps(commands, default=str)]
    done = subprocess.run(
        [sys.executable, "-c", COMMANDS, *arguments],
        cwd=REPOSITORY,
        env={
            **os.environ,
            "PYTHONPATH": str(REPOSITORY),
            "PYTHONWARNINGS": "ignore",
        },
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == [0] * len(commands), done.stderr
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["difference", "look.png", "maps", "sheet.png"]
    assert list(tmp_path.rglob(".*")) == []
