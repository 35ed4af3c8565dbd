"""`featviz.layers`, `featviz.summary` and `featviz.kernels`: a model without an image."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, Unpack

from PIL import Image

from featviz.api import showing
from featviz.api.keywords import KernelKeywords, Layers, LoadingKeywords, Model, TileKeywords
from featviz.api.lending import Feeding, Room, lent, loading, selectors
from featviz.api.showing import Page
from featviz.api.words import keyword_errors
from featviz.drawing.kernels import DRAW
from featviz.errors import UsageError
from featviz.inspection.kernels import NO_IMAGE, KernelOptions, KernelsResult, draw_kernels
from featviz.inspection.layers import Listing, list_model
from featviz.inspection.summary import SORTS, Summary, summarise
from featviz.models.load import ModelOptions
from featviz.pipeline.keywords import names_of, take
from featviz.records import DrawOptions, Skip
from featviz.records.checking import check, filled, no_option, whole_number
from featviz.text import by, counted


@dataclass(frozen=True, repr=False)
class LayerTable(Listing):
    """All modules of a model; shows itself as a table."""

    def __repr__(self) -> str:
        return f"<LayerTable: {self.footer}>"

    def __str__(self) -> str:
        return str(self.table)

    def _repr_html_(self) -> str:
        return showing.render(Page(table=self.table))


@dataclass(frozen=True, repr=False)
class SummaryTable(Summary):
    """Parameters, multiply-accumulates and memory of a model; shows itself as a table."""

    def __repr__(self) -> str:
        total = self.totals
        return f"<SummaryTable: {total.parameters:,} parameters, {total.macs:,} MACs>"

    def __str__(self) -> str:
        return str(self.table)

    def _repr_html_(self) -> str:
        return showing.render(Page(table=self.table))


@dataclass(frozen=True, repr=False, eq=False)
class KernelPicture:
    """The kernels of a layer."""

    row: Mapping[str, Any]
    """All that the manifest says of them: layer, type, shape, range, min, max, mean, std, ..."""
    folder: Path
    """Where the picture is."""
    room: Room | None
    """What keeps a temporary folder."""

    @property
    def layer(self) -> str:
        """Qualified name of the layer."""
        return str(self.row["layer"])

    @property
    def image(self) -> Image.Image:
        """The picture, a tile for each output channel: mode L, P or RGB.

        Raises:
            StoreError: it cannot be read.
        """
        return showing.read_picture(self.folder, str(self.row["file"]))

    def __repr__(self) -> str:
        return f"<KernelPicture {self._words}>"

    def _repr_html_(self) -> str:
        shown = showing.figure(lambda: self.image, self._words, showing.LARGE)
        return showing.render(Page([shown]))

    @property
    def _words(self) -> str:
        return f"{self.layer} ({self.row['type']}), {by(self.row['shape'])}"


@dataclass(frozen=True, repr=False, eq=False)
class KernelPictures:
    """The kernels of a model's layers."""

    captures: tuple[KernelPicture, ...]
    """A picture for each layer, in the order of the model."""
    skipped: tuple[Skip, ...]
    """Layers whose kernels could not be drawn, each with the reason."""
    out: Path | None
    """The folder of the pictures; None where it is temporary."""

    def __repr__(self) -> str:
        return f"<KernelPictures of {counted(len(self.captures), 'layer')}>"

    def _repr_html_(self) -> str:
        figures = [
            showing.figure(partial(getattr, one, "image"), one._words)
            for one in self.captures[: showing.MOST]
        ]
        left = len(self.captures) - showing.MOST
        return showing.render(Page(figures, [f"{left} more in .captures"] if left > 0 else []))


@keyword_errors()
def layers(
    model: Model,
    layers: Layers | None = None,
    *,
    functions: bool = False,
    **options: Unpack[LoadingKeywords],
) -> LayerTable:
    """List the modules of a model: types, parameters, output shapes and calls.

    Shapes and calls come from one forward pass on zeros.

    Args:
        model: a MODEL string, or a module, which is given back as it was.
        layers: selectors, a class of modules, or a list of these; the rows that they take are
            `selected`. None selects what `featviz.run` draws without `layers`.
        functions: list the functions that modules call, too.
        options: how a MODEL string is loaded (weights, arch, device, ...) and what the model gets
            (size in pixels, channels, transform, forward_args, ...).

    Returns:
        A record with `rows`, each with index, name, type, parameters (a count), output_shape, calls
        and selected.

    Raises:
        FeatvizError: no such model, or no layer matches.

    Example:
        >>> import featviz, torch
        >>> model = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.ReLU())
        >>> [(row.name, row.output_shape) for row in featviz.layers(model, size=8).rows]
        [('', [1, 4, 6, 6]), ('0', [1, 4, 6, 6]), ('1', [1, 4, 6, 6])]
    """
    text, known = selectors(layers), ("layers", "functions")
    with loading(model, dict(options), known) as (source, inputs):
        return LayerTable(**vars(list_model(source, inputs, text, functions)))


@keyword_errors()
def summary(
    model: Model,
    layers: Layers | None = None,
    *,
    depth: int | None = None,
    sort: Literal["index", "params", "macs", "memory"] = "index",
    **options: Unpack[LoadingKeywords],
) -> SummaryTable:
    """Count a model's parameters, multiply-accumulates (MACs) and activation memory, by one forward
    pass on zeros.

    Args:
        model: a MODEL string, or a module, which is given back as it was.
        layers: selectors, a class of modules, or a list of these: the rows to show. None shows all;
            totals count all.
        depth: show so many levels of modules inside one another; None shows all.
        sort: by place in the model, or by a figure with the largest first.
        options: as for `featviz.layers`.

    Returns:
        A record with `rows`, `totals` (parameters, MACs, FLOPs, bytes) and `not_counted`, the
        operators without a formula.

    Raises:
        FeatvizError: a bad option, no such model, no layer matches, or the model cannot take the
            zeros.

    Example:
        >>> import featviz, torch
        >>> model = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.ReLU())
        >>> totals = featviz.summary(model, size=8).totals
        >>> totals.parameters, totals.macs
        (112, 3888)
    """
    if sort not in SORTS:
        raise UsageError(f"sort {sort!r} is not one of {', '.join(map(repr, SORTS))}")
    if depth is not None:
        depth = whole_number("depth", depth)
    text, known = selectors(layers), ("layers", "depth", "sort")
    with loading(model, dict(options), known) as (source, inputs):
        return SummaryTable(**vars(summarise(source, inputs, text, depth, sort)))


@keyword_errors()
def kernels(
    model: Model,
    layers: Layers | None = None,
    out: str | Path | None = None,
    *,
    overwrite: bool = False,
    all_slices: bool = False,
    tensorboard: str | Path | None = None,
    **options: Unpack[KernelKeywords],
) -> KernelPictures:
    """Draw the kernels of a model's convolutions, a picture for each layer and a tile for each
    output channel; zero is mid-grey.

    Args:
        model: a MODEL string, or a module, which is given back as it was.
        layers: selectors, a class of modules, or a list of these. None takes all convolutions.
        out: the folder of the pictures. None leaves nothing behind.
        overwrite: replace the kernels that are there.
        all_slices: a tile for each input of each kernel.
        tensorboard: folder for TensorBoard's events (extra `featviz[tensorboard]`).
        options: how tiles are drawn (normalize, cmap, nrow, padding in pixels, scale, max_maps,
            titles, ...), format, and how a MODEL string is loaded (weights, arch, ...).

    Returns:
        A record with `captures`, each with `image`, `layer` and `row`.

    Raises:
        FeatvizError: a bad option, no such model, nothing to draw, or the folder failed.

    Example:
        >>> import featviz, torch
        >>> model = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.ReLU())
        >>> kernels = featviz.kernels(model, scale=1)
        >>> kernels.captures
        (<KernelPicture 0 (Conv2d), 4×3×3×3>,)
        >>> kernels.captures[0].image.size
        (12, 12)
    """
    given: dict[str, Any] = dict(options)
    for_model = take(given, names_of(ModelOptions))
    drawing = {*TileKeywords.__annotations__, "titles", "format"}
    draw = replace(DRAW, **_vars_of(filled(DrawOptions, take(given, drawing)), drawing, options))
    if given:
        own = ("layers", "out", "overwrite", "all_slices", "tensorboard")
        raise no_option(given, {*drawing, *names_of(ModelOptions), *own})
    room = Room() if out is None else None
    place = room.path / "kernels" if room is not None else out
    plain = {"layers": selectors(layers), "out": place, "overwrite": overwrite}
    plain |= {"all_slices": all_slices, "tensorboard": tensorboard}
    asked = replace(filled(KernelOptions, plain), draw=draw)
    check(asked)
    with lent(model, for_model, NO_IMAGE, Feeding()) as source:
        result = draw_kernels(source, asked)
    return _pictures(result, room)


def _pictures(result: KernelsResult, room: Room | None) -> KernelPictures:
    captures = tuple(KernelPicture(row, result.out, room) for row in result.rows)
    return KernelPictures(captures, result.skipped, None if room else result.out)


def _vars_of(record: DrawOptions, names: set[str], given: Mapping[str, Any]) -> dict[str, Any]:
    """Those of the fields that were given, as the record holds them."""
    return {name: getattr(record, name) for name in names & given.keys()}
