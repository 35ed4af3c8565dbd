"""Options of the Python API: what means the same is taken, the rest ends in one line."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import featviz as fv
from featviz.api.tensors import GRID_NAMES
from featviz.api.words import of_keywords
from featviz.errors import UsageError
from featviz.records import REDUCTIONS, DrawOptions, PassOptions
from featviz.records.checking import choices

from .drawn import AS_IT_IS, NAN, drawn

BAD_DRAWING = [
    ("pick", "best", "pick 'best' is not one of 'first', 'top', 'spread'"),
    ("order", "size", "order 'size' is not one of 'index', 'mean', 'similarity'"),
    ("reduce", "l1", "reduce 'l1' is not one of 'mean', 'max', 'l2', 'max-abs', 'pca'"),
    ("nrow", "x", "nrow 'x' is neither a whole number nor auto"),
    ("nrow", 2.5, "nrow 2.5 is neither a whole number nor auto"),
    ("nrow", True, "nrow True is neither a whole number nor auto"),
    ("nrow", 0, "nrow 0 is below 1"),
    ("scale", 0, "scale 0 is below 1"),
    ("scale", "2", "scale '2' is neither a whole number nor auto"),
    ("padding", -1, "padding -1 is below 0"),
    ("padding", 2.0, "padding 2.0 is not a valid integer"),
    ("padding", True, "padding True is not a valid integer"),
    ("pad_value", 2, "pad_value 2.0 is outside 0..1"),
    ("pad_value", NAN, "pad_value nan is outside 0..1"),
    ("pad_value", "grey", "pad_value 'grey' is not a valid float"),
    ("min_tile", 0, "min_tile 0 is below 1"),
    ("max_maps", "3", "max_maps '3' is not a valid integer"),
    ("max_slices", 0, "max_slices 0 is below 1"),
    ("collapse", "x", "collapse 'x' is not a valid float"),
    ("collapse", 0, "collapse 0 is no correlation above 0"),
    ("overlay", "a", "overlay 'a' is not a valid float"),
    ("labels", "yes", "labels 'yes' is not a valid boolean"),
    ("cmap", 5, "cmap 5 is not a text"),
    ("cmap", "virdis", "cmap 'virdis' is no colormap"),
    ("normalize", None, "normalize None is not a text"),
    ("normalize", "foo", "normalize 'foo' is no normalization mode"),
    ("tensor_layout", 5, "tensor_layout 5 is not a text"),
    ("tensor_layout", "foo", "'foo' is no layout"),
]
BAD_OF_RUNS = [
    ("figure", 1, "figure 1 is not a valid boolean"),
    ("first", 0, "first 0 is below 1"),
    ("format", "gif", "format 'gif' is not one of 'png', 'webp', 'jpg', 'avif'"),
    ("format", None, "format None is not one of"),
    ("tensors", "npz", "tensors 'npz' is not 'npy'"),
]
BAD_INPUT = [
    ("size", "abc", "size 'abc' is no size: a number of pixels, or HEIGHTxWIDTH"),
    ("size", 0, "size 0 is no size"),
    ("size", True, "size True is no size"),
    ("size", (1, 2, 3), r"size \(1, 2, 3\) is no size"),
    ("size", 10**9, "size 1000000000 is above 65536"),
    ("crop", (0, 5), r"crop \(0, 5\) is no size"),
    ("mean", "x", "mean 'x' is not numbers separated by commas"),
    ("mean", [None] * 3, "is not numbers separated by commas"),
    ("mean", (1, 2), "mean has 2 numbers for 3 channels"),
    ("std", NAN, "std nan is not numbers"),
    ("channels", 0, r"channels 0 is outside 1\.\.4096"),
    ("channels", True, "channels True is not a valid integer"),
    ("exif", "no", "exif 'no' is not a valid boolean"),
    ("background", 5, "background 5 is not a text"),
    ("background", "whit", "background 'whit' is no colour"),
    ("frames", 0, "frames 0 is below 1"),
    ("inputs", 1.5, "inputs 1.5 is not a valid integer"),
]
BAD_PASS = [
    ("capture", "foo", "capture 'foo' is nothing to capture"),
    ("capture", 5, "capture 5 is not a text"),
    ("capture", [], "capture is empty"),
    ("grad_rule", "x", "grad_rule 'x' is not one of 'plain', 'guided', 'deconv'"),
    ("target", 5, "target '5' cannot be read"),
    ("ablate", 5, "ablate 5 is not a text"),
    ("noise", [3], r"noise \[3\] is not a text"),
]
BAD_RUN = [
    ("jobs", 0, "jobs 0 is below 1"),
    ("jobs", "x", "jobs 'x' is not a valid integer"),
    ("fail_fast", "x", "fail_fast 'x' is not a valid boolean"),
    ("archive", 5, "archive 5 is not a text"),
    ("shard", "0/2", "shard '0/2' is no part of a whole"),
    ("max_output_size", "x", "'x' is no amount of bytes"),
    ("max_output_size", -1, "max_output_size -1 is below 0"),
    ("max_files", 1.5, "max_files 1.5 is not a valid integer"),
    ("overwrite", "x", "overwrite 'x' is not a valid boolean"),
    ("resume", "x", "resume 'x' is not a valid boolean"),
    ("tensorboard", 5, "tensorboard 5 is not a text"),
    ("out", 5, "out 5 is not a text"),
    ("paddign", 3, "no option paddign"),
]
BAD_MODEL = [
    ("device", "gpu", "device 'gpu' is no device"),
    ("device", 5, "device 5 is not a text"),
    ("seed", "x", "seed 'x' is not a valid integer"),
    ("seed", 10**30, "seed 10+ is outside"),
    ("weights", 5, "weights 5 is not a text"),
    ("arch", 5, "arch 5 is not a text"),
    ("model_args", "x", "model_args 'x' is no mapping"),
    ("allow_globals", 5, "allow_globals 5 is not a text"),
    ("trust", "x", "trust 'x' is not a valid boolean"),
    ("key", 5, "key 5 is not a text"),
    ("strip_prefix", 5, "strip_prefix 5 is not a text"),
    ("ema", "x", "ema 'x' is not a valid boolean"),
    ("partial", 1, "partial 1 is not a valid boolean"),
]


@pytest.mark.parametrize(
    ("wrong", "meant"),
    [("layer", "layers"), ("colormap", "cmap"), ("over_write", "overwrite"), ("outdir", "out")],
)
def test_a_misspelt_keyword_of_run_is_told_what_it_means(
    wrong: str, meant: str, tiny: nn.Module, picture: Path
) -> None:
    """The keywords that `featviz.run` names are known beside the fields of the option records."""
    with pytest.raises(UsageError, match=f"no option {wrong}") as refused:
        fv.run(tiny, picture, **{wrong: "x"})
    assert refused.value.hint == f"did you mean {meant}?"


def test_capture_tells_which_layer_may_be_meant() -> None:
    """Names that only a number tells apart, in their order."""
    model = nn.ModuleDict({f"b{n}": nn.ReLU() for n in (10, 2, 1)})
    with (
        pytest.raises(UsageError, match="no layer matches 'b3'") as refused,
        fv.capture(model, "b3"),
    ):
        pass
    assert str(refused.value.hint).startswith("did you mean b1 or b2 or b10? types here: ReLU 3")


@pytest.mark.parametrize(("name", "value", "message"), BAD_DRAWING)
def test_grid_refuses_bad_values(name: str, value: Any, message: str) -> None:
    """Every field of DrawOptions that grid has, by choice, range and type."""
    with pytest.raises(UsageError, match=message):
        fv.grid(torch.rand(1, 2, 4, 4), **{name: value})


@pytest.mark.parametrize(
    ("name", "value", "message"), [*BAD_DRAWING, *BAD_OF_RUNS, *BAD_INPUT, *BAD_PASS, *BAD_RUN]
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
        ("reduce", "l1", f"'l1' is not one of {', '.join(map(repr, REDUCTIONS))}."),
        ("tensors", "npz", "'npz' is not 'npy'."),
        ("grad_rule", "x", "'x' is not one of 'plain', 'guided', 'deconv'."),
        ("nrow", "x", "'x' is neither a whole number nor auto"),
        ("padding", "x", "'x' is not a valid integer"),
        ("pad_value", "x", "'x' is not a valid float"),
        ("size", "abc", "'abc' is no size: a number of pixels, or HEIGHTxWIDTH"),
        ("mean", "x", "'x' is not numbers separated by commas"),
        ("mean", "nan", "'nan' is not numbers separated by commas"),
        ("max_output_size", "x", "'x' is no amount of bytes"),
        ("nrow", 0, "nrow 0 is below 1"),
        ("scale", 0, "scale 0 is below 1"),
        ("min_tile", 0, "min_tile 0 is below 1"),
        ("max_slices", -3, "max_slices -3 is below 1"),
        ("padding", -1, "padding -1 is below 0"),
        ("pad_value", 2.0, "pad_value 2.0 is outside 0..1"),
        ("overlay", 1.5, "overlay 1.5 is outside 0..1"),
        ("collapse", 0.0, "collapse 0 is no correlation above 0"),
        ("size", 10**9, "size 1000000000 is above 65536"),
        ("frames", 0, "frames 0 is below 1"),
        ("inputs", 0, "inputs 0 is below 1"),
        ("jobs", 0, "jobs 0 is below 1"),
        ("capture", "foo", "capture 'foo' is nothing to capture"),
        ("cmap", "virdis", "cmap 'virdis' is no colormap of matplotlib"),
        ("background", "whit", "background 'whit' is no colour"),
        ("device", "gpu", "device 'gpu' is no device"),
        ("seed", 10**30, f"seed {10**30} is outside"),
        ("shard", "0/2", "shard '0/2' is no part of a whole"),
    ],
)
def test_python_and_the_command_line_use_the_same_words(
    name: str, value: Any, words: str, picture: Path, tmp_path: Path, featviz: Callable[..., Any]
) -> None:
    """Both refuse the value with the same line, but for what the option is called."""
    flag, model = f"--{name.replace('_', '-')}", ("squeezenet1_1", "--weights", "none")
    done = featviz("run", model[0], picture, *model[1:], f"{flag}={value}", "--out", tmp_path / "o")
    said = done.err.replace(flag, name)
    assert done.code == 2 and words in said and "Traceback" not in said
    options = {"weights": "none", name: value}
    with pytest.raises(UsageError) as caught:
        fv.run("squeezenet1_1", picture, out=tmp_path / "o", **options)
    assert words.removesuffix(".") in caught.value.message
    assert "--" not in f"{caught.value.message} {caught.value.hint}"


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


def test_dir_lists_the_public_names() -> None:
    """And nothing else."""
    functions = ["audit", "cam", "capture", "diff", "exemplars", "grid", "kernels", "layers"]
    more = ["Watcher", "__version__", "look", "report", "run", "summary"]
    assert dir(fv) == sorted([*functions, *more])


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
    said = re.escape(of_keywords(message))
    if options.keys() <= set(GRID_NAMES):
        with pytest.raises(UsageError, match=said):
            fv.grid(torch.zeros(1, 2, 4, 4), **options)
    with pytest.raises(UsageError, match=said):
        fv.run("resnet18", ["x.png"], **options)
    with pytest.raises(UsageError, match=re.escape(message)):
        draw_kernels(ModelOptions("resnet18"), KernelOptions(out=tmp_path / "out", draw=draw))


@pytest.mark.parametrize("depth", ["a", 1.5, True, -1])
def test_depth_of_a_summary_is_a_whole_number(depth: Any) -> None:
    """As on the command line, 0 or more; numpy's integers are taken."""
    model = nn.Sequential(nn.Sequential(nn.Conv2d(3, 4, 3)))
    message = f"depth {depth!r} is no whole number of 0 or more"
    with pytest.raises(UsageError, match=re.escape(message)):
        fv.summary(model, depth=depth, size=8)
    assert [len(fv.summary(model, depth=np.int64(n), size=8).rows) for n in (0, 1, 2)] == [1, 2, 3]
