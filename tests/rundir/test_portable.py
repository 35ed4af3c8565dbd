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
import importlib, os, sys
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


@pytest.fixture
def commands(tmp_path: Path) -> list[list[str]]:
    """The README's demonstration, and what one does with a run."""
    out = str(tmp_path / "maps")
    model = str(REPOSITORY / "configs" / "digits_cnn.pth")
    picture = str(REPOSITORY / "sample_images" / "digits" / "00-5.png")
    demonstration = str(REPOSITORY / "configs" / "digits.toml")
    again = ["run", model, str(REPOSITORY / "sample_images" / "digits"), "--out", out]
    again += ["--layers", "Conv2d,ReLU,MaxPool2d,AdaptiveAvgPool2d"]
    return [
        ["run", "--config", demonstration, "--out", out],
        ["report", out],
        ["report", out],
        [*again, "--resume"],
        ["verify", out],
        [*again, "--overwrite", "--cmap", "viridis"],
        ["diff", out, out, "--out", str(tmp_path / "difference")],
        ["sheet", out, "--layers", "0", "--out", str(tmp_path / "sheet.png")],
        ["look", model, picture, "--out", str(tmp_path / "look.png")],
    ]


@pytest.mark.slow
def test_all_works_without_what_windows_lacks(
    commands: list[list[str]], tmp_path: Path
) -> None:
    """A run, its report twice, `--resume`, `--overwrite` and readers: as elsewhere, and
    nothing is left beside them."""
    names = json.dumps(NOT_EVERYWHERE)
    program = [
        sys.executable,
        "-c",
        f"import json\n{COMMANDS}",
        names,
        json.dumps(commands),
    ]
    environment = {
        **os.environ,
        "PYTHONPATH": str(REPOSITORY),
        "PYTHONWARNINGS": "ignore",
    }
    done = subprocess.run(
        program,
        cwd=REPOSITORY,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == [0] * len(commands), done.stderr
    found = sorted(path.name for path in tmp_path.iterdir())
    assert found == ["difference", "look.png", "maps", "sheet.png"]
    assert not [*tmp_path.rglob(".*")]
