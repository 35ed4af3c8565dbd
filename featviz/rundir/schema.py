"""What the files of a run directory may hold. Whoever reads one has it from somebody else.

msgspec checks types, ranges and lengths while it decodes, in a third of the time of json and
dataclasses; what one field says of another is checked here.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Annotated, Any, NotRequired, TypedDict, TypeVar

import msgspec
from msgspec import Meta

from featviz.files import is_inside, parse_json
from featviz.records import FORMATS, SUFFIXES, Capture, GridPlan, Guess, Place, Skip
from featviz.rundir import INPUT_FILE, STATS_FILE
from featviz.rundir.write import SCHEMA_VERSION
from featviz.text import by, quoted

_T = TypeVar("_T")

MOST_RECORD = 64 * 2**20
"""Bytes of run.json or of a manifest: half a million images, or rows."""
MOST_MAPS = 2**24
"""Maps of a tensor: 400 MB of statistics."""
_LARGEST = max(format.largest for format in FORMATS.values())
"""Pixels a side of a picture."""

_Text = Annotated[str, Meta(max_length=4096)]
"""A name, or a few words."""
_Reason = Annotated[str, Meta(max_length=100_000)]
_Count = Annotated[int, Meta(ge=0, le=2**53)]
_Pixels = Annotated[int, Meta(ge=1, le=_LARGEST)]
_Two = Meta(min_length=2, max_length=2)
_Channel = Annotated[int, Meta(ge=0, lt=MOST_MAPS)]
_Channels = Annotated[list[_Channel], Meta(min_length=1)]


class GridFields(TypedDict):
    """`grid` of a row of `captures`."""

    nrow: _Pixels
    padding: Annotated[int, Meta(ge=0, le=_LARGEST)]
    tile: Annotated[list[_Pixels], _Two]
    """Height and width."""
    scale: _Pixels | Annotated[list[_Pixels], _Two]
    top: NotRequired[Annotated[int, Meta(ge=0, le=_LARGEST)]]
    """Height of the title; a grid without one has no such field."""


@dataclass(frozen=True)
class CaptureRow(Capture):
    """A row of `captures`: what its fields may be, beyond their types."""

    layer: _Text
    type: _Text
    index: _Count
    kind: Annotated[str, Meta(pattern=r"\A[a-z][a-z-]{0,30}\Z")]
    call: _Count
    key: _Text
    shape: Annotated[list[_Count], Meta(max_length=64)]
    layout: _Text
    maps: Annotated[int, Meta(ge=1, le=MOST_MAPS)]
    file: _Text
    grid: GridFields
    normalize: _Text
    range: Annotated[list[float | None], _Two] | None
    zero_fraction: Annotated[float, Meta(ge=0, le=1)]
    nonfinite: _Count
    channels: _Channels | None = None
    slices: Annotated[list[Annotated[int, Meta(ge=1, le=_LARGEST)]], _Two] | None = None
    steps: list[_Count] | None = None
    tensor: _Text | None = None
    constant: Annotated[list[_Pixels], Meta(min_length=3, max_length=3)] | None = None
    collapsed: dict[_Text, _Channels] | None = None
    reduce: _Text | None = None
    overlay: Annotated[float, Meta(ge=0, le=1)] | None = None
    figure: _Text | None = None

    @property
    def place(self) -> Place:
        """What it is matched by."""
        return Place(self.layer, self.kind, self.call, self.key)

    @property
    def label(self) -> str:
        """`layer1.0.conv1`; its class for the model itself."""
        return self.layer or self.type

    @property
    def drawn(self) -> list[int]:
        """The channels that have a tile of their own, in tile order; none where all channels
        became one tile."""
        if self.reduce is not None:
            return []
        return [*range(self.maps)] if self.channels is None else self.channels

    @property
    def side(self) -> int:
        """Tiles side by side for each channel."""
        return self.slices[0] if self.slices else 1

    @property
    def beside(self) -> list[int]:
        """The slices side by side for each channel; where a row does not say, the first."""
        return [*range(self.side)] if self.steps is None else self.steps

    @cached_property
    def plan(self) -> GridPlan:
        """The geometry of its picture."""
        grid: Any = self.grid
        tiles = 1 if self.reduce is not None else len(self.channels or ()) or self.maps
        tiles *= self.side
        scale = grid["scale"]
        down, across = (scale, scale) if isinstance(scale, int) else scale
        (height, width), columns = grid["tile"], grid["nrow"]
        size, rows = (height // down, width // across), -(-tiles // columns)
        top = grid.get("top", 0)
        return GridPlan(tiles, columns, rows, size, (down, across), grid["padding"], top)

    @property
    def files(self) -> list[str]:
        """The picture, and the tensor and figure where there are some."""
        return [name for column in _ENDS if (name := getattr(self, column)) is not None]


@dataclass(frozen=True)
class Skipped(Skip):
    """A row of `skipped`."""

    layer: _Text
    type: _Text
    index: _Count
    kind: _Text
    call: _Count
    key: _Text
    reason: _Reason


@dataclass(frozen=True, slots=True)
class Class(Guess):
    """A row of `prediction`."""

    index: _Count
    name: _Text | None
    probability: Annotated[float, Meta(ge=0, le=1)]


@dataclass(frozen=True, slots=True)
class Size:
    """Width and height of an image file in pixels."""

    width: _Count
    height: _Count


@dataclass(frozen=True, slots=True)
class ImageFields:
    """`image` of a manifest."""

    path: Annotated[str, Meta(min_length=1, max_length=4096)]
    """Relative to the argument that it came from; it is a name, and nothing is opened by it."""
    sha256: _Text
    size: Size | None = None
    files: list[_Text] | None = None
    """The files of a clip, or of several images."""


@dataclass(frozen=True)
class Input:
    """`input` of a manifest."""

    shape: Annotated[
        list[_Count | Annotated[list[_Count], Meta(max_length=64)]], Meta(max_length=4096)
    ]
    """[1, C, H, W], or several of these."""
    preprocessing: _Text

    @property
    def shapes(self) -> list[list[int]]:
        """One for each input of the model."""
        several = [size for size in self.shape if isinstance(size, list)]
        return several or [[size for size in self.shape if isinstance(size, int)]]

    @property
    def shown(self) -> tuple[int, int] | None:
        """Width and height of input.png: frames and several images stand side by side; None where
        an input is no picture."""
        if not all(len(shape) in (4, 5) for shape in self.shapes):
            return None
        frames = [math.prod(shape[2:-2]) for shape in self.shapes]
        width = sum(n * shape[-1] for n, shape in zip(frames, self.shapes, strict=True))
        return width, max(shape[-2] for shape in self.shapes)


@dataclass(frozen=True)
class TargetFields:
    """`target` of a manifest."""

    of: _Text | None
    value: float | None
    grad_rule: _Text


@dataclass(frozen=True)
class InterventionFields:
    """A row of `interventions`."""

    kind: _Text
    what: _Text


@dataclass(frozen=True, slots=True)
class FileSum:
    """A row of `files`."""

    file: _Text
    bytes: _Count
    sha256: Annotated[str, Meta(pattern=r"\A[0-9a-f]{64}\Z")]


@dataclass(frozen=True)
class Manifest:
    """manifest.json; fields of a later featviz are left out."""

    schema_version: Annotated[int, Meta(ge=1)]
    image: ImageFields
    input: Input
    captures: list[CaptureRow]
    skipped: list[Skipped]
    never_ran: list[_Text]
    files: list[FileSum] | None = None
    """All other files of the image; None up to schema version 1."""
    fingerprint: _Text | None = None
    prediction: list[Class] = field(default_factory=list)
    target: TargetFields | None = None
    interventions: list[InterventionFields] = field(default_factory=list)

    @property
    def named(self) -> list[str]:
        """The files of the image, but for the manifest itself."""
        rows = [name for row in self.captures for name in row.files]
        return [*dict.fromkeys([INPUT_FILE, *rows, STATS_FILE])]


@dataclass(frozen=True)
class _Kernels:
    """A manifest of kernels, as far as it is looked at."""

    captures: list[CaptureRow]


@dataclass(frozen=True)
class Images:
    """`images` of run.json."""

    total: _Count
    complete: list[_Text]
    missing: list[_Text] = field(default_factory=list)


@dataclass(frozen=True)
class Failure:
    """A row of `failures`."""

    image: _Text
    error: _Reason


@dataclass(frozen=True)
class RunRecord:
    """run.json, as far as it is looked at."""

    images: Images
    failures: list[Failure]
    featviz: _Text | None = None
    torch: _Text | None = None
    torchvision: _Text | None = None
    device: _Text | None = None
    model: dict[_Text, Any] | None = None
    preprocessing: _Text | None = None
    layers: list[_Text] | None = None
    options: dict[_Text, Any] | None = None


@dataclass(frozen=True)
class Seen:
    """`images` of audit.json."""

    seen: _Count


@dataclass(frozen=True)
class AuditRow:
    """A row of `layers` of audit.json."""

    label: _Text
    channels: _Count
    findings: dict[_Text, list[_Channel]]
    """Channels, by what was found."""
    layer: _Text | None = None
    type: _Text = ""
    apoz: Annotated[float, Meta(ge=0, le=1)] | None = None
    """Average percentage of zeros, as a share; None where no activation gives zeros."""


@dataclass(frozen=True)
class DrawnSuspects:
    """A row of `drawn` of audit.json: a picture."""

    layer: _Text
    channels: list[_Channel]
    """From the top."""
    suspects: _Count
    """All channels of the layer with a finding."""
    file: _Text
    shown: _Text = ""
    """The layer whose maps are drawn."""
    rows: Annotated[list[_Pixels], _Two] | None = None
    """Where the first channel's row begins, and how high each is; None in older ones."""


@dataclass(frozen=True)
class Audit:
    """audit.json, as far as a report shows it."""

    images: Seen
    layers: list[AuditRow]
    drawn: list[DrawnSuspects] = field(default_factory=list)
    model: dict[_Text, Any] = field(default_factory=dict)
    options: dict[_Text, Any] = field(default_factory=dict)
    featviz: _Text = ""
    torch: _Text = ""
    device: _Text = ""
    preprocessing: _Text = ""

    @property
    def clean(self) -> bool:
        """Whether nothing was found in any channel."""
        return not any(found for row in self.layers for found in row.findings.values())


_MANIFESTS = msgspec.json.Decoder(Manifest)


def read_manifest(data: bytes) -> Manifest:
    """A manifest that can be trusted to be one.

    Raises:
        ValueError: `captures[3].grid.nrow is 0, expected 1 or more`; or it is no JSON.
    """
    manifest = _decode(data)
    for contradiction in _contradictions(manifest):
        raise ValueError(contradiction)
    return manifest


def check_record(content: Any) -> RunRecord:
    """The content of run.json, if it is one.

    Raises:
        ValueError: `images.total is -1, expected 0 or more`.
    """
    return _convert(content, RunRecord)


def check_failures(content: Any) -> list[Failure]:
    """`failures` of a run.json of which nothing else needs to fit.

    Raises:
        ValueError: it is none.
    """
    return _convert(content, list[Failure])


def check_kernels(content: Any) -> list[CaptureRow]:
    """The rows of a manifest of kernels, as those of an image; `slices`, which is one number there,
    becomes as many of as many.

    Raises:
        ValueError: `captures[0].maps is 0, expected 1 or more`; or it is none.
    """
    rows = content.get("captures") if isinstance(content, dict) else None
    if isinstance(rows, list):
        rows = [
            {**row, "slices": [row.get("slices", 1)] * 2} if isinstance(row, dict) else row
            for row in rows
        ]
    kernels = _convert({"captures": rows}, _Kernels).captures
    for n, row in enumerate(kernels):
        for where, value, expected in _of_row(row):
            raise ValueError(misfit(f"captures[{n}].{where}", value, expected))
    return kernels


def check_audit(content: Any) -> Audit:
    """The content of audit.json, if it is one.

    Raises:
        ValueError: `layers[0].channels is missing`.
    """
    return _convert(content, Audit)


def check_version(content: Any) -> None:
    """Whether a document has a version that this featviz reads.

    Raises:
        ValueError: it has none, or a later one.
    """
    version = content.get("schema_version") if isinstance(content, dict) else None
    if not isinstance(version, int) or isinstance(version, bool):
        raise ValueError(f"cannot be read: its schema_version is {quoted(repr(version))}")
    if version > SCHEMA_VERSION:
        raise ValueError(
            f"has schema version {version}, this featviz reads up to {SCHEMA_VERSION}; "
            "install a newer one"
        )


def _decode(data: bytes) -> Manifest:
    """Names that are no UTF-8 are written as lone surrogates, which only Python's own JSON reads;
    of what does not fit, it tells the value too."""
    try:
        manifest = _MANIFESTS.decode(data)
        if manifest.schema_version <= SCHEMA_VERSION:
            return manifest
    except (msgspec.MsgspecError, ValueError, RecursionError):
        pass
    try:
        content = parse_json(data.decode("utf-8"))
    except ValueError as error:
        raise ValueError(f"cannot be read: {quoted(str(error))}") from None
    check_version(content)
    return _convert(content, Manifest)


def _convert(content: Any, kind: type[_T]) -> _T:
    try:
        return msgspec.convert(content, kind)
    except msgspec.ValidationError as error:
        raise ValueError(_words(str(error), content)) from None


# What does not fit, in words

_KINDS = {
    "int": "a whole number",
    "float": "a number",
    "str": "text",
    "array": "a list",
    "object": "an object",
    "bool": "true or false",
    "null": "null",
}
_ERROR = re.compile(r"(?P<what>.*?)(?: - at `\$(?P<at>.*)`)?", re.DOTALL)
_LIMIT = re.compile(
    r"Expected `(?P<kind>\w+)`(?P<length> of length)? (?P<sign>[<>]=?) (?P<limit>.+)"
)
_SIGNS = {">=": "{} or more", "<=": "{} or less", ">": "more than {}", "<": "less than {}"}
_SHOWN = 60
"""Characters of a value in a message."""


def _words(error: str, content: Any) -> str:
    """`captures[3].grid.nrow is 0, expected 1 or more`, from msgspec's words."""
    parts = _ERROR.fullmatch(error)
    what, at = (parts["what"], parts["at"] or "") if parts else (error, "")
    where = at.removeprefix(".")
    if missing := re.fullmatch(r"Object missing required field `(.*)`", what):
        return f"{where}.{missing[1]} is missing".removeprefix(".")
    return misfit(where or "the document", _value(content, at), _expected(what))


def misfit(where: str, value: Any, expected: str) -> str:
    """`captures[3].grid.nrow is 0, expected 1 or more`."""
    shown = "" if value is _UNKNOWN else f" is {quoted(_json(value), _SHOWN)}"
    return f"{quoted(where)}{shown}, expected {expected}"


def _json(value: Any) -> str:
    if isinstance(value, (list, dict)) and len(value) > _SHOWN:
        return f"{'a list' if isinstance(value, list) else 'an object'} of {len(value)}"
    try:
        return json.dumps(value, ensure_ascii=False)
    except ValueError:  # an integer of more digits than Python writes
        return "a number of too many digits"


_UNKNOWN = object()


def _value(content: Any, path: str) -> Any:
    """What stands at `.captures[3].grid`; for an entry of a mapping msgspec says `[...]`."""
    for name, index in re.findall(r"\.(\w+)|\[(\d+|\.\.\.)\]", path):
        if index == "...":
            return _UNKNOWN
        try:
            content = content[name] if name else content[int(index)]
        except (KeyError, IndexError, TypeError):
            return _UNKNOWN
    return content


def _expected(what: str) -> str:
    if limit := _LIMIT.fullmatch(what):
        count = _SIGNS[limit["sign"]].format(limit["limit"].removesuffix(".0"))
        unit = "entries" if limit["kind"] == "array" else "characters"
        return f"{count} {unit}" if limit["length"] else count
    if kinds := re.match(r"Expected `(.+?)`, got", what):
        return " or ".join(_KINDS.get(kind, kind) for kind in kinds[1].split(" | "))
    if pattern := re.fullmatch(r"Expected `str` matching regex (.*)", what):
        return f"text like {pattern[1]}"
    return f"something else ({quoted(what)})"


# What one field says of another


def _contradictions(manifest: Manifest) -> Iterator[str]:
    """In words, with the path of the field."""
    seen: dict[Place, int] = {}
    for n, row in enumerate(manifest.captures):
        for where, value, expected in _of_row(row):
            yield misfit(f"captures[{n}].{where}", value, expected)
        if (first := seen.setdefault(row.place, n)) != n:
            yield f"captures[{n}] is the same tensor as captures[{first}]"
    yield from _of_files(manifest)


def _of_files(manifest: Manifest) -> Iterator[str]:
    """Whether `files` lists each file of the image once, and nothing else."""
    if manifest.files is None:
        if manifest.schema_version > 1:
            yield "files is missing"
        return
    listed = [row.file for row in manifest.files]
    for name in sorted(set(manifest.named) ^ set(listed)):
        yield f"files {'lists' if name in listed else 'lacks'} {quoted(name)}"
    if len(set(listed)) < len(listed):
        yield "files lists a file twice"


_ENDS = {"file": SUFFIXES, "tensor": (".npy",), "figure": (".png",)}
"""How the names in these fields of a row end."""


def _of_row(row: CaptureRow) -> Iterator[tuple[str, Any, str]]:
    for column, ends in _ENDS.items():
        if (name := getattr(row, column)) is not None:
            yield from _of_name(column, name, ends)
    if row.channels is not None:
        yield from _of_channels(row, row.channels)
    if row.slices is not None and row.slices[0] > row.slices[1]:
        yield "slices", row.slices, "no more drawn than there are"
    if row.steps is not None:
        yield from _of_steps(row, row.steps)
    yield from _of_collapsed(row, row.collapsed or {})
    yield from _of_grid(row)


def _of_name(field: str, name: str, ends: tuple[str, ...]) -> Iterator[tuple[str, Any, str]]:
    if not is_inside(name):
        yield field, name, "a file inside the image's folder"
    elif not name.endswith(ends):
        yield field, name, f"a name that ends in {' or '.join(ends)}"


def _of_channels(row: CaptureRow, channels: list[int]) -> Iterator[tuple[str, Any, str]]:
    if max(channels) >= row.maps:
        yield "channels", max(channels), f"less than maps ({row.maps})"
    elif len(set(channels)) < len(channels):
        yield "channels", channels, "each channel once"


def _of_steps(row: CaptureRow, steps: list[int]) -> Iterator[tuple[str, Any, str]]:
    drawn, held = row.slices or (1, 1)
    if len(steps) != drawn or sorted(set(steps)) != steps:
        yield "steps", steps, f"each of the {drawn} drawn slices once, in order"
    elif steps[-1] >= held:
        yield "steps", steps[-1], f"less than slices ({held})"


def _of_collapsed(
    row: CaptureRow, collapsed: Mapping[str, list[int]]
) -> Iterator[tuple[str, Any, str]]:
    drawn = set(row.drawn) if collapsed else set()
    for leader, group in collapsed.items():
        if not (leader.isascii() and leader.isdecimal() and int(leader[:9]) in drawn):
            yield "collapsed", leader, "drawn channels as names"
        elif max(group) >= row.maps:
            yield "collapsed", max(group), f"less than maps ({row.maps})"


def _of_grid(row: CaptureRow) -> Iterator[tuple[str, Any, str]]:
    plan, grid = row.plan, row.grid
    if 0 in plan.map_size:
        yield "grid.scale", grid["scale"], f"no more than the tile {grid['tile']}"
    if max(size := (plan.width, plan.height)) > _LARGEST:
        yield "grid", by(size), f"a picture of at most {_LARGEST} pixels a side"
