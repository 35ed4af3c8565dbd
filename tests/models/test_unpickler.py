"""Hostile pickles by hand: each asks for more than data, and gets one line within bounds.

A file may take four times its size and 64 MB; what is read here is below 1 MB, in a process that
may grow by MOST bytes. A hang or a payload's marker fails the test.
"""

from __future__ import annotations

import resource
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from pickle_assembler import LINEAR, ORDERED, SEQUENTIAL, call, module, partial, tensor, zipped
from torch import nn
from unpickler_bounds import BOUNDS
from unpickler_calls import CALLS, KEPT_AS_DATA

from featviz.errors import LoadError
from featviz.models import digests
from featviz.models.files import checkpoint
from featviz.models.files.state_dict import unwrap

MOST = 400 * 2**20
"""Bytes by which the process may grow."""

HOSTILE = CALLS | BOUNDS

pytestmark = pytest.mark.usefixtures("deadline")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, where a payload would leave its marker."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture(autouse=True)
def _little_memory() -> Iterator[None]:
    """Memory beyond MOST is a failure."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    before = resource.getrlimit(resource.RLIMIT_AS)
    limit = pages * resource.getpagesize() + MOST
    resource.setrlimit(resource.RLIMIT_AS, (limit, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_AS, before)


@pytest.mark.parametrize("attempt", HOSTILE)
def test_a_pickle_that_asks_for_more_is_refused(attempt: str, folder: Path) -> None:
    """One line says what it does; nothing runs, nothing grows, nothing hangs."""
    make, words = HOSTILE[attempt]
    path = make(folder)
    with pytest.raises(LoadError) as caught:
        checkpoint.read(path)
    assert words in caught.value.message
    assert caught.value.message.startswith("model.pth ")
    assert caught.value.message.isprintable() and len(caught.value.message) < 600
    assert [entry.name for entry in folder.iterdir()] == ["model.pth"]


@pytest.mark.parametrize("attempt", KEPT_AS_DATA)
def test_what_a_pickle_keeps_is_never_called(attempt: str, folder: Path) -> None:
    """Such files are read to the end, and what they hold is no model."""
    make, words = KEPT_AS_DATA[attempt]
    with pytest.raises(LoadError) as caught:
        unwrap(checkpoint.read(make(folder)), name="model.pth")
    assert words in caught.value.message
    assert [entry.name for entry in folder.iterdir()] == ["model.pth"]


def test_the_assembler_makes_models(folder: Path) -> None:
    """The modules that are attacked above do load when nothing is wrong with them."""
    inner = module(
        LINEAR,
        _parameters={
            "weight": call(
                "torch._utils:_rebuild_parameter", tensor((2, 2), (2, 1)), True, call(ORDERED)
            ),
            "bias": None,
        },
        in_features=2,
    )
    path = zipped(
        module(SEQUENTIAL, _modules={"0": inner, "1": module(inplace=False, norm=partial(eps=0.1))})
    )(folder)
    model = checkpoint.read(path)
    assert [type(part) for part in model] == [nn.Linear, nn.ReLU]
    assert model[1].norm.keywords == {"eps": 0.1}
    assert torch.equal(model(torch.ones(1, 2)), torch.zeros(1, 2))
    assert len(digests.of_module(model)) == 64
