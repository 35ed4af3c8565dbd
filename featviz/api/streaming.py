"""`featviz.audit` and `featviz.exemplars`: many images through a model."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Literal, Unpack

from PIL import Image

from featviz.api import showing
from featviz.api.keywords import Layers, LoadingKeywords, Model, Picture
from featviz.api.lending import Room, as_files, loading, selectors, several
from featviz.api.showing import Page
from featviz.api.words import keyword_errors
from featviz.audit import AuditOptions, AuditResult
from featviz.audit import audit as audit_models
from featviz.audit.model_audit import AuditRequest
from featviz.audit.output import audit_table
from featviz.errors import FeatvizError, UsageError
from featviz.exemplars import ExemplarResult, find_exemplars
from featviz.exemplars.options import ExemplarOptions
from featviz.models.load import LoadedModel, ModelOptions
from featviz.models.preprocess import InputOptions
from featviz.pipeline.processes import parse_shard
from featviz.records.checking import filled
from featviz.records.exemplars import ExemplarChoice
from featviz.records.findings import Thresholds
from featviz.rundir.exemplars import ExemplarChannel, ExemplarLayer
from featviz.text import counted

Pictures = Picture | list[Picture] | tuple[Picture, ...]
"""Paths and images in memory, one or several."""


@dataclass(frozen=True, repr=False)
class AuditTable(AuditResult):
    """What the channels of models do for images; shows itself as a table."""

    room: Room | None = None
    """What keeps a temporary folder."""

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
        found = [model.document["total"]["findings"] for model in self.models]
        counts = [f"{sum(one[name] for one in found)} {name}" for name in found[0]]
        verdicts = [verdict for model in self.models for verdict in model.verdicts]
        broken = sum(not verdict.held for verdict in verdicts)
        gates = f"; gates: {broken} of {len(verdicts)} broken" if verdicts else ""
        return f"<AuditTable of {counted(len(self.models), 'model')}: {', '.join(counts)}{gates}>"

    def __str__(self) -> str:
        return "\n".join([str(audit_table(self)), *self._broken])

    @property
    def _broken(self) -> list[str]:
        """A line for each gate that is broken."""
        return [
            f"{model.label}: gate {verdict.gate} is broken: {verdict.words}"
            for model in self.models
            for verdict in model.verdicts
            if not verdict.held
        ]

    def _repr_html_(self) -> str:
        read = self.suspects.__getitem__
        ways = list(self.suspects)[: showing.MOST]
        figures = [showing.figure(partial(read, way), Path(way).stem) for way in ways]
        seen = counted(self.models[0].document["images"]["seen"], "image")
        lines = [*self._broken, f"{seen} seen; the verdicts hold for these images"]
        return showing.render(Page(figures, lines, audit_table(self)))


@dataclass(frozen=True, repr=False)
class ExemplarSheets(ExemplarResult):
    """The images that excite channels most; shows itself as a gallery."""

    room: Room | None = None
    """What keeps a temporary folder."""

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


@keyword_errors()
def audit(
    model: Model | Sequence[str | Path],
    images: Pictures,
    layers: Layers | None = None,
    out: str | Path | None = None,
    *,
    overwrite: bool = False,
    eps: float = 0.0,
    saturated_at: float = 0.99,
    redundant_at: float | None = None,
    batch_size: int = 1,
    fail_on: str | Sequence[str] = (),
    baseline: str | Path | None = None,
    junit: str | Path | None = None,
    prune_out: str | Path | None = None,
    verify: bool = False,
    max_suspects: int = 48,
    **options: Unpack[LoadingKeywords],
) -> AuditTable:
    """Stream images through a model, and find channels that do nothing for them.

    Args:
        model: a MODEL string or a module, which is given back as it was; or a list of MODEL
            strings, which are audited one after the other.
        images: paths and images in memory, as for `featviz.run`.
        layers: selectors, a class of modules, or a list of these. None takes all activations.
        out: the folder of audit.json and the pictures. None leaves nothing behind.
        overwrite: replace the audit that is there.
        eps: values of at most this are zero, and values no further apart are equal.
        saturated_at: share of values at a bound, 0..1, above which a channel is saturated.
        redundant_at: correlation, 0..1, above which channels are redundant; None looks for none.
        batch_size: the largest number of images of one shape that go through together.
        fail_on: gates, such as `"dead>5%"`; `exit_code` is 4 where one is broken.
        baseline: an earlier audit.json than which nothing may be worse.
        junit: file for the verdicts as JUnit XML.
        prune_out: JSON file for the channels that can be cut out.
        verify: run the images again without these channels.
        max_suspects: the largest number of channels that are drawn.
        options: how a MODEL string is loaded, and what the model gets, as for `featviz.run`.

    Returns:
        A record with `models`; each has `document`, the content of audit.json, and `verdicts`.

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
        >>> found.models[0].document["layers"][0]["findings"]["dead"]
        [3]
    """
    request = filled(
        AuditRequest, {"batch_size": batch_size, "verify": verify, "max_suspects": max_suspects}
    )
    limits = {"eps": eps, "saturated_at": saturated_at, "redundant_at": redundant_at}
    room = Room() if out is None else None
    plain: dict[str, Any] = {"out": room.path / "audit" if room else out, "overwrite": overwrite}
    plain |= {"fail_on": fail_on, "baseline": baseline, "junit": junit, "prune_out": prune_out}
    known = ("layers", *limits, *plain, "batch_size", "verify", "max_suspects")
    asked = filled(AuditOptions, plain)
    thresholds, text = filled(Thresholds, limits), selectors(layers)
    with as_files(images) as files, _sources(model, dict(options), known) as (sources, inputs):
        request = replace(request, layers=text, inputs=inputs, thresholds=thresholds)
        result = audit_models(sources, files, replace(asked, asked=request))
    return AuditTable(result.out, result.models, room)


@contextmanager
def _sources(
    model: Any, options: dict[str, Any], known: Sequence[str]
) -> Iterator[tuple[Sequence[ModelOptions] | LoadedModel, InputOptions]]:
    models = several(model)
    if not models:
        raise UsageError("there is no model", "give a module, or MODEL strings")
    with loading(models[0], options, known) as (source, inputs):
        if isinstance(source, ModelOptions):
            yield [source, *(replace(source, spec=_text(one)) for one in models[1:])], inputs
        elif len(models) == 1:
            yield source, inputs
        else:
            raise UsageError("several models are MODEL strings", "audit modules one by one")


def _text(model: Any) -> str:
    if not isinstance(model, (str, Path)):
        raise UsageError("several models are MODEL strings", "audit modules one by one")
    return str(model)


@keyword_errors()
def exemplars(
    model: Model,
    images: Pictures,
    layers: Layers | None = None,
    out: str | Path | None = None,
    *,
    overwrite: bool = False,
    top: int = 9,
    by: Literal["max", "mean"] = "max",
    per_class: bool = False,
    batch_size: int = 1,
    shard: str | None = None,
    **options: Unpack[LoadingKeywords],
) -> ExemplarSheets:
    """Find the images, and the places in them, that excite each channel most.

    Args:
        model: a MODEL string, or a module, which is given back as it was.
        images: paths and images in memory, as for `featviz.run`.
        layers: selectors, a class of modules, or a list of these. None takes one layer for each
            stage.
        out: the folder of the pictures and exemplars.json. None leaves nothing behind.
        overwrite: replace the exemplars that are there.
        top: images of each channel.
        by: rank images by the largest value of the channel's map, and show what the unit there
            sees; or by the mean of the map, and show whole images.
        per_class: choose the images of each class apart: the names of their folders.
        batch_size: the largest number of images of one shape that go through together.
        shard: take this part of the images, `"1/4"`.
        options: how a MODEL string is loaded, and what the model gets, as for `featviz.run`.

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
    room = Room() if out is None else None
    plain: dict[str, Any] = {
        "out": room.path / "exemplars" if room else out,
        "overwrite": overwrite,
    }
    plain |= {"layers": selectors(layers), "batch_size": batch_size}
    choice = {"top": top, "by": by, "per_class": per_class}
    asked = filled(ExemplarOptions, plain)
    asked = replace(asked, choice=filled(ExemplarChoice, choice))
    asked = replace(asked, shard=None if shard is None else parse_shard(str(shard)))
    known = (*plain, *choice, "shard")
    with as_files(images) as files, loading(model, dict(options), known) as (source, inputs):
        result = find_exemplars(source, files, replace(asked, inputs=inputs))
    if result is None:
        raise FeatvizError("this process is not the first of its team")
    return ExemplarSheets(result.out, result.record, room)
