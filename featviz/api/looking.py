"""`featviz.look`: one page on what a model makes of an image."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, Unpack

from PIL import Image

from featviz.api import showing
from featviz.api.keywords import Layers, LoadingKeywords, Model, Picture
from featviz.api.lending import Room, as_files, loading, selectors
from featviz.api.showing import Page
from featviz.api.words import keyword_errors
from featviz.inspection.look import LookOptions, LookResult
from featviz.inspection.look import look as look_at
from featviz.inspection.shown import ShownLayer
from featviz.records import Guess, PageOptions
from featviz.records.checking import filled
from featviz.text import counted


@dataclass(frozen=True, repr=False, eq=False)
class LookPage:
    """One page on what a model makes of an image; shows itself as the picture."""

    result: LookResult
    """All that the page was made of; where `out` is None, its `path` is gone."""
    out: Path | None
    """The file of the picture; None where none was wanted."""

    @property
    def image(self) -> Image.Image:
        """The page, mode RGB."""
        return Image.fromarray(self.result.picture)

    @property
    def input(self) -> Image.Image:
        """What the model saw, un-normalised, mode RGB."""
        return Image.fromarray(self.result.shown)

    @property
    def prediction(self) -> tuple[Guess, ...]:
        """The likeliest classes, where the model is a classifier."""
        return self.result.prediction

    @property
    def layers(self) -> tuple[ShownLayer, ...]:
        """The rows of the page: each layer with the channels that are shown, and their numbers."""
        return self.result.layers

    def __repr__(self) -> str:
        said = f", {self.prediction[0].words}" if self.prediction else ""
        layers = counted(len(self.layers), "layer")
        return f"<LookPage of {self.result.image}: {layers}{said}>"

    def _repr_html_(self) -> str:
        words = repr(self).strip("<>")
        return showing.render(Page([showing.figure(lambda: self.image, words, showing.PAGE)]))


@keyword_errors()
def look(
    model: Model,
    image: Picture,
    layers: Layers | None = None,
    out: str | Path | None = None,
    *,
    overwrite: bool = False,
    maps: int = PageOptions.maps,
    by: Literal["deviation", "value"] = PageOptions.by,
    cmap: str = PageOptions.cmap,
    **options: Unpack[LoadingKeywords],
) -> LookPage:
    """Draw one quick picture of what a model makes of an image, like the command `featviz look`.

    It shows the input, the prediction, and of each layer the maps that tell most.

    Args:
        model: a MODEL string, or a module, which is given back as it was.
        image: a path, a PIL image, an array [H, W] or [H, W, C], or a tensor [H, W] or [C, H, W],
            as for `featviz.run`; of several images the first is shown.
        layers: selectors, a class of modules, or a list of these. None takes one layer for each
            stage, at most 10.
        out: a PNG file for the picture, in place of an earlier picture of look. None writes none.
        overwrite: replace any file at `out`.
        maps: how many maps of each layer are shown.
        by: show the maps whose values vary most from place to place, or those of highest mean.
        cmap: `grey`, or a colormap of matplotlib.
        options: how a MODEL string is loaded, and what the model gets, as for `featviz.run`.

    Returns:
        A record with `image` (the picture), `input`, `prediction` and `layers`.

    Raises:
        FeatvizError: a bad option, no such model, layer or image, nothing that can be drawn, or the
            file cannot be written.

    Example:
        >>> import featviz, torch
        >>> model = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.ReLU())
        >>> page = featviz.look(model, torch.rand(3, 16, 16), "Conv2d", size=16, maps=2)
        >>> page
        <LookPage of image-0.png: 1 layer>
        >>> page.image.mode, [row.layer for row in page.layers]
        ('RGB', ['0'])
    """
    room = Room()
    plain: dict[str, Any] = {"layers": selectors(layers), "overwrite": overwrite}
    plain["out"] = room.path / "look.png" if out is None else out
    choice = {"maps": maps, "by": by, "cmap": cmap}
    asked = replace(filled(LookOptions, plain), page=filled(PageOptions, choice))
    known = (*plain, *choice)
    with as_files(image) as files, loading(model, dict(options), known) as (source, inputs):
        result = look_at(source, files, replace(asked, inputs=inputs))
    return LookPage(result, None if out is None else result.path)
