"""The public functions: small, for notebooks and for use inside other programs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from PIL import Image
from torch import Tensor, nn

from featviz import drawing, pipeline, select
from featviz.drawing import Drawer
from featviz.errors import UsageError
from featviz.hints import read_told
from featviz.hooks import hooked, list_layers
from featviz.models.load import ModelOptions, adopt
from featviz.models.preprocess import InputOptions
from featviz.plans import read_options
from featviz.preparation import RunOptions, check_options
from featviz.records import (
    INTERVENTIONS,
    DrawOptions,
    Hints,
    ImageResult,
    Layer,
    RunResult,
    Site,
)

T = TypeVar("T")


@contextmanager
def capture(model: nn.Module, layers: str) -> Iterator[Mapping[str, list[Tensor]]]:
    """Keep what layers give while the block runs.

    Args:
        model: any module; the caller runs it, in the mode that the caller chose.
        layers: selectors, as for `--layers`: `"Conv2d,layer1.*,!*.downsample.*"`, `"fn:add"`.
            Functions are found as they are called, so an index into them counts from the first.

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
    found: dict[str, list[Tensor]] = {}
    everything, selectors = list_layers(model), select.parse(layers)
    chosen = select.select(everything, selectors)
    functions = _AsCalled(selectors) if select.wants_functions(selectors) else None
    if not chosen and functions is None:
        raise _no_match(layers, everything)

    def keep(site: Site, tensor: Tensor) -> None:
        name = site.layer.name + (f":{site.key}" if site.key else "")
        found.setdefault(name, []).append(tensor.clone())

    with hooked(model, chosen, keep, wanted=functions):
        yield found
    if functions is not None and functions.seen and not found:
        raise _no_match(layers, functions.seen)


class _AsCalled:
    """Which functions selectors take, asked as the model calls them."""

    def __init__(self, selectors: list[select.Selector]) -> None:
        if late := [s.text for s in selectors if s.of_functions and s.from_the_end]:
            raise UsageError(
                f"selector {late[0]!r} counts from the end, and functions are found as they are "
                "called",
                "count from the first, for example fn:relu#0",
            )
        self._selectors = selectors
        self._taken: dict[Layer, bool] = {}

    @property
    def seen(self) -> list[Layer]:
        """Every function, in the order of the first calls."""
        return list(self._taken)

    def __call__(self, layer: Layer) -> bool:
        if layer not in self._taken:
            self._taken[layer] = layer in select.select([*self._taken, layer], self._selectors)
        return self._taken[layer]


def _no_match(text: str, layers: list[Layer]) -> UsageError:
    return UsageError(f"no layer matches {text!r}", f"types here: {select.types_present(layers)}")


def grid(tensor: Tensor, *, image: Image.Image | None = None, **options: Any) -> Image.Image:
    """Draw one tensor as `featviz run` would.

    Args:
        tensor: [1, C, H, W], a vector [1, F], a batch [N, C, H, W] or a clip [1, C, T, H, W]; other
            shapes with `tensor_layout="tokens:14x14+1"`, `"nhwc"`, ... (see `--tensor-layout`).
        image: what the model saw, for `overlay`; the tiles get its size.
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
    draw = _fill(DrawOptions, options)
    check_options(RunOptions(draw=draw))
    if draw.figure or draw.shared_basis:
        raise UsageError("a figure and a shared basis are for runs", "featviz.run draws them")
    if (draw.overlay is None) != (image is None):
        raise UsageError("an overlay and its image go together", "overlay=0.5, image=picture")
    layout = read_told(draw.tensor_layout[0])[1] if draw.tensor_layout else None
    ground = [] if image is None else [np.asarray(image.convert("RGB"))]
    site = Site(Layer(0, "tensor", "Tensor"), "output", 0, "")
    parts = Drawer(draw).draw(site, tensor.detach(), Hints(layout=layout), ground)
    return drawing.to_image(parts[""])


def run(
    model: str | nn.Module,
    images: str | Path | Sequence[str | Path],
    layers: str | None = None,
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
        images: files, folders or globs.
        layers: selectors; None takes one layer for each stage.
        out: the run directory.
        overwrite: replace a run that is there.
        resume: go on with the same run that is there.
        tensorboard: folder for TensorBoard's events (extra `featviz[tensorboard]`).
        options: as on the command line, with underscores. Fields of DrawOptions, InputOptions and
            ModelOptions: normalize, cmap, nrow, padding, scale, max_maps, order,
            collapse, labels, overlay, reduce, figure, size, crop, mean, std,
            weights, arch, seed, device, ... What goes in and what flows back: capture
            (`"output,grad"`, or a sequence), target (`"class:281"`), grad_rule. Interventions, each
            a string or a sequence of them: ablate (`"layer3.*.relu:5,17"`), scale_channel
            (`"conv1:3=2.0"`), clamp (`"relu:0,6"`), noise (`"conv1:0.1"`, drawn from `seed`),
            grad_scale (`"layer4:0.5"`).

    Returns:
        What became of each image; `failures` and `exit_code` sum it up.

    Raises:
        FeatvizError: nothing could be begun, or the run directory cannot be written.
    """
    own = isinstance(model, nn.Module)
    passing = {"capture": "output", **_taken(options, _PASSING)}
    seed = options.pop("seed", 0) if own and "noise" in passing else options.get("seed", 0)
    draw = _fill(DrawOptions, _taken(options, _names(DrawOptions)))
    for_model = _taken(options, _names(ModelOptions) - {"spec"})
    inputs = _fill(InputOptions, options)
    if own and for_model:
        raise UsageError(f"{', '.join(for_model)} is for a MODEL string, and a module was given")
    source = (
        adopt(model, inputs) if isinstance(model, nn.Module) else ModelOptions(model, **for_model)
    )
    passes = read_options({**passing, "seed": seed})
    found: list[ImageResult] = []
    board = None if tensorboard is None else Path(tensorboard)
    paths = [images] if isinstance(images, (str, Path)) else images
    result = pipeline.run(
        source,
        [str(path) for path in paths],
        RunOptions(
            layers,
            Path(out),
            overwrite,
            resume,
            tensorboard=board,
            draw=draw,
            inputs=inputs,
            passes=passes,
        ),
        lambda image, total: found.append(image),
    )
    return replace(result, images=tuple(found))


_PASSING = {"capture", "target", "grad_rule", *(kind.replace("-", "_") for kind in INTERVENTIONS)}
"""The options of run that are gradients and interventions."""


def _taken(options: dict[str, Any], names: set[str]) -> dict[str, Any]:
    """Those of the options that have these names; they are removed."""
    return {name: options.pop(name) for name in list(options) if name in names}


def _names(kind: Any) -> set[str]:
    return {f.name for f in fields(kind)}


def _fill(kind: type[T], options: Mapping[str, Any]) -> T:
    if isinstance(options.get("tensor_layout"), str):
        options = {**options, "tensor_layout": (options["tensor_layout"],)}
    try:
        return kind(**options)
    except TypeError:
        known = [f.name for f in fields(kind)]  # type: ignore[arg-type]
        wrong = [name for name in options if name not in known]
        raise UsageError(f"no option {', '.join(wrong)}", f"there is {', '.join(known)}") from None
