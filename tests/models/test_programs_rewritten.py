"""Good .pt2 files: what is written anew for torch's reader gives what the file's program gives."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from exported import INPUTS, Net, packed, records
from hostile_payloads import saved_bytes
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from torchvision import models

from featviz.errors import LoadError
from featviz.models.files import exported, exported_archive


class Branches(nn.Module):
    """Shared and nested modules, a buffer that is a view, a constant, three kinds of outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 3, 1)
        self.again = self.conv
        self.block = nn.Sequential(nn.BatchNorm2d(3), nn.ReLU(inplace=True))
        self.register_buffer("row", torch.arange(12.0).reshape(4, 3)[1])
        self.scale = torch.tensor(2.0)
        self.tied = nn.Conv2d(3, 3, 1)
        self.tied.weight = self.conv.weight

    def forward(self, image: Tensor) -> dict[str, Any]:
        with torch.no_grad():
            first = self.block(self.conv(image)) * self.scale
        second = self.tied(self.block(self.again(first))) + self.row[:, None, None]
        return {"sum": second.flatten(1).sum(1), "both": (first, [second.half()])}


GOOD: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], tuple[int, ...]]] = {
    "branches": (Branches, (), ()),
    "training mode": (lambda: nn.Sequential(nn.Conv2d(3, 2, 1), nn.BatchNorm2d(2)), (), ()),
    "free sizes": (lambda: nn.Conv2d(3, 2, 3, stride=2, padding=1), (0, 2, 3), ()),
    "resnet18": (lambda: models.resnet18(weights=None).eval(), (0, 2, 3), ("slow",)),
    "mobilenet_v3_small": (lambda: models.mobilenet_v3_small(weights=None).eval(), (), ("slow",)),
    "vit": (lambda: models.VisionTransformer(64, 16, 2, 4, 64, 128).eval(), (0,), ("slow",)),
    "swin_t": (lambda: models.swin_t(weights=None).eval(), (), ("slow",)),
}
"""Programs by name: how they are made, and which of their sizes are free."""


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=[pytest.mark.slow] if marks else []) for n, (*_, marks) in GOOD.items()],
)
def test_what_is_written_anew_gives_what_torchs_own_module_gives(name: str, tmp_path: Path) -> None:
    """Bit for bit, with the same modules, parameters, buffers and sharing."""
    torch.manual_seed(0)
    make, free, _ = GOOD[name]
    shapes = (dict.fromkeys(free, torch.export.Dim.AUTO),)
    example = torch.zeros(2 if 0 in free else 1, 3, 64, 64)
    program = torch.export.export(make(), (example,), dynamic_shapes=shapes)
    torch.export.save(program, tmp_path / "m.pt2")
    rewritten = exported.read(tmp_path / "m.pt2").module
    original = torch.export.load(tmp_path / "m.pt2")
    tree = torch.export.unflatten(original)
    assert [n for n, _ in rewritten.named_modules()] == [n for n, _ in tree.named_modules()]
    for mine, theirs in (
        (dict(rewritten.named_parameters()), dict(tree.named_parameters())),
        (dict(rewritten.named_buffers()), dict(tree.named_buffers())),
    ):
        assert list(mine) == list(theirs)
        assert all(torch.equal(mine[n], theirs[n]) for n in mine)
    side = 96 if 2 in free else 64
    image = torch.randn(2 if 0 in free else 1, 3, side, side)
    expected = tree_leaves(original.module()(image))
    for got, want in zip(tree_leaves(rewritten(image)), expected, strict=True):
        assert got.dtype == want.dtype and torch.equal(got, want)


@pytest.mark.slow
def test_weights_as_torch_2_8_wrote_them(tmp_path: Path) -> None:
    """A pickle of named tensors becomes records of plain bytes; what shared memory shares it."""
    module = Net().eval()
    state = module.state_dict(keep_vars=True)
    state = {**state, "conv.twin": state["conv.weight"]}
    contents = records()
    for name in [name for name in contents if name.startswith("data/")]:
        del contents[name]
    contents |= {
        "data/weights/model.pt": saved_bytes(state),
        "data/constants/model.pt": saved_bytes({}),
    }
    contents[INPUTS] = saved_bytes(((torch.zeros(1, 3, 16, 20),), {}))
    rewritten = exported.read(packed(tmp_path / "old.pt2", contents)).module
    image = torch.randn(1, 3, 16, 20)
    assert torch.equal(rewritten(image), module(image))
    assert rewritten.conv.twin is rewritten.conv.weight


@pytest.mark.usefixtures("deadline")
def test_weights_as_torch_2_8_wrote_them_are_read_by_our_own_reader(tmp_path: Path) -> None:
    """Numbers as keys may all have one hash; no other reader of pickles sees them."""
    contents = records()
    for name in [name for name in contents if name.startswith("data/")]:
        del contents[name]
    state = {2**64: torch.zeros(1)}
    contents |= {
        "data/weights/model.pt": saved_bytes(state),
        "data/constants/model.pt": saved_bytes({}),
    }
    contents[INPUTS] = saved_bytes(((torch.zeros(1, 3, 16, 20),), {}))
    with pytest.raises(LoadError, match="holds a key that is too large a number; nothing was"):
        exported.read(packed(tmp_path / "old.pt2", contents))


def test_large_weights_are_not_copied_into_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is written anew is in a file of its own, which is gone afterwards."""
    spooled = tempfile.SpooledTemporaryFile
    monkeypatch.setattr(tempfile, "SpooledTemporaryFile", lambda most: spooled(100))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "t"))
    (tmp_path / "t").mkdir()
    path = packed(tmp_path / "net.pt2", records())
    with exported_archive.rewritten(path) as file:
        assert isinstance(file.fileno(), int)
    assert exported.read(path).module(torch.zeros(1, 3, 16, 20)).shape == (1, 2, 16, 20)
    assert [*(tmp_path / "t").iterdir()] == []


def test_no_room_for_the_copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The line names the place and the way to another one."""

    def full(*args: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(tempfile, "SpooledTemporaryFile", full)
    with pytest.raises(LoadError, match=r"net\.pt2 cannot be loaded: No space left") as caught:
        exported.read(packed(tmp_path / "net.pt2", records()))
    assert "TMPDIR" in str(caught.value.hint)
