"""The table of docs/models.md on inputs that are no photographs, and on further arguments."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import Outcome
from PIL import Image
from torch import nn

from models.model_tables import Row, check_row, rows
from models.test_arguments import CODE as ARGUMENTS

TITLE = "Images that are no photographs, and models that take more than an image"

pytestmark = [
    pytest.mark.usefixtures("imports_undone"),
    pytest.mark.filterwarnings("ignore"),  # torch's own, on quantisation
]

CODE = f"""{ARGUMENTS}

def of(channels):
    return nn.Sequential(nn.Conv2d(channels, 4, 3), nn.ReLU())

def satellite(): return of(13)
def four(): return of(4)
def grey(): return of(1)
def rgb(): return of(3)
def volume(channels=1): return nn.Sequential(nn.Conv3d(channels, 2, 3, padding=1), nn.ReLU())
def volume4(): return volume(4)
def small():
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 5))
def first_three(image):
    import numpy as np
    return torch.from_numpy(np.asarray(image, "f4"))[:3]
"""


@pytest.fixture(scope="module")
def things(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the rows name, in one folder."""
    root = tmp_path_factory.mktemp("things")
    (root / "net.py").write_text(CODE)
    random = np.random.default_rng(0)
    scene = random.random((13, 12, 16)).astype("f4")
    np.save(root / "scene.npy", scene)
    np.savez_compressed(root / "scene.npz", image=scene, label=np.ones(1))
    torch.save(torch.from_numpy(scene), root / "scene.pt")
    tifffile = pytest.importorskip("tifffile", reason="tifffile is not installed")
    tifffile.imwrite(root / "scene.tif", scene, photometric="minisblack", planarconfig="separate")
    pixels = random.integers(0, 256, (12, 16, 4)).astype("u1")
    Image.fromarray(pixels).save(root / "rgba.png")
    Image.fromarray(pixels[..., :3]).save(root / "photo.png")
    np.save(root / "ct.npy", random.integers(-1000, 3000, (12, 16)).astype("i2"))
    np.save(root / "floats.npy", scene[:3] * 9 - 4)
    np.save(root / "objects.npy", np.array([{}]), allow_pickle=True)
    np.save(root / "volume.npy", random.random((24, 12, 16)).astype("f4"))
    np.save(root / "volume4.npy", random.random((4, 6, 12, 16)).astype("f4"))
    np.save(root / "mask.npy", np.ones((1, 1, 1, 1), "f4"))
    names: dict[str, object] = {}
    exec(CODE, names)
    small = names["small"]
    assert callable(small)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        quantised = torch.ao.quantization.quantize_dynamic(small().eval(), {nn.Linear})
    torch.save(quantised, root / "quantised.pth")
    return root


@pytest.mark.parametrize("row", rows(TITLE, 19), ids=lambda row: row.command)
def test_each_row_is_true(
    row: Row,
    things: Path,
    tmp_path: Path,
    featviz: Callable[..., Outcome],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What works draws pictures; what does not ends with the words of the table."""
    if "--preset yolo" in row.command:
        pytest.importorskip("ultralytics")
    monkeypatch.chdir(things)
    check_row(row, tmp_path / "out", featviz)
