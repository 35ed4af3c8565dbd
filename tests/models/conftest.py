"""Fixtures for models: a deadline for hostile files, and imports that are taken back."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

HANGS = 60
"""Seconds after which a test with a deadline hangs."""

_SEEN: list[tuple[str, str]] = []
_NEVER = (
    "socket.connect",
    "socket.getaddrinfo",
    "subprocess.Popen",
    "os.system",
    "os.exec",
)


def _note(event: str, args: tuple[Any, ...]) -> None:
    if event in _NEVER or (event == "open" and isinstance(args[0], str)):
        _SEEN.append((event, str(args[0])))


@pytest.fixture
def watched(tmp_path: Path) -> Callable[[], list[str]]:
    """Asks for the connections, the programs and the files opened in the test's folder
    `secret` since it was asked before."""
    if _note not in _HOOKS:
        sys.addaudithook(_note)
        _HOOKS.append(_note)
    secret = str(tmp_path / "secret")

    def since() -> list[str]:
        seen = []
        for event, argument in _SEEN:
            if event != "open" or argument.startswith(secret):
                seen.append(f"{event} {argument}")
        _SEEN.clear()
        return seen

    since()
    return since


_HOOKS: list[object] = []


@pytest.fixture
def deadline() -> Iterator[None]:
    """Ends a test that hangs; no test comes near it, however busy the machine is."""

    def late(*args: object) -> None:
        pytest.fail(f"no answer within {HANGS} seconds")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(HANGS)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


@pytest.fixture
def imports_undone() -> Iterator[None]:
    """Importing user code adds modules `user_...`; takes them back."""
    before = set(sys.modules)
    yield
    for name in set(sys.modules) - before:
        if name.startswith(("user_", "featviz_user_")):
            del sys.modules[name]
