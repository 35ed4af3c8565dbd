"""What a command may not do with a hostile input, watched by `sys.addaudithook`.

The hook raises, so that nothing happens, and reports, so that code which swallows the exception is
found out all the same. An audit hook cannot be taken away again: it belongs in a child process.

The event of `os.open(name, dir_fd=...)` does not say which folder it means, so `os.open` is wrapped
to remember it. Whoever opens past the wrapper is taken to mean the current folder; the harness
compares all files of the sandbox before and after, which sees that too.
"""

from __future__ import annotations

# ruff: noqa: PTH100, PTH115, PTH117, PTH118, PTH119, PTH120
import functools
import importlib.util
import os
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from types import CodeType
from typing import Any

MARKER = "featviz_hostile"
"""Stands in every payload: code that holds it came out of an input."""

_PROCESSES = {
    "os.system",
    "os.exec",
    "os.posix_spawn",
    "os.spawn",
    "os.fork",
    "os.forkpty",
    "os.startfile",
    "os.kill",
    "pty.spawn",
    "subprocess.Popen",
}
_NETWORK = {
    "socket.connect",
    "socket.bind",
    "socket.getaddrinfo",
    "socket.gethostbyname",
    "socket.sendto",
    "urllib.Request",
    "webbrowser.open",
}
_SIGHTS = {"antigravity", "this"}
"""Modules that do something when they are imported, and that nobody needs."""

_FOREIGN_GLOBALS = {"os", "posix", "nt", "subprocess", "sys", "importlib", "runpy", "socket", "pty"}
"""Modules none of whose names an unpickler has business with."""

_CALLERS = {"eval", "exec", "compile", "getattr", "open", "__import__", "globals", "breakpoint"}

_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
_ONE_PATH = {
    "os.remove": 1,
    "os.rmdir": 1,
    "os.mkdir": 2,
    "os.truncate": None,
    "os.chmod": 2,
    "os.chown": 3,
    "os.utime": 3,
    "os.mkfifo": None,
    "os.mknod": None,
    "shutil.rmtree": 1,
}
"""Events that change one path, the first argument; the position of its dir_fd."""


class ViolationError(Exception):
    """Raised in place of what was tried."""


@dataclass(frozen=True)
class Rules:
    """What holds for one input."""

    sandbox: str
    """Real path of the folder with the input and everything around it."""
    writable: tuple[str, ...]
    """Real paths of folders and files that may be written."""
    own_code: tuple[str, ...] = ()
    """Python files of the sandbox that the command line names, and may run."""


class Watch:
    """The hook; `rules` are those of the input at hand, None lets everything pass."""

    def __init__(self, report: Callable[[str], None]) -> None:
        self.report = report
        self.rules: Rules | None = None
        self._busy = False

    def __call__(self, event: str, arguments: tuple[Any, ...]) -> None:
        if self.rules is None or self._busy:
            return
        self._busy = True
        try:
            fault = _fault(self.rules, event, arguments)
        finally:
            self._busy = False
        if fault is not None:
            self.report(f"{event}: {fault}")
            raise ViolationError(fault)


def _fault(rules: Rules, event: str, args: tuple[Any, ...]) -> str | None:
    if event in _PROCESSES or event in _NETWORK:
        return _shown(args)
    if event == "open":
        return _opening(rules, *args)
    if event in _ONE_PATH:
        position = _ONE_PATH[event]
        return _changing(rules, args[0], _at(args, position))
    if event == "os.rename":
        return _changing(rules, args[0], args[2]) or _changing(rules, args[1], args[3])
    if event == "os.link":
        return _changing(rules, args[1], args[3])
    if event == "os.symlink":
        return _changing(rules, args[1], args[2])
    if event in ("compile", "exec"):
        return _running(rules, args)
    if event == "import":
        return _importing(rules, args)
    if event == "ctypes.dlopen":
        return _inside(rules, args[0])
    if event == "pickle.find_class":
        return _finding(args)
    return None


def _at(args: tuple[Any, ...], position: int | None) -> int:
    found = args[position] if position is not None and len(args) > position else -1
    return found if isinstance(found, int) else -1


def _opening(rules: Rules, path: Any, mode: Any, flags: Any) -> str | None:
    if isinstance(path, int):
        return None
    flags = flags if isinstance(flags, int) else 0
    if flags & _WRITING:
        follows = not flags & (os.O_NOFOLLOW | os.O_EXCL)
        return _changing(rules, path, _folder.fd, follows)
    name = os.fsdecode(path) if isinstance(path, (str, bytes, os.PathLike)) else ""
    if name.endswith((".py", ".pyc", ".so")) and not _is_read_as_text():
        return _inside(rules, name)
    return None


def _is_read_as_text() -> bool:
    """Whether a hint looks for names in the syntax tree of a file: to run it would be other
    events."""
    frame = sys._getframe()
    while frame is not None:
        if frame.f_code.co_filename.endswith(os.path.join("featviz", "models", "outline.py")):
            return True
        frame = frame.f_back
    return False


def _changing(rules: Rules, path: Any, dir_fd: int, follows: bool = False) -> str | None:
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
    if any(real == own or real.startswith(own + os.sep) for own in rules.writable):
        return None
    beside = {os.path.join(os.path.dirname(w), f".{os.path.basename(w)}") for w in rules.writable}
    if any(real.startswith(own) for own in beside):  # what is swapped in when it is whole
        return None
    return f"outside the destination: {real}"


def _inside(rules: Rules, path: Any) -> str | None:
    """Code that lies beside the input."""
    if not isinstance(path, (str, bytes, os.PathLike)) or os.fsdecode(path).startswith("<"):
        return None  # `<string>` and its like
    real = os.path.realpath(os.fsdecode(path))
    if real.endswith(".pyc"):
        real = importlib.util.source_from_cache(real)
    if real.startswith(rules.sandbox + os.sep) and real not in rules.own_code:
        return f"foreign code: {real}"
    return None


def _running(rules: Rules, args: tuple[Any, ...]) -> str | None:
    code = args[0]
    if isinstance(code, CodeType):
        if _holds(code):
            return f"foreign code: {code.co_filename}"
        return _inside(rules, code.co_filename)
    if len(args) > 1 and args[1] == "<unknown>":  # ast.parse; to run it would be another event
        return None
    text = code if isinstance(code, str) else bytes(code or b"").decode(errors="replace")
    if MARKER in text:
        return f"foreign source: {text[:80]!r}"
    return _inside(rules, args[1]) if len(args) > 1 else None


def _holds(code: CodeType) -> bool:
    """Whether the marker is among the constants or names; installed files are not looked at."""
    if not code.co_filename.startswith("<"):
        return False
    names = (*code.co_names, *code.co_varnames)
    if any(MARKER in name for name in names):
        return True
    return any(
        _holds(value)
        if isinstance(value, CodeType)
        else isinstance(value, (str, bytes)) and MARKER in str(value)
        for value in code.co_consts
    )


def _importing(rules: Rules, args: tuple[Any, ...]) -> str | None:
    name, file = args[0], args[1]
    if name in _SIGHTS or MARKER in str(name):
        return f"import {name}"
    return _inside(rules, file) if file else None


def _finding(args: tuple[Any, ...]) -> str | None:
    module, name = args[0], args[1]
    if MARKER in f"{module}{name}" or str(module).split(".")[0] in _FOREIGN_GLOBALS:
        return f"{module}.{name}"
    if module in ("builtins", "__builtin__") and name in _CALLERS:
        return f"{module}.{name}"
    return None


def _shown(args: tuple[Any, ...]) -> str:
    return repr(args)[:200]


class _Folder(threading.local):
    """The dir_fd of the `os.open` that is under way in this thread."""

    fd = -1


_folder = _Folder()


def _remembering(opened: Callable[..., int]) -> Callable[..., int]:
    @functools.wraps(opened)
    def wrapper(path: Any, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
        _folder.fd = -1 if dir_fd is None else dir_fd
        try:
            return opened(path, flags, mode, dir_fd=dir_fd)
        finally:
            _folder.fd = -1

    return wrapper


def install(report: Callable[[str], None]) -> Watch:
    """Add the hook to this process, for good."""
    watch = Watch(report)
    os.open = _remembering(os.open)  # type: ignore[assignment]
    os.supports_dir_fd.add(os.open)
    sys.addaudithook(watch)
    return watch
