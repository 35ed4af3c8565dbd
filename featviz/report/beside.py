"""What is shown beside a run: audits, kernels and exemplars of the same model. Audits and kernels
have pages of their own, too, as a series of runs has."""

from __future__ import annotations

import logging
from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from featviz.audit.gates import FINDINGS
from featviz.errors import CompareError, StoreError
from featviz.options.commands import ReportOptions
from featviz.report import words
from featviz.report.views import PictureView, ReportPage
from featviz.rundir import AUDIT_FILE
from featviz.rundir.image import ReadImage
from featviz.rundir.read import ReadRun, read_run
from featviz.rundir.schema import Capture
from featviz.rundir.studies import (
    Audit,
    ExemplarRecord,
    exemplar_pictures,
    read_audit,
    read_exemplars,
    read_kernels,
    read_steps,
)
from featviz.text import by, counted, listed, quoted

log = logging.getLogger(__name__)

Box = tuple[int, int, int, int]  # left, top, width and height in pixels of a picture


Extra = Mapping[str, Any]
"""A picture beside the maps of a layer, of kernels, suspects or exemplars: its `title`, `words`,
`picture`, the `key` of its colours, and `channels`, where each is in it (`Box`), or its own one."""


@dataclass(frozen=True)
class AuditViews:
    """An audit as pages show it."""

    record: Audit
    layers: Sequence[Mapping[str, Any]]
    """Each `row`, its `id`, its `suspects` (`Extra`), what was `found` of its channels, and its
    `home`, the layer on whose page it stands: itself, or where the run has no page of it, the one
    before it whose maps come to it; else empty."""

    @classmethod
    def of_record(
        cls, found: tuple[Audit, ReadImage], pages: Collection[str] | None = None
    ) -> AuditViews:
        """Sort pictures of an audit to its layers, and these to the pages of a run, if any."""
        audit, pictures = found
        drawn: defaultdict[str, list[Extra]] = defaultdict(list)
        for number, own in enumerate(audit.drawn):
            if (size := pictures.pixels.get(own.file)) is None:
                continue
            alt = f"Suspects of {own.layer}, channels {words.channel_list(own.channels)}"
            about = f"{len(own.channels)} of {counted(own.suspects, 'channel')} with a finding"
            if own.shown and own.shown != own.layer:
                about += f"; maps of {own.shown}, the input of {own.layer}"
            top, height = own.rows or (0, 0)
            boxes = {c: (0, top + n * height, size[0], height) for n, c in enumerate(own.channels)}
            alt += ", with the images that excite each most"
            picture = PictureView(f"s{number}", pictures, own.file, size, alt)
            extra = {"title": "Suspects of the audit", "words": about, "picture": picture}
            drawn[own.layer].append({**extra, "channels": boxes if own.rows else {}})
        layers = []
        for n, row in enumerate(audit.layers):
            home = row.layer or row.label
            if pages is not None:
                names = (sheet.shown for sheet in audit.drawn if sheet.layer == row.label)
                home = next((name for name in (home, *names) if name in pages), "")
            some = {name: channels for name, channels in row.findings.items() if channels}
            place = {"row": row, "id": f"audited-{n:03d}", "home": home}
            layers.append({**place, "suspects": drawn[row.label], "found": some})
        return cls(audit, layers)

    @property
    def total(self) -> Mapping[str, int]:
        """How many channels of all layers have each finding, those that were looked for."""
        counts: Counter[str] = Counter()
        for layer in self.layers:
            counts.update({name: len(own) for name, own in layer["row"].findings.items()})
        return counts

    @property
    def dead(self) -> str | None:
        """`4 in 1 layer, by the audit of 20 images`; None where no layer could be judged."""
        found = [own["dead"] for layer in self.layers if "dead" in (own := layer["row"].findings)]
        if not found:
            return None
        count, layers = sum(map(len, found)), counted(sum(map(bool, found)), "layer")
        where = f"{count:,} in {layers}" if count else "none"
        return f"{where}, by the audit of {counted(self.record.images.seen, 'image')}"

    def of(self, name: str) -> Mapping[str, list[int]]:
        """What was found of a layer, all its calls together."""
        found: dict[str, list[int]] = {}
        for layer in self.layers:
            for finding, channels in layer["found"].items() if layer["home"] == name else ():
                found[finding] = sorted({*found.get(finding, ()), *channels})
        return found


def read_extras(
    run: ReadRun, pages: Sequence[ReportPage], options: ReportOptions
) -> tuple[dict[str, list[Extra]], AuditViews | None]:
    """What stands beside the maps of a run, by the ids of their groups; and the run's audit."""
    extras: dict[str, list[Extra]] = {g.id: [] for page in pages for g in page.groups}
    firsts = {page.name: page.groups[0].id for page in pages}
    if options.kernels is not None:
        kernels = read_kernels(options.kernels)
        check(run, "kernels", options.kernels, kernels[0]["model"])
        drawn = dict(kernel_pictures(kernels))
        for layer in _shared(drawn, firsts, "kernels", options.kernels):
            extras[firsts[layer]].append(drawn[layer])
    audit = None
    if (found := read_audit(run.root, options.audit)) is not None:
        check(run, "audit", options.audit or run.root / AUDIT_FILE, found[0].model)
        audit = AuditViews.of_record(found, firsts.keys())
        for row in audit.layers:
            extras.get(firsts.get(row["home"], ""), []).extend(row["suspects"])
    if options.exemplars is not None:
        record = read_exemplars(options.exemplars)
        check(run, "exemplars", options.exemplars, record.model)
        ids = {(page.name, group.stem): group.id for page in pages for group in page.groups}
        sheets = _exemplars(record, exemplar_pictures(options.exemplars, record))
        for place in _shared(sheets, ids, "exemplars", options.exemplars):
            extras[ids[place]] += sheets[place]
    return extras, audit


def _shared(given: Collection[Any], drawn: Collection[Any], kind: str, place: Path) -> list[Any]:
    """What both have: layers, or layers and their tensors."""
    if both := [one for one in given if one in drawn]:
        return both
    names = dict.fromkeys(one if isinstance(one, str) else one[0] for one in given)
    hint = "run again with these --layers: " + listed([quoted(name or ".") for name in names], 5)
    raise StoreError(f"{quoted(str(place))} has {kind} of no layer of this run", hint)


def check(run: ReadRun, option: str, place: Path, given: Mapping[str, Any]) -> None:
    """Refuse what is of another model, by the model in its record: by a digest whatever it is
    called, the surest first, else as torchvision's own by its name; warn where neither is there."""
    model, digests = run.record.get("model") or {}, ("parameters", "sha256")
    where = f"--{option} {quoted(str(place))}"
    names = [name for name in digests if model.get(name) and given.get(name)][:1]
    if not any(record.get(name) for record in (model, given) for name in digests):
        names = [name for name in ("name", "weights", "seed") if name in model and name in given]
    if apart := [name for name in names if model.get(name) != given.get(name)]:
        theirs, ours = (
            quoted(words.name_of(record))
            + "".join(f" ({n} {quoted(str(record.get(n)))[:12]})" for n in apart if n != "name")
            for record in (given, model)
        )
        why = f"{where} is of another model than the run: {theirs} there, {ours} in the run"
        raise CompareError(why, f"make it with featviz {option} {quoted(words.name_of(model))}")
    if not names:
        log.warning("%s: whether it is of the run's model is not known", where)


def kernel_pictures(kernels: tuple[Mapping[str, Any], ReadImage]) -> Iterator[tuple[str, Extra]]:
    """The kernels of each convolution under its name: a tile or a row of tiles for each channel."""
    record, pictures = kernels
    for number, row in enumerate(pictures.captures.values()):
        alt, plan = f"{counted(row.maps, 'kernel')} of {row.label}", row.plan
        size = (plan.width, plan.height)
        picture = PictureView(f"k{number}", pictures, row.file, size, alt)
        what = "mean over the inputs, " if row.layout == "mean" else ""
        inputs = counted(row.shape[1] if len(row.shape) > 1 else 1, "input")
        some = f"{len(row.drawn)} of " if len(row.drawn) < row.maps else ""
        about = f"{what}{inputs} per channel · {some}{counted(row.maps, 'kernel')} · "
        about += f"{by(row.shape)} · weights {words.span(row.min, row.max)}"
        boxes = {channel: plan.box(slot * row.side) for slot, channel in enumerate(row.drawn)}
        extra = {"title": "Kernels", "words": about, "picture": picture, "channels": boxes}
        yield row.layer, {**extra, "key": words.key(row, record["options"])}


def _exemplars(record: ExemplarRecord, pictures: ReadImage) -> dict[tuple[str, str], list[Extra]]:
    """The sheets of each tensor, one for each class with `--per-class`, by its layer and stem."""
    found: defaultdict[tuple[str, str], list[Extra]] = defaultdict(list)
    largest = "value" if record.options["by"] == "max" else "mean"
    for number, layer in enumerate(record.layers):
        channels: dict[int, PictureView] = {}
        for row in layer.channels:
            if row.file:
                best = ", ".join(f"{one.image} {words.number(one.value)}" for one in row.exemplars)
                alt = f"What excites channel {row.channel} of {layer.label} most: {best}"
                size = pictures.pixels[row.file]
                channels[row.channel] = PictureView("", pictures, row.file, size, alt)
        about = f"the largest {largest} over {counted(record.images.seen, 'image')}"
        if layer.receptive_field.how == "computed":
            about += f"; a unit sees {by(layer.receptive_field.size)} pixels of the input"
        title = f"Exemplars: {layer.class_name}" if layer.class_name else "Exemplars"
        alt = f"Exemplars of all channels of {layer.label}"
        size = pictures.pixels[layer.sheet]
        sheet = PictureView(f"e{number}", pictures, layer.sheet, size, alt)
        own = {"title": title, "words": about, "picture": sheet, "channels": channels}
        found[layer.label, layer.stem].append(own)
    return found


# Series

BOX = {"left": 6.0, "width": 308.0, "top": 6.0, "height": 52.0, "room": 40.0}
"""Where the curves of a chart lie, in pixels, and the room at their right for the scale."""


def series_views(root: Path) -> dict[str, Any]:
    """All of a series' page: `steps`, (number, run, audit) each; the `layers`, with their pictures
    and how many channels have each finding, step by step; and what is `left_out`."""
    steps: list[tuple[int, ReadRun, AuditViews | None]] = []
    left_out = {}
    for number, path in read_steps(root).items():
        try:
            run, record = read_run(path), read_audit(path, None)
        except StoreError as error:
            left_out[path.name] = error.message
            continue
        steps.append((number, run, AuditViews.of_record(record) if record else None))
        faults = {**run.failures, **run.left_out}
        left_out |= {f"{path.name}/{name}": reason for name, reason in faults.items()}
    if not steps:
        reason = next(iter(left_out.values()), "none is there")
        raise StoreError(f"{quoted(str(root))} has no step that can be shown: {reason}")
    strips: dict[tuple[int, str, str], dict[str, list[tuple[int, Capture, PictureView]]]] = {}
    for number, run, _ in steps:
        for name, image in run.images.items():
            for row in image.captures.values():
                alt = f"{words.tiles(row)} of {row.label} at step {number}, of {name}"
                picture = PictureView("", image, row.file, (row.plan.width, row.plan.height), alt)
                by_image = strips.setdefault((row.index, row.label, row.place.stem), {})
                by_image.setdefault(name, []).append((number, row, picture))
    first, last = steps[0][0], steps[-1][0]
    ends = {n: BOX["left"] + BOX["width"] * (n - first) / max(1, last - first) for n, _, _ in steps}
    layers = []
    for _, own in sorted(strips.items()):
        row, channels = next(iter(own.values()))[0][1], 0
        found: dict[int, Mapping[str, list[int]]] = {}
        for number, _, audit in steps:
            rows = [one["row"] for one in (audit.layers if audit else ())]
            counts = [one.channels for one in rows if (one.layer or one.label) == row.layer]
            if audit and counts:
                channels, found[number] = max(channels, *counts), audit.of(row.layer)
        curves = {  # names that are known alone: the record may be anybody's
            name: {n: len(one.get(name, ())) for n, one in found.items()}
            for name in FINDINGS
            if any(name in one for one in found.values())
        }
        most = max((count for curve in curves.values() for count in curve.values()), default=0)
        about = {"row": row, "strips": own, "channels": channels, "most": most}
        layers.append({**about, "curves": curves})
    return {"steps": steps, "layers": layers, "ends": ends, "left_out": left_out, "box": BOX}
