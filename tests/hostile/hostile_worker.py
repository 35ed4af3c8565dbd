"""Imports featviz once and forks children, which run the command lines of attacks.

Requests and replies are lines of JSON on stdin and stdout; `hostile_harness.py` is the
other side. A child runs under the audit hook, with RLIMIT_AS and RLIMIT_CPU, and is
killed when the wall clock has run out. To fork it takes five times as long as most
attacks do, so that it takes several, one after the other; one that something was wrong
with takes no more."""

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
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import hostile_audit

LARGEST = 2_000_000
"""Bytes of a stream that are looked at."""
STREAMS = ("out", "err", "violations")


ATTACKS = 20
"""Of a child, at most."""
LARGEST_REQUEST = 2**20


@dataclass
class Child:
    """A process that waits for attacks."""

    pid: int
    link: socket.socket
    attacks: int = 0
    """How many it has had."""


def forked(folder: Path) -> Child:
    """A new child.

    Args:
        folder: where the streams of command lines are written.
    """
    here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    here.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, LARGEST_REQUEST)
    pid = os.fork()
    if pid == 0:
        here.close()
        serve(there, folder)
    there.close()
    return Child(pid, here)


def attacked(
    child: Child, request: dict[str, Any], folder: Path
) -> list[dict[str, Any]]:
    """What became of each command line, in a child; none is run after one that ended
    the child."""
    child.attacks += 1
    child.link.settimeout(request["seconds"])
    child.link.sendall(json.dumps(request).encode())
    outcomes: list[dict[str, Any]] = []
    for number, _ in enumerate(request["commands"]):
        outcome = awaited(child.link)
        outcome |= streams_of(folder, number)
        outcomes.append(outcome)
        if outcome["code"] is None:
            break
    return outcomes


def is_spent(child: Child, outcomes: list[dict[str, Any]]) -> bool:
    """Whether the next attack needs another child."""
    has_ended = outcomes[-1]["code"] is None
    has_violated = any(outcome["violations"] for outcome in outcomes)
    return has_ended or has_violated or child.attacks == ATTACKS


def end(child: Child, outcome: dict[str, Any]) -> None:
    """Have a child end, and note the signal that has ended it before."""
    child.link.close()
    if outcome["late"]:
        os.kill(child.pid, signal.SIGKILL)
    _, status = os.waitpid(child.pid, 0)
    if outcome["code"] is None and not outcome["late"]:
        outcome["signal"] = os.WTERMSIG(status) or -os.WEXITSTATUS(status)


def awaited(link: socket.socket) -> dict[str, Any]:
    """The exit code of a command line, which may be late, or never come."""
    outcome: dict[str, Any] = {"late": False, "signal": None, "code": None}
    try:
        answer = link.recv(100)
    except TimeoutError:
        outcome["late"] = True
        return outcome
    if answer:
        outcome["code"] = int(answer)
    return outcome


def streams_of(folder: Path, number: int) -> dict[str, str]:
    """What a command line wrote to its streams."""
    streams = {}
    for name in STREAMS:
        path = folder / f"{name}.{number}"
        data = path.read_bytes() if path.exists() else b""
        streams[name] = data[:LARGEST].decode(errors="surrogateescape")
    return streams


def serve(link: socket.socket, folder: Path) -> None:
    """The child: run the command lines of attacks, and send the exit code of each.
    Never returns."""
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    watch = hostile_audit.install()
    search_path = list(sys.path)
    while message := link.recv(LARGEST_REQUEST):
        request = json.loads(message)
        suffer(request, watch, link, folder)
        sys.path[:] = search_path
        forget_modules(request["sandbox"])
    os._exit(0)


def suffer(
    request: dict[str, Any],
    watch: hostile_audit.Watch,
    link: socket.socket,
    folder: Path,
) -> None:
    """Run the command lines of an attack."""
    os.chdir(request["cwd"])
    limit_memory(request["memory"])
    rules = hostile_audit.Rules(
        sandbox=request["sandbox"],
        writable=tuple(request["writable"]),
        own_code=tuple(request["own_code"]),
    )
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT
    for number, arguments in enumerate(request["commands"]):
        out, err, violations = (
            os.open(folder / f"{name}.{number}", flags) for name in STREAMS
        )
        os.dup2(out, 1)
        os.dup2(err, 2)
        watch.report_to = violations
        watch.rules = rules
        code = run(arguments, request["cpu"])
        watch.rules = None
        for stream in (out, err, violations):
            os.close(stream)
        link.sendall(str(code).encode())


def forget_modules(sandbox: str) -> None:
    """Have the modules of a sandbox imported anew, of which another one has its own."""
    for name, module in list(sys.modules.items()):
        file = getattr(module, "__file__", None) or ""
        if file.startswith(sandbox):
            del sys.modules[name]


def limit_memory(growth: int) -> None:
    """Let the address space of this process grow by so many bytes, and leave no core."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    status = Path("/proc/self/status").read_text()
    kilobytes = int(status.partition("VmSize:")[2].split()[0])
    most = kilobytes * 1024 + growth
    resource.setrlimit(resource.RLIMIT_AS, (most, resource.RLIM_INFINITY))


def limit_time(seconds: int) -> None:
    """Give this process so many more seconds of a processor."""
    used = sum(resource.getrusage(resource.RUSAGE_SELF)[:2])
    limit = int(used) + 1 + seconds
    resource.setrlimit(resource.RLIMIT_CPU, (limit, resource.RLIM_INFINITY))


def text_stream(descriptor: int) -> io.TextIOWrapper:
    file = os.fdopen(descriptor, "wb", closefd=False)
    return io.TextIOWrapper(file, errors="backslashreplace")


def run(arguments: list[str], seconds: int) -> int:
    """Run a command line, or plant a fault, and return the exit code."""
    limit_time(seconds)
    sys.stdout = text_stream(1)
    sys.stderr = text_stream(2)
    try:
        if arguments[0] == "plant":
            return importlib.import_module("planted_faults").plant(*arguments[1:])
        from featviz import cli

        return cli.guarded(arguments)
    except BaseException:
        traceback.print_exc()
        return 1
    finally:
        with contextlib.suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()


LIBRARIES = (
    # ask the system for libraries, and whether it has IPv6
    "timm",
    "tensorboard.summary.writer.record_writer",
    # take half a second
    "onnx",
    "onnxruntime",
)
HONEST_LINES = """
    layers net.pth
    identify net.pth
    run net.pth a.png b.png --out run
    run net.pth a.png b.png --out other
    audit net.pth a.png --out audit
    kernels net.pth --out kernels
    report run
    report run --single-file
    sheet run --layers 0 --out sheet.png
    diff run other --html diff.html
    merge run other --out whole
    layers squeezenet1_1 --weights none
"""


def warm(folder: Path) -> None:
    """Import what commands import when they are used, by using them on honest files."""
    import numpy as np
    import torch
    from PIL import Image
    from torch import nn

    from featviz import cli

    for name in LIBRARIES:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU())
    torch.save(net.eval(), folder / "net.pth")
    noise = np.random.default_rng(0).integers(0, 255, (20, 24, 3), dtype=np.uint8)
    for name in ("a.png", "b.png"):
        Image.fromarray(noise).save(folder / name)
    for line in HONEST_LINES.strip().splitlines():
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
        streams = Path(name, "streams")
        child: Child | None = None
        for line in sys.stdin:
            streams.mkdir()
            child = child or forked(streams)
            outcomes = attacked(child, json.loads(line), streams)
            if is_spent(child, outcomes):
                end(child, outcomes[-1])
                child = None
            print(json.dumps(outcomes), file=replies, flush=True)
            shutil.rmtree(streams)


if __name__ == "__main__":
    main()
