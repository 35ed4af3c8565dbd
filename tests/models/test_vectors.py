"""Inputs that are no images: `--input`, vectors in files, and tensors by name from
Python."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import Run
from PIL import Image
from runs import refused

import featviz as package
from featviz.models.arguments import UserTransform
from models.drawn import DrawnImage
from models.loading import load

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


@pytest.fixture
def net(tmp_path: Path) -> Path:
    path = tmp_path / "generator_net.py"
    path.write_text(CODE)
    return path


@pytest.fixture
def draw_numbers(featviz: Run, net: Path, tmp_path: Path) -> Run:
    """Draw seeded random numbers, with further options."""
    layers = ["--layers", "up,fn:view,fn:relu", "--tensors", "npy"]
    call = ["run", f"{net}:Generator", "--input", "z=randn:1,16", "--seed", 3, *layers]
    return lambda *options: featviz(*call, "--out", tmp_path / "out", *options)


@pytest.mark.medium
def test_random_numbers_by_name_without_an_image(
    draw_numbers: Run, net: Path, tmp_path: Path
) -> None:
    """The one image is named after the argument; its maps are those of the seeded
    numbers, square ones as maps and not as tokens; input.png is a strip."""
    done = draw_numbers()
    assert done.code == 0, done.err
    assert "guess" not in done.err
    z = torch.randn(1, 16, generator=torch.Generator().manual_seed(3))
    drawn = DrawnImage(tmp_path / "out" / "z")
    expected = load(f"{net}:Generator", seed=3)(z).detach()
    torch.testing.assert_close(drawn.tensor("fn:relu"), expected, atol=1e-5, rtol=1e-7)
    layouts = {name: row["layout"] for name, row in drawn.rows.items()}
    assert layouts == dict.fromkeys(["up", "fn:view", "fn:relu"], "nchw")
    described = drawn.manifest["input"]["preprocessing"]
    assert described == "z=randn:1,16 (seed 3) in place of an image"
    assert drawn.manifest["input"]["shape"] == [1, 16]


@pytest.mark.medium
def test_numbers_are_shown_as_a_strip(draw_numbers: Run, tmp_path: Path) -> None:
    """input.png has a column for each."""
    draw_numbers()
    z = torch.randn(1, 16, generator=torch.Generator().manual_seed(3))
    strip = DrawnImage(tmp_path / "out" / "z").input()
    assert strip.shape == (16, 16)
    assert (strip == strip[:1]).all()
    assert strip[0].argmax() == z.argmax()
    assert strip[0].argmin() == z.argmin()


@pytest.mark.medium
def test_a_run_on_numbers_is_a_whole_run(
    draw_numbers: Run, featviz: Run, tmp_path: Path
) -> None:
    """It resumes, verifies and reports."""
    draw_numbers()
    again = draw_numbers("--resume")
    assert again.code == 0
    assert "1 was complete before" in again.err
    assert featviz("verify", tmp_path / "out").code == 0
    assert featviz("report", tmp_path / "out").code == 0


@pytest.mark.medium
def test_files_of_vectors(featviz: Run, net: Path, tmp_path: Path) -> None:
    """[F] and [1, F], of numpy and of torch.save, where the first layer is linear; a
    picture among them fails alone."""
    z = torch.linspace(-1, 1, 16)
    np.save(tmp_path / "a.npy", z)
    torch.save(z[None], tmp_path / "b.pt")
    Image.new("RGB", (8, 8)).save(tmp_path / "c.png")
    files = [tmp_path / name for name in ("a.npy", "b.pt", "c.png")]
    out = tmp_path / "out"
    options = ["--layers", "fn:relu", "--tensors", "npy", "--out", out]
    done = featviz("run", f"{net}:Generator", *files, *options)
    assert done.code == 3
    assert "c.png: is no vector of 16 numbers" in done.err
    expected = load(f"{net}:Generator")(z[None]).detach()
    of_numpy = DrawnImage(out / "a.npy").tensor("fn:relu")
    of_torch = DrawnImage(out / "b.pt").tensor("fn:relu")
    torch.testing.assert_close(of_numpy, expected, atol=1e-5, rtol=1e-7)
    torch.testing.assert_close(of_torch, expected, atol=1e-5, rtol=1e-7)
    assert '"vector of 16 numbers"' in (out / "run.json").read_text()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["--input", "q=randn:1,16"],
            "input q: forward of Generator takes z, label, scale",
        ),
        (["--input", "z=3"], "input z=3 is no tensor"),
        (["--input", "z=randn:1,16:int64"], "input z=randn:1,16:int64 is no value"),
        (["--input", "z=none.npy"], "input z: none.npy is no file"),
        (["c.png", "--input", "z=randn:1,16"], "input takes the place of an image"),
        ([], "featviz run needs IMAGE"),
    ],
)
def test_what_is_no_input_gets_one_line(
    featviz: Run, net: Path, tmp_path: Path, arguments: list[str], message: str
) -> None:
    """A usage error that names the value; nothing is written."""
    Image.new("RGB", (8, 8)).save(tmp_path / "c.png")
    refused(featviz("run", f"{net}:Generator", *arguments, "-q"), 2, message)
    assert not (tmp_path / "featviz-out").exists()


def test_an_overlay_needs_an_image(featviz: Run, net: Path) -> None:
    """Numbers are nothing that maps may lie over."""
    options = ["--input", "z=randn:1,16", "--layers", "up", "--overlay", "0.5", "-q"]
    done = featviz("run", f"{net}:Generator", *options)
    refused(done, 1, "no image lie over nothing")


Z = torch.randn(1, 16, generator=torch.Generator().manual_seed(0))


@pytest.mark.medium
@pytest.mark.parametrize(
    "images",
    [Z, [Z[0]], {"z": Z}, {"z": Z, "label": torch.tensor([0.0])}],
    ids=["tensor", "list", "name", "names"],
)
def test_from_python(images: Any, net: Path) -> None:
    """A tensor [1, F], a list of these, or a mapping by the names of forward's
    arguments; the module is given back without a hook."""
    model = load(f"{net}:Generator")
    (maps,) = package.run(model, images, "fn:relu", tensors=True).captures
    torch.testing.assert_close(maps.tensor, model(Z).detach(), atol=1e-6, rtol=1e-7)
    assert not model._forward_pre_hooks


def test_from_python_a_number_is_no_tensor(net: Path) -> None:
    """The error names the argument."""
    with pytest.raises(package.errors.UsageError, match="z is a int and no tensor"):
        package.run(load(f"{net}:Generator"), {"z": 3})


@pytest.mark.parametrize(
    ("value", "shape"),
    [
        ("zeros:3", [1, 3]),
        ("zeros:1", [1]),
        ("zeros:3:int64", [3]),
        ("ones:3:bool", [3]),
        ("randn:2,3", [2, 3]),
    ],
)
def test_a_vector_of_floats_is_a_batch_of_one(value: str, shape: list[int]) -> None:
    """Integers may be indices, of which a model takes [N] as well."""
    transform = UserTransform.input([f"x={value}"])
    (tensor,) = transform(None)
    assert list(tensor.shape) == shape
    (again,) = transform(None)
    assert torch.equal(again, tensor)
    assert again is not tensor
