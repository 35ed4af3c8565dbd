"""What is shown beside a run: audits, kernels and exemplars of the same model."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from featviz.errors import CompareError, StoreError
from featviz.records import Comparison
from featviz.report import audited, excited, views, words
from featviz.report import kernels as kernels_of
from featviz.rundir import AUDIT_FILE
from featviz.rundir.audits import ReadAudit, read_audit
from featviz.rundir.exemplars import ExemplarRecord, read_pictures, read_record
from featviz.rundir.image import ReadImage
from featviz.rundir.kernels import ReadKernels, read_kernels
from featviz.rundir.read import ReadRun
from featviz.text import listed, quoted

log = logging.getLogger(__name__)

_DIGESTS = ("parameters", "sha256")
"""Entries of a model's record that tell models apart whatever they are called, the surest first:
the same parameters may come from two files."""
_NAMES = ("name", "weights", "seed")
"""Entries that do so where a model has no digest, as torchvision's own."""
_SHOWN = 12
"""Digits of a digest that a message shows."""
_LISTED = 5
"""Layers that a message names."""


Judge = Callable[[ReadRun, ReadRun], Comparison]
"""Compares two runs, that of `--compare` first.

Raises:
    CompareError: they cannot be compared.
"""


@dataclass(frozen=True)
class Beside:
    """What is shown beside a run."""

    audit: ReadAudit | None
    kernels: ReadKernels | None
    exemplars: ExemplarRecord | None
    pictures: ReadImage | None
    """Those of the exemplars."""
    verdict: Comparison | None = None
    """On the other run."""
    not_compared: str = ""
    """Why there is no verdict on the other run."""

    def judged(self, run: ReadRun, other: ReadRun, judge: Judge) -> Beside:
        """With a verdict on another run, or the reason why there is none."""
        try:
            return replace(self, verdict=judge(other, run))
        except CompareError as error:
            return replace(self, not_compared=error.message)

    def arrange(self, run: ReadRun, other: ReadRun | None) -> views.ReportViews:
        """The pages of a run, of one to compare it with, and of what is shown given."""
        arranged = replace(
            views.arrange(run, other),
            verdict=self.verdict,
            not_compared=self.not_compared,
        )
        if self.kernels is not None:
            own = kernels_of.views_of(self.kernels, arranged.layers)
            arranged = replace(arranged, kernels=own)
        if self.audit is not None:
            pages = {page.name for page in arranged.layers}
            arranged = replace(arranged, audit=audited.arrange(self.audit, pages))
        if self.exemplars is None or self.pictures is None:
            return arranged
        found = excited.exemplar_views(arranged.layers, self.exemplars, self.pictures)
        return replace(arranged, exemplars=found)


@dataclass(frozen=True)
class Given:
    """What an option names."""

    option: str
    """`exemplars`; the command that makes it has the same name."""
    place: Path
    model: Mapping[str, Any]
    """As in its record."""


def read(run: ReadRun, audit: Path | None, kernels: Path | None, exemplars: Path | None) -> Beside:
    """Read what is to be shown beside a run.

    Args:
        audit: an audit.json, or its folder; None takes the one in the run, if there is one.
        kernels: the folder of some, or None; so `exemplars`.

    Raises:
        StoreError: one of them is not what it should be, or shows nothing of the run.
        CompareError: it is of another model.
    """
    by_audit = read_audit(run.root, audit)
    drawn = None if kernels is None else read_kernels(kernels)
    record = None if exemplars is None else read_record(exemplars)
    if by_audit is not None:
        check(run, Given("audit", audit or run.root / AUDIT_FILE, by_audit.record.model))
    if drawn is not None and kernels is not None:
        check(run, Given("kernels", kernels, drawn.model))
        _check_layers(run, drawn)
    if record is None or exemplars is None:
        return Beside(by_audit, drawn, None, None)
    check(run, Given("exemplars", exemplars, record.model))
    return Beside(by_audit, drawn, record, read_pictures(exemplars, record))


def check(run: ReadRun, given: Given) -> None:
    """Refuse what is of another model; warn where that is not known.

    Raises:
        CompareError: the models differ; names what differs, and in what.
    """
    model = run.record.get("model") or {}
    where = f"--{given.option} {quoted(str(given.place))}"
    names = _told_by(model, given.model)
    differing = [name for name in names if model.get(name) != given.model.get(name)]
    if differing:
        of = words.name_of(model)
        raise CompareError(
            f"{where} is of another model than the run {quoted(str(run.place))}: "
            f"{_said(given.model, differing)} there, {_said(model, differing)} in the run",
            f"make it with featviz {given.option} {quoted(of)}, or report a run of "
            f"{quoted(words.name_of(given.model))}",
        )
    if not names:
        log.warning("%s: whether it is of the run's model is not known", where)


def _told_by(one: Mapping[str, Any], other: Mapping[str, Any]) -> list[str]:
    """The entries by which two models are told apart; none where they have none in common."""
    for name in _DIGESTS:
        if one.get(name) and other.get(name):
            return [name]
    if any(record.get(name) for record in (one, other) for name in _DIGESTS):
        return []
    return [name for name in _NAMES if name in one and name in other]


def _said(model: Mapping[str, Any], names: Collection[str]) -> str:
    """`digits_cnn.pth (sha256 fda36d5078de)`."""
    own = (f"{name} {quoted(str(model.get(name)))[:_SHOWN]}" for name in names if name != "name")
    inside = ", ".join(own)
    return quoted(words.name_of(model)) + (f" ({inside})" if inside else "")


def _check_layers(run: ReadRun, kernels: ReadKernels) -> None:
    """Raise where no page of the run would show any of the kernels."""
    drawn = {row.layer for image in run.images.values() for row in image.captures.values()}
    layers = [row.layer for row in kernels.pictures.captures.values()]
    if drawn and drawn.isdisjoint(layers):
        raise StoreError(
            f"{quoted(str(kernels.pictures.root))} has kernels of no layer of this run",
            "run again with these --layers: "
            + listed([quoted(name or ".") for name in layers], _LISTED),
        )
