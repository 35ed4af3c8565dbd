"""Fixtures for models: a deadline for hostile files, and imports that are taken back."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator

import pytest

HANGS = 60
"""Seconds after which a test with a deadline hangs."""


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
def imports_undone(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Importing user code prepends to sys.path and adds modules `user_...`; takes both back."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    before = set(sys.modules)
    yield
    for name in set(sys.modules) - before:
        if name.startswith(("user_", "featviz_user_")):
            del sys.modules[name]
