"""`featviz.capture` and `featviz.grid`: tensors of a forward pass, and one tensor as a
picture."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn

from featviz.api.keywords import (
    NOT_OF_TENSORS,
    Layers,
    Picture,
    alone_with,
    check_module,
    keywords_of,
    names_of,
    selectors,
)
from featviz.drawing import drawer
from featviz.drawing.picture import to_image
from featviz.errors import LayoutError, UsageError
from featviz.hooks.capture import hooked
from featviz.hooks.eval_mode import as_written, uncompiled
from featviz.hooks.layers import list_layers, modules_by_name
from featviz.hooks.selectors import (
    Selector,
    of_functions,
    parse,
    remedy,
    select,
    types_present,
    warn_of_unmatched,
)
from featviz.images import arrays
from featviz.layout import recognise
from featviz.options import DrawOptions, no_option, read_from
from featviz.records import CaptureSite, Hints, Layer
from featviz.run.prepare import check_drawing

_NO_BACKWARD = -1
"""What `torch._C._current_graph_task_id` returns if no backward pass is running."""


@contextmanager
def capture(
    model: nn.Module, layers: Layers | None = None
) -> Iterator[Mapping[str, list[Tensor]]]:
    """Keep the outputs of layers while the block runs.

    Args:
        model: any module; the caller runs it. Inside the block compiled models run as
            they are written, in all threads, since compiled code runs past hooks.
        layers: selectors, a class of modules, or a list of these; None takes all
            modules that have no modules inside. `fn:relu#0` is the relu that is called
            first. An index of functions cannot count from the end (`fn:relu#-1`), since
            functions are found only as the model runs.

    Yields:
        A mapping that fills as the model runs. Its keys are qualified names, with `:KEY`
        behind for a tensor in a tuple, list or dict. Its values are lists with a detached
        copy for each call. Calls that a backward pass repeats (torch.utils.checkpoint)
        are not taken again.

    Raises:
        UsageError: a selector cannot be read, or counts functions from the end; or no
            layer matches. If functions are selected, no match is an error only at the end
            of the block.

    Example:
        >>> import torch, featviz
        >>> model = torch.nn.Sequential(torch.nn.Conv2d(1, 4, 3), torch.nn.ReLU(inplace=True))
        >>> with featviz.capture(model, "Conv2d,ReLU") as maps:
        ...     _ = model(torch.zeros(1, 1, 8, 8))
        >>> {name: [list(t.shape) for t in tensors] for name, tensors in maps.items()}
        {'0': [[1, 4, 6, 6]], '1': [[1, 4, 6, 6]]}
    """
    check_module(model)
    model = uncompiled(model)
    every_layer = list_layers(model)
    parsed = _read_selectors(layers)
    by_functions = bool(of_functions(parsed))
    if layers is None:
        modules = modules_by_name(model)
        chosen = [
            layer for layer in every_layer if not any(modules[layer.name].children())
        ]
    else:
        chosen = select(every_layer, parsed)
        if not chosen and not by_functions:
            raise _no_layer_error(layers, every_layer, parsed)
    # filled by hooks while the caller's block runs
    captured: dict[str, list[Tensor]] = {}
    # by function, in the order of their first calls: whether its outputs are kept
    called: dict[Layer, bool] = {}

    def keep(site: CaptureSite, tensor: Tensor) -> None:
        """Keep a copy of a tensor under the name of its layer."""
        # in a backward pass, torch.utils.checkpoint runs layers again
        if torch._C._current_graph_task_id() != _NO_BACKWARD:
            return
        name = site.layer.name + (f":{site.key}" if site.key else "")
        # a copy, since the next layer may work in place
        captured.setdefault(name, []).append(tensor.clone())

    def is_taken(layer: Layer) -> bool:
        """Whether a function is selected. This is decided at its first call."""
        if layer not in called:
            called[layer] = layer in select([*called, layer], parsed)
        return called[layer]

    hooks = hooked(
        model, chosen, keep, takes_function=is_taken if by_functions else None
    )
    with alone_with(model), as_written(), hooks:
        yield captured
    if by_functions and not captured:
        present = types_present([*called]) or "none, but inside torch's own modules"
        raise _no_layer_error(
            layers,
            [*every_layer, *called],
            parsed,
            f"functions called in the block: {present}",
        )
    # only now, when all called functions are known
    warn_of_unmatched([*every_layer, *called], parsed)


def _no_layer_error(
    layers: Layers | None,
    present: Sequence[Layer],
    parsed: Sequence[Selector],
    *facts: str,
) -> UsageError:
    """The error if selectors match no layer.

    Args:
        layers: the selectors as the caller gave them.
        present: all layers of the model.
        parsed: the selectors as they were read.
        *facts: further texts for the hint.
    """
    return UsageError(
        f"no layer matches {selectors(layers)!r}", remedy(present, parsed, *facts)
    )


def _read_selectors(layers: Layers | None) -> list[Selector]:
    """Read selectors; an empty list for None.

    Raises:
        UsageError: a selector cannot be read, or counts functions from the end.
    """
    text = selectors(layers)
    if text is None:
        return []
    parsed = parse(text)
    for selector in of_functions(parsed):
        if "-" in selector.text.partition("#")[2]:
            raise UsageError(
                f"selector {selector.text!r} counts from the end, and functions are"
                " found as they are called",
                "count from the first, for example fn:relu#0",
            )
    return parsed


@keywords_of(DrawOptions, but=NOT_OF_TENSORS)
def grid(
    tensor: Tensor | np.ndarray, *, image: Picture | None = None, **options: Any
) -> Image.Image:
    """Draw one tensor as `featviz.run` would.

    Args:
        tensor: maps [C, H, W] or [1, C, H, W], a vector [1, F], a batch [N, C, H, W] or
            a clip [1, C, T, H, W], as tensor or array; other shapes with
            `tensor_layout="tokens:14x14+1"`, `"nhwc"`, ... [1, X, Y] may be one map or
            tokens: a map is `tensor[None]`, and tokens take `tensor_layout`.
        image: what the model saw, for `overlay`; the tiles get its size. A PIL image,
            or an array or tensor as for `featviz.run`.
        options: those below.

    Returns:
        An image of mode L; of mode P with a colormap, or if values are NaN or infinite; of
        mode RGB with `reduce="pca"` or an overlay.

    Example:
        >>> import torch, featviz
        >>> featviz.grid(torch.arange(32.0).reshape(1, 2, 4, 4), scale=1).size
        (14, 8)
    """
    keywords = dict(options)
    draw = read_from(DrawOptions, keywords, NOT_OF_TENSORS)
    if keywords:
        raise no_option(
            keywords, names_of(DrawOptions, but=(*NOT_OF_TENSORS, "forward_args"))
        )
    _check_options_of_grid(draw, has_image=image is not None)
    layout = draw.tensor_layout[0] if draw.tensor_layout else None
    hints = Hints(override=layout)
    maps = _with_batch_axis(_as_tensor(tensor), hints)
    pictures = [] if image is None else arrays.to_images(image)
    if len(pictures) > 1:
        raise UsageError(
            f"an overlay takes one image, not {len(pictures)}", "give one of them"
        )
    background = [np.asarray(picture.convert("RGB")) for picture in pictures]
    # the drawer needs a site, but this tensor belongs to no layer
    site = CaptureSite(Layer(0, "tensor", "Tensor"), "output", 0, "")
    return to_image(drawer.draw(draw, site, maps, hints, background)[""])


def _check_options_of_grid(draw: DrawOptions, *, has_image: bool) -> None:
    """Refuse options that need a layer, a gradient or an image.

    Args:
        has_image: whether the caller gave an image.

    Raises:
        UsageError: there is such an option, or drawing cannot take the value of one.
    """
    check_drawing(draw)
    if (draw.overlay is not None) != has_image:
        raise UsageError(
            "an overlay and its image go together", "overlay=0.5, image=picture"
        )
    if draw.weighs or draw.attends:
        raise UsageError(
            f"reduce={draw.reduce} needs more than a layer's output, and grid draws one"
            " tensor",
            "featviz.cam(model, image), or featviz.run with the same reduce",
        )
    # `conv1=grid` gives a layout to a layer, but grid draws no layer
    if len(draw.tensor_layout) > 1 or any("=" in text for text in draw.tensor_layout):
        text = ", ".join(map(repr, draw.tensor_layout))
        raise UsageError(
            f"tensor_layout={text}: grid draws one tensor, which has one layout and no"
            " layer",
            f"for example tensor_layout={draw.tensor_layout[0].rpartition('=')[2]!r}",
        )


def _as_tensor(tensor: Tensor | np.ndarray) -> Tensor:
    """A tensor without a graph, made from a tensor or from an array in any byte order.

    Raises:
        UsageError: `tensor` is neither a tensor nor an array of numbers.
    """
    if isinstance(tensor, np.ndarray):
        with suppress(TypeError, ValueError):
            return torch.from_numpy(tensor.astype(tensor.dtype.newbyteorder("=")))
    if not isinstance(tensor, Tensor):
        type_name = getattr(tensor, "dtype", type(tensor).__name__)
        raise UsageError(
            f"grid draws a tensor or an array of numbers, not {str(type_name)!r}",
            "give maps [C, H, W]",
        )
    return tensor.detach()


def _with_batch_axis(maps: Tensor, hints: Hints) -> Tensor:
    """Maps [C, H, W] as [1, C, H, W], the shape of a layer's output. Any other tensor is
    returned as it is, and so are all tensors if `hints` name a layout.

    Raises:
        LayoutError: the shape is [1, X, Y], and may be one map or tokens.
    """
    if maps.is_nested or maps.ndim != 3 or hints.override is not None:
        return maps
    if len(maps) != 1:
        return maps[None]
    try:
        recognise(list(maps.shape), hints)
    except LayoutError as error:
        raise LayoutError(
            error.message, "one map is [1, 1, H, W]: tensor[None]"
        ) from None
    return maps
