"""The Python API: what a user would hand in has the meaning one expects, or ends in one line."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor, nn

import featviz as fv
from featviz.errors import FeatvizError, LayoutError, UsageError
from featviz.images import memory
from featviz.records import DrawOptions, ImageResult, PassOptions
from featviz.records.checking import choices

AS_IT_IS = {"size": (20, 24), "mean": (0, 0, 0), "std": (1, 1, 1)}
NAN = float("nan")


@pytest.fixture
def pixels(picture: Path) -> np.ndarray:
    """The picture as an array, uint8 [20, 24, 3]."""
    return np.asarray(Image.open(picture))


def drawn(model: nn.Module, images: Any, out: Path, layers: Any = "Conv2d", **more: Any) -> Any:
    """A run's images."""
    found = fv.run(model, images, layers, out, **{**AS_IT_IS, **more}).images
    assert all(isinstance(image, ImageResult) and image.error is None for image in found)
    return found


# Options ------------------------------------------------------------------------------------

BAD_DRAWING = [
    ("format", "gif", "--format 'gif' is not one of 'png', 'webp', 'jpg', 'avif'"),
    ("format", None, "--format None is not one of"),
    ("pick", "best", "--pick 'best' is not one of 'first', 'top', 'spread'"),
    ("tensors", "npz", "--tensors 'npz' is not 'npy'"),
    ("order", "size", "--order 'size' is not one of 'index', 'mean', 'similarity'"),
    ("reduce", "l1", "--reduce 'l1' is not one of 'mean', 'max', 'l2', 'pca'"),
    ("nrow", "x", "--nrow 'x' is neither a whole number nor auto"),
    ("nrow", 2.5, "--nrow 2.5 is neither a whole number nor auto"),
    ("nrow", True, "--nrow True is neither a whole number nor auto"),
    ("nrow", 0, "--nrow 0 is below 1"),
    ("scale", 0, "--scale 0 is below 1"),
    ("scale", "2", "--scale '2' is neither a whole number nor auto"),
    ("padding", -1, "--padding -1 is below 0"),
    ("padding", 2.0, "--padding 2.0 is not a valid integer"),
    ("padding", None, "--padding None is not a valid integer"),
    ("pad_value", 2, "--pad-value 2.0 is outside 0..1"),
    ("pad_value", NAN, "--pad-value nan is outside 0..1"),
    ("pad_value", "grey", "--pad-value 'grey' is not a valid float"),
    ("min_tile", 0, "--min-tile 0 is below 1"),
    ("max_maps", "3", "--max-maps '3' is not a valid integer"),
    ("max_slices", 0, "--max-slices 0 is below 1"),
    ("collapse", "x", "--collapse 'x' is not a valid float"),
    ("collapse", 0, "--collapse 0 is no correlation above 0"),
    ("overlay", "a", "--overlay 'a' is not a valid float"),
    ("labels", "yes", "--labels 'yes' is not a valid boolean"),
    ("figure", 1, "--figure 1 is not a valid boolean"),
    ("first", 0, "--first 0 is below 1"),
    ("cmap", 5, "--cmap 5 is not a text"),
    ("cmap", "virdis", "--cmap 'virdis' is no colormap"),
    ("normalize", None, "--normalize None is not a text"),
    ("normalize", "foo", "--normalize 'foo' is no normalization mode"),
    ("tensor_layout", 5, "--tensor-layout 5 is not a text"),
    ("tensor_layout", "foo", "'foo' is no layout"),
]
BAD_INPUT = [
    ("size", "abc", "--size 'abc' is no size: a number of pixels, or HEIGHTxWIDTH"),
    ("size", 0, "--size 0 is no size"),
    ("size", True, "--size True is no size"),
    ("size", (1, 2, 3), r"--size \(1, 2, 3\) is no size"),
    ("size", 10**9, "--size 1000000000 is above 65536"),
    ("crop", (0, 5), r"--crop \(0, 5\) is no size"),
    ("mean", "x", "--mean 'x' is not numbers separated by commas"),
    ("mean", [None] * 3, "is not numbers separated by commas"),
    ("mean", (1, 2), "--mean has 2 numbers for 3 channels"),
    ("std", NAN, "--std nan is not numbers"),
    ("channels", 2, "--channels 2 is not one of 1, 3"),
    ("channels", True, "--channels True is not a valid integer"),
    ("exif", "no", "--exif 'no' is not a valid boolean"),
    ("background", 5, "--background 5 is not a text"),
    ("background", "whit", "--background 'whit' is no colour"),
    ("frames", 0, "--frames 0 is below 1"),
    ("inputs", 1.5, "--inputs 1.5 is not a valid integer"),
]
BAD_PASS = [
    ("capture", "foo", "--capture 'foo' is nothing to capture"),
    ("capture", 5, "--capture 5 is not a text"),
    ("capture", [], "--capture is empty"),
    ("grad_rule", "x", "--grad-rule 'x' is not one of 'plain', 'guided', 'deconv'"),
    ("target", 5, "--target '5' cannot be read"),
    ("ablate", 5, "--ablate 5 is not a text"),
    ("noise", [3], r"--noise \[3\] is not a text"),
]
BAD_RUN = [
    ("jobs", 0, "--jobs 0 is below 1"),
    ("jobs", "x", "--jobs 'x' is not a valid integer"),
    ("fail_fast", "x", "--fail-fast 'x' is not a valid boolean"),
    ("archive", 5, "--archive 5 is not a text"),
    ("shard", "0/2", "--shard '0/2' is no part of a whole"),
    ("max_output_size", "x", "'x' is no amount of bytes"),
    ("max_output_size", -1, "--max-output-size -1 is below 0"),
    ("max_files", 1.5, "--max-files 1.5 is not a valid integer"),
    ("overwrite", "x", "--overwrite 'x' is not a valid boolean"),
    ("resume", "x", "--resume 'x' is not a valid boolean"),
    ("tensorboard", 5, "--tensorboard 5 is not a text"),
    ("out", 5, "--out 5 is not a text"),
    ("paddign", 3, "no option paddign"),
]
BAD_MODEL = [
    ("device", "gpu", "--device 'gpu' is no device"),
    ("device", 5, "--device 5 is not a text"),
    ("seed", "x", "--seed 'x' is not a valid integer"),
    ("seed", 10**30, "--seed 10+ is outside"),
    ("weights", 5, "--weights 5 is not a text"),
    ("arch", 5, "--arch 5 is not a text"),
    ("model_args", "x", "--model-arg 'x' is no mapping"),
    ("allow_globals", 5, "--allow-global 5 is not a text"),
    ("unsafe_load", "x", "--unsafe-load 'x' is not a valid boolean"),
    ("key", 5, "--key 5 is not a text"),
    ("strip_prefix", 5, "--strip-prefix 5 is not a text"),
    ("ema", "x", "--ema 'x' is not a valid boolean"),
    ("partial", 1, "--partial 1 is not a valid boolean"),
]


@pytest.mark.parametrize(("name", "value", "message"), BAD_DRAWING)
def test_grid_refuses_bad_values(name: str, value: Any, message: str) -> None:
    """Every field of DrawOptions, by choice, range and type."""
    with pytest.raises(UsageError, match=message):
        fv.grid(torch.rand(1, 2, 4, 4), **{name: value})


@pytest.mark.parametrize(
    ("name", "value", "message"), [*BAD_DRAWING, *BAD_INPUT, *BAD_PASS, *BAD_RUN]
)
def test_run_refuses_bad_values(
    name: str, value: Any, message: str, tiny: nn.Module, picture: Path, tmp_path: Path
) -> None:
    """Before anything is written."""
    options = {"out": tmp_path / "out", **AS_IT_IS, name: value}
    with pytest.raises(UsageError, match=message):
        fv.run(tiny, picture, "Conv2d", **options)  # type: ignore[arg-type]
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(("name", "value", "message"), BAD_MODEL)
def test_run_refuses_bad_values_of_a_model(
    name: str, value: Any, message: str, picture: Path, tmp_path: Path
) -> None:
    """Every field of ModelOptions."""
    options = {"weights": "none", name: value}
    with pytest.raises(UsageError, match=message):
        fv.run("squeezenet1_1", picture, out=tmp_path / "out", **options)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("format", "gif", "'gif' is not one of 'png', 'webp', 'jpg', 'avif'."),
        ("pick", "best", "'best' is not one of 'first', 'top', 'spread'."),
        ("order", "size", "'size' is not one of 'index', 'mean', 'similarity'."),
        ("reduce", "l1", "'l1' is not one of 'mean', 'max', 'l2', 'pca'."),
        ("tensors", "npz", "'npz' is not 'npy'."),
        ("grad_rule", "x", "'x' is not one of 'plain', 'guided', 'deconv'."),
        ("nrow", "x", "'x' is neither a whole number nor auto"),
        ("padding", "x", "'x' is not a valid integer"),
        ("pad_value", "x", "'x' is not a valid float"),
        ("size", "abc", "'abc' is no size: a number of pixels, or HEIGHTxWIDTH"),
        ("mean", "x", "'x' is not numbers separated by commas"),
        ("mean", "nan", "'nan' is not numbers separated by commas"),
        ("max_output_size", "x", "'x' is no amount of bytes"),
        ("nrow", 0, "--nrow 0 is below 1"),
        ("scale", 0, "--scale 0 is below 1"),
        ("min_tile", 0, "--min-tile 0 is below 1"),
        ("max_slices", -3, "--max-slices -3 is below 1"),
        ("padding", -1, "--padding -1 is below 0"),
        ("pad_value", 2.0, "--pad-value 2.0 is outside 0..1"),
        ("overlay", 1.5, "--overlay 1.5 is outside 0..1"),
        ("collapse", 0.0, "--collapse 0 is no correlation above 0"),
        ("size", 10**9, "--size 1000000000 is above 65536"),
        ("frames", 0, "--frames 0 is below 1"),
        ("inputs", 0, "--inputs 0 is below 1"),
        ("jobs", 0, "--jobs 0 is below 1"),
        ("capture", "foo", "--capture 'foo' is nothing to capture"),
        ("cmap", "virdis", "--cmap 'virdis' is no colormap of matplotlib"),
        ("background", "whit", "--background 'whit' is no colour"),
        ("device", "gpu", "--device 'gpu' is no device"),
        ("seed", 10**30, f"--seed {10**30} is outside"),
        ("shard", "0/2", "--shard '0/2' is no part of a whole"),
    ],
)
def test_python_and_the_command_line_use_the_same_words(
    name: str, value: Any, words: str, picture: Path, tmp_path: Path, featviz: Callable[..., Any]
) -> None:
    """Both refuse the value, with the same line."""
    flag, model = f"--{name.replace('_', '-')}", ("squeezenet1_1", "--weights", "none")
    done = featviz("run", model[0], picture, *model[1:], f"{flag}={value}", "--out", tmp_path / "o")
    assert done.code == 2 and words in done.err and "Traceback" not in done.err
    options = {"weights": "none", name: value}
    with pytest.raises(UsageError) as caught:
        fv.run("squeezenet1_1", picture, out=tmp_path / "o", **options)
    assert words.removesuffix(".") in caught.value.message


@pytest.mark.parametrize(
    "options",
    [
        {"nrow": "auto", "scale": "auto"},
        {"nrow": np.int64(3), "padding": np.int32(1), "pad_value": np.float32(0.5)},
        {"labels": np.True_, "max_maps": np.uint8(2)},
        {"size": "20x24", "mean": "0,0,0", "std": [1, 1, 1]},
        {"size": [20, 24], "crop": (8,)},
        {"jobs": 1, "fail_fast": True, "shard": "1/1", "max_output_size": "1GB", "max_files": 99},
        {"capture": ["output", "input"], "ablate": ["0:1"]},
    ],
)
def test_run_takes_what_means_the_same(
    options: dict[str, Any], tiny: nn.Module, picture: Path, tmp_path: Path
) -> None:
    """numpy's numbers, lists, and what one would type on the command line."""
    assert drawn(tiny, picture, tmp_path / "out", **options)[0].captures
    json.loads((tmp_path / "out" / "run.json").read_text())


@pytest.mark.parametrize("command", ["layers", "summary", "audit"])
@pytest.mark.parametrize(
    ("flag", "words"),
    [
        ("--frames=0", "--frames 0 is below 1"),
        ("--inputs=0", "--inputs 0 is below 1"),
        ("--size=99999", "--size 99999 is above 65536"),
        (f"--seed={2**64}", f"--seed {2**64} is outside"),
    ],
)
def test_every_command_that_loads_a_model_checks_its_options(
    command: str, flag: str, words: str, tiny_file: Path, picture: Path, featviz: Callable[..., Any]
) -> None:
    """Not only `run`."""
    images = [picture] if command == "audit" else []
    done = featviz(command, tiny_file, *images, flag)
    assert done.code == 2 and words in done.err and "Traceback" not in done.err


def test_choices_have_one_source() -> None:
    """The command line reads its choices from the records."""
    from featviz.cli.commands.run import command

    offered = {p.name: p.type.choices for p in command.params if hasattr(p.type, "choices")}
    for kind, names in (
        (DrawOptions, ("pick", "order", "reduce", "format", "tensors")),
        (PassOptions, ("grad_rule",)),
    ):
        for name in names:
            assert list(offered[name]) == choices(kind, name) != []


def test_a_long_value_is_cut() -> None:
    """A message stays one line, whatever was given."""
    with pytest.raises(UsageError) as caught:
        fv.grid(torch.rand(1, 2, 4, 4), cmap=nn.Sequential(*[nn.ReLU()] * 50))
    assert "\n" not in caught.value.message and len(caught.value.message) < 250


# Images in memory ---------------------------------------------------------------------------


def _in_memory(pixels: np.ndarray) -> dict[str, Any]:
    tensor = torch.from_numpy(pixels.copy()).permute(2, 0, 1)
    return {
        "PIL": Image.fromarray(pixels),
        "array": pixels,
        "array of floats": pixels / 255,
        "big-endian": (pixels / 255).astype(">f4"),
        "tensor": tensor,
        "batch of one": tensor[None],
        "floats": tensor / 255,
        "with a gradient": (tensor / 255).requires_grad_(),
        "strided": pixels[::-1, ::-1][::-1, ::-1],
    }


@pytest.mark.parametrize("kind", list(_in_memory(np.zeros((2, 2, 3), np.uint8))))
def test_an_image_in_memory_is_drawn_as_its_file(
    kind: str, pixels: np.ndarray, picture: Path, tiny: nn.Module, tmp_path: Path
) -> None:
    """The same pixels give the same feature maps, under a name of their own."""
    (own,) = drawn(tiny, _in_memory(pixels)[kind], tmp_path / "memory", tensors="npy")
    (file,) = drawn(tiny, picture, tmp_path / "file", tensors="npy")
    assert (own.image, file.image) == ("image-0.png", "picture.png")
    for name in ("input.png", own.captures[0].tensor, own.captures[0].file):
        one = (tmp_path / "memory" / own.folder / name).read_bytes()
        assert one == (tmp_path / "file" / file.folder / name).read_bytes()
    manifest = json.loads((tmp_path / "memory" / own.folder / "manifest.json").read_text())
    assert manifest["image"]["path"] == "image-0.png" and len(manifest["image"]["sha256"]) == 64
    assert "featviz-" not in (tmp_path / "memory" / "run.json").read_text()


def test_paths_and_images_mix(
    pixels: np.ndarray, picture: Path, tiny: nn.Module, tmp_path: Path
) -> None:
    """A list holds any of them, in order; a batch is as many images as it has."""
    batch = torch.rand(2, 3, 5, 6)
    images = [Image.fromarray(pixels), picture, str(picture.parent), batch, pixels]
    found = drawn(tiny, images, tmp_path / "out")
    names = ["image-0.png", "picture.png", "image-1.png", "image-2.png", "image-3.png"]
    assert [image.image for image in found] == names


def test_a_file_called_like_an_image_in_memory(
    pixels: np.ndarray, tiny: nn.Module, tmp_path: Path
) -> None:
    """They are told apart by a name that is the same in every run."""
    Image.fromarray(pixels).save(tmp_path / "image-0.png")
    runs = [
        [i.image for i in drawn(tiny, [pixels, tmp_path / "image-0.png"], tmp_path / out)]
        for out in ("one", "two")
    ]
    assert runs[0] == runs[1] and runs[0][0] == "in-memory/image-0.png"


def test_images_in_memory_can_be_resumed(
    pixels: np.ndarray, tiny: nn.Module, tmp_path: Path
) -> None:
    """The same pixels are the same image; others are drawn again."""
    out = tmp_path / "out"
    drawn(tiny, [pixels, pixels], out)
    again = drawn(tiny, [pixels, 255 - pixels], out, resume=True)
    assert [image.kept for image in again] == [True, False]


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "RGBA", "CMYK", "HSV", "I", "F", "I;16"])
def test_pil_images_of_every_mode(mode: str, tmp_path: Path) -> None:
    """Nothing of an image is lost on its way but what conversion to RGB takes."""
    pixels = np.arange(48, dtype=np.uint8).reshape(6, 8)
    grey = Image.fromarray(pixels)
    image = Image.fromarray(pixels.astype(np.uint16)) if mode == "I;16" else grey.convert(mode)
    (path,) = memory.to_files([image], tmp_path)
    with Image.open(path) as found:
        kept = image.convert("RGB") if mode in ("CMYK", "HSV") else image
        assert found.mode == kept.mode
        assert np.array_equal(np.asarray(found), np.asarray(kept))


def test_the_exif_of_an_opened_photograph_is_kept(tmp_path: Path) -> None:
    """A photograph that lies on its side is turned, as its file would be."""
    exif = Image.Exif()
    exif[274] = 6
    Image.new("RGB", (8, 4)).save(tmp_path / "photo.jpg", exif=exif)
    with Image.open(tmp_path / "photo.jpg") as photo:
        (path,) = memory.to_files([photo], tmp_path)
    with Image.open(path) as found:
        assert found.size == (8, 4) and found.getexif()[274] == 6


def test_grey_and_bool_tensors() -> None:
    """[H, W], one channel, bool and half precision are images, too."""
    values = torch.linspace(0, 1, 12).reshape(3, 4)
    expected = (values * 255).round().to(torch.uint8).numpy()
    for tensor in (values, values[None], values[None, None]):
        (found,) = memory.to_images(tensor)
        assert found.mode == "L" and np.array_equal(np.asarray(found), expected)
    (found,) = memory.to_images(values > 0.5)
    assert np.array_equal(np.asarray(found), (values > 0.5).numpy() * np.uint8(255))
    (found,) = memory.to_images(values.half())
    assert np.abs(np.asarray(found).astype(int) - expected).max() <= 1


@pytest.mark.parametrize(
    ("image", "message"),
    [
        (torch.rand(3, 4, 4) - 0.5, "image 0 has values from -0.* floats of an image are 0..1"),
        (torch.full((3, 4, 4), NAN), "image 0 has values from nan to nan"),
        (torch.zeros(3, 4, 4, dtype=torch.int64), "image 0 holds int64"),
        (torch.zeros(3, 4, 4, dtype=torch.complex64), "image 0 holds torch.complex64"),
        (torch.rand(3, 4, 4).to_sparse(), "image 0 is no dense tensor"),
        (torch.zeros(3, 4, 4, device="meta"), "image 0 is no dense tensor"),
        (torch.zeros(5), r"channels \[5\] is no image"),
        (torch.zeros(3, 0, 5), r"channels \[0, 5, 3\] is no image"),
        (np.zeros((3, 20, 24), np.uint8), r"channels \[3, 20, 24\] is no image"),
        (np.array([["a"]]), "image 0 holds <U1"),
        (Image.new("RGB", (0, 0)), "it has no pixels"),
        (b"abc", "image 0 is of type 'bytes'"),
        (None, "image 0 is of type 'NoneType'"),
        ({}, "image 0 is of type 'dict'"),
        ([[1]], "image 0 is of type 'list'"),
        ([], "there are no images"),
    ],
)
def test_what_is_no_image(image: Any, message: str, tiny: nn.Module, tmp_path: Path) -> None:
    """One line says what it is and what an image would be."""
    with pytest.raises(FeatvizError, match=message) as caught:
        fv.run(tiny, image, "Conv2d", tmp_path / "out")
    assert caught.value.hint and not (tmp_path / "out").exists()


# Models and layers --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("layers", "names"),
    [
        (nn.Conv2d, ["0"]),
        ([nn.Conv2d, nn.ReLU], ["0", "1"]),
        (["0", "1"], ["0", "1"]),
        (("Conv2d", nn.ReLU), ["0", "1"]),
        (["Conv2d,ReLU", "!1"], ["0"]),
        (nn.modules.conv._ConvNd, ["0"]),
    ],
)
def test_layers_are_text_classes_or_lists(
    layers: Any, names: list[str], tiny: nn.Module, picture: Path, tmp_path: Path
) -> None:
    """In `run` as in `capture`."""
    (image,) = drawn(tiny, picture, tmp_path / "out", layers)
    assert [capture.layer for capture in image.captures] == names
    with fv.capture(tiny, layers) as maps:
        tiny(torch.zeros(1, 3, 8, 8))
    assert list(maps) == names


@pytest.mark.parametrize("layers", [5, [5], int, torch.relu, nn.ReLU()])
def test_what_selects_no_layers(layers: Any, tiny: nn.Module, picture: Path) -> None:
    """One line says what does."""
    for attempt in (
        lambda: fv.run(tiny, picture, layers),
        lambda: fv.capture(tiny, layers).__enter__(),
    ):
        with pytest.raises(UsageError, match="which is neither text nor a class of modules"):
            attempt()
    with pytest.raises(UsageError, match="holds no selector"):
        fv.capture(tiny, []).__enter__()


@pytest.mark.parametrize(
    "make", [torch.jit.script, lambda m: torch.jit.trace(m, torch.rand(1, 3, 8, 8))]
)
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_torchscript_ends_in_one_line(make: Any, tiny: nn.Module, picture: Path) -> None:
    """Its layers take no hooks; the hint says what does."""
    scripted = make(tiny)
    for attempt in (
        lambda: fv.run(scripted, picture),
        lambda: fv.capture(scripted, "Conv2d").__enter__(),
    ):
        with pytest.raises(UsageError, match="TorchScript, which takes no hooks") as caught:
            attempt()
        assert "torch.export" in str(caught.value.hint)


@pytest.mark.parametrize("model", [5, None, nn.Conv2d])
def test_what_is_no_model(model: Any, picture: Path) -> None:
    """Neither a MODEL string nor a module."""
    with pytest.raises(UsageError, match="neither a MODEL string nor a module"):
        fv.run(model, picture)
    with pytest.raises(UsageError, match="not a module"):
        fv.capture(model, "Conv2d").__enter__()


def test_an_exported_program_is_sent_to_unflatten(tiny: nn.Module, picture: Path) -> None:
    """torch.export's own object is no module, and one call makes it one."""
    program = torch.export.export(tiny, (torch.zeros(1, 3, 8, 8),))
    with pytest.raises(UsageError, match="'ExportedProgram'") as caught:
        fv.run(program, picture)  # type: ignore[arg-type]
    assert "torch.export.unflatten" in str(caught.value.hint)


def test_a_path_is_a_model(tiny_file: Path, picture: Path, tmp_path: Path) -> None:
    """Path as well as str; a device as torch has it."""
    options = {"device": torch.device("cpu"), **AS_IT_IS}
    result = fv.run(tiny_file, picture, nn.Conv2d, tmp_path / "out", **options)
    assert result.exit_code == 0


# grid ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "form",
    [
        lambda t: t,
        lambda t: t[None],
        lambda t: t.numpy(),
        lambda t: t[None].numpy(),
        lambda t: t.numpy().astype(">f4"),
        lambda t: t.numpy()[:, ::-1, ::-1][:, ::-1, ::-1],
        lambda t: t.double().requires_grad_(),
    ],
)
def test_grid_draws_maps_in_every_form(form: Callable[[Tensor], Any]) -> None:
    """[C, H, W] is [1, C, H, W] of one image; an array is a tensor."""
    maps = torch.rand(5, 6, 7, generator=torch.Generator().manual_seed(0))
    assert np.array_equal(np.asarray(fv.grid(form(maps))), np.asarray(fv.grid(maps[None])))


def test_grid_guesses_not_between_a_map_and_tokens() -> None:
    """[1, X, Y] is refused with the way to say which; [1, 1, F] is a vector."""
    one = torch.rand(1, 16, 8)
    with pytest.raises(LayoutError, match=r"shape \[1, 16, 8\]") as caught:
        fv.grid(one)
    assert caught.value.hint == "one map is [1, 1, H, W]: tensor[None]"
    told = fv.grid(one, tensor_layout="tokens:4x4")
    maps = one.reshape(1, 4, 4, 8).permute(0, 3, 1, 2)
    assert np.array_equal(np.asarray(told), np.asarray(fv.grid(maps)))
    vector = fv.grid(torch.arange(6.0).reshape(1, 1, 6))
    assert np.array_equal(np.asarray(vector), np.asarray(fv.grid(torch.arange(6.0)[None])))


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (None, "not 'NoneType'"),
        ([[1.0]], "not 'list'"),
        (Image.new("L", (2, 2)), "not 'Image'"),
        (np.array(["a"]), "not 'array of <U1'"),
        (np.ones((3, 4, 4), np.longdouble), "not 'array of "),
        (torch.ones(3, 4, 4, dtype=torch.complex64), "holds complex numbers"),
        (torch.ones(3, 4, 4).to_sparse(), "is stored as torch.sparse_coo"),
        (torch.ones(3, 4, 4, device="meta"), "device meta"),
        (torch.zeros(0, 3, 3), "holds no values"),
    ],
)
def test_what_grid_cannot_draw(value: Any, message: str) -> None:
    """One line, whatever it is."""
    with pytest.raises((UsageError, LayoutError), match=message):
        fv.grid(value)


@pytest.mark.parametrize("option", [{"format": "webp"}, {"tensors": "npy"}])
def test_options_of_runs_are_no_options_of_grid(option: dict[str, Any]) -> None:
    """What grid would ignore is refused."""
    with pytest.raises(UsageError, match="--tensors and --format are for runs"):
        fv.grid(torch.rand(1, 2, 4, 4), **option)


def test_the_image_of_an_overlay_is_any_image(pixels: np.ndarray) -> None:
    """A PIL image, an array or a tensor."""
    maps = torch.rand(2, 5, 6)
    tensor = torch.from_numpy(pixels.copy()).permute(2, 0, 1)
    drawings = [
        np.asarray(fv.grid(maps, overlay=0.5, image=image))
        for image in (Image.fromarray(pixels), pixels, tensor / 255)
    ]
    assert all(np.array_equal(drawings[0], other) for other in drawings)
    with pytest.raises(UsageError, match="an overlay takes one image, not 2"):
        fv.grid(maps, overlay=0.5, image=torch.rand(2, 3, 4, 4))


def test_dir_lists_the_public_names() -> None:
    """And nothing else."""
    assert dir(fv) == sorted(["__version__", "capture", "grid", "run"])


# Tensors of every kind ----------------------------------------------------------------------


class Gives(nn.Module):
    """Something of the values of an image."""

    def __init__(self, make: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.make = make

    def forward(self, x: Tensor) -> Any:
        return self.make(x)


class Beside(nn.Module):
    """A convolution, and a layer whose output nobody takes."""

    def __init__(self, make: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.conv, self.odd = nn.Conv2d(3, 3, 1), Gives(make)

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv(x)
        self.odd(x)
        return x.mean((2, 3))


def _quantised(x: Tensor) -> Tensor:
    return torch.quantize_per_tensor(x, 0.125, 3, torch.quint8)


def _by_channel(x: Tensor) -> Tensor:
    return torch.quantize_per_channel(x, torch.ones(3) / 8, torch.zeros(3), 1, torch.qint8)


DRAWN: dict[str, tuple[Callable[[Tensor], Tensor], str]] = {
    "quantised": (_quantised, "float32"),
    "quantised by channel": (_by_channel, "float32"),
    "bfloat16": (lambda x: x.bfloat16(), "float32"),
    "float8": (lambda x: x.to(torch.float8_e4m3fn), "float32"),
    "float16": (lambda x: x.half(), "float16"),
    "float64": (lambda x: x.double(), "float64"),
    "bool": (lambda x: x > 0, "bool"),
    "int64": (lambda x: (x * 9).long(), "int64"),
    "uint16": (lambda x: (x.abs() * 9).to(torch.uint16), "uint16"),
    "negative view": (lambda x: torch.conj(x * 1j).imag, "float32"),
}
SKIPPED: dict[str, tuple[Callable[[Tensor], Any], str]] = {
    "complex": (lambda x: x * 1j, "holds complex numbers (torch.complex64)"),
    "sparse": (lambda x: x.to_sparse(), "is stored as torch.sparse_coo, not as a dense tensor"),
    "mkldnn": (lambda x: x.to_mkldnn(), "is stored as torch._mkldnn, not as a dense tensor"),
    "meta": (lambda x: x.to("meta"), "is on the device meta, where tensors have no values"),
    "nested": (
        lambda x: torch.nested.nested_tensor([x[0, 0], x[0, 1, :3]]),
        "is a nested tensor, not a dense one",
    ),
    "bits": (
        lambda x: torch.empty(1, 3, 4, 4, dtype=torch.bits8),
        "holds torch.bits8, which torch cannot turn into floats",
    ),
}


def _plain(tensor: Tensor) -> np.ndarray:
    dense = tensor.dequantize() if tensor.is_quantized else tensor
    return dense.float().resolve_neg().numpy()


@pytest.mark.parametrize("kind", DRAWN)
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_tensors_of_every_kind_are_drawn_kept_and_counted(
    kind: str, picture: Path, tmp_path: Path
) -> None:
    """Picture, .npy and TensorBoard's histogram of the same values; quantised ones dequantised."""
    make, dtype = DRAWN[kind]
    torch.manual_seed(0)
    model = Beside(make).eval()
    board = tmp_path / "board"
    options = {"tensors": "npy", "tensorboard": board}
    (image,) = drawn(model, picture, tmp_path / "out", ["conv", "odd"], **options)
    assert not image.skipped
    kept = {
        c.layer: np.load(tmp_path / "out" / image.folder / str(c.tensor)) for c in image.captures
    }
    expected = _plain(make(torch.from_numpy(kept["conv"])))
    assert kept["odd"].dtype == dtype
    assert np.array_equal(kept["odd"].astype(np.float32), expected)
    histogram = _histograms(board)["histogram/odd"]
    assert (histogram.min, histogram.max) == (expected.min(), expected.max())
    assert histogram.num == expected.size


def _histograms(board: Path) -> dict[str, Any]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = EventAccumulator(str(board), size_guidance={"histograms": 0})
    found.Reload()
    return {tag: found.Histograms(tag)[0].histogram_value for tag in found.Tags()["histograms"]}


@pytest.mark.parametrize("kind", SKIPPED)
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_what_cannot_be_drawn_is_skipped_with_the_reason(
    kind: str, picture: Path, tmp_path: Path
) -> None:
    """The rest of the image is complete, with and without selectors."""
    make, reason = SKIPPED[kind]
    for number, layers in enumerate((["conv", "odd"], None)):
        options = {"tensors": "npy", "tensorboard": tmp_path / "board"}
        (image,) = drawn(Beside(make).eval(), picture, tmp_path / str(number), layers, **options)
        assert [capture.layer for capture in image.captures] == ["conv"]
        reasons = [skip.reason for skip in image.skipped]
        assert reasons == [reason] if number == 0 else set(reasons) <= {reason}


@pytest.mark.parametrize("kind", [*DRAWN, *SKIPPED])
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_audit_counts_or_skips_tensors_of_every_kind(kind: str, picture: Path) -> None:
    """A layer with real values is counted; another is named with the reason."""
    from featviz.audit.model_audit import AuditRequest, examine
    from featviz.images.find import find_samples
    from featviz.models.load import adopt
    from featviz.models.preprocess import InputOptions

    make, reason = {**DRAWN, **SKIPPED}[kind]
    inputs = InputOptions(size=(20, 24))
    asked = AuditRequest("conv,odd", inputs)
    samples = find_samples([str(picture)])
    found = examine(adopt(Beside(make).eval(), inputs), samples, asked, lambda *_: None)
    assert found is not None
    counted = [row["label"] for row in found.document["layers"] if row["label"] == "odd"]
    skipped = {row["layer"]: row["reason"] for row in found.document["skipped"]}
    if kind in DRAWN:
        assert counted == ["odd"] and not skipped
    else:
        assert skipped["odd"] in (reason, "gives a nested tensor, not a tensor")


@pytest.mark.filterwarnings("ignore")
def test_kernels_of_a_quantised_convolution(tmp_path: Path) -> None:
    """They are drawn as the values that they stand for."""
    from featviz.drawing.filters import is_convolution, read_filters

    conv = torch.ao.nn.quantized.Conv2d(3, 2, 3)
    weight = torch.quantize_per_tensor(torch.rand(2, 3, 3, 3), 0.01, 0, torch.qint8)
    conv.set_weight_bias(weight, None)
    assert is_convolution(conv)
    assert torch.equal(read_filters(conv).data[:, :, 0], weight.dequantize())


def test_hash_is_of_the_file_that_the_image_becomes(
    pixels: np.ndarray, tiny: nn.Module, tmp_path: Path
) -> None:
    """sha256 tells one image in memory from another."""
    images = [pixels, 255 - pixels, pixels]
    found = drawn(tiny, images, tmp_path / "out")
    sums = [
        json.loads((tmp_path / "out" / i.folder / "manifest.json").read_text())["image"]["sha256"]
        for i in found
    ]
    (path,) = memory.to_files([pixels], tmp_path)
    assert sums[0] == sums[2] != sums[1]
    assert sums[0] == hashlib.sha256(Path(path).read_bytes()).hexdigest()


@pytest.mark.parametrize(
    "options",
    [
        {"collapse": 0.0},
        {"order": "mean", "reduce": "mean"},
        {"cmap": "viridis", "reduce": "pca"},
        {"shared_basis": True},
        {"first": 4},
    ],
)
def test_contradictions_are_refused_in_the_same_words(
    options: dict[str, Any], tmp_path: Path
) -> None:
    """The option records say what does not go together: grid, run and kernels refuse it alike."""
    from featviz.inspection.kernels import KernelOptions, draw_kernels
    from featviz.models.load import ModelOptions

    draw = DrawOptions(**options)
    message, _ = next(draw.contradictions())
    with pytest.raises(UsageError, match=re.escape(message)):
        fv.grid(torch.zeros(1, 2, 4, 4), **options)
    with pytest.raises(UsageError, match=re.escape(message)):
        fv.run("resnet18", ["x.png"], **options)
    with pytest.raises(UsageError, match=re.escape(message)):
        draw_kernels(ModelOptions("resnet18"), KernelOptions(out=tmp_path / "out", draw=draw))
