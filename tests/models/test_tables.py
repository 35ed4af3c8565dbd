"""The tables of docs/models.md: what people have, the command, and whether it works."""

from __future__ import annotations

import importlib
import re
import shlex
import shutil
import sys
import warnings
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from conftest import ROOT, SCENES, Run
from PIL import Image
from runs import refused
from safetensors.torch import save_file
from torch import nn
from torchvision.transforms.functional import to_tensor

from models.test_arguments import CODE as ARGUMENTS

pytestmark = [
    pytest.mark.slow,
    pytest.mark.usefixtures("imports_undone"),
    pytest.mark.filterwarnings("ignore"),  # torch's own, on quantisation
]


class Row(NamedTuple):
    """A row of a table."""

    title: str
    having: str
    """What people have."""
    command: str
    result: str
    """Begins with yes or no."""


def rows(title: str, minimum: int) -> list[Row]:
    """The rows of the table under a heading: no line is overlooked, and the last column
    of each begins with yes or no."""
    text = (ROOT / "docs" / "models.md").read_text()
    section = text.split(f"## {title}\n")[1].split("\n## ")[0]
    cells = re.findall(
        r"^\| (.+) \| `featviz (.+?)` \| (.+) \|$", section, re.MULTILINE
    )
    table = [Row(title, *line) for line in cells]
    assert len(table) == section.count("| `featviz ")
    assert len(table) >= minimum
    for row in table:
        assert row.result.startswith(("yes", "no: `"))
    return table


def save_folders(root: Path) -> None:
    """Folders of Hugging Face and timm, and one of an adapter."""
    hf = importlib.import_module("models.hf_folders")
    hf.photo(90, 60).save(root / "photo.jpg")
    for family in ("vit", "clip", "dinov2"):
        hf.save(family, root / family)
    for name in ("remote", "quantised", "old"):
        shutil.copytree(root / "vit", root / name)
    shutil.copy(root / "vit" / "model.safetensors", root / "tuned.safetensors")
    hf.edit(root / "remote", auto_map={"AutoModel": "modeling.Net"})
    hf.edit(root / "quantised", quantization_config={"quant_method": "gptq"})
    vit = hf.theirs(root / "vit")
    torch.save(vit.state_dict(), root / "old" / "pytorch_model.bin")
    (root / "old" / "model.safetensors").unlink()
    program = torch.export.export(vit, (torch.zeros(1, 3, 32, 32),))
    torch.export.save(program, root / "vit.pt2")
    save_other_folders(root)


def save_other_folders(root: Path) -> None:
    """Of a model of texts, of no model, of an adapter, and of timm."""
    transformers = importlib.import_module("models.hf_folders").transformers
    config = transformers.BertConfig(
        hidden_size=8, num_attention_heads=2, intermediate_size=8, vocab_size=9
    )
    transformers.BertModel(config).save_pretrained(root / "bert")
    for name in ("folder", "adapter", "timm-folder"):
        (root / name).mkdir()
    (root / "folder" / "weights.pth").touch()
    (root / "adapter" / "adapter_config.json").write_text('{"peft_type": "LORA"}')
    timm = importlib.import_module("timm").create_model("test_resnet")
    save_file(timm.state_dict(), root / "timm-folder" / "model.safetensors")
    (root / "timm-folder" / "config.json").write_text('{"architecture": "test_resnet"}')


def classifier() -> Any:
    """YOLO11n-cls with names, and classes that are not all alike."""
    model: Any = importlib.import_module("models.ultralytics_files").built(
        "yolo11n-cls"
    )
    model.names = {number: f"thing {number}" for number in range(1000)}
    with torch.no_grad():
        model.get_submodule("model.10.linear").weight.mul_(64)
    return model


def save_checkpoints(root: Path) -> None:
    """Models of Ultralytics with random weights, as their trainer saves them."""
    files = importlib.import_module("models.ultralytics_files")
    photo = Image.open(SCENES / "landscape.jpg").convert("RGB")
    photo.resize((120, 90)).save(root / "photo.jpg")
    arguments = {"train_args": {**vars(files.get_cfg()), "imgsz": 96}}
    for name in ("yolov8n", "yolo11n-seg", "yolo11n-pose", "yolo11n-obb"):
        files.save(files.built(name), root / f"{name}.pt", **arguments)
    files.save(classifier(), root / "yolo11n-cls.pt", **arguments)
    model = files.built("yolo11n")
    files.save(model, root / "yolo11n.pt", **arguments)
    files.save(model, root / "last.pt", "ema", **arguments)
    model.criterion = importlib.import_module("ultralytics.utils.loss").BboxLoss(16)
    files.save(model, root / "epoch3.pt", **arguments)
    fused = files.built("yolo11n").fuse(verbose=False)
    files.save(fused, root / "fused.pt", **arguments)


CODE = f"""{ARGUMENTS}

def of(channels):
    return nn.Sequential(nn.Conv2d(channels, 4, 3), nn.ReLU())

def Generator(): return GeneratorOfVectors()
class GeneratorOfVectors(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc, self.up = nn.Linear(16, 64), nn.ConvTranspose2d(4, 3, 2, 2)
    def forward(self, z): return self.up(self.fc(z).view(-1, 4, 4, 4))
def satellite(): return of(13)
def four(): return of(4)
def grey(): return of(1)
def rgb(): return of(3)
def volume(channels=1): return nn.Sequential(nn.Conv3d(channels, 2, 3, padding=1), nn.ReLU())
def volume4(): return volume(4)
def first_three(image):
    import numpy as np
    return torch.from_numpy(np.asarray(image, "f4"))[:3]
"""


def save_arrays(root: Path) -> None:
    """Arrays, and code of models that take them."""
    (root / "net.py").write_text(CODE)
    random = np.random.default_rng(0)
    scene = random.random((13, 12, 16)).astype("f4")
    arrays = {
        "scene": scene,
        "ct": random.integers(-1000, 3000, (12, 16)).astype("i2"),
        "floats": scene[:3] * 9 - 4,
        "volume": random.random((24, 12, 16)).astype("f4"),
        "volume4": random.random((4, 6, 12, 16)).astype("f4"),
        "latent": random.random(16),
        "mask": np.ones((1, 1, 1, 1), "f4"),
        "objects": np.array([{}]),
    }
    for name, array in arrays.items():
        np.save(root / f"{name}.npy", array)
    np.savez_compressed(root / "scene.npz", image=scene, label=np.ones(1))
    torch.save(torch.from_numpy(scene), root / "scene.pt")
    save_pictures(root, scene)
    save_quantised(root / "quantised.pth")


def save_pictures(root: Path, scene: np.ndarray) -> None:
    """Of thirteen channels, of four and of three."""
    tifffile = importlib.import_module("tifffile")
    layout = {"photometric": "minisblack", "planarconfig": "separate"}
    tifffile.imwrite(root / "scene.tif", scene, **layout)
    pixels = np.random.default_rng(0).integers(0, 256, (12, 16, 4)).astype("u1")
    Image.fromarray(pixels).save(root / "rgba.png")
    Image.fromarray(pixels[..., :3]).save(root / "photo.png")


def save_quantised(path: Path) -> None:
    small = nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 5)
    ).eval()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.save(torch.ao.quantization.quantize_dynamic(small, {nn.Linear}), path)


HUGGING_FACE = "Hugging Face folders"
ULTRALYTICS = "Ultralytics"
ARRAYS = "Images that are no photographs, and models that take more than an image"


class Table(NamedTuple):
    """A table of a document."""

    rows: int
    """It has at least so many."""
    package: str
    make: Callable[[Path], None]
    """Writes the files of its commands."""


TABLES: dict[str, Table] = {
    HUGGING_FACE: Table(18, "transformers", save_folders),
    ULTRALYTICS: Table(14, "ultralytics", save_checkpoints),
    ARRAYS: Table(21, "tifffile", save_arrays),
}
"""How many rows a table has at least, the package that it needs, and what makes its
things."""


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The folder of what the rows of a table name, made once."""

    @cache
    def folder(title: str) -> Path:
        table = TABLES[title]
        pytest.importorskip(table.package, reason=f"{table.package} is not installed")
        root = tmp_path_factory.mktemp("tables")
        table.make(root)
        return root

    return folder


ROWS = [row for title, table in TABLES.items() for row in rows(title, table.rows)]


def set_up(row: Row, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have a package where the row needs it, or have it not where the row says so."""
    if "--preset yolo" in row.command:
        pytest.importorskip("ultralytics")
    if "without the package" in row.having:
        for name in list(sys.modules):
            if name.partition(".")[0] == "ultralytics":
                monkeypatch.setitem(sys.modules, name, None)


@pytest.mark.parametrize(
    "row", ROWS, ids=[f"{row.command} ({row.having})" for row in ROWS]
)
def test_each_row_is_true(
    row: Row,
    folder_of: Callable[[str], Path],
    tmp_path: Path,
    featviz: Run,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What works draws pictures; what does not ends with the message of the table."""
    monkeypatch.chdir(folder_of(row.title))
    set_up(row, monkeypatch)
    done = featviz(*shlex.split(row.command), "--out", tmp_path / "out")
    pictures = list((tmp_path / "out").glob("*/*/*.png"))
    if row.result.startswith("yes"):
        assert done.code == 0, done.err
        assert pictures
    else:
        (message,) = re.findall(r"`(.+)`", row.result)
        refused(done, done.code or 1, message)
        assert not pictures


def test_the_classes_of_a_classifier_are_those_of_its_own_shares(
    folder_of: Callable[[str], Path], tmp_path: Path, featviz: Run
) -> None:
    """The five likeliest, by name, with the shares that the model itself gives for the
    picture."""
    root = folder_of(ULTRALYTICS)
    out = tmp_path / "out"
    done = featviz("run", root / "yolo11n-cls.pt", root / "photo.jpg", "--out", out)
    seen = to_tensor(Image.open(out / "photo.jpg" / "input.png").convert("RGB"))
    with torch.no_grad():
        shares = classifier()(seen[None])[0][0]
    best = int(shares.argmax())
    assert 0.01 < shares[best] < 0.9
    assert f"photo.jpg: thing {best} {100 * float(shares[best]):.1f} %" in done.err
