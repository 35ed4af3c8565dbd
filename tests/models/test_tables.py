"""The tables of docs/models.md: what people have, the command, and whether it works."""

from __future__ import annotations

import importlib
import re
import shlex
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from conftest import ROOT, SCENES, Run
from PIL import Image
from safetensors.torch import save_file
from torch import nn

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
    works: str


def rows(title: str, least: int) -> list[Row]:
    """The rows of the table under a heading: no line is overlooked, and the last column
    of each begins with yes or no."""
    text = (
        (ROOT / "docs" / "models.md")
        .read_text()
        .split(f"## {title}\n")[1]
        .split("\n## ")[0]
    )
    lines = re.findall(r"^\| (.+) \| `featviz (.+?)` \| (.+) \|$", text, re.MULTILINE)
    assert len(lines) == text.count("| `featviz ") >= least
    assert all(works.startswith(("yes", "no: `")) for *_, works in lines)
    return [Row(title, *line) for line in lines]


def save_folders(root: Path) -> None:
    """Folders of Hugging Face and timm, and one of an adapter."""
    hf = importlib.import_module("models.hf_folders")
    hf.photo(90, 60).save(root / "photo.jpg")
    for family in ("vit", "clip", "dinov2"):
        hf.save(family, root / family)
    (root / "tuned.safetensors").write_bytes(
        (root / "vit" / "model.safetensors").read_bytes()
    )
    hf.edit(hf.save("vit", root / "remote"), auto_map={"AutoModel": "modeling.Net"})
    hf.edit(
        hf.save("vit", root / "quantised"), quantization_config={"quant_method": "gptq"}
    )
    weights = hf.theirs(hf.save("vit", root / "old")).state_dict()
    torch.save(weights, root / "old" / "pytorch_model.bin")
    (root / "old" / "model.safetensors").unlink()
    text = {
        "hidden_size": 8,
        "num_attention_heads": 2,
        "intermediate_size": 8,
        "vocab_size": 9,
    }
    bert = hf.transformers.BertModel(hf.transformers.BertConfig(**text))
    bert.save_pretrained(root / "bert")
    for name in ("folder", "adapter", "timm-folder"):
        (root / name).mkdir()
    (root / "folder" / "weights.pth").touch()
    (root / "adapter" / "adapter_config.json").write_text('{"peft_type": "LORA"}')
    timm = importlib.import_module("timm").create_model("test_resnet")
    save_file(timm.state_dict(), root / "timm-folder" / "model.safetensors")
    (root / "timm-folder" / "config.json").write_text('{"architecture": "test_resnet"}')
    program = torch.export.export(hf.theirs(root / "vit"), (torch.zeros(1, 3, 32, 32),))
    torch.export.save(program, root / "vit.pt2")


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
    Image.open(SCENES / "landscape.jpg").convert("RGB").resize((120, 90)).save(
        root / "photo.jpg"
    )
    for name in (*files.NAMES, "yolo11n-pose", "yolo11n-obb"):
        model = classifier() if name == "yolo11n-cls" else files.built(name)
        files.save(model, root / f"{name}.pt")
    files.save(files.built("yolo11n"), root / "last.pt", "ema")
    files.save(files.built("yolo11n").fuse(verbose=False), root / "fused.pt")
    model = files.built("yolo11n")
    model.criterion = importlib.import_module("ultralytics.utils.loss").BboxLoss(16)
    files.save(model, root / "epoch3.pt")


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
    np.save(root / "scene.npy", scene)
    np.savez_compressed(root / "scene.npz", image=scene, label=np.ones(1))
    torch.save(torch.from_numpy(scene), root / "scene.pt")
    tifffile = pytest.importorskip("tifffile", reason="tifffile is not installed")
    tifffile.imwrite(
        root / "scene.tif", scene, photometric="minisblack", planarconfig="separate"
    )
    pixels = random.integers(0, 256, (12, 16, 4)).astype("u1")
    Image.fromarray(pixels).save(root / "rgba.png")
    Image.fromarray(pixels[..., :3]).save(root / "photo.png")
    np.save(root / "ct.npy", random.integers(-1000, 3000, (12, 16)).astype("i2"))
    np.save(root / "floats.npy", scene[:3] * 9 - 4)
    np.save(root / "objects.npy", np.array([{}]), allow_pickle=True)
    np.save(root / "volume.npy", random.random((24, 12, 16)).astype("f4"))
    np.save(root / "volume4.npy", random.random((4, 6, 12, 16)).astype("f4"))
    np.save(root / "latent.npy", random.random(16))
    np.save(root / "mask.npy", np.ones((1, 1, 1, 1), "f4"))
    parts = (nn.Conv2d(3, 4, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 5))
    small = nn.Sequential(*parts).eval()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        quantised = torch.ao.quantization.quantize_dynamic(small, {nn.Linear})
    torch.save(quantised, root / "quantised.pth")


HUGGING_FACE, ULTRALYTICS = "Hugging Face folders", "Ultralytics"
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
def things(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The folder of what the rows of a table name, made once."""
    made: dict[str, Path] = {}

    def folder(title: str) -> Path:
        table = TABLES[title]
        pytest.importorskip(table.package, reason=f"{table.package} is not installed")
        if title not in made:
            made[title] = tmp_path_factory.mktemp("things")
            table.make(made[title])
        return made[title]

    return folder


ROWS = [row for title, table in TABLES.items() for row in rows(title, table.rows)]


@pytest.mark.parametrize(
    "row", ROWS, ids=[f"{row.command} ({row.having})" for row in ROWS]
)
def test_each_row_is_true(
    row: Row,
    things: Callable[[str], Path],
    tmp_path: Path,
    featviz: Run,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What works draws pictures; what does not ends with the words of the table."""
    monkeypatch.chdir(things(row.title))
    if "--preset yolo" in row.command:
        pytest.importorskip("ultralytics")
    if "without the package" in row.having:
        for name in [
            name for name in sys.modules if name.partition(".")[0] == "ultralytics"
        ]:
            monkeypatch.setitem(sys.modules, name, None)
    done = featviz(*shlex.split(row.command), "--out", tmp_path / "out")
    pictures = list((tmp_path / "out").glob("*/*/*.png"))
    if row.works.startswith("yes"):
        assert done.code == 0, done.err
        assert pictures
    else:
        (words,) = re.findall(r"`(.+)`", row.works)
        assert done.code in (1, 2) and words in done.err
        assert "Traceback" not in done.err and not pictures


def test_the_classes_of_a_classifier_are_those_of_its_own_shares(
    things: Callable[[str], Path], tmp_path: Path, featviz: Run
) -> None:
    """The five likeliest, by name, with the shares that the model itself gives for the
    picture."""
    out, root = tmp_path / "out", things(ULTRALYTICS)
    line = featviz("run", root / "yolo11n-cls.pt", root / "photo.jpg", "--out", out).err
    seen = Image.open(out / "photo.jpg" / "input.png").convert("RGB")
    pixels = torch.tensor(list(seen.tobytes())).reshape(1, *seen.size[::-1], 3) / 255
    with torch.no_grad():
        shares = classifier()(pixels.permute(0, 3, 1, 2))[0][0]
    best = int(shares.argmax())
    assert 0.01 < shares[best] < 0.9
    assert (
        f"photo.jpg: thing {best} {float(shares[best]):.1%}".replace("%", " %") in line
    )
