"""`featviz.look` and `featviz.cam`: what a model makes of an image, and where the evidence lies."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from msgspec import structs
from PIL import Image
from torch import Tensor

from featviz.api import showing
from featviz.api.keywords import Layers, Model, Picture, keywords_of
from featviz.api.lending import Room, as_files, loading, selectors
from featviz.api.showing import Page, ShownPicture
from featviz.inspection.cam import ImageCam, LayerCam
from featviz.inspection.cam import cam as explain
from featviz.inspection.look import LookResult, ShownLayer
from featviz.inspection.look import look as look_at
from featviz.options import (
    CamOptions,
    ClassMapOptions,
    InputOptions,
    LookOptions,
    ModelOptions,
    PageOptions,
    read_from,
)
from featviz.records import REDUCTIONS, Guess
from featviz.text import by, counted


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


@keywords_of(PageOptions, LookOptions, InputOptions, ModelOptions)
def look(
    model: Model,
    image: Picture,
    layers: Layers | None = None,
    out: str | Path | None = None,
    **options: Any,
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
        options: those below.

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
    given = {**options, "layers": selectors(layers), "out": out or room.path / "look.png"}
    page = read_from(PageOptions, given)
    asked = read_from(LookOptions, given)
    kinds = PageOptions, LookOptions
    with as_files(image) as files, loading(model, given, *kinds) as (source, inputs):
        result = look_at(source, files, structs.replace(asked, page=page, inputs=inputs))
    return LookPage(result, None if out is None else result.path)


@dataclass(frozen=True, repr=False, eq=False)
class ClassMap:
    """The class activation map of one call of a layer, for one image."""

    of: ImageCam = field(repr=False)
    at: LayerCam = field(repr=False)

    @property
    def name(self) -> str:
        """The image: its path relative to the argument it came from; `image-0.png` for one in
        memory."""
        return self.of.image

    @property
    def layer(self) -> str:
        """Qualified name of the layer; empty for the model itself."""
        return self.at.site.layer.name

    @property
    def call(self) -> int:
        """Which call of the layer, from 0."""
        return self.at.site.call

    @property
    def method(self) -> str:
        """`gradcam`, `layercam`, ..."""
        return self.of.method

    @property
    def target(self) -> str:
        """What the map is evidence for: `tabby`, `class 281`, or the target as it was given."""
        return self.of.target

    @property
    def score(self) -> float | None:
        """The value of the target."""
        return self.of.outcome.target

    @property
    def prediction(self) -> tuple[Guess, ...]:
        """The likeliest classes, where the model is a classifier."""
        return self.of.prediction

    @property
    def file(self) -> Path | None:
        """The picture of the image with all of its maps, where `out` was given."""
        return self.of.path

    @property
    def range(self) -> tuple[float, float]:
        """The values that are drawn darkest and brightest."""
        return self.at.limits

    @property
    def image(self) -> Image.Image:
        """The map over what the model saw: RGB, in the size of the input."""
        return Image.fromarray(self.at.picture)

    @property
    def tensor(self) -> Tensor:
        """The map's values, float32 [H, W] in the resolution of the layer; [T, H, W] of a clip."""
        return torch.from_numpy(self.at.values.copy())

    @property
    def _words(self) -> str:
        method = REDUCTIONS[self.method].words
        return f"{self.at.name}, {by(self.at.values.shape)}: {method} for {self.target}"

    def __repr__(self) -> str:
        return f"<ClassMap of {self._words}>"

    def _repr_html_(self) -> str:
        return showing.render(Page([self._figure(showing.LARGE)]))

    def _figure(self, side: int) -> ShownPicture:
        said = f": {self.prediction[0].words}" if self.prediction else ""
        return showing.figure(lambda: self.image, f"{self.name}{said}. {self._words}", side)


@dataclass(frozen=True, repr=False, eq=False)
class ClassMaps:
    """The class activation maps of images."""

    images: tuple[ImageCam, ...]
    """What became of each image."""

    @cached_property
    def maps(self) -> tuple[ClassMap, ...]:
        """Every map: image by image, in the order in which the layers ran."""
        return tuple(ClassMap(one, at) for one in self.images for at in one.maps)

    @property
    def failures(self) -> dict[str, str]:
        """Why images failed, by their names."""
        errors = {one.image: one.error for one in self.images}
        return {name: error.message for name, error in errors.items() if error is not None}

    @property
    def image(self) -> Image.Image:
        """The picture of the first map."""
        return self.maps[0].image

    @property
    def tensor(self) -> Tensor:
        """The values of the first map, float32 [H, W]."""
        return self.maps[0].tensor

    def __repr__(self) -> str:
        failed = f", {len(self.failures)} failed" if self.failures else ""
        one = self.images[0]
        words = f"{REDUCTIONS[one.method].words} of {counted(len(self.images), 'image')}"
        return f"<ClassMaps, {words}{failed}: {counted(len(self.maps), 'map')}>"

    def _repr_html_(self) -> str:
        lines = [repr(self).strip("<>")]
        lines += [f"{name} failed: {reason}" for name, reason in self.failures.items()]
        if (left := len(self.maps) - showing.MOST) > 0:
            lines.append(f"{left} more in .maps")
        figures = [one._figure(showing.SMALL) for one in self.maps[: showing.MOST]]
        return showing.render(Page(figures, lines))


@keywords_of(ClassMapOptions, CamOptions, InputOptions, ModelOptions)
def cam(
    model: Model,
    images: Picture | list[Picture] | tuple[Picture, ...],
    target: str | None = None,
    method: str = "gradcam",
    layers: Layers | None = None,
    **options: Any,
) -> ClassMaps:
    """Show where in images the evidence for a class lies, like the command `featviz cam`.

    Args:
        model: a MODEL string, or a module, which is given back as it was.
        images: as for `featviz.run`.
        target: `"class:281"`, `"class:tabby"`, `"output[out]:mean"`, ... None is the predicted
            class of each image.
        method: `"gradcam"`, `"gradcam++"`, `"layercam"` and `"hirescam"` show what speaks for the
            target, `"xgradcam"` and `"gradxact"` also what speaks against it.
        layers: as for `featviz.run`. None takes the last layer whose output has places of the image
            that the target depends on.
        options: those below; without `out` nothing is written.

    Returns:
        The maps, with `image` and `tensor` of the first of them.

    Raises:
        FeatvizError: a bad option, no such model, image or layer; the target does not fit the
            output; no gradient reaches the layers; or each of the images failed, the first of them
            in this way. Why some images failed is in `failures`.

    Example:
        >>> import featviz, torch
        >>> head = torch.nn.Flatten(), torch.nn.Linear(784, 2)
        >>> net = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.ReLU(), *head)
        >>> maps = featviz.cam(net, torch.rand(3, 16, 16), "class:1", "gradxact", size=16)
        >>> maps
        <ClassMaps, gradient × activation of 1 image: 1 map>
        >>> maps.maps[0]
        <ClassMap of 1, 14×14: gradient × activation for class 1>
        >>> maps.image.size, maps.tensor.shape
        ((16, 16), torch.Size([14, 14]))
    """
    given = {**options, "target": target, "method": method, "layers": selectors(layers)}
    maps = read_from(ClassMapOptions, given)
    asked = read_from(CamOptions, given)
    kinds = ClassMapOptions, CamOptions
    with as_files(images) as files, loading(model, given, *kinds) as (source, inputs):
        results = tuple(explain(source, files, structs.replace(asked, maps=maps, inputs=inputs)))
    if not any(one.maps for one in results) and results[0].error is not None:
        raise results[0].error
    return ClassMaps(results)
