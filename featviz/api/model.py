"""`featviz.layers` and `featviz.kernels`: a model without an image."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from PIL import Image

from featviz.api import showing
from featviz.api.keywords import NOT_OF_KERNELS, Layers, Model, keywords_of, ordered
from featviz.inspection.kernels import NO_IMAGE, draw_kernels
from featviz.inspection.layers import Listing, list_model
from featviz.options import KernelOptions, ListOptions, ModelOptions
from featviz.records import Skip
from featviz.text import by, counted


@dataclass(frozen=True, repr=False)
class LayerTable(Listing):
    """All modules of a model; shows itself as a table."""

    out = None

    @property
    def document(self) -> dict[str, Any]:
        """What `--json` prints."""
        return self.as_json()

    def __repr__(self) -> str:
        total = self.totals
        macs = "" if total.macs is None else f", {total.macs:,} MACs"
        return f"<LayerTable: {total.modules} modules, {total.parameters:,} parameters{macs}>"

    def __str__(self) -> str:
        return str(self.table)

    def _repr_html_(self) -> str:
        return showing.render(table=self.table)


@dataclass(frozen=True, repr=False, eq=False)
class KernelPicture(showing.OnePicture):
    """The kernels of a layer."""

    of: KernelPictures
    row: Mapping[str, Any]
    """All that the manifest says of them: layer, type, shape, range, min, max, mean, std, ..."""
    layer: str

    @property
    def image(self) -> Image.Image:
        """The picture, a tile for each output channel: mode L, P or RGB."""
        return self.of.picture_at(str(self.row["file"]))

    @property
    def _words(self) -> str:
        return f"{self.layer} ({self.row['type']}), {by(self.row['shape'])}"

    def __repr__(self) -> str:
        return f"<KernelPicture {self._words}>"


@dataclass(frozen=True, repr=False, eq=False)
class KernelPictures(showing.FolderResult):
    """The kernels of a model's layers."""

    skipped: tuple[Skip, ...]

    @property
    def captures(self) -> tuple[KernelPicture, ...]:
        """A picture for each layer, in the order of the model."""
        return tuple(KernelPicture(self, row, row["layer"]) for row in self.document["captures"])

    def __repr__(self) -> str:
        return f"<KernelPictures of {counted(len(self.captures), 'layer')}>"

    def _repr_html_(self) -> str:
        pictures = [(partial(getattr, one, "image"), one._words) for one in self.captures]
        return showing.gallery(pictures, ".captures")


@keywords_of(ListOptions, ModelOptions)
def layers(model: Model, layers: Layers | None = None, **options: Any) -> LayerTable:
    """List the modules of a model: types, shapes, parameters, multiply-accumulates (MACs), calls
    and activation memory.

    Shapes, MACs, memory and calls come from one forward pass on zeros.

    Args:
        model: a MODEL string, or a module, which is given back as it was.
        layers: selectors, a class of modules, or a list of these; the rows that they take are
            `selected`. None selects what `featviz.run` draws without `layers`.

    Returns:
        A record with `document` (what `--json` prints); `rows`, each with index, name, type,
        parameters (a count), output_shape, macs, activation_bytes, calls and selected; `totals`;
        and `not_counted`, the operators without a formula.

    Raises:
        FeatvizError: no such model, or no layer matches.

    Example:
        >>> import featviz, torch
        >>> model = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.ReLU())
        >>> [(row.name, row.output_shape) for row in featviz.layers(model, size=8).rows]
        [('', [1, 4, 6, 6]), ('0', [1, 4, 6, 6]), ('1', [1, 4, 6, 6])]
        >>> totals = featviz.layers(model, size=8).totals
        >>> totals.parameters, totals.macs
        (112, 3888)
    """
    order = ordered(ListOptions, model, options, layers)
    asked = order.options
    with order.lent() as source:
        listed = list_model(source, asked.inputs, asked.layers, asked.functions, asked.tree)
    return LayerTable(**vars(listed))


@keywords_of(KernelOptions, ModelOptions, but=NOT_OF_KERNELS)
def kernels(
    model: Model, layers: Layers | None = None, out: str | Path | None = None, **options: Any
) -> KernelPictures:
    """Draw the kernels of a model's convolutions, a picture for each layer and a tile for each
    output channel; zero is mid-grey.

    Args:
        model: a MODEL string, or a module, which is given back as it was.
        layers: selectors, a class of modules, or a list of these. None takes all convolutions.
        out: the folder of the pictures. None leaves nothing behind.

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
    order = ordered(KernelOptions, model, options, layers, NOT_OF_KERNELS, "kernels", out=out)
    with order.lent(NO_IMAGE) as source:
        result = draw_kernels(source, order.options)
    return KernelPictures(result.as_json(), result.out, order.room, result.skipped)
