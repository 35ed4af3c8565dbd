"""Imports featviz once and forks a child for each attack, which runs the command lines
of it.

Requests and replies are lines of JSON on stdin and stdout; `hostile_harness.py` is the
other side. A child runs under the audit hook, with RLIMIT_AS and RLIMIT_CPU, and is
killed when the wall clock has run out."""

from __future__ import annotations

import contextlib
import gc
import importlib
import io
import json
import os
import resource
import shutil
import signal
import socket
import sys
import tempfile
import traceback
from pathlib import Path
from typing import Any

import hostile_audit

MOST = 2_000_000
"""Bytes of a stream that are looked at."""
STREAMS = ("out", "err", "violations")


def attacked(request: dict[str, Any], folder: Path) -> list[dict[str, Any]]:
    """What became of each command line, in a child; none is run after one that ended
    the child."""
    here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    pid = os.fork()
    if pid == 0:
        here.close()
        serve(there, request, folder)
    there.close()
    here.settimeout(request["seconds"])
    faults: list[dict[str, Any]] = []
    for number, _ in enumerate(request["commands"]):
        outcome: dict[str, Any] = {"late": False, "signal": None, "code": None}
        try:
            answer = here.recv(100)
        except TimeoutError:
            answer, outcome["late"] = b"", True
            os.kill(pid, signal.SIGKILL)
        outcome["code"] = int(answer) if answer else None
        for name in STREAMS:
            path = folder / f"{name}.{number}"
            text = path.read_bytes()[:MOST] if path.exists() else b""
            outcome[name] = text.decode(errors="surrogateescape")
        faults.append(outcome)
        if not answer:
            break
    here.close()
    _, status = os.waitpid(pid, 0)
    if faults[-1]["code"] is None and not faults[-1]["late"]:
        faults[-1]["signal"] = os.WTERMSIG(status) or -os.WEXITSTATUS(status)
    return faults


def serve(link: socket.socket, request: dict[str, Any], folder: Path) -> None:
    """The child: run the command lines, and send the exit code of each. Never returns."""
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.chdir(request["cwd"])
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    status = Path("/proc/self/status").read_text()
    used = next(
        int(line.split()[1])
        for line in status.splitlines()
        if line.startswith("VmSize:")
    )
    resource.setrlimit(resource.RLIMIT_AS, (used * 1024 + request["memory"],) * 2)
    watch = hostile_audit.install()
    rules = hostile_audit.Rules(
        request["sandbox"], tuple(request["writable"]), tuple(request["own_code"])
    )
    for number, arguments in enumerate(request["commands"]):
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT
        files = [os.open(folder / f"{name}.{number}", flags) for name in STREAMS]
        os.dup2(files[0], 1)
        os.dup2(files[1], 2)
        watch.report_to = files[2]
        watch.rules = rules
        code = run(arguments, request["cpu"])
        watch.rules = None
        link.sendall(str(code).encode())
    os._exit(0)


def run(words: list[str], seconds: int) -> int:
    used = sum(resource.getrusage(resource.RUSAGE_SELF)[:2])
    resource.setrlimit(
        resource.RLIMIT_CPU, (int(used) + 1 + seconds, resource.RLIM_INFINITY)
    )
    sys.stdout, sys.stderr = (
        io.TextIOWrapper(os.fdopen(n, "wb", closefd=False), errors="backslashreplace")
        for n in (1, 2)
    )
    try:
        if words[0] == "plant":
            return importlib.import_module("planted_faults").plant(*words[1:])
        from featviz import cli

        return cli.guarded(words)
    except BaseException:
        traceback.print_exc()
        return 1
    finally:
        with contextlib.suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()


def warm(folder: Path) -> None:
    """Import what commands import when they are used, by using them on honest files."""
    import numpy as np
    import torch
    from PIL import Image
    from torch import nn

    from featviz import cli

    for name in ("timm", "tensorboard.summary.writer.record_writer"):
        with contextlib.suppress(ImportError):
            # ask the system for libraries, and whether it has IPv6
            importlib.import_module(name)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU()
    ).eval()
    torch.save(net, folder / "net.pth")
    noise = np.random.default_rng(0).integers(0, 255, (20, 24, 3), dtype=np.uint8)
    for name in ("a.png", "b.png"):
        Image.fromarray(noise).save(folder / name)
    for line in (
        "layers net.pth",
        "identify net.pth",
        "run net.pth a.png b.png --out run",
        "run net.pth a.png b.png --out other",
        "audit net.pth a.png --out audit",
        "kernels net.pth --out kernels",
        "report run",
        "report run --single-file",
        "sheet run --layers 0 --out sheet.png",
        "diff run other --html diff.html",
        "merge run other --out whole",
        "layers squeezenet1_1 --weights none",
    ):
        cli.guarded([*line.split(), "-q"])


def main() -> None:
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    with tempfile.TemporaryDirectory() as name, contextlib.chdir(name):
        warm(Path(name))
        gc.collect()
        # else each child copies what it imported when it first looks for cycles
        gc.freeze()
        print("ready", file=replies, flush=True)
        for line in sys.stdin:
            streams = Path(name, "streams")
            streams.mkdir()
            print(
                json.dumps(attacked(json.loads(line), streams)),
                file=replies,
                flush=True,
            )
            shutil.rmtree(streams)


if __name__ == "__main__":
    main()
