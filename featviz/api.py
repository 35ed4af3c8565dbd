"""The public functions: small, for notebooks and for use inside other programs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn

from featviz import pipeline
from featviz.drawing.drawer import Drawer
from featviz.drawing.picture import to_image
from featviz.errors import LayoutError, UsageError
from featviz.hooks.capture import hooked
from featviz.hooks.layers import list_layers
from featviz.hooks.selectors import Selector, parse, remedy, select, wants_functions
from featviz.images import memory
from featviz.layout import recognise
from featviz.layout.overrides import parse_override
from featviz.models.load import LoadedModel, ModelOptions, adopt
from featviz.models.preprocess import InputOptions
from featviz.pipeline.keywords import names_of, read_keywords, take
from featviz.pipeline.options import check_drawing
from featviz.records import DrawOptions, Hints, ImageResult, Layer, RunResult, Site
from featviz.records.checking import filled

Layers = str | type[nn.Module] | Sequence[str | type[nn.Module]]
"""Selectors as text, classes of modules, or a list of these."""

Picture = str | Path | Image.Image | np.ndarray | Tensor
"""A path, or an image in memory."""


@contextmanager
def capture(model: nn.Module, layers: Layers) -> Iterator[Mapping[str, list[Tensor]]]:
    """Keep what layers give while the block runs.

    Args:
        model: any module; the caller runs it, in the mode that the caller chose.
        layers: selectors, as for `--layers`: `"Conv2d,layer1.*,!*.downsample.*"`, `"fn:add"`; a
            class of modules, `torch.nn.Conv2d`; or a list of these. Functions are found as they
            are called, so an index into them counts from the first.

    Yields:
        A mapping that fills as the model runs: qualified name (with `:KEY` behind it for what
        stands in a tuple, list or dict) to one tensor for each call. The tensors are detached
        copies, so a later in-place operation does not change them.

    Raises:
        UsageError: no layer matches; where functions are asked for, at the end of the block.

    Example:
        >>> import torch, featviz
        >>> model = torch.nn.Sequential(torch.nn.Conv2d(1, 4, 3), torch.nn.ReLU(inplace=True))
        >>> with featviz.capture(model, "Conv2d,ReLU") as maps:
        ...     _ = model(torch.zeros(1, 1, 8, 8))
        >>> {name: [list(t.shape) for t in tensors] for name, tensors in maps.items()}
        {'0': [[1, 4, 6, 6]], '1': [[1, 4, 6, 6]]}
    """
    _refuse_what_takes_no_hooks(model)
    text = _selectors(layers) or ""
    captured: dict[str, list[Tensor]] = {}
    everything, selectors = list_layers(model), parse(text)
    chosen = select(everything, selectors)
    functions = _AsCalled(selectors) if wants_functions(selectors) else None
    if not chosen and functions is None:
        raise _no_match(text, everything)

    def keep(site: Site, tensor: Tensor) -> None:
        name = site.layer.name + (f":{site.key}" if site.key else "")
        captured.setdefault(name, []).append(tensor.clone())

    with hooked(model, chosen, keep, wanted=functions):
        yield captured
    if functions is not None and functions.seen and not captured:
        raise _no_match(text, list(functions.seen))


class _AsCalled:
    """Which functions selectors take, asked as the model calls them."""

    def __init__(self, selectors: list[Selector]) -> None:
        if late := [s.text for s in selectors if s.of_functions and s.from_the_end]:
            raise UsageError(
                f"selector {late[0]!r} counts from the end, and functions are found as they are "
                "called",
                "count from the first, for example fn:relu#0",
            )
        self._selectors = selectors
        self.seen: dict[Layer, bool] = {}
        """Every function in the order of the first calls, and whether it is taken."""

    def __call__(self, layer: Layer) -> bool:
        if layer not in self.seen:
            self.seen[layer] = layer in select([*self.seen, layer], self._selectors)
        return self.seen[layer]


def _no_match(text: str, layers: Sequence[Layer]) -> UsageError:
    return UsageError(f"no layer matches {text!r}", remedy(layers, parse(text)))


def grid(
    tensor: Tensor | np.ndarray, *, image: Picture | None = None, **options: Any
) -> Image.Image:
    """Draw one tensor as `featviz run` would.

    Args:
        tensor: maps [C, H, W] or [1, C, H, W], a vector [1, F], a batch [N, C, H, W] or a clip
            [1, C, T, H, W], as tensor or array; other shapes with
            `tensor_layout="tokens:14x14+1"`, `"nhwc"`, ... (see `--tensor-layout`). [1, X, Y] may
            be one map or tokens: a map is `tensor[None]`, and tokens take `tensor_layout`.
        image: what the model saw, for `overlay`; the tiles get its size. A PIL image, or an array
            or tensor as for `featviz.run`.
        options: fields of `featviz.records.DrawOptions`: normalize, cmap, nrow, padding,
            pad_value, scale, min_tile, max_maps, max_slices, pick, order, collapse, labels, reduce,
            overlay, tensor_layout.

    Returns:
        An image of mode L, or P for a colormap or where values are NaN or infinite, or RGB for
        `reduce="pca"` and overlays.

    Raises:
        UsageError: an option that does not exist, a bad value, or an overlay without an image.
        LayoutError: a shape that cannot be drawn.

    Example:
        >>> import torch, featviz
        >>> featviz.grid(torch.arange(32.0).reshape(1, 2, 4, 4), scale=1).size
        (14, 8)
    """
    draw = filled(DrawOptions, options)
    check_drawing(draw)
    if draw.figure or draw.shared_basis:
        raise UsageError("a figure and a shared basis are for runs", "featviz.run draws them")
    if draw.tensors is not None or draw.flat or draw.format != DrawOptions.format:
        raise UsageError(
            "--tensors, --flat and --format are for runs", "save the image that grid returns"
        )
    if (draw.overlay is None) != (image is None):
        raise UsageError("an overlay and its image go together", "overlay=0.5, image=picture")
    layout = parse_override(draw.tensor_layout[0])[1] if draw.tensor_layout else None
    hints = Hints(layout=layout)
    pictures = [] if image is None else memory.to_images(image)
    if len(pictures) > 1:
        raise UsageError(f"an overlay takes one image, not {len(pictures)}", "give one of them")
    ground = [np.asarray(picture.convert("RGB")) for picture in pictures]
    site = Site(Layer(0, "tensor", "Tensor"), "output", 0, "")
    parts = Drawer(draw).draw(site, _of_one_image(_as_tensor(tensor), hints), hints, ground)
    return to_image(parts[""])


def _as_tensor(value: Any) -> Tensor:
    if isinstance(value, Tensor):
        return value.detach()
    if isinstance(value, np.ndarray):
        with suppress(TypeError, ValueError):
            return torch.from_numpy(value.astype(value.dtype.newbyteorder("=")))
    kind = f"array of {value.dtype}" if isinstance(value, np.ndarray) else type(value).__name__
    raise UsageError(
        f"grid draws a tensor or an array of numbers, not {kind!r}", "give maps [C, H, W]"
    )


def _of_one_image(tensor: Tensor, hints: Hints) -> Tensor:
    """Maps [C, H, W] get the axis of the batch that a layer's output would have.

    Raises:
        LayoutError: [1, H, W] may be one map, or the tokens [1, T, D] of an image.
    """
    if tensor.is_nested or tensor.ndim != 3 or hints.layout is not None:
        return tensor
    if len(tensor) != 1:
        return tensor[None]
    try:
        recognise(list(tensor.shape), hints)
    except LayoutError as error:
        raise LayoutError(error.message, "one map is [1, 1, H, W]: tensor[None]") from None
    return tensor


def run(
    model: str | Path | nn.Module,
    images: Picture | Sequence[Picture],
    layers: Layers | None = None,
    out: str | Path = "featviz-out",
    *,
    overwrite: bool = False,
    resume: bool = False,
    tensorboard: str | Path | None = None,
    **options: Any,
) -> RunResult:
    """Draw the feature maps of images into a run directory, like `featviz run`.

    Args:
        model: a MODEL string (`"resnet18"`, a file, `"file.py:factory"`), or a module, which is
            given back as it was.
        images: files, folders or globs; PIL images; arrays [H, W] or [H, W, C]; tensors [H, W],
            [C, H, W] or [1, C, H, W]; or a list of these. What is in memory is an image before any
            preprocessing: uint8, or floats in 0..1 (as for
            `torchvision.transforms.functional.to_pil_image`), and is called `image-0.png`,
            `image-1.png`, ... in the run.
        layers: selectors; a class of modules (`torch.nn.Conv2d`); or a list of these. None takes
            one layer for each stage.
        out: the run directory.
        overwrite: replace a run that is there.
        resume: go on with the same run that is there.
        tensorboard: folder for TensorBoard's runs (extra `featviz[tensorboard]`).
        options: as on the command line, with underscores. Fields of DrawOptions, InputOptions and
            ModelOptions: normalize, cmap, nrow, padding, scale, max_maps, order, collapse, labels,
            overlay, reduce, figure, size, crop, mean, std, weights, arch, seed, device, ... For the
            run: archive, wait, verify, prune, durable, fail_fast, jobs, step, shard,
            max_output_size, max_files. What goes in and what flows back: capture (`"output,grad"`,
            or a sequence), target (`"class:281"`), grad_rule.
            Interventions, each a string or a sequence of them: ablate (`"layer3.*.relu:5,17"`),
            scale_channel (`"conv1:3=2.0"`), clamp (`"relu:0,6"`), noise (`"conv1:0.1"`, drawn from
            `seed`), grad_scale (`"layer4:0.5"`).

    Returns:
        What became of each image; `failures` and `exit_code` sum it up.

    Raises:
        FeatvizError: nothing could be begun, or the run directory cannot be written.
    """
    is_module = isinstance(model, nn.Module)
    for_noise = {"seed"} if is_module and "noise" in options else set()
    for_model = take(options, names_of(ModelOptions) - for_noise)
    if is_module and for_model:
        raise UsageError(f"{', '.join(for_model)} is for a MODEL string, and a module was given")
    seed = options.pop("seed", for_model.get("seed", 0))
    given = {"layers": _selectors(layers), "out": out, "overwrite": overwrite}
    given |= {"resume": resume, "tensorboard": tensorboard}
    asked = read_keywords(options, seed, given)
    if not (pictures := _several(images)):
        raise UsageError("there are no images", "give paths or images")
    finished: list[ImageResult] = []
    with TemporaryDirectory(prefix="featviz-") as folder:
        room = Path(folder) / "in-memory"
        room.mkdir()
        result = pipeline.run(
            _source(model, for_model, asked.inputs),
            memory.to_files(pictures, room),
            asked,
            lambda image, total: finished.append(image),
        )
    return replace(result, images=tuple(finished))


def _source(
    model: Any, options: Mapping[str, Any], inputs: InputOptions
) -> ModelOptions | LoadedModel:
    """A MODEL string with its options, or a module that is there."""
    if isinstance(model, nn.Module):
        _refuse_what_takes_no_hooks(model)
        return adopt(model, inputs)
    if not isinstance(model, (str, Path)):
        raise UsageError(
            f"the model is {type(model).__name__!r}, and neither a MODEL string nor a module",
            "of an exported program, torch.export.unflatten makes a module",
        )
    if isinstance(options.get("device"), torch.device):
        options = {**options, "device": str(options["device"])}
    return filled(ModelOptions, {"spec": model, **options})


def _refuse_what_takes_no_hooks(model: Any) -> None:
    if isinstance(model, torch.jit.ScriptModule):
        raise UsageError(
            "the model is TorchScript, which takes no hooks on its layers",
            "give the module that it was made from, or export that with torch.export (.pt2)",
        )
    if not isinstance(model, nn.Module):
        raise UsageError(f"the model is {type(model).__name__!r}, not a module", "an nn.Module")


def _selectors(layers: Any) -> str | None:
    """Selectors as text."""
    if layers is None:
        return None
    return ",".join(map(_selector, _several(layers)))


def _selector(layer: Any) -> str:
    if isinstance(layer, type) and issubclass(layer, nn.Module):
        return layer.__name__
    if isinstance(layer, str):
        return layer
    raise UsageError(
        f"layers has a {type(layer).__name__!r}, which is neither text nor a class of modules",
        "for example 'Conv2d,layer1.*', torch.nn.Conv2d, or a list of these",
    )


def _several(values: Any) -> Sequence[Any]:
    return values if isinstance(values, (list, tuple)) else [values]
