"""A process that has imported featviz and forks a child for each command line.

Requests and replies are lines of JSON on stdin and stdout; `hostile_harness.py` is the other side.
A child runs under the audit hook, with RLIMIT_AS and RLIMIT_CPU; the server kills it when the wall
clock has run out. A child serves requests until one of them ends it, or the next asks for a
`fresh` one.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import io
import json
import os
import resource
import select
import signal
import socket
import sys
import tempfile
import traceback
from pathlib import Path
from typing import Any

import hostile_audit

_MOST = 2_000_000
"""Bytes of a stream that are looked at."""


class Child:
    """A forked process that runs command lines; its streams are files."""

    def __init__(self, folder: Path, memory: int) -> None:
        self.folder, self.memory = folder, memory
        self.paths = {name: folder / name for name in ("out", "err", "faults")}
        here, there = socket.socketpair()
        for path in self.paths.values():
            path.write_bytes(b"")
        self.pid = os.fork()
        if self.pid == 0:
            here.close()
            _serve(there, self.paths, memory)
        there.close()
        self.link = here

    def ask(self, request: dict[str, Any]) -> dict[str, Any]:
        """Run one command line; what became of it. The child may be gone afterwards."""
        for path in self.paths.values():
            os.truncate(path, 0)
        self.link.sendall(json.dumps(request).encode() + b"\n")
        ready, _, _ = select.select([self.link], [], [], request["seconds"])
        answer = self.link.recv(65536) if ready else b""
        found: dict[str, Any] = {"late": not ready, "signal": None, "code": None}
        if answer:
            found |= json.loads(answer)
        else:
            os.kill(self.pid, signal.SIGKILL)
            found["signal"] = None if found["late"] else self._reap()
            if found["late"]:
                self._reap()
        return found | {name: _read(path) for name, path in self.paths.items()}

    def _reap(self) -> int | None:
        _, status = os.waitpid(self.pid, 0)
        self.pid = 0
        self.link.close()
        if os.WIFSIGNALED(status):
            return os.WTERMSIG(status)
        return -os.WEXITSTATUS(status)

    def end(self) -> None:
        """Let it go."""
        if self.pid:
            self.link.close()
            os.waitpid(self.pid, 0)
            self.pid = 0


def _read(path: Path) -> str:
    with path.open("rb") as file:
        return file.read(_MOST).decode(errors="surrogateescape")


def _serve(link: socket.socket, paths: dict[str, Path], memory: int) -> None:
    """The child: answer requests until the other end is closed. Never returns."""
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    files = {name: os.open(path, os.O_WRONLY | os.O_APPEND) for name, path in paths.items()}
    os.dup2(files["out"], 1)
    os.dup2(files["err"], 2)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    watch = hostile_audit.install(
        lambda words: os.write(files["faults"], words.encode(errors="replace") + b"\n") and None
    )
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    limit = _status("VmSize") + memory
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    requests = link.makefile("rb")
    for line in requests:
        link.sendall(json.dumps(_answer(watch, json.loads(line))).encode())
    os._exit(0)


def _answer(watch: hostile_audit.Watch, request: dict[str, Any]) -> dict[str, Any]:
    os.chdir(request["cwd"])
    os.environ["TMPDIR"] = tempfile.tempdir = request["temporary"]
    used = sum(resource.getrusage(resource.RUSAGE_SELF)[:2])
    soft = int(used) + 1 + request["cpu"]
    resource.setrlimit(resource.RLIMIT_CPU, (soft, resource.RLIM_INFINITY))
    before = _status("VmRSS")
    sys.stdout = io.TextIOWrapper(os.fdopen(1, "wb", closefd=False), errors="backslashreplace")
    sys.stderr = io.TextIOWrapper(
        os.fdopen(2, "wb", closefd=False), errors="backslashreplace", line_buffering=True
    )
    watch.rules = hostile_audit.Rules(
        request["sandbox"], tuple(request["writable"]), tuple(request["own_code"])
    )
    try:
        code = _run(request)
    except BaseException:
        traceback.print_exc()
        code = 1
    finally:
        watch.rules = None
        with contextlib.suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
    return {"code": code, "grown": max(0, _status("VmHWM") - before)}


def _run(request: dict[str, Any]) -> int:
    """The command line, or the function (`module:name`) that is asked for."""
    from featviz import cli

    if "call" not in request:
        return cli.guarded(request["argv"])
    from featviz.errors import FeatvizError

    module, name = request["call"].split(":")
    try:
        getattr(importlib.import_module(module), name)(*request["argv"])
    except FeatvizError as error:
        print(f"error: {error.message}", file=sys.stderr)
        return error.exit_code
    except SystemExit as error:
        return int(error.code or 0)
    return 0


def _status(field: str) -> int:
    """Bytes of a field of /proc/self/status."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    raise LookupError(field)


def warm(folder: Path) -> None:
    """Import what commands import when they are used, by using them on honest files."""
    import numpy as np
    import torch
    import torch.export
    from PIL import Image
    from torch import nn

    from featviz import cli

    with contextlib.suppress(ImportError):
        importlib.import_module("timm")  # asks the system for libraries
    torch.set_num_threads(1)
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU()).eval()
    torch.save(net, folder / "net.pth")
    torch.export.save(torch.export.export(net, (torch.zeros(1, 3, 16, 20),)), folder / "net.pt2")
    noise = np.random.default_rng(0).integers(0, 255, (20, 24, 3), dtype=np.uint8)
    for name in ("a.png", "b.png"):
        Image.fromarray(noise).save(folder / name)
    run, out = folder / "run", folder / "other"
    lines = [
        ["layers", folder / "net.pt2"],
        ["summary", folder / "net.pth"],
        ["identify", folder / "net.pth"],
        ["run", folder / "net.pth", folder / "a.png", folder / "b.png", "--out", run],
        ["run", folder / "net.pt2", folder / "a.png", "--out", folder / "third"],
        ["run", folder / "net.pth", folder / "a.png", folder / "b.png", "--out", out],
        ["audit", folder / "net.pth", folder / "a.png", "--out", folder / "audit"],
        ["kernels", folder / "net.pth", "--out", folder / "kernels"],
        ["report", run],
        ["report", run, "--single-file"],
        ["sheet", run, "--layer", "0", "--out", folder / "sheet.png"],
        ["diff", run, out, "--html", folder / "diff.html"],
        ["merge", run, out, "--out", folder / "whole"],
        ["layers", "squeezenet1_1", "--weights", "none"],
    ]
    for line in lines:
        cli.guarded([str(word) for word in line] + ["-q"])


def main() -> None:
    """Serve requests from stdin until it ends."""
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "warm").mkdir()
        warm(Path(folder) / "warm")
        gc.collect()
        gc.freeze()  # else each child copies what it imported when it first looks for cycles
        print(json.dumps({"ready": True}), file=replies, flush=True)
        child: Child | None = None
        for line in sys.stdin:
            request = json.loads(line)
            if child is not None and (request["fresh"] or child.memory != request["memory"]):
                child.end()
            if child is None or not child.pid:
                child = Child(Path(folder), request["memory"])
            found = child.ask(request)
            print(json.dumps(found), file=replies, flush=True)


if __name__ == "__main__":
    main()
