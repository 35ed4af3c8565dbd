"""MODEL strings to modules: sources, options that fit, devices, and files that are no
model."""

from __future__ import annotations

import sys
import zipfile
from importlib import metadata
from pathlib import Path
from typing import Any
from urllib.error import URLError

import pytest
import torch
from conftest import Run
from safetensors.torch import save_file
from torch import Tensor
from torchvision import models

import featviz
from featviz.errors import LoadError, UsageError
from featviz.models import sources
from featviz.models.load import pick_device
from models.loading import OLD, SMALL, WHOLE, load, same_weights, skeleton

pytestmark = [pytest.mark.usefixtures("imports_undone"), pytest.mark.medium]


@pytest.mark.parametrize(
    ("spec", "options", "message"),
    [
        ("resnet18", {"arch": "resnet18"}, "--arch is for files of weights"),
        ("FILE", {"weights": "none"}, "--weights does not go with a model file"),
        ("FILE", {"arch": "FILE"}, "is a file of its own"),
    ],
)
def test_options_that_do_not_go_together(
    spec: str, options: dict[str, str], message: str, tiny_file: Path
) -> None:
    """Each contradiction is a usage error that names the option."""
    paths = {
        name: value.replace("FILE", str(tiny_file)) for name, value in options.items()
    }
    with pytest.raises(UsageError, match=message):
        load(spec.replace("FILE", str(tiny_file)), **paths)


@pytest.mark.parametrize("name", ["gpu", "cuda:x", "cuda:-1", "", "CPU"])
def test_a_device_that_is_none(name: str) -> None:
    """Only torch's own names are."""
    with pytest.raises(UsageError, match=f"--device '{name}' is no device"):
        pick_device(name)


@pytest.mark.parametrize(("name", "count"), [("cuda", 0), ("cuda:0", 0), ("cuda:2", 2)])
def test_a_device_that_is_not_here(
    name: str, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A GPU beyond those of the machine is a usage error that counts them."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    message = f"{name}: this machine has {count} cuda devices"
    with pytest.raises(UsageError, match=message):
        pick_device(name)


def test_without_a_gpu_auto_is_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of any maker."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    assert pick_device("auto") == torch.device("cpu")


def test_a_module_without_values_is_refused() -> None:
    """On the device meta a module of a program's ends as one of the command line; its
    layers can be listed, and their operations counted."""
    message = "weight is on the device meta, where tensors have no values"
    module = torch.nn.Conv2d(3, 2, 1, device="meta")
    with pytest.raises(LoadError, match=message):
        featviz.run(module, torch.rand(3, 8, 8), preset="none")
    table = featviz.layers(module, size=8, preset="none").document
    assert [row["macs"] for row in table["layers"]] == [3 * 2 * 8 * 8]


MESSAGE = "operator torchvision::nms does not exist"


@pytest.fixture
def unfit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A torchvision that was built for another torch."""
    package = tmp_path / "torchvision"
    package.mkdir()
    (package / "__init__.py").write_text(f"raise RuntimeError({MESSAGE!r})")
    described = tmp_path / "torchvision-8.2.dist-info" / "METADATA"
    described.parent.mkdir()
    described.write_text("Metadata-Version: 2.1\nName: torchvision\nVersion: 8.2\n")
    for name in list(sys.modules):
        if name.partition(".")[0] == "torchvision":
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.syspath_prepend(tmp_path)


@pytest.fixture
def block_file(tmp_path: Path) -> Path:
    """A file with a whole model of torchvision's classes."""
    torch.save(models.resnet.BasicBlock(4, 4), tmp_path / "whole.pth")
    return tmp_path / "whole.pth"


@pytest.mark.parametrize("spec", ["{file}", SMALL])
def test_torch_and_torchvision_that_do_not_fit_end_in_one_line(
    spec: str, block_file: Path, unfit: None, featviz: Run
) -> None:
    """The operator error at import becomes one line with both versions, and a hint, for
    a name and for a file with a whole model of torchvision's classes."""
    done = featviz("layers", spec.format(file=block_file))
    versions = f"torch {metadata.version('torch')} and torchvision 8.2"
    line, hint = done.err.splitlines()
    assert done.code == 1
    assert done.out == ""
    assert line == f"error: {versions} cannot be used together: {MESSAGE}"
    assert hint.startswith("hint: ")
    assert hint.endswith(" --force-reinstall torch torchvision")


def test_a_build_for_the_cpu_is_replaced_by_one(
    block_file: Path, unfit: None, tmp_path: Path, featviz: Run
) -> None:
    """PyPI has the build for CUDA, which takes several GB."""
    described = tmp_path / "torch-8.1+cpu.dist-info" / "METADATA"
    described.parent.mkdir()
    described.write_text("Metadata-Version: 2.1\nName: torch\nVersion: 8.1+cpu\n")

    done = featviz("layers", block_file)

    assert done.err.startswith("error: torch 8.1+cpu and torchvision 8.2 cannot be")
    index = "--index-url https://download.pytorch.org/whl/cpu"
    assert done.err.endswith(f" torch torchvision {index}\n")


ENTRY = models.SqueezeNet1_1_Weights.IMAGENET1K_V1


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder of torch.hub's downloads."""
    monkeypatch.setenv("TORCH_HOME", str(tmp_path / "home"))
    folder = tmp_path / "home" / "hub" / "checkpoints"
    folder.mkdir(parents=True)
    return folder


@pytest.fixture(scope="module")
def weights() -> dict[str, Tensor]:
    """A state dict of SMALL that no seed gives."""
    return dict(skeleton(SMALL).state_dict())


@pytest.mark.parametrize("suffix", [".pth", ".safetensors"])
def test_weights_for_an_arch_arrive_unchanged(
    suffix: str, weights: dict[str, Tensor], tmp_path: Path
) -> None:
    """FILE --arch NAME gives the architecture with exactly the file's tensors, and so
    does torchvision:NAME --weights FILE."""
    path = tmp_path / f"weights{suffix}"
    save = save_file if suffix == ".safetensors" else torch.save
    save(weights, path)
    assert same_weights(load(path, arch=SMALL), weights)
    assert same_weights(load(f"torchvision:{SMALL}", weights=str(path)), weights)


@pytest.fixture
def weights_file(weights: dict[str, Tensor], tmp_path: Path) -> Path:
    torch.save(weights, tmp_path / "weights.pth")
    return tmp_path / "weights.pth"


def test_weights_of_another_arch_do_not_fit(
    weights: dict[str, Tensor], weights_file: Path
) -> None:
    """The error counts the tensors that fit and names missing and unexpected keys."""
    state = models.shufflenet_v2_x0_5().state_dict()
    keys = [key for key in state if not key.endswith("num_batches_tracked")]
    message = (
        rf"weights\.pth does not fit shufflenet_v2_x0_5: 0 of {len(keys)} tensors; "
        rf"missing conv1\.0\.weight, .* and {len(keys) - 4} more; "
        rf"unexpected .*features\.0\.weight.* and {len(weights) - 4} more"
    )
    with pytest.raises(LoadError, match=message):
        load(weights_file, arch="shufflenet_v2_x0_5")


def test_another_number_of_classes_is_told_by_shapes(
    weights: dict[str, Tensor], weights_file: Path
) -> None:
    """The shapes of the head are named, and the hint says how to change the model's."""
    count = len(weights)
    message = (
        rf"{count - 2} of {count} tensors; classifier\.1\.weight is"
        r" \[1000, 512, 1, 1\], not \[10, 512"
    )
    with pytest.raises(LoadError, match=message) as caught:
        load(weights_file, arch=SMALL, model_args={"num_classes": 10})
    assert "num_classes" in str(caught.value.hint)


@pytest.mark.parametrize("choice", [None, "IMAGENET1K_V1"])
def test_weights_that_cannot_be_downloaded(
    choice: str | None, hub: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a network: the file, the folder where to put it, and --weights none."""

    def offline(*args: object, **kwargs: object) -> None:
        raise URLError("Name or service not known")

    monkeypatch.setattr(torch.hub, "download_url_to_file", offline)
    message = r"SqueezeNet1_1_Weights\.IMAGENET1K_V1.*not known"
    with pytest.raises(LoadError, match=message) as caught:
        load(SMALL, weights=choice)
    hint = str(caught.value.hint)
    assert Path(ENTRY.url).name in hint
    assert str(hub) in hint
    assert "--weights none" in hint


def test_a_download_leaves_stdout_alone(
    hub: Path, weights: dict[str, Tensor], monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    """torch.hub says on stdout what it downloads, and --json is there."""

    def download(url: str, file: str, *args: object, **more: object) -> None:
        torch.save(weights, file)

    monkeypatch.setattr(torch.hub, "download_url_to_file", download)
    assert same_weights(load(SMALL), weights)
    streams = capsys.readouterr()
    assert streams.out == ""
    assert "Downloading" in streams.err


@pytest.mark.parametrize("choice", [None, "IMAGENET1K_V1"])
def test_weights_in_the_cache_are_used(
    choice: str | None,
    hub: Path,
    weights: dict[str, Tensor],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A file put where the message says is taken, without a network."""
    monkeypatch.setattr(torch.hub, "download_url_to_file", pytest.fail)
    torch.save(weights, hub / Path(ENTRY.url).name)
    assert same_weights(load(SMALL, weights=choice), weights)


@pytest.mark.parametrize(
    "content",
    [b"", b"<html>", WHOLE[:1000], OLD[:1000]],
    ids=["empty", "page", "zip", "legacy"],
)
def test_a_corrupt_file_in_the_cache(content: bytes, hub: Path) -> None:
    """A broken download is named with its folder, and ends in one line."""
    (hub / Path(ENTRY.url).name).write_bytes(content)
    with pytest.raises(LoadError, match="could not be loaded") as caught:
        load(SMALL)
    assert "\n" not in caught.value.message
    assert Path(ENTRY.url).name in str(caught.value.hint)
    assert str(hub) in str(caught.value.hint)


def test_a_header_that_begins_as_a_pickle_does(tmp_path: Path) -> None:
    """A safetensors header of 640 bytes begins with the first two bytes of a pickle."""
    path = tmp_path / "weights.safetensors"
    for length in range(500, 700):
        save_file({"x" * length: torch.zeros(1)}, path)
        if path.read_bytes().startswith(b"\x80\x02"):
            break
    assert path.read_bytes().startswith(b"\x80\x02")
    assert sources.sniff(path) == sources.SAFETENSORS


@pytest.mark.parametrize(
    ("name", "content", "description"),
    [
        ("a.pth", b"\xff\xd8\xff\xe0 a photograph", "a JPEG image"),
        ("a.pth", b"\x89HDF\r\n", "an HDF5 file (Keras?)"),
        ("a.pth", b"  <html>", "a web page"),
        ("a.pth", b'{"model": 1}', "a JSON file"),
        ("a.pth", b"accuracy: 0.9\n", "a text file"),
        ("a.pth", b"\0\1\2\3", "no format that featviz knows"),
        ("a.pth", b"", "empty"),
        ("a.pth", bytes(257) + b"ustar", "a tar archive (of torch before 0.1.10:"),
        ("a.PKL", b"\0\1\2\3", sources.PICKLE),
        ("a.pth", b"\x80\x05N.", sources.PICKLE),
        ("a.pth", b"\x80\x06N.", "no format that featviz knows"),
        ("a.onnx", b"\0\1\2\3", sources.ONNX),
        ("a.bin", b"\x08\x09\x12\x07pytorch", sources.ONNX),
        ("a.index.json", b'{"weight_map": {}}', sources.SHARDS),
    ],
)
def test_a_file_is_told_by_its_first_bytes(
    name: str, content: bytes, description: str, tmp_path: Path
) -> None:
    """A name counts only where these say nothing."""
    (tmp_path / name).write_bytes(content)
    assert sources.sniff(tmp_path / name).startswith(description)


@pytest.mark.parametrize(
    ("members", "description"),
    [
        ({"a/data.pkl": 9, "a/data/0": 9}, sources.ZIP),
        ({"a/data.pkl": 9, "a/constants.pkl": 9}, sources.TORCHSCRIPT),
        ({"a/Archive_Format": 9, "a/data.pkl": 9}, sources.EXPORTED),
        ({"w.npy": 9, "b.npy": 9}, sources.ARRAYS),
        ({"w.npy": 9, "readme.txt": 9}, "a zip archive that is no checkpoint"),
        ({}, "a zip archive that is no checkpoint"),
        ({"a/data.pkl": 10**6}, "a zip archive that would unpack to 1,000,000 bytes"),
    ],
)
def test_a_zip_file_is_told_by_the_names_in_it(
    members: dict[str, int], description: str, tmp_path: Path
) -> None:
    """And refused where it unpacks to twenty times its size."""
    path = tmp_path / "a.pth"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, size in (members or {"a.png": 1}).items():
            archive.writestr(name, bytes(size))
    assert sources.sniff(path) == description


def test_the_folder_of_an_adapter_is_told_how_to_become_a_model(tmp_path: Path) -> None:
    """The hint is what peft does with an adapter and its model."""
    (tmp_path / "adapter_config.json").write_text('{"peft_type": "LORA"}')
    (tmp_path / "adapter_model.safetensors").touch()
    message = "holds an adapter, which is no model by itself"
    with pytest.raises(LoadError, match=message) as caught:
        load(tmp_path)
    assert "model.merge_and_unload().save_pretrained('DIR')" in str(caught.value.hint)
