"""Results that are not single runs: reads audits, exemplars and kernels; writes verdicts of
gates for CI servers; and finds the run directories of a series, one for each watched step
of a training.

    OUT/step-000000/  OUT/step-000100/  ...

The folder of a step gets such a name when all its files are written. So a folder with such
a name and a run.json is complete."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any
from xml.etree import ElementTree

import msgspec
from msgspec import Meta

from featviz import files
from featviz.errors import FileError, StoreError
from featviz.files import ReadFolder
from featviz.options.commands import MOST_TOP
from featviz.records import CaptureKey, Verdict
from featviz.rundir import (
    APOZ_FILE,
    AUDIT_FILE,
    EXEMPLARS_FILE,
    LOCK_FILE,
    MANIFEST_FILE,
    REPORT,
    REPORT_FILE,
    REPORT_ZIP,
    RUN_FILE,
    schema,
)
from featviz.rundir.folder import is_hidden, reported
from featviz.rundir.image import ReadImage, read_pictures
from featviz.rundir.read import Failure
from featviz.rundir.schema import MOST_RECORD, Capture, Count, Reason, Text, read_json
from featviz.text import quoted

SCHEMA_VERSION = 1
"""The version of exemplars.json. 1: first release."""

_MOST = 2**28
"""The most bytes that an exemplars.json may have: enough for two million exemplars."""
_STEP = re.compile(r"step-(\d{6,15})")
_BESIDE_STEPS = {LOCK_FILE, REPORT, REPORT_FILE, REPORT_ZIP}
"""Files and folders besides the steps that featviz puts into the folder of a series."""
_Small = Annotated[int, Meta(ge=0, lt=2**31)]
_Two = Annotated[list[_Small], Meta(min_length=2, max_length=2)]
_Four = Annotated[list[_Small], Meta(min_length=4, max_length=4)]


@dataclass(frozen=True)
class Seen:
    """`images` of audit.json, and of exemplars.json."""

    seen: Count
    total: Count = 0
    failures: list[Failure] = field(default_factory=list)


@dataclass(frozen=True)
class Exemplar:
    """An image that excites a channel."""

    image: Text
    number: Count
    """The number of the image among all images, from 0."""
    value: float
    """The value by which exemplars are ranked: the largest of the map, or its mean."""
    place: _Two | None
    """Row and column of the largest value in the channel's map; None with `--by mean`."""
    map: _Two | None
    """The number of rows and of columns of that map."""
    box: _Four | None
    """The receptive field of the unit at `place`, in pixels of the input: left, top, right
    and bottom. None if it holds only padding, or the image could not be read again."""


@dataclass(frozen=True)
class ExemplarChannel:
    """A channel of a layer."""

    channel: _Small
    file: Text | None
    """The picture of the channel's exemplars; None if no image excites the channel."""
    exemplars: Annotated[list[Exemplar], Meta(max_length=100_000)]
    row: _Four | None = None
    """The rectangle of the channel's tiles in the picture of all channels: left, top,
    width and height. None if that picture has no room for the channel."""


@dataclass(frozen=True)
class FieldOfView:
    """The size of the receptive fields of a layer, for an input of the first image's
    size."""

    how: Text
    """`computed`, `unknown`, or `no place` (the layer gives no map of the input)."""
    size: _Two
    """Height and width of the largest receptive field of a unit, in pixels of the input."""


@dataclass(frozen=True)
class ExemplarLayer:
    """The exemplars of a tensor of a layer; with `--per-class`, only from the images of
    one class."""

    layer: Text
    type: Text
    index: _Small
    call: _Small
    key: Text
    class_name: Text | None
    shape: Annotated[list[Count], Meta(max_length=64)]
    layout: Text
    receptive_field: FieldOfView
    sheet: Text
    channels: Annotated[list[ExemplarChannel], Meta(max_length=2**20)]

    @property
    def label(self) -> str:
        """The name of the layer; for the model itself, its class."""
        return self.layer or self.type

    @property
    def title(self) -> str:
        """The name of the tensor: `relu`, or `relu.call1` for the second call."""
        return self.label + self.address.suffix

    @property
    def address(self) -> CaptureKey:
        """The key of the capture of this tensor."""
        return CaptureKey(self.layer, "output", self.call, self.key)


@dataclass(frozen=True)
class ExemplarRecord:
    """exemplars.json."""

    schema_version: Count
    featviz: Text
    torch: Text
    torchvision: Text
    device: Text
    model: dict[Text, Any]
    preprocessing: Text
    options: dict[Text, Any]
    images: Seen
    skipped: list[dict[Text, Reason]]
    never_ran: list[Text]
    layers: list[ExemplarLayer]

    @property
    def room(self) -> int:
        """The most exemplars in the picture of a channel: --top, or fewer if there are
        fewer images."""
        return max(1, min(int(self.options["top"]), self.images.total))

    def as_json(self) -> Mapping[str, Any]:
        """The content of exemplars.json, as JSON types."""
        content: Mapping[str, Any] = msgspec.to_builtins(self)
        return content


def read_exemplars(root: Path) -> ExemplarRecord:
    """Read the exemplars.json of a folder.

    Args:
        root: the folder that the user named; it need not exist.

    Raises:
        StoreError: the folder has no exemplars.json, or one that does not fit.
    """
    path = root / EXEMPLARS_FILE
    if not path.exists():
        raise StoreError(
            f"{quoted(root)} holds no exemplars: it has no {EXEMPLARS_FILE}",
            "give a folder that featviz exemplars wrote",
        )
    with _reading(path, "exemplars"):
        content = files.read_json(path, _MOST)
        schema.check_version(content, SCHEMA_VERSION)
        record: ExemplarRecord = schema.convert(content, ExemplarRecord)
        _check_exemplars(record)
    return record


def _check_exemplars(record: ExemplarRecord) -> None:
    """Refuse a record whose fields contradict one another.

    Raises:
        ValueError: the message names the contradiction.
    """
    top = record.options.get("top")
    # `type`, since True is an instance of int
    is_top = type(top) is int and 1 <= top <= MOST_TOP
    if not is_top or record.options.get("by") not in ("max", "mean"):
        raise ValueError("options.top or options.by is none that featviz has")
    for layer in record.layers:
        for row in layer.channels:
            # a report puts the names of the images below the tiles of the picture
            count = len(row.exemplars)
            has_picture = bool(row.file)
            if count > record.room or has_picture != (count > 0):
                raise ValueError(
                    f"channel {row.channel} of {layer.sheet} has {count} exemplars"
                )


def exemplar_pictures(root: Path, record: ExemplarRecord) -> ReadImage:
    """Read the headers of the pictures of exemplars, by `read_pictures`.

    Args:
        root: the folder of the exemplars.
        record: the content of its exemplars.json.

    Raises:
        StoreError: a picture is missing, or cannot be read.
    """
    names = []
    for layer in record.layers:
        names.append(layer.sheet)
        names += [row.file for row in layer.channels if row.file]
    with _reading(root, "exemplars"):
        return read_pictures(root, "exemplars", names)


@contextmanager
def _reading(path: Path, result: str) -> Iterator[None]:
    """Turn errors of the block, which reads files, into StoreErrors that name them.

    Args:
        path: the file that the block reads, or the folder of several files.
        result: what the files belong to, such as `exemplars`.
    """
    try:
        yield
    except FileNotFoundError as error:
        folder = path if path.is_dir() else path.parent
        missing = quoted(folder / str(error.filename))
        raise StoreError(f"{missing} is missing", f"draw the {result} again") from None
    except (FileError, StoreError, OSError, ValueError) as error:
        reason = str(error).removeprefix("cannot be read: ")
        raise StoreError(f"{quoted(path)} cannot be read: {quoted(reason)}") from error


@dataclass(frozen=True)
class AuditRow:
    """A row of `layers` of audit.json."""

    label: Text
    channels: Count
    findings: dict[Text, list[schema.Channel]]
    layer: Text | None = None
    call: Count = 0
    type: Text = ""
    apoz: Annotated[float, Meta(ge=0, le=1)] | None = None
    """The average percentage of zeros (APoZ), as a share 0..1; None if the layer gives no
    zeros."""


@dataclass(frozen=True)
class SuspectImage:
    """An image that excites a suspect, and the place of its tiles in the picture of the
    layer's suspects."""

    image: Text
    tile: schema.Box
    """The place of the tile that shows what the model saw."""
    map: schema.Box
    """The place of the tile that shows the channel's map."""


@dataclass(frozen=True)
class DrawnSuspect:
    """A channel with a finding: a row of the picture of a layer."""

    channel: schema.Channel
    finding: Text
    range: Annotated[list[float], schema.Two]
    """The values that are drawn darkest and brightest."""
    images: list[SuspectImage]


@dataclass(frozen=True)
class DrawnSuspects:
    """A row of `drawn` of audit.json: the picture of a layer's suspects."""

    layer: Text
    channels: list[DrawnSuspect]
    """The suspects in the picture."""
    suspects: Count
    """How many channels of the layer have a finding, in the picture or not."""
    file: Text
    shown: Text = ""
    """The layer whose maps the picture shows. It is a layer before `layer` if no image
    excites the suspects."""


@dataclass(frozen=True)
class Audit:
    """The entries of audit.json that a report shows."""

    images: Seen
    layers: list[AuditRow]
    drawn: list[DrawnSuspects] = field(default_factory=list)
    model: dict[Text, Any] = field(default_factory=dict)
    options: dict[Text, Any] = field(default_factory=dict)
    featviz: Text = ""
    torch: Text = ""
    device: Text = ""
    preprocessing: Text = ""

    @property
    def clean(self) -> bool:
        """Whether no channel has a finding."""
        return not any(any(row.findings.values()) for row in self.layers)


def is_audit(root: Path) -> bool:
    """Whether a folder holds an audit, and no run."""
    return (root / AUDIT_FILE).exists() and not (root / RUN_FILE).exists()


def read_audit(root: Path, requested: Path | None) -> tuple[Audit, ReadImage] | None:
    """Read an audit, and the headers of its pictures: the chart, and the pictures of
    suspects.

    Args:
        root: a folder that may hold an audit.
        requested: the audit.json, or the folder of an audit, that the user named; it is
            read instead of `root`. None reads `root`.

    Returns:
        The audit, and those of its pictures that exist. None if nothing was requested,
        and `root` holds no audit.

    Raises:
        StoreError: the requested audit is missing; or an audit cannot be read.
    """
    path = root if requested is None else requested
    if requested is None or path.is_dir():
        path /= AUDIT_FILE
    try:
        # A run directory may come from anybody, so no link in it is followed. A path that
        # the user named may be a link.
        if requested is None:
            with ReadFolder(root) as folder:
                content = folder.read_json(AUDIT_FILE, MOST_RECORD)
        else:
            content = files.read_json(path, MOST_RECORD)
        audit: Audit = schema.convert(content, Audit)
        names = [APOZ_FILE, *(row.file for row in audit.drawn)]
        return audit, read_pictures(path.parent, "audit", names, may_be_missing=True)
    except FileNotFoundError as error:
        if requested is None:
            return None
        reason = str(error.strerror)
    except (FileError, ValueError) as error:
        reason = str(error)
    raise StoreError(
        f"{quoted(path)} is no audit.json: {reason}",
        "give one that featviz audit wrote",
    )


def is_kernels(root: Path) -> bool:
    """Whether a folder holds kernels: a run.json of kernels, and a manifest. False if
    run.json cannot be read."""
    try:
        has_manifest = (root / MANIFEST_FILE).exists()
        return has_manifest and read_json(root / RUN_FILE).get("kind") == "kernels"
    except StoreError:
        return False


def read_kernels(root: Path) -> tuple[Mapping[str, Any], ReadImage]:
    """Read what `featviz kernels` wrote.

    Returns:
        The content of run.json, in which `model` and `options` are objects, maybe empty;
        and the pictures, as an image with a capture for each.

    Raises:
        StoreError: the folder holds no kernels, or they cannot be read.
    """
    record = {}
    # if run.json is missing, the message below says that the folder holds no kernels
    if (root / RUN_FILE).exists():
        record = read_json(root / RUN_FILE)
    if record.get("kind") != "kernels":
        raise StoreError(
            f"{quoted(root)} holds no kernels",
            "give a folder that `featviz kernels` wrote",
        )
    with _reading(root, "kernels"):
        with ReadFolder(root) as folder:
            manifest = folder.read_json(MANIFEST_FILE, MOST_RECORD)
        captures = schema.convert(manifest, dict[str, Any]).get("captures")
        kernel_rows = schema.convert(captures, list[dict[str, Any]])
        for row in kernel_rows:
            # A capture has two numbers of slices, [drawn, held]. The record of a kernel
            # has one, since all its slices are drawn.
            row["slices"] = [row.get("slices", 1)] * 2
        rows = schema.convert(kernel_rows, list[Capture])
        schema.check_rows(rows)
        pictures = read_pictures(root, "kernels", [row.file for row in rows], rows)
    # a damaged entry is replaced by an empty one, so that the pictures can be shown
    for key in ("model", "options"):
        if not isinstance(record.get(key), dict):
            record[key] = {}
    return record, pictures


def junit(verdicts: Mapping[str, Sequence[Verdict]], command: str = "audit") -> bytes:
    """JUnit XML for CI servers: a suite for each model, and in it a test case for each
    gate. It has no time and no name of a machine, so that the same verdicts give the same
    bytes.

    Args:
        verdicts: the verdicts of the gates, by the name of the model.
        command: the command that judged, `audit` or `diff`; it is part of names.
    """
    root = ElementTree.Element("testsuites", name=f"featviz {command}")
    for model, verdicts_of_model in verdicts.items():
        failures = sum(not verdict.held for verdict in verdicts_of_model)
        attributes = {
            "name": _legal(model),
            "tests": str(len(verdicts_of_model)),
            "failures": str(failures),
            "errors": "0",
            "skipped": "0",
        }
        suite = ElementTree.SubElement(root, "testsuite", attributes)
        for verdict in verdicts_of_model:
            case = ElementTree.SubElement(
                suite,
                "testcase",
                classname=_legal(f"featviz.{command}.{model}"),
                name=_legal(verdict.gate),
            )
            message = _legal(verdict.message)
            if verdict.held:
                ElementTree.SubElement(case, "system-out").text = message
            else:
                ElementTree.SubElement(case, "failure", message=message).text = message
    # indented, since people read these files, too
    ElementTree.indent(root)
    return bytes(ElementTree.tostring(root, "utf-8", xml_declaration=True)) + b"\n"


def _legal(text: str) -> str:
    """A text for XML 1.0: U+FFFD replaces characters that are not printable. Names of
    files may have characters that XML cannot hold (https://www.w3.org/TR/xml/#charsets).
    """
    return "".join(
        character if character.isprintable() or character in "\t\n\r" else "\ufffd"
        for character in text
    )


def step_folder(root: Path, step: int) -> Path:
    """The folder of a training step: `OUT/step-000100`."""
    return root / f"step-{step:06d}"


def read_steps(root: Path) -> dict[int, Path]:
    """The run directories of a series, by their training steps in rising order; empty if
    the folder holds no series."""
    folders = step_folders(root).items()
    return {step: path for step, path in folders if (path / RUN_FILE).is_file()}


def step_folders(root: Path) -> dict[int, Path]:
    """The folders that have the name of a step, by the numbers of the steps in rising
    order; also those without a complete run. Links are left out.

    Raises:
        StoreError: the folder cannot be read.
    """
    if not root.is_dir():
        return {}
    with reported(root):
        paths = list(root.iterdir())
    folders = {}
    for path in paths:
        match = _STEP.fullmatch(path.name)
        # a link may lead to a step of another series
        if match is not None and not path.is_symlink():
            folders[int(match[1])] = path
    return dict(sorted(folders.items()))


def check_series(
    root: Path, overwrite: bool, resume: bool, board: Path | None
) -> list[int]:
    """Refuse, before the training, a folder that a series cannot be written into.

    Args:
        root: the folder; it need not exist.
        overwrite: whether an earlier series may be replaced.
        resume: whether an earlier series may go on.
        board: the folder of TensorBoard's events, which may lie in `root`; None for none.

    Returns:
        The steps of the earlier series; empty if there is none.

    Raises:
        StoreError: `root` is a file, or holds files that featviz did not write, or an
            earlier series without `overwrite` or `resume`.
    """
    if root.exists() and not root.is_dir():
        raise StoreError(
            f"--out {root} is a file, not a folder", "name another with --out"
        )
    steps = list(read_steps(root))
    out = f"--out {quoted(root)}"
    if steps and not (overwrite or resume):
        raise StoreError(
            f"{out} holds a series up to step {steps[-1]}",
            "overwrite=True replaces it, resume=True goes on with it, or name another"
            " --out",
        )
    if not steps and root.is_dir():
        _check_no_others(root, board, out)
    return steps


def _check_no_others(root: Path, board: Path | None, out: str) -> None:
    """Refuse a folder that holds files that featviz did not write.

    Args:
        root: the folder, which has no series.
        board: the folder of TensorBoard's events, which `root` may hold; None for none.
        out: the folder, as a message names it.

    Raises:
        StoreError: the message names the first such file.
    """
    # Often the folder of the events is made before the series. It, and the folders on the
    # way to it, do not count.
    events = []
    if board is not None:
        events = [board.resolve(), *board.resolve().parents]
        if root.resolve() == events[0]:
            return
    for path in sorted(root.iterdir()):
        if (
            path.name in _BESIDE_STEPS
            or is_hidden(path.name)
            or path.resolve() in events
        ):
            continue
        raise StoreError(
            f"{out} is not empty and holds no series: {quoted(path.name)}",
            "name another folder with --out",
        )
