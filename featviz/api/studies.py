"""`featviz.layers` and `kernels`, a model without an image; `look` and `cam`, what it makes of one;
`audit` and `exemplars`, what its channels do for many."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from PIL import Image
from torch import Tensor

from featviz.api import showing
from featviz.api.keywords import (
    NOT_OF_KERNELS,
    Layers,
    Model,
    Picture,
    Pictures,
    keywords_of,
    ordered,
)
from featviz.audit.audit import audit as audit_model
from featviz.audit.output import audit_table
from featviz.exemplars.exemplars import exemplar_table, find_exemplars
from featviz.inspection.cam import ImageCam, LayerCam
from featviz.inspection.cam import cam as explain
from featviz.inspection.kernels import NO_IMAGE, draw_kernels
from featviz.inspection.layers import Listing, list_model
from featviz.inspection.look import LookResult
from featviz.inspection.look import look as look_at
from featviz.options import (
    AuditOptions,
    CamOptions,
    ExemplarOptions,
    KernelOptions,
    ListOptions,
    LookOptions,
    ModelOptions,
)
from featviz.records import REDUCTIONS, Skip, TextTable, Verdict
from featviz.rundir.studies import ExemplarChannel, ExemplarLayer
from featviz.text import by, counted


@dataclass(frozen=True, repr=False)
class LayerTable(showing.Shown, Listing):
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

    def _table(self) -> TextTable:
        return self.table


@dataclass(frozen=True, repr=False, eq=False)
class KernelPicture(showing.Shown):
    """The kernels of a layer."""

    of: KernelPictures
    row: Mapping[str, Any]
    """All that the manifest says of them: layer, type, shape, range, min, max, mean, std, ..."""
    layer: str
    side = showing.LARGE

    @property
    def image(self) -> Image.Image:
        """The picture, a tile for each output channel: mode L, P or RGB."""
        return self.of.picture_at(str(self.row["file"]))

    def __repr__(self) -> str:
        return f"<KernelPicture {self.layer} ({self.row['type']}), {by(self.row['shape'])}>"

    def _pictures(self) -> showing.Pictures:
        yield lambda: self.image, repr(self).strip("<>").partition(" ")[2]


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

    def _pictures(self) -> showing.Pictures:
        for one in self.captures:
            yield from one._pictures()


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
        and `not_counted`, the operators from outside torch, without a formula.

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
        document, skipped = draw_kernels(source, order.options)
    return KernelPictures(document, order.options.out, order.room, tuple(skipped))


@dataclass(frozen=True, repr=False, eq=False)
class LookPage(showing.Shown, LookResult):
    """One page on what a model makes of an image; shows itself as the picture."""

    out: Path | None = None
    """The file of the picture; None where none was wanted, and `path` is gone."""
    side = showing.PAGE

    @property
    def image(self) -> Image.Image:
        """The page, mode RGB."""
        return Image.fromarray(self.picture)

    @property
    def input(self) -> Image.Image:
        """What the model saw, un-normalised, mode RGB."""
        return Image.fromarray(self.shown)

    def __repr__(self) -> str:
        said = f", {self.prediction[0].words}" if self.prediction else ""
        return f"<LookPage of {self.name}: {counted(len(self.layers), 'layer')}{said}>"

    def _pictures(self) -> showing.Pictures:
        yield lambda: self.image, repr(self).strip("<>")


@keywords_of(LookOptions, ModelOptions)
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
        image: a path or an image in memory, as for `featviz.run`; of several the first is shown.
        layers: as for `featviz.run`; None takes at most 10.
        out: a PNG file for the picture, in place of an earlier picture of look. None writes none.

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
    order = ordered(LookOptions, model, options, layers, place="look.png", out=out)
    result = order.given_to(look_at, image)
    return LookPage(**vars(result), out=None if out is None else result.path)


@dataclass(frozen=True, repr=False, eq=False)
class ClassMaps(showing.Shown):
    """The class activation maps of images; `image` and `tensor` are those of the first map."""

    images: tuple[ImageCam, ...]

    @property
    def maps(self) -> tuple[LayerCam, ...]:
        """Every map: image by image, in the order in which the layers ran."""
        return tuple(one for image in self.images for one in image.maps)

    @property
    def failures(self) -> dict[str, str]:
        """Why images failed, by their names."""
        return {one.image: one.error.message for one in self.images if one.error is not None}

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
        words = f"{REDUCTIONS[self.images[0].method].words} of {counted(len(self.images), 'image')}"
        return f"<ClassMaps, {words}{failed}: {counted(len(self.maps), 'map')}>"

    def _pictures(self) -> showing.Pictures:
        for one in self.images:
            for at in one.maps:
                yield partial(getattr, at, "image"), f"{one.words} at {at.name}"

    def _lines(self) -> list[str]:
        failed = [f"{name} failed: {reason}" for name, reason in self.failures.items()]
        return [repr(self).strip("<>"), *failed]


@keywords_of(CamOptions, ModelOptions)
def cam(
    model: Model,
    images: Pictures,
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
        A record with `maps`, each with `layer`, `image`, `tensor` and `limits`, the values drawn
        darkest and brightest; `images`, each with its `maps`, `prediction`, `target` and `path`;
        and `image` and `tensor` of the first map.

    Raises:
        FeatvizError: nothing could be begun, or each of the images failed, the first of them in
            this way. Why some images failed is in `failures`.

    Example:
        >>> import featviz, torch
        >>> head = torch.nn.Flatten(), torch.nn.Linear(784, 2)
        >>> net = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.ReLU(), *head)
        >>> maps = featviz.cam(net, torch.rand(3, 16, 16), "class:1", "gradxact", size=16)
        >>> maps
        <ClassMaps, gradient × activation of 1 image: 1 map>
        >>> maps.maps[0].layer, maps.images[0].target
        ('1', 'class 1')
        >>> maps.image.size, maps.tensor.shape
        ((16, 16), torch.Size([14, 14]))
    """
    order = ordered(CamOptions, model, options, layers, target=target, method=method)
    results = order.given_to(lambda *given: tuple(explain(*given)), images)
    if not any(one.maps for one in results) and results[0].error is not None:
        raise results[0].error
    return ClassMaps(results)


@dataclass(frozen=True, repr=False, eq=False)
class AuditTable(showing.FolderResult):
    """What the channels of a model do for images; shows itself as a table."""

    verdicts: tuple[Verdict, ...]
    exit_code: int

    @cached_property
    def suspects(self) -> dict[str, Image.Image]:
        """Pictures of channels that have a finding, by their file in `out`."""
        files = sorted(self.folder.rglob("suspects/*.png"))
        names = [file.relative_to(self.folder).as_posix() for file in files]
        return {name: self.picture_at(name) for name in names}

    def __repr__(self) -> str:
        found = self.document["total"]["findings"].items()
        words = ", ".join(f"{count} {name}" for name, count in found)
        if self.verdicts:
            words += f"; gates: {len(self._broken)} of {len(self.verdicts)} broken"
        return f"<AuditTable: {words}>"

    def __str__(self) -> str:
        return "\n".join([str(audit_table(self.document)), *self._broken])

    @property
    def _broken(self) -> list[str]:
        broken = [verdict for verdict in self.verdicts if not verdict.held]
        return [f"gate {verdict.gate} is broken: {verdict.words}" for verdict in broken]

    def _pictures(self) -> showing.Pictures:
        for name in self.suspects:
            yield partial(self.picture_at, name), Path(name).stem

    def _lines(self) -> list[str]:
        seen = counted(self.document["images"]["seen"], "image")
        return [*self._broken, f"{seen} seen; the verdicts hold for these images"]

    def _table(self) -> TextTable:
        return audit_table(self.document)


@dataclass(frozen=True, repr=False, eq=False)
class ExemplarSheets(showing.FolderResult):
    """The images that excite channels most; shows itself as a gallery."""

    layers: tuple[ExemplarLayer, ...]
    """The tensors that were looked at; each has `channels`, and they `exemplars`."""
    table: TextTable
    exit_code: int

    def sheet(self, layer: ExemplarLayer) -> Image.Image:
        """The picture of a layer: a row for each channel, the best image first."""
        return self.picture_at(layer.sheet)

    def picture(self, channel: ExemplarChannel) -> Image.Image | None:
        """The picture of a channel; None where no image excites it."""
        return None if channel.file is None else self.picture_at(channel.file)

    def __repr__(self) -> str:
        seen = counted(self.document["images"]["seen"], "image")
        return f"<ExemplarSheets of {counted(len(self.layers), 'layer')}: {seen} seen>"

    def _pictures(self) -> showing.Pictures:
        for row in self.layers:
            yield partial(self.sheet, row), row.label

    def _lines(self) -> list[str]:
        return [repr(self).strip("<>")]

    def _table(self) -> TextTable:
        return self.table


@keywords_of(AuditOptions, ModelOptions)
def audit(
    model: Model,
    images: Pictures,
    layers: Layers | None = None,
    out: str | Path | None = None,
    **options: Any,
) -> AuditTable:
    """Stream images through a model, and find channels that do nothing for them.

    Args:
        model: a MODEL string or a module, which is given back as it was.
        images: paths and images in memory, as for `featviz.run`.
        layers: selectors, a class of modules, or a list of these. None takes all activations.
        out: the folder of audit.json and the pictures. None leaves nothing behind.
        options: those below; with `fail_on`, `exit_code` is 4 where a gate is broken.

    Returns:
        A record with `document`, the content of audit.json, and `verdicts`.

    Raises:
        FeatvizError: nothing could be begun or written, or not one image went through. Why some
            failed is in `document["images"]["failures"]`.

    Example:
        >>> import featviz, torch
        >>> conv = torch.nn.Conv2d(3, 4, 3)
        >>> with torch.no_grad():
        ...     _ = conv.bias.copy_(torch.tensor([9.0, 9.0, 9.0, -9.0]))
        >>> model = torch.nn.Sequential(conv, torch.nn.ReLU())
        >>> found = featviz.audit(model, torch.rand(2, 3, 16, 16), size=16)
        >>> found.document["layers"][0]["findings"]["dead"]
        [3]
    """
    order = ordered(AuditOptions, model, options, layers, place="audit", out=out)
    document, verdicts, code = order.given_to(audit_model, images)
    return AuditTable(document, order.options.out, order.room, verdicts, code)


@keywords_of(ExemplarOptions, ModelOptions)
def exemplars(
    model: Model,
    images: Pictures,
    layers: Layers | None = None,
    out: str | Path | None = None,
    **options: Any,
) -> ExemplarSheets:
    """Find the images, and the places in them, that excite each channel most.

    Args:
        model: a MODEL string, or a module, which is given back as it was.
        images: paths and images in memory, as for `featviz.run`.
        layers: as for `featviz.run`.
        out: the folder of the pictures and exemplars.json. None leaves nothing behind.

    Returns:
        A record with `document`, the content of exemplars.json, `layers`, `sheet(layer)` and
        `picture(channel)`.

    Raises:
        FeatvizError: nothing could be begun or written, or not one image went through.

    Example:
        >>> import featviz, torch
        >>> model = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.ReLU())
        >>> dark, light = torch.zeros(3, 8, 8), torch.ones(3, 8, 8)
        >>> found = featviz.exemplars(model, [dark, light], "Conv2d", top=1, size=8)
        >>> found
        <ExemplarSheets of 1 layer: 2 images seen>
        >>> [len(row.exemplars) for row in found.layers[0].channels]
        [1, 1, 1, 1]
    """
    order = ordered(ExemplarOptions, model, options, layers, place="exemplars", out=out)
    found = order.given_to(find_exemplars, images)
    files, code = (found.as_json(), order.options.out, order.room), 3 * bool(found.images.failures)
    return ExemplarSheets(*files, tuple(found.layers), exemplar_table(found), code)
