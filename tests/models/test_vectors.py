"""Inputs that are no images: `--input`, vectors in files, and tensors by name from
Python."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import Run
from PIL import Image
from runs import refused
from torch import Tensor, nn

import featviz as package

pytestmark = pytest.mark.usefixtures("imports_undone")

CODE = """
import torch
from torch import nn

class Generator(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(16, 40 * 36)
        self.up = nn.ConvTranspose2d(40, 6, 4, 2, 1)
    def forward(self, z, label=None, scale=1):
        x = torch.relu(self.up(self.fc(z).view(-1, 40, 6, 6)))
        return x * scale if label is None else x + label[:, None, None, None]
"""


class Generator(nn.Module):
    """A generator whose every feature map can be computed by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(16, 40 * 36)
        self.up = nn.ConvTranspose2d(40, 6, 4, 2, 1)

    def forward(self, z: Tensor, label: Tensor | None = None) -> Tensor:
        """Draw an image."""
        x: Tensor = self.up(self.fc(z).view(-1, 40, 6, 6))
        return x if label is None else x + label[:, None, None, None]


@pytest.fixture
def net(tmp_path: Path) -> Path:
    path = tmp_path / "generator_net.py"
    path.write_text(CODE)
    return path


def test_random_numbers_by_name_without_an_image(
    featviz: Run, net: Path, tmp_path: Path
) -> None:
    """The one image is named after the argument; its maps are those of the seeded
    numbers, square ones as maps and not as tokens; input.png is a strip; the run is
    whole, resumes, and reports."""
    out = tmp_path / "out"
    layers = ("--layers", "up,fn:view,fn:relu", "--tensors", "npy", "--out", out)
    given = (
        "run",
        f"{net}:Generator",
        "--input",
        "z=randn:1,16",
        "--seed",
        "3",
        *layers,
    )
    done = featviz(*given)
    assert done.code == 0 and "guess" not in done.err, done.err
    manifest = json.loads((out / "z" / "manifest.json").read_text())
    rows = {row["layer"]: row for row in manifest["captures"]}
    assert [rows[name]["layout"] for name in ("up", "fn:view", "fn:relu")] == [
        "nchw"
    ] * 3
    torch.manual_seed(3)
    model = Generator()
    z = torch.randn(1, 16, generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        expected = model(z).numpy()
    np.testing.assert_allclose(
        np.load(out / "z" / rows["up"]["tensor"]), expected, atol=1e-5
    )
    assert manifest["input"]["shape"] == [1, 16]
    assert (
        manifest["input"]["preprocessing"]
        == "z=randn:1,16 (seed 3) in place of an image"
    )
    shown = np.asarray(Image.open(out / "z" / "input.png"))
    assert shown.shape == (16, 16) and (shown == shown[:1]).all()
    assert shown[0].argmax() == z.argmax() and shown[0].argmin() == z.argmin()
    again = featviz(*given, "--resume")
    assert again.code == 0 and "1 was complete before" in again.err
    assert featviz("verify", out).code == featviz("report", out).code == 0


def test_files_of_vectors(featviz: Run, net: Path, tmp_path: Path) -> None:
    """[F] and [1, F], of numpy and of torch.save, where the first layer is linear; a
    picture among them fails alone."""
    z = np.linspace(-1, 1, 16)
    np.save(tmp_path / "a.npy", z)
    torch.save(torch.tensor(z)[None], tmp_path / "b.pt")
    Image.new("RGB", (8, 8)).save(tmp_path / "c.png")
    files = [tmp_path / name for name in ("a.npy", "b.pt", "c.png")]
    layers = ("--layers", "up", "--tensors", "npy", "--out", tmp_path / "out")
    done = featviz("run", f"{net}:Generator", *files, *layers)
    assert done.code == 3 and "c.png: is no vector of 16 numbers" in done.err, done.err
    kept = [
        np.load(tmp_path / "out" / name / "002_up" / "output.npy")
        for name in ("a.npy", "b.pt")
    ]
    torch.manual_seed(0)
    with torch.no_grad():
        expected = Generator()(torch.tensor(z, dtype=torch.float32)[None]).numpy()
    np.testing.assert_allclose(kept, [expected, expected], atol=1e-5)
    assert '"vector of 16 numbers"' in (tmp_path / "out" / "run.json").read_text()


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            ["--input", "q=randn:1,16"],
            "input q: forward of Generator takes z, label, scale",
        ),
        (["--input", "z=3"], "input z=3 is no tensor"),
        (["--input", "z=randn:1,16:int64"], "input z=randn:1,16:int64 is no value"),
        (["--input", "z=none.npy"], "input z: none.npy is no file"),
        (["c.png", "--input", "z=randn:1,16"], "input takes the place of an image"),
        ([], "featviz run needs IMAGES"),
    ],
)
def test_what_is_no_input_gets_one_line(
    featviz: Run, net: Path, tmp_path: Path, given: list[str], message: str
) -> None:
    """A usage error that names the value; nothing is written."""
    Image.new("RGB", (8, 8)).save(tmp_path / "c.png")
    refused(featviz("run", f"{net}:Generator", *given, "-q"), 2, message)
    assert not (tmp_path / "featviz-out").exists()


def test_an_overlay_needs_an_image(featviz: Run, net: Path) -> None:
    """Numbers are nothing that maps may lie over."""
    given = ("--input", "z=randn:1,16", "--layers", "up", "--overlay", "0.5", "-q")
    refused(featviz("run", f"{net}:Generator", *given), 1, "no image lie over nothing")


def test_from_python() -> None:
    """A tensor [1, F], a list of these, or a mapping by the names of forward's
    arguments; the module is given back without a hook."""
    model, z = Generator(), torch.randn(1, 16)
    for images in (z, [z[0]], {"z": z}, {"z": z, "label": torch.tensor([0.0])}):
        (maps,) = package.run(model, images, "up", tensors=True).captures
        with torch.no_grad():
            assert torch.allclose(maps.tensor, model(z), atol=1e-6)
    assert not model._forward_pre_hooks
    with pytest.raises(package.errors.UsageError, match="z is a int and no tensor"):
        package.run(model, {"z": 3})
