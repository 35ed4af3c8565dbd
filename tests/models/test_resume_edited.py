"""--resume refuses a run whose code, settings or arguments were edited since."""

from __future__ import annotations

import hashlib
import linecache
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from cli.outcomes import Run
from runs import make_photos, run_json, tree
from torch import nn

import featviz as fv
from featviz.api.lending import Feeding, lent
from featviz.models.importing import from_file
from featviz.models.load import InputOptions, LoadedModel, ModelOptions, load_model
from featviz.models.transform import UserTransform
from featviz.rundir.unlike import differences

pytestmark = pytest.mark.usefixtures("imports_undone")

CODE = """
import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 2, 3)
    def extra_repr(self):
        return f"by={object()}"
    def forward(self, x):
        return F.relu(self.conv(x))

def prepare(image):
    return torch.from_numpy(np.array(image)).permute(2, 0, 1) / 255
"""


@pytest.fixture
def code(tmp_path: Path) -> Path:
    (tmp_path / "user_net.py").write_text(CODE)
    return tmp_path / "user_net.py"


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    return make_photos(tmp_path / "photos", 2)


def edit(code: Path, old: str, new: str) -> None:
    assert CODE.count(old) == 1
    code.write_text(CODE.replace(old, new))


def test_an_edited_factory_is_another_model(
    featviz: Run, code: Path, photos: Path, tmp_path: Path
) -> None:
    """gelu for relu changes no tensor and no name; as MODEL and as --arch. run.json has the
    sha256 of the file, and an address in `extra_repr` is no difference."""
    weights = tmp_path / "weights.pth"
    torch.save(load_model(ModelOptions(f"{code}:Net"), InputOptions()).module.state_dict(), weights)
    for index, model in enumerate(([f"{code}:Net"], [weights, "--arch", f"{code}:Net"])):
        code.write_text(CODE)
        out = tmp_path / str(index)
        base = ["run", *model, photos, "--layers", "Net", "--out", out, "--resume"]
        assert featviz(*base).code == 0
        expected = hashlib.sha256(CODE.encode()).hexdigest()
        assert run_json(out)["model"]["code_sha256"] == expected
        assert "(2 were complete before)" in featviz(*base).err
        before = tree(out)
        edit(code, "F.relu", "F.gelu")
        done = featviz(*base)
        assert done.code == 1 and "holds another run; its model.code_sha256 is" in done.err
        assert tree(out) == before


def test_a_factory_of_a_module_is_told_by_its_file(
    featviz: Run, code: Path, photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """pkg.mod:factory is recorded as file.py:factory is."""
    monkeypatch.syspath_prepend(code.parent)
    done = featviz("run", "user_net:Net", photos, "--layers", "Net", "--out", tmp_path / "out")
    assert done.code == 0, done.err
    expected = hashlib.sha256(CODE.encode()).hexdigest()
    assert run_json(tmp_path / "out")["model"]["code_sha256"] == expected


def test_an_edited_transform_is_another_run(
    featviz: Run, tiny_file: Path, code: Path, photos: Path, tmp_path: Path
) -> None:
    """Its file's sha256 stands in the words of the preprocessing, which are refused."""
    base = ["run", tiny_file, photos, "--layers", "0", "--out", tmp_path / "out"]
    base += ["--transform", f"{code}:prepare", "--resume"]
    assert featviz(*base).code == 0
    digest = hashlib.sha256(CODE.encode()).hexdigest()[:16]
    words = run_json(tmp_path / "out")["preprocessing"]
    assert words == f"RGB, transform user_net.py:prepare (sha256 {digest})"
    assert "(2 were complete before)" in featviz(*base).err
    before = tree(tmp_path / "out")
    edit(code, "/ 255", "/ 10")
    done = featviz(*base)
    assert done.code == 1 and "holds another run; its preprocessing is" in done.err
    edited = hashlib.sha256(code.read_bytes()).hexdigest()[:16]
    assert all(f"(sha256 {one})" in done.err for one in (digest, edited))
    assert tree(tmp_path / "out") == before


def test_settings_of_a_module_and_a_transform_from_python(photos: Path, tmp_path: Path) -> None:
    """The slope of an activation, and a function of the same name that does something else."""

    def net(slope: float) -> nn.Module:
        net = nn.Sequential(nn.Conv2d(3, 2, 3), nn.LeakyReLU(slope))
        nn.init.ones_(net[0].weight)  # type: ignore[arg-type]
        nn.init.zeros_(net[0].bias)  # type: ignore[arg-type]
        return net

    def filled(value: float) -> Callable[[Any], torch.Tensor]:
        return lambda image: torch.full((3, 8, 8), value)

    def run(slope: float, value: float) -> list[bool]:
        feeding = filled(value)
        found = fv.run(
            net(slope), photos, "0", tmp_path / "out", size=8, transform=feeding, resume=True
        )
        return [image.kept for image in found.images]

    assert run(0.01, 0.5) == [False, False] and run(0.01, 0.5) == [True, True]
    with pytest.raises(fv.errors.StoreError, match=r"its model\.parameters is"):
        run(5.0, 0.5)
    with pytest.raises(fv.errors.StoreError, match="its preprocessing is"):
        run(0.01, 0.25)


def test_a_function_is_told_where_it_is_given(code: Path) -> None:
    """Once, and not again where it was sent to, as to an actor, which may not have its source."""
    prepare = from_file(code).prepare
    feeding = Feeding.taken({"transform": prepare})
    assert feeding.transform is not None and feeding.transform.code is not None
    code.unlink()
    linecache.clearcache()
    assert UserTransform.of(prepare).code != feeding.transform.code
    with lent(nn.Conv2d(3, 1, 1), {}, InputOptions(), feeding) as loaded:
        assert isinstance(loaded, LoadedModel)
        words = f"RGB, transform prepare (sha256 {feeding.transform.code[:16]})"
        assert loaded.preprocess.words == words


class Plus(nn.Module):
    """Adds the last of a list."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 2, 1)
        nn.init.ones_(self.conv.weight)

    def forward(self, x: torch.Tensor, many: Any = None) -> torch.Tensor:
        added: torch.Tensor = self.conv(x) + many[-1]
        return added


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ([*range(1000)], [*range(999), 7]),
        ([torch.tensor(0.12345678)], [torch.tensor(0.12345)]),
    ],
)
def test_long_arguments_that_differ_in_their_tail(
    one: list[Any], other: list[Any], photos: Path, tmp_path: Path
) -> None:
    """Words that are cut or rounded for the manifest have a sha256 of the whole beside them."""
    torch.manual_seed(0)
    model = Plus()

    def run(many: list[Any]) -> list[bool]:
        given = {"many": many}
        found = fv.run(model, photos, "conv", tmp_path, size=8, forward_args=given, resume=True)
        return [image.kept for image in found.images]

    tmp_path /= "out"
    assert run(one) == [False, False] and run(list(one)) == [True, True]
    assert "… (sha256 " in run_json(tmp_path)["preprocessing"] or len(one) == 1
    with pytest.raises(fv.errors.StoreError, match="its preprocessing is"):
        run(other)


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ("a" * 70, "a" * 70 + "b", ["..." + "a" * 20 + '"', "..." + "a" * 20 + 'b"']),
        ("ab", "ac" * 40, ['"ab"', '"' + "ac" * 28 + "..."]),
        (
            "ab" * 40 + "0" * 90,
            "ab" * 40 + "1",
            ["..." + "ab" * 10 + "0" * 37 + "...", "..." + "ab" * 10 + '1"'],
        ),
        ("ab" * 40, "cd" * 40, ['"' + "ab" * 28 + "...", '"' + "cd" * 28 + "..."]),
    ],
)
def test_a_refusal_shows_where_long_values_differ(old: str, new: str, expected: list[str]) -> None:
    """Both from twenty characters before the first that differs; short ones whole."""
    (words,) = differences({"preprocessing": old}, {"preprocessing": new})
    assert words == f"its preprocessing is {expected[0]}, this one's {expected[1]}"
