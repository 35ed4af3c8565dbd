"""What a command may not do with a hostile input, watched by `sys.addaudithook`.

The hook raises, so that nothing happens, and reports, so that code which swallows the
exception is found out all the same. An audit hook cannot be taken away again: it
belongs in a child process.

The event of `open` does not say of which folder a relative name is: one that does not
climb is left to the harness, which compares all files of the sandbox before and after.
"""

from __future__ import annotations

# ruff: noqa: PTH100, PTH115, PTH117, PTH118
import importlib.util
import os
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from types import CodeType
from typing import Any, NamedTuple

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
_MODULES_TEXT = "os posix nt subprocess sys importlib runpy socket pty"
_FOREIGN_GLOBALS = set(_MODULES_TEXT.split())
"""Modules none of whose names an unpickler has business with."""
_CALLERS_TEXT = "eval exec compile getattr open __import__ globals breakpoint"
_CALLERS = set(_CALLERS_TEXT.split())
"""Builtins that can run anything."""
_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND


class PathArgument(NamedTuple):
    """Where an event names a path."""

    path: int
    """Its position among the arguments."""
    folder: int | None = None
    """Position of the descriptor of the folder that it is relative to."""


_PATHS: dict[str, list[PathArgument]] = {
    "os.remove": [PathArgument(0, 1)],
    "os.rmdir": [PathArgument(0, 1)],
    "os.mkdir": [PathArgument(0, 2)],
    "os.truncate": [PathArgument(0)],
    "os.chmod": [PathArgument(0, 2)],
    "os.chown": [PathArgument(0, 3)],
    "os.utime": [PathArgument(0, 3)],
    "shutil.rmtree": [PathArgument(0, 1)],
    "os.rename": [PathArgument(0, 2), PathArgument(1, 3)],
    "os.link": [PathArgument(1, 3)],
    "os.symlink": [PathArgument(1, 2)],
}
"""Events that change paths."""


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


def _violation(rules: Rules, event: str, arguments: tuple[Any, ...]) -> str | None:
    """What is wrong with an event, in words."""
    if event in _NEVER:
        return repr(arguments)[:200]
    if event in _PATHS:
        return _changing_all(rules, _PATHS[event], arguments)
    if event in _JUDGES:
        return _JUDGES[event](rules, *arguments)
    return None


def _changing_all(
    rules: Rules,
    positions: list[PathArgument],
    arguments: tuple[Any, ...],
) -> str | None:
    for position in positions:
        folder = -1
        if position.folder is not None and len(arguments) > position.folder:
            folder = arguments[position.folder]
        if not isinstance(folder, int):
            folder = -1
        violation = _changing(rules, arguments[position.path], folder)
        if violation:
            return violation
    return None


def _opening(rules: Rules, path: Any, mode: Any, flags: Any) -> str | None:
    if isinstance(path, int) or not isinstance(flags, int) or not flags & _WRITING:
        return None
    if not os.path.isabs(path) and b".." not in os.fsencode(path):
        return None
    return _changing(rules, path, follows=not flags & (os.O_NOFOLLOW | os.O_EXCL))


def _changing(
    rules: Rules,
    path: Any,
    folder: int = -1,
    follows: bool = False,
) -> str | None:
    """Whether a path that is written lies outside of what may be written.

    Args:
        folder: the descriptor of the folder that it is relative to.
        follows: whether a link in its place would be followed.
    """
    if isinstance(path, int):
        return None
    name = os.fsdecode(path)
    if folder >= 0 and not os.path.isabs(name):
        name = os.path.join(os.readlink(f"/proc/self/fd/{folder}"), name)
    if follows:
        real = os.path.realpath(name)
    else:
        parent, last = os.path.split(os.path.abspath(name))
        real = os.path.join(os.path.realpath(parent), last)
    for writable in rules.writable:
        parent, last = os.path.split(writable)
        # what is swapped in when whole
        hidden = os.path.join(parent, f".{last}")
        if real == writable or real.startswith((writable + os.sep, hidden)):
            return None
    return f"outside the destination: {real}"


def _foreign_code(rules: Rules, path: Any) -> str | None:
    if not isinstance(path, (str, bytes, os.PathLike)):
        return None
    name = os.fsdecode(path)
    if name.startswith("<"):
        return None  # `<string>` and its like
    real = os.path.realpath(name)
    if real.endswith(".pyc"):
        real = importlib.util.source_from_cache(real)
    if real.startswith(rules.sandbox + os.sep) and real not in rules.own_code:
        return f"foreign code: {real}"
    return None


def _importing(rules: Rules, name: str, file: Any, *paths: Any) -> str | None:
    if name in _SIGHTS or MARKER in name:
        return f"import {name}"
    return _foreign_code(rules, file)


def _running(rules: Rules, code: Any, file: Any = "<none>") -> str | None:
    if isinstance(code, CodeType):
        file = code.co_filename
        if file.startswith("<") and _holds_marker(code):
            return f"foreign code: {file}"
        return _foreign_code(rules, file)
    if file == "<unknown>":  # ast.parse; to run it would be another event
        return None
    text = code
    if not isinstance(code, str):
        text = bytes(code or b"").decode(errors="replace")
    if MARKER in text:
        return f"foreign source: {text[:80]!r}"
    return _foreign_code(rules, file)


def _holds_marker(code: CodeType) -> bool:
    if MARKER in "".join((*code.co_names, *code.co_varnames)):
        return True
    for value in code.co_consts:
        if isinstance(value, CodeType) and _holds_marker(value):
            return True
        if isinstance(value, (str, bytes)) and MARKER in str(value):
            return True
    return False


def _finding(rules: Rules, module: str, name: str) -> str | None:
    is_foreign = module.split(".")[0] in _FOREIGN_GLOBALS
    calls = module in ("builtins", "__builtin__") and name in _CALLERS
    if is_foreign or calls or MARKER in f"{module}{name}":
        return f"{module}.{name}"
    return None


_JUDGES: dict[str, Callable[..., str | None]] = {
    "open": _opening,
    "compile": _running,
    "exec": _running,
    "import": _importing,
    "ctypes.dlopen": _foreign_code,
    "pickle.find_class": _finding,
}
"""Who says what is wrong with an event."""
_thread = threading.local()


def install() -> Watch:
    """Add the hook to this process, for good."""
    watch = Watch()
    sys.addaudithook(watch)
    return watch
