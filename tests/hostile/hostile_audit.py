"""What a command may not do with a hostile input, watched by `sys.addaudithook`.

The hook raises, so that nothing happens, and reports, so that code which swallows the
exception is found out all the same. An audit hook cannot be taken away again: it
belongs in a child process.

The event of `open` does not say of which folder a relative name is: one that does not
climb is left to the harness, which compares all files of the sandbox before and after.
"""

from __future__ import annotations

# ruff: noqa: PTH100, PTH115, PTH117, PTH118, PTH119, PTH120
import importlib.util
import os
import sys
import threading
from dataclasses import dataclass
from types import CodeType
from typing import Any

MARKER = "featviz_hostile"
"""Stands in every payload: code that holds it came out of an input."""

_NEVER_TEXT = """
    os.system os.exec os.posix_spawn os.spawn os.fork os.forkpty os.kill os.startfile pty.spawn
    subprocess.Popen webbrowser.open urllib.Request socket.connect socket.bind
    socket.getaddrinfo socket.gethostbyname socket.sendto
"""
_NEVER = set(_NEVER_TEXT.split())
"""Events of processes and of the network."""
_SIGHTS = {"antigravity", "this"}
"""Modules that do something when they are imported, and that nobody needs."""
_FOREIGN_GLOBALS = {
    "os",
    "posix",
    "nt",
    "subprocess",
    "sys",
    "importlib",
    "runpy",
    "socket",
    "pty",
}
"""Modules none of whose names an unpickler has business with."""
_CALLERS = {
    "eval",
    "exec",
    "compile",
    "getattr",
    "open",
    "__import__",
    "globals",
    "breakpoint",
}
_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
_PATHS: dict[str, list[tuple[int, int | None]]] = {
    "os.remove": [(0, 1)],
    "os.rmdir": [(0, 1)],
    "os.mkdir": [(0, 2)],
    "os.truncate": [(0, None)],
    "os.chmod": [(0, 2)],
    "os.chown": [(0, 3)],
    "os.utime": [(0, 3)],
    "shutil.rmtree": [(0, 1)],
    "os.rename": [(0, 2), (1, 3)],
    "os.link": [(1, 3)],
    "os.symlink": [(1, 2)],
}
"""Events that change paths: the positions of each path among the arguments, and of its
dir_fd."""


class ViolationError(Exception):
    """Raised in place of what was tried."""


@dataclass(frozen=True)
class Rules:
    sandbox: str
    """The folder with the input and everything around it."""
    writable: tuple[str, ...]
    """Folders and files that may be written."""
    own_code: tuple[str, ...] = ()
    """Python files of the sandbox that the command line names, and may run."""


class Watch:
    """The hook; `rules` are those of the attack at hand, None lets everything pass."""

    def __init__(self) -> None:
        self.report_to = 2
        self.rules: Rules | None = None

    def __call__(self, event: str, arguments: tuple[Any, ...]) -> None:
        if self.rules is None or getattr(_thread, "busy", False):
            return
        _thread.busy = True  # what the hook itself does is not watched
        try:
            violation = _violation(self.rules, event, arguments)
        finally:
            _thread.busy = False
        if violation:
            os.write(self.report_to, f"{event}: {violation}\n".encode(errors="replace"))
            raise ViolationError(violation)


def _violation(rules: Rules, event: str, args: tuple[Any, ...]) -> str | None:
    if event in _NEVER:
        return repr(args)[:200]
    if event == "open":
        return _opening(rules, *args)
    if event in _PATHS:
        for path, position in _PATHS[event]:
            folder = (
                args[position] if position is not None and len(args) > position else -1
            )
            outside = _changing(
                rules, args[path], folder if isinstance(folder, int) else -1
            )
            if outside:
                return outside
    if event in ("compile", "exec"):
        return _running(rules, args)
    if event == "import":
        name = str(args[0])
        file = args[1]
        sight = name in _SIGHTS or MARKER in name
        return f"import {name}" if sight else _foreign_code(rules, file or "<none>")
    if event == "ctypes.dlopen":
        return _foreign_code(rules, args[0])
    if event == "pickle.find_class":
        return _finding(*args)
    return None


def _opening(rules: Rules, path: Any, mode: Any, flags: Any) -> str | None:
    flags = flags if isinstance(flags, int) else 0
    if not flags & _WRITING or isinstance(path, int):
        return None
    if not os.path.isabs(path) and b".." not in os.fsencode(path):
        return None
    return _changing(rules, path, -1, not flags & (os.O_NOFOLLOW | os.O_EXCL))


def _changing(
    rules: Rules, path: Any, dir_fd: int, follows: bool = False
) -> str | None:
    if isinstance(path, int):
        return None
    name = os.fsdecode(path)
    if dir_fd >= 0 and not os.path.isabs(name):
        name = os.path.join(os.readlink(f"/proc/self/fd/{dir_fd}"), name)
    if follows:
        real = os.path.realpath(name)
    else:
        folder, last = os.path.split(os.path.abspath(name))
        real = os.path.join(os.path.realpath(folder), last)
    for writable in rules.writable:
        hidden = os.path.join(
            os.path.dirname(writable), f".{os.path.basename(writable)}"
        )
        if real == writable or real.startswith(
            (writable + os.sep, hidden)
        ):  # what is swapped in when whole
            return None
    return f"outside the destination: {real}"


def _foreign_code(rules: Rules, path: Any) -> str | None:
    if not isinstance(path, (str, bytes, os.PathLike)) or os.fsdecode(path).startswith(
        "<"
    ):
        return None  # `<string>` and its like
    real = os.path.realpath(os.fsdecode(path))
    if real.endswith(".pyc"):
        real = importlib.util.source_from_cache(real)
    if real.startswith(rules.sandbox + os.sep) and real not in rules.own_code:
        return f"foreign code: {real}"
    return None


def _running(rules: Rules, args: tuple[Any, ...]) -> str | None:
    code = args[0]
    file = args[1] if len(args) > 1 else "<none>"
    if isinstance(code, CodeType):
        if code.co_filename.startswith("<") and _holds_marker(code):
            return f"foreign code: {code.co_filename}"
        return _foreign_code(rules, code.co_filename)
    if file == "<unknown>":  # ast.parse; to run it would be another event
        return None
    text = (
        code if isinstance(code, str) else bytes(code or b"").decode(errors="replace")
    )
    return (
        f"foreign source: {text[:80]!r}"
        if MARKER in text
        else _foreign_code(rules, file)
    )


def _holds_marker(code: CodeType) -> bool:
    if any(MARKER in name for name in (*code.co_names, *code.co_varnames)):
        return True
    return any(
        (
            _holds_marker(value)
            if isinstance(value, CodeType)
            else isinstance(value, (str, bytes)) and MARKER in str(value)
        )
        for value in code.co_consts
    )


def _finding(module: str, name: str) -> str | None:
    foreign = MARKER in f"{module}{name}" or module.split(".")[0] in _FOREIGN_GLOBALS
    calls = module in ("builtins", "__builtin__") and name in _CALLERS
    return f"{module}.{name}" if foreign or calls else None


_thread = threading.local()


def install() -> Watch:
    """Add the hook to this process, for good."""
    watch = Watch()
    sys.addaudithook(watch)
    return watch
