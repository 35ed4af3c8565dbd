"""The functions that look into a model: `featviz.layers` and `kernels` without an image;
`look`, `cam` and `field` on some images; `audit` and `exemplars` on many."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from PIL import Image
from torch import Tensor

from featviz.api.keywords import (
    NOT_OF_KERNELS,
    Layers,
    Model,
    Picture,
    Pictures,
    in_one_process,
    keywords_of,
    read_request,
)
from featviz.audit.audit import audit as audit_model
from featviz.audit.output import audit_table
from featviz.errors import FileError, StoreError
from featviz.exemplars.exemplars import exemplar_table, find_exemplars
from featviz.files import ReadFolder
from featviz.inspection.cam import ImageCam, LayerCam
from featviz.inspection.cam import cam as explain
from featviz.inspection.field import FieldResult, measure_fields
from featviz.inspection.kernels import NO_IMAGE, draw_kernels
from featviz.inspection.layers import Listing, list_model
from featviz.inspection.look import LookResult
from featviz.inspection.look import look as look_at
from featviz.options import ModelOptions
from featviz.options.commands import (
    AuditOptions,
    CamOptions,
    ExemplarOptions,
    FieldOptions,
    KernelOptions,
    ListOptions,
    LookOptions,
)
from featviz.records import REDUCTIONS, Verdict
from featviz.run.results import TemporaryFolder
from featviz.rundir.image import BROKEN, format_of
from featviz.text import TextTable, by, counted, quoted


@dataclass(frozen=True, repr=False, eq=False)
class KernelPicture:
    """The kernels of a layer."""

    of: StudyResult
    """The result that has the picture."""
    row: Mapping[str, Any]
    """The layer's row of the manifest: layer, type, shape, range, min, max, mean, std, ...
    """
    layer: str

    @property
    def image(self) -> Image.Image:
        """The picture, a tile for each output channel: mode L, P or RGB."""
        return self.of.picture(str(self.row["file"]))

    def __repr__(self) -> str:
        return (
            f"<KernelPicture {self.layer} ({self.row['type']}),"
            f" {by(self.row['shape'])}>"
        )


@dataclass(frozen=True, repr=False, eq=False)
class StudyResult:
    """The result of `kernels`, `audit` or `exemplars`: a document, and pictures in a
    folder."""

    title: str
    """The result in one line."""
    document: Mapping[str, Any]
    """What `--json` prints."""
    folder: Path
    temporary: TemporaryFolder | None
    """The folder, if the caller named none; it is removed with the result."""
    files: Mapping[str, str]
    """By name of the file: the captions of the pictures that a notebook shows."""
    table: TextTable | None = None
    """The table that the command prints; None for kernels."""
    table_first: bool = False
    """Whether a notebook shows the table above the pictures."""
    lines: tuple[str, ...] = ()
    """Lines below the table: the gates that failed."""
    verdicts: tuple[Verdict, ...] = ()
    """The verdicts on the gates and the baseline of an audit."""
    exit_code: int = 0
    """The exit code that the command would have."""

    @property
    def out(self) -> Path | None:
        """The folder; None if it is temporary."""
        return self.folder if self.temporary is None else None

    @property
    def captures(self) -> tuple[KernelPicture, ...]:
        """For `kernels`, a picture for each layer, in the order of the model; else empty."""
        rows = self.document.get("captures", ())
        return tuple(KernelPicture(self, row, row["layer"]) for row in rows)

    def picture(self, file: str) -> Image.Image:
        """A picture in the folder, by its name in `files` or in the document.

        Raises:
            StoreError: the picture is missing, damaged, or outside of the folder.
        """
        return picture_in(self.folder, file)

    def __repr__(self) -> str:
        return f"<{self.title}>"

    def __str__(self) -> str:
        return "\n".join([str(self.table or self.title), *self.lines])


def picture_in(folder: Path, file: str) -> Image.Image:
    """A picture in a folder of results, by its name.

    Raises:
        StoreError: the picture is missing, damaged, or outside of the folder.
    """
    try:
        with (
            ReadFolder(folder) as opened,
            opened.open(file) as content,
            Image.open(content, formats=[format_of(file).pillow]) as picture,
        ):
            picture.load()
            return picture
    except (FileError, *BROKEN) as error:
        message = f"{quoted(file)} cannot be read: {quoted(str(error))}"
        raise StoreError(message) from error


@keywords_of(ListOptions, ModelOptions)
def layers(model: Model, layers: Layers | None = None, **options: Any) -> Listing:
    """List the modules of a model: types, parameters, and from one forward pass on
    zeros shapes, multiply-accumulates (MACs), calls and activation memory.

    Args:
        model, layers: as for `featviz.run`; the rows that `layers` takes are
            `selected`.

    Returns:
        A record with `document` (what `--json` prints); `rows`, each with index, name,
        type, parameters, output_shape, macs, activation_bytes, calls and selected; and
        `totals`.

    Example:
        >>> import featviz, torch
        >>> model = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.ReLU())
        >>> [(row.name, row.output_shape) for row in featviz.layers(model, size=8).rows]
        [('', [1, 4, 6, 6]), ('0', [1, 4, 6, 6]), ('1', [1, 4, 6, 6])]
    """
    request = read_request(ListOptions, model, options, layers)
    with request.borrowed() as source:
        return list_model(source, request.options)


@keywords_of(KernelOptions, ModelOptions, but=NOT_OF_KERNELS)
def kernels(
    model: Model,
    layers: Layers | None = None,
    out: str | Path | None = None,
    **options: Any,
) -> StudyResult:
    """Draw the kernels of a model's convolutions, a picture for each layer and a tile
    for each output channel; zero is mid-grey.

    Args:
        model, layers: as for `featviz.run`; without layers all convolutions.
        out: the folder of the pictures; None for a temporary one.

    Returns:
        A record with `captures`, each with `image`, `layer` and `row`.

    Example:
        >>> import featviz, torch
        >>> model = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.ReLU())
        >>> featviz.kernels(model, scale=1).captures
        (<KernelPicture 0 (Conv2d), 4×3×3×3>,)
    """
    request = read_request(
        KernelOptions,
        model,
        options,
        layers,
        but=NOT_OF_KERNELS,
        name="kernels",
        out=out,
    )
    with request.borrowed(NO_IMAGE) as source:
        document, _ = draw_kernels(source, request.options)
    rows = document["captures"]
    return StudyResult(
        title=f"kernels of {counted(len(rows), 'layer')}",
        document=document,
        folder=request.options.out,
        temporary=request.temporary,
        files={
            row["file"]: f"{row['layer']} ({row['type']}), {by(row['shape'])}"
            for row in rows
        },
    )


@keywords_of(LookOptions, ModelOptions)
def look(
    model: Model,
    image: Picture,
    layers: Layers | None = None,
    out: str | Path | None = None,
    **options: Any,
) -> LookResult:
    """Draw one quick picture of what a model makes of an image, like the command
    `featviz look`: the input, the prediction, and the most telling maps of each layer.

    Args:
        model, image, layers: as for `featviz.run`; the first of several images is
            shown, with at most 10 layers.
        out: a PNG file for the picture, which may replace an earlier picture of look; None
            writes no file.

    Returns:
        A record with `image` (the picture), `input`, `prediction` and `layers`.

    Example:
        >>> import featviz, torch
        >>> model = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.ReLU())
        >>> featviz.look(model, torch.rand(3, 16, 16), "Conv2d", size=16, maps=2)
        <LookResult of image-0.png: 1 layer>
    """
    request = read_request(
        LookOptions, model, options, layers, name="look.png", out=out
    )
    result = request.call(look_at, image)
    return result if out is None else replace(result, out=result.path)


@dataclass(frozen=True, repr=False, eq=False)
class ClassMaps:
    """The class activation maps of images. `image` and `tensor` are those of the first map,
    or for a detector with several levels, those of the maximum over the levels."""

    images: tuple[ImageCam, ...]

    @property
    def maps(self) -> tuple[LayerCam, ...]:
        """Every map: image by image, in the order in which the layers ran."""
        return tuple(cam for image in self.images for cam in image.maps)

    @property
    def failures(self) -> dict[str, str]:
        """By name of the image: why it failed."""
        failed = [image for image in self.images if image.error is not None]
        return {image.image: str(image.error) for image in failed}

    @property
    def image(self) -> Image.Image:
        """The picture of the first map."""
        return self._first.image

    @property
    def tensor(self) -> Tensor:
        """The values of the first map, float32 [H, W]."""
        return self._first.tensor

    @property
    def _first(self) -> LayerCam:
        image = next(image for image in self.images if image.maps)
        return image.maximum or image.maps[0]

    def __repr__(self) -> str:
        failed = f", {len(self.failures)} failed" if self.failures else ""
        method = REDUCTIONS[self.images[0].method].title
        images = counted(len(self.images), "image")
        return (
            f"<ClassMaps, {method} of {images}{failed}:"
            f" {counted(len(self.maps), 'map')}>"
        )


@keywords_of(CamOptions, ModelOptions)
def cam(
    model: Model,
    images: Pictures,
    target: str | None = None,
    method: str = "gradcam",
    layers: Layers | None = None,
    **options: Any,
) -> ClassMaps:
    """Show where in images the evidence for a class, a box or a region lies, like the
    command `featviz cam`.

    Args:
        model, images: as for `featviz.run`.
        target: `"class:281"`, `"class:tabby"`, `"box:1"`, `"pixel:120,80"`, ... None is
            the predicted class, the most confident box or the largest region of each
            image.
        method: `"gradcam"`, `"gradcam++"`, `"layercam"` and `"hirescam"` show what
            speaks for the target, `"xgradcam"` and `"gradxact"` also what speaks
            against it.
        layers: as for `featviz.run`. None takes, for a detector, the layers whose maps
            enter its head; for a segmentation, the last map before the logits; else the
            last layer with places of the image on which the target depends.
        options: those below; without `out` nothing is written.

    Returns:
        A record with `maps`, each with `layer`, `image`, `tensor` and `limits`, the
        values drawn darkest and brightest; `images`, each with its `maps`,
        `prediction`, `target` and `path`; `image` and `tensor` of the first map; and in
        `failures` why some images failed.

    Example:
        >>> import featviz, torch
        >>> head = torch.nn.Flatten(), torch.nn.Linear(784, 2)
        >>> net = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.ReLU(), *head)
        >>> maps = featviz.cam(net, torch.rand(3, 16, 16), "class:1", "gradxact", size=16)
        >>> maps
        <ClassMaps, gradient × activation of 1 image: 1 map>
        >>> maps.maps[0].layer, maps.image.size, maps.tensor.shape
        ('1', (16, 16), torch.Size([14, 14]))
    """
    request = read_request(
        CamOptions,
        model,
        in_one_process(model, options),
        layers,
        target=target,
        method=method,
    )
    results = request.call(lambda *arguments: tuple(explain(*arguments)), images)
    if not any(result.maps for result in results) and results[0].error is not None:
        raise results[0].error
    return ClassMaps(results)


@keywords_of(FieldOptions, ModelOptions)
def field(
    model: Model,
    images: Pictures,
    layers: Layers | None = None,
    out: str | Path | None = None,
    **options: Any,
) -> FieldResult:
    """Measure how far layers look, like the command `featviz field`: the effective
    receptive field of each layer's middle unit.

    Args:
        model, images, layers: as for `featviz.run`; without layers one for each stage.
        out: a PNG file for the picture of all fields. None writes none.

    Returns:
        A record with `image`, the picture of all fields, and `layers`, each with
        `tensor` (the mean absolute gradient at each pixel), `image`, `sides` (of the
        squares that hold 20, 30, 50 and 99 %), and `theoretical`, the box of pixels
        that the unit can see.

    Example:
        >>> import featviz, torch
        >>> model = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.Conv2d(4, 4, 5))
        >>> found = featviz.field(model, torch.rand(3, 16, 16), "Conv2d", size=16)
        >>> [layer.sides[0.99] for layer in found.layers]
        [3, 7]
        >>> found.layers[1].theoretical
        PixelBox(left=5, top=5, right=12, bottom=12)
    """
    request = read_request(FieldOptions, model, options, layers, out=out)
    return request.call(measure_fields, images)


@keywords_of(AuditOptions, ModelOptions)
def audit(
    model: Model,
    images: Pictures,
    layers: Layers | None = None,
    out: str | Path | None = None,
    **options: Any,
) -> StudyResult:
    """Stream images through a model, and find channels that do nothing for them.

    Args:
        model, images: as for `featviz.run`.
        layers: selectors, a class of modules, or a list of these. None takes all
            activations.
        out: the folder of audit.json and the pictures; None for a temporary one.
        options: those below; with `fail_on`, `exit_code` is 4 if a gate fails.

    Returns:
        A record with `document`, the content of audit.json, `verdicts`, and
        `picture(file)` for the pictures of suspects, which `files` names.

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
    request = read_request(AuditOptions, model, options, layers, name="audit", out=out)
    document, verdicts, code = request.call(audit_model, images)
    folder = request.options.out
    suspects = sorted(folder.rglob("suspects/*.png"))
    # a failed gate is a result, not an exception, so that a notebook goes on
    failed = [verdict for verdict in verdicts if not verdict.held]
    findings = document["total"]["findings"]
    title = f"audit of {counted(document['images']['seen'], 'image')}: "
    title += ", ".join(f"{count} {name}" for name, count in findings.items())
    if verdicts:
        title += f"; gates: {len(failed)} of {len(verdicts)} failed"
    return StudyResult(
        title=title,
        document=document,
        folder=folder,
        temporary=request.temporary,
        files={path.relative_to(folder).as_posix(): path.stem for path in suspects},
        table=audit_table(document),
        table_first=True,
        lines=tuple(
            f"gate {verdict.gate} failed: {verdict.message}" for verdict in failed
        ),
        verdicts=verdicts,
        exit_code=code,
    )


@keywords_of(ExemplarOptions, ModelOptions)
def exemplars(
    model: Model,
    images: Pictures,
    layers: Layers | None = None,
    out: str | Path | None = None,
    **options: Any,
) -> StudyResult:
    """Find the images, and the places in them, that excite each channel most.

    Args:
        model, images, layers: as for `featviz.run`.
        out: the folder of the pictures and exemplars.json; None for a temporary one.

    Returns:
        A record with `document`, the content of exemplars.json, and `picture(file)`,
        which opens the `sheet` of one of its layers, or the `file` of a channel.

    Example:
        >>> import featviz, torch
        >>> model = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.ReLU())
        >>> dark, light = torch.zeros(3, 8, 8), torch.ones(3, 8, 8)
        >>> found = featviz.exemplars(model, [dark, light], "Conv2d", top=1, size=8)
        >>> found
        <exemplars of 1 layer: 2 images seen>
        >>> [len(row["exemplars"]) for row in found.document["layers"][0]["channels"]]
        [1, 1, 1, 1]
    """
    request = read_request(
        ExemplarOptions, model, options, layers, name="exemplars", out=out
    )
    record = request.call(find_exemplars, images)
    sheets = {row.sheet: row.label for row in record.layers}
    seen = counted(record.images.seen, "image")
    return StudyResult(
        title=f"exemplars of {counted(len(sheets), 'layer')}: {seen} seen",
        document=record.as_json(),
        folder=request.options.out,
        temporary=request.temporary,
        files=sheets,
        table=exemplar_table(record),
        exit_code=3 if record.images.failures else 0,
    )
