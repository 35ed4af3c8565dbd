"""`featviz.audit` and `featviz.exemplars`: many images through a model."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from msgspec import structs
from PIL import Image

from featviz.api import showing
from featviz.api.keywords import Layers, Model, Picture, keywords_of
from featviz.api.lending import Room, as_files, loading, selectors
from featviz.api.showing import Page
from featviz.audit.audit import AuditResult
from featviz.audit.audit import audit as audit_model
from featviz.audit.output import audit_table
from featviz.exemplars.exemplars import ExemplarResult, find_exemplars
from featviz.options import (
    AuditOptions,
    ExemplarChoice,
    ExemplarOptions,
    InputOptions,
    ModelOptions,
    Thresholds,
    read_from,
)
from featviz.rundir.studies import ExemplarChannel, ExemplarLayer
from featviz.text import counted

Pictures = Picture | list[Picture] | tuple[Picture, ...]
"""Paths and images in memory, one or several."""


@dataclass(frozen=True, repr=False)
class AuditTable(AuditResult):
    """What the channels of a model do for images; shows itself as a table."""

    room: Room | None = None

    @cached_property
    def suspects(self) -> dict[str, Image.Image]:
        """Pictures of channels that have a finding, by their file in `out`.

        Raises:
            StoreError: one cannot be read.
        """
        files = sorted(self.out.rglob("suspects/*.png"))
        ways = [file.relative_to(self.out).as_posix() for file in files]
        return {way: showing.read_picture(self.out, way) for way in ways}

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
        return [
            f"gate {verdict.gate} is broken: {verdict.words}"
            for verdict in self.verdicts
            if not verdict.held
        ]

    def _repr_html_(self) -> str:
        read = self.suspects.__getitem__
        ways = list(self.suspects)[: showing.MOST]
        figures = [showing.figure(partial(read, way), Path(way).stem) for way in ways]
        seen = counted(self.document["images"]["seen"], "image")
        lines = [*self._broken, f"{seen} seen; the verdicts hold for these images"]
        return showing.render(Page(figures, lines, audit_table(self.document)))


@dataclass(frozen=True, repr=False)
class ExemplarSheets(ExemplarResult):
    """The images that excite channels most; shows itself as a gallery."""

    room: Room | None = None

    @property
    def layers(self) -> tuple[ExemplarLayer, ...]:
        """The tensors that were looked at; each has `channels`, and they `exemplars`."""
        return tuple(self.record.layers)

    def sheet(self, layer: ExemplarLayer) -> Image.Image:
        """The picture of a layer: a row for each channel, the best image first.

        Raises:
            StoreError: it cannot be read.
        """
        return showing.read_picture(self.out, layer.sheet)

    def picture(self, channel: ExemplarChannel) -> Image.Image | None:
        """The picture of a channel; None where no image excites it.

        Raises:
            StoreError: it cannot be read.
        """
        return None if channel.file is None else showing.read_picture(self.out, channel.file)

    def __repr__(self) -> str:
        layers, seen = counted(len(self.layers), "layer"), self.record.images.seen
        return f"<ExemplarSheets of {layers}: {counted(seen, 'image')} seen>"

    def _repr_html_(self) -> str:
        rows = self.layers[: showing.MOST]
        side = 2 * showing.SMALL if len(rows) > 1 else showing.LARGE
        figures = [
            showing.figure(partial(self.sheet, row), row.layer or row.type, side) for row in rows
        ]
        return showing.render(
            Page(figures, [f"{counted(self.record.images.seen, 'image')} seen"], self.table)
        )


@keywords_of(AuditOptions, Thresholds, InputOptions, ModelOptions)
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
        FeatvizError: nothing could be begun, not one image went through, or the results could not
            be written. What goes wrong with one image is in `document["images"]["failures"]`.

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
    room, kinds = Room() if out is None else None, (AuditOptions, Thresholds)
    given = {**options, "layers": selectors(layers), "out": room.path / "audit" if room else out}
    asked, thresholds = read_from(AuditOptions, given), read_from(Thresholds, given)
    with as_files(images) as files, loading(model, given, *kinds) as (source, inputs):
        asked = structs.replace(asked, inputs=inputs, thresholds=thresholds)
        result = audit_model(source, files, asked)
    return AuditTable(result.out, result.document, result.verdicts, room)


@keywords_of(ExemplarOptions, ExemplarChoice, InputOptions, ModelOptions)
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
        layers: selectors, a class of modules, or a list of these. None takes one layer for each
            stage.
        out: the folder of the pictures and exemplars.json. None leaves nothing behind.
        options: those below.

    Returns:
        A record with `layers`, `sheet(layer)`, `picture(channel)` and `record`, which is the
        content of exemplars.json.

    Raises:
        FeatvizError: nothing could be begun, not one image went through, or the results could not
            be written.

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
    room, kinds = Room() if out is None else None, (ExemplarOptions, ExemplarChoice)
    place = room.path / "exemplars" if room else out
    given = {**options, "layers": selectors(layers), "out": place}
    choice = read_from(ExemplarChoice, given)
    asked = read_from(ExemplarOptions, given)
    with as_files(images) as files, loading(model, given, *kinds) as (source, inputs):
        result = find_exemplars(source, files, structs.replace(asked, choice=choice, inputs=inputs))
    return ExemplarSheets(result.out, result.record, room)
