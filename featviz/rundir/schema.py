"""What the files of a run directory may hold. Whoever reads one has it from somebody else.

msgspec checks types, ranges and lengths while it decodes, in a third of the time of json and
dataclasses; what one field says of another is checked here.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from typing import Annotated, Any, TypedDict, TypeVar

import msgspec
from msgspec import Meta

from featviz.files import is_inside, parse_json
from featviz.records import FORMATS, SUFFIXES, GridPlan, Guess, Place, Skip
from featviz.rundir import INPUT_FILE, SCHEMA_VERSION, STATS_FILE
from featviz.text import by, quoted

_T = TypeVar("_T")

GROWING = ("images", "failures", "schema_version")
"""Keys of run.json that change while a run goes on; all others tell how it draws."""
MOST_RECORD = 64 * 2**20
"""Bytes of run.json or of a manifest: half a million images, or rows."""
MOST_MAPS = 2**24
"""Maps of a tensor: 400 MB of statistics."""
_LARGEST = max(format.largest for format in FORMATS.values())
"""Pixels a side of a picture."""

Text = Annotated[str, Meta(max_length=4096)]
"""A name, or a few words."""
Reason = Annotated[str, Meta(max_length=100_000)]
Count = Annotated[int, Meta(ge=0, le=2**53)]
_Pixels = Annotated[int, Meta(ge=1, le=_LARGEST)]
_Two = Meta(min_length=2, max_length=2)
_Channel = Annotated[int, Meta(ge=0, lt=MOST_MAPS)]
_Channels = Annotated[list[_Channel], Meta(min_length=1)]


_ENDS = {"file": SUFFIXES, "tensor": (".npy",), "figure": (".png",)}
"""How the names in these fields of a row of `captures` end."""


class GridFields(TypedDict):
    """`grid` of a row of `captures`."""

    nrow: _Pixels
    padding: Annotated[int, Meta(ge=0, le=_LARGEST)]
    tile: Annotated[list[_Pixels], _Two]
    scale: _Pixels | Annotated[list[_Pixels], _Two]


@dataclass(frozen=True, slots=True)
class Capture:
    """One drawn tensor: a row of `captures`, as it is written, read and shown."""

    layer: Text
    type: Text
    index: Count
    kind: Annotated[str, Meta(pattern=r"\A[a-z][a-z-]{0,30}\Z")]
    call: Count
    key: Text
    shape: Annotated[list[Count], Meta(max_length=64)]
    layout: Text
    maps: Annotated[int, Meta(ge=1, le=MOST_MAPS)]
    """Maps that the tensor holds; `channels` lists those that were drawn, where not all were."""
    file: Text
    grid: GridFields
    normalize: Text
    """The scale that was used; one-number maps share the layer's even under `map`."""
    range: Annotated[list[float | None], _Two] | None
    """Values drawn darkest and brightest; None where each map has its own (see `stats.npz`)."""
    min: float | None
    max: float | None
    mean: float | None
    std: float | None
    zero_fraction: Annotated[float, Meta(ge=0, le=1)]
    nonfinite: Count
    channels: _Channels | None = None
    slices: Annotated[list[Annotated[int, Meta(ge=1, le=_LARGEST)]], _Two] | None = None
    """[drawn, held] tiles of each channel, side by side, where it holds several: the time steps of
    a clip, the regions of a batch."""
    steps: list[Count] | None = None
    """The slices that are drawn, from 0, where not all are."""
    tensor: Text | None = None
    constant: Annotated[list[_Pixels], Meta(min_length=3, max_length=3)] | None = None
    """Slices, height and width of each map, where all maps are constant: the picture is one strip
    of their values, a number for each channel."""
    collapsed: dict[Text, _Channels] | None = None
    """The channels that share a tile, by the channel that is drawn."""
    reduce: Text | None = None
    overlay: Annotated[float, Meta(ge=0, le=1)] | None = None
    """How much of the map lies over the input, 0..1, where it does."""
    figure: Text | None = None
    cmap: Text | None = None
    """The colormap, where it is that of phases, whatever the run's is."""

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

    @property
    def plan(self) -> GridPlan:
        """The geometry of its picture."""
        grid = self.grid
        tiles = 1 if self.reduce is not None else len(self.channels or ()) or self.maps
        tiles *= self.side
        scale = grid["scale"]
        down, across = (scale, scale) if isinstance(scale, int) else scale
        (height, width), columns = grid["tile"], grid["nrow"]
        size, rows = (height // down, width // across), -(-tiles // columns)
        return GridPlan(tiles, columns, rows, size, (down, across), grid["padding"])

    @property
    def size(self) -> tuple[int, int]:
        """Width and height of its picture."""
        plan = self.plan
        return plan.width, plan.height

    @property
    def files(self) -> list[str]:
        """The picture, and the tensor and figure where there are some."""
        return [name for column in _ENDS if (name := getattr(self, column)) is not None]


OPTIONAL = {one.name for one in fields(Capture) if one.default is None}
"""Fields that a row has only where they have a value."""


@dataclass(frozen=True, slots=True)
class Size:
    """Width and height of an image file in pixels."""

    width: Count
    height: Count


@dataclass(frozen=True, slots=True)
class ImageFields:
    """`image` of a manifest."""

    path: Annotated[str, Meta(min_length=1, max_length=4096)]
    """Relative to the argument that it came from; it is a name, and nothing is opened by it."""
    sha256: Text
    size: Size | None = None
    files: list[Text] | None = None


@dataclass(frozen=True)
class Input:
    """`input` of a manifest."""

    shape: Annotated[
        list[Count | Annotated[list[Count], Meta(max_length=64)]], Meta(max_length=4096)
    ]
    """[1, C, H, W], or several of these."""
    preprocessing: Text

    @property
    def shapes(self) -> list[list[int]]:
        """One for each input of the model."""
        several = [size for size in self.shape if isinstance(size, list)]
        return several or [[size for size in self.shape if isinstance(size, int)]]

    @property
    def shown(self) -> tuple[int, int] | None:
        """Width and height of input.png: frames and several images stand side by side; None where
        an input is no picture."""
        if not all(len(shape) in (4, 5) and shape[-2:] != [1, 1] for shape in self.shapes):
            return None
        frames = [math.prod(shape[2:-2]) for shape in self.shapes]
        width = sum(n * shape[-1] for n, shape in zip(frames, self.shapes, strict=True))
        return width, max(shape[-2] for shape in self.shapes)


@dataclass(frozen=True)
class TargetFields:
    """`target` of a manifest."""

    of: Text | None
    value: float | None
    grad_rule: Text


@dataclass(frozen=True, slots=True)
class FileSum:
    """A row of `files`."""

    file: Text
    bytes: Count
    sha256: Annotated[str, Meta(pattern=r"\A[0-9a-f]{64}\Z")]


@dataclass(frozen=True)
class Manifest:
    """manifest.json; fields of a later featviz are left out."""

    schema_version: int
    image: ImageFields
    input: Input
    captures: list[Capture]
    skipped: list[Skip]
    never_ran: list[Text]
    files: list[FileSum]
    fingerprint: Text | None = None
    prediction: list[Guess] = field(default_factory=list)
    target: TargetFields | None = None
    interventions: list[dict[Text, Text]] = field(default_factory=list)
    """The kind of each, and what it changes."""

    @property
    def named(self) -> list[str]:
        """The files of the image, but for the manifest itself."""
        rows = [name for row in self.captures for name in row.files]
        return [*dict.fromkeys([INPUT_FILE, *rows, STATS_FILE])]


@dataclass(frozen=True)
class Images:
    """`images` of run.json."""

    total: Count
    complete: list[Text]
    missing: list[Text] = field(default_factory=list)


@dataclass(frozen=True)
class Failure:
    """A row of `failures`."""

    image: Text
    error: Reason
    number: Count | None = None
    """Its number among all images, from 0, where that is told."""


@dataclass(frozen=True)
class RunRecord:
    """run.json, as far as it is looked at."""

    images: Images
    failures: list[Failure]
    featviz: Text | None = None
    torch: Text | None = None
    torchvision: Text | None = None
    device: Text | None = None
    model: dict[Text, Any] | None = None
    preprocessing: Text | None = None
    layers: list[Text] | None = None
    options: dict[Text, Any] | None = None


@dataclass(frozen=True)
class Seen:
    """`images` of audit.json, and of exemplars.json."""

    seen: Count
    total: Count = 0
    failures: list[Failure] = field(default_factory=list)


@dataclass(frozen=True)
class AuditRow:
    """A row of `layers` of audit.json."""

    label: Text
    channels: Count
    findings: dict[Text, list[_Channel]]
    layer: Text | None = None
    type: Text = ""
    apoz: Annotated[float, Meta(ge=0, le=1)] | None = None
    """Average percentage of zeros, as a share; None where no activation gives zeros."""


@dataclass(frozen=True)
class DrawnSuspects:
    """A row of `drawn` of audit.json: a picture."""

    layer: Text
    channels: list[_Channel]
    suspects: Count
    file: Text
    shown: Text = ""
    rows: Annotated[list[_Pixels], _Two] | None = None
    """Where the first channel's row begins, and how high each is."""


@dataclass(frozen=True)
class Audit:
    """audit.json, as far as a report shows it."""

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
        """Whether nothing was found in any channel."""
        return not any(found for row in self.layers for found in row.findings.values())


class _Rows(TypedDict):
    captures: list[Capture]


_MANIFESTS = msgspec.json.Decoder(Manifest)


def read_manifest(data: bytes) -> Manifest:
    """A manifest that can be trusted to be one; else a ValueError that names the first misfit:
    ``captures[3].grid.nrow is 0, expected `int` >= 1``."""
    try:
        manifest = _MANIFESTS.decode(data)
        whole = manifest.schema_version == SCHEMA_VERSION
    except (msgspec.MsgspecError, ValueError, RecursionError):
        whole = False
    if not whole:  # Python's own JSON reads names that are no UTF-8, and gives values to name
        try:
            content = parse_json(data.decode("utf-8"))
        except ValueError as error:
            raise ValueError(f"cannot be read: {quoted(str(error))}") from None
        check_version(content)
        manifest = convert(content, Manifest)
    for contradiction in _of_rows(manifest.captures):
        raise ValueError(contradiction)
    listed = [row.file for row in manifest.files]
    for name in sorted(set(manifest.named) ^ set(listed)):
        raise ValueError(f"files {'lists' if name in listed else 'lacks'} {quoted(name)}")
    if len(set(listed)) < len(listed):
        raise ValueError("files lists a file twice")
    return manifest


def fingerprint(record: Mapping[str, Any]) -> str:
    """sha256 of what a run.json says of the model and the options: what has the same was drawn in
    the same way."""
    settings = {key: value for key, value in record.items() if key not in GROWING}
    text = json.dumps(settings, sort_keys=True, default=str)
    return hashlib.sha256(text.encode("utf-8", "backslashreplace")).hexdigest()


def check_kernels(content: Any) -> list[Capture]:
    """The rows of a manifest of kernels, as those of an image; `slices`, which is one number there,
    becomes as many of as many."""
    rows = content.get("captures") if isinstance(content, dict) else None
    for row in rows if isinstance(rows, list) else ():
        if isinstance(row, dict):
            row["slices"] = [row.get("slices", 1)] * 2
    kernels = convert({"captures": rows}, _Rows)["captures"]
    for contradiction in _of_rows(kernels):
        raise ValueError(contradiction)
    return kernels


def check_version(content: Any, known: int = SCHEMA_VERSION) -> None:
    """Refuse a document of another version than this featviz reads, or of none."""
    version = content.get("schema_version") if isinstance(content, dict) else None
    if not isinstance(version, int) or isinstance(version, bool):
        raise ValueError(f"cannot be read: its schema_version is {quoted(repr(version))}")
    if version != known:
        raise ValueError(f"has schema version {version}, this featviz reads {known}")


def convert(content: Any, kind: type[_T]) -> _T:
    """The content of a document, if it is one of this kind; else a ValueError."""
    try:
        return msgspec.convert(content, kind)
    except msgspec.ValidationError as error:
        raise ValueError(_words(str(error), content)) from None


# What does not fit, in words

_ERROR = re.compile(r"(?P<what>.*?)(?: - at `\$\.?(?P<at>.*)`)?", re.DOTALL)
_SHOWN = 60
"""Characters of a value in a message."""


def _words(error: str, content: Any) -> str:
    """``captures[3].grid.nrow is 0, expected `int` >= 1``, from msgspec's words."""
    parts = _ERROR.fullmatch(error)
    what, where = (parts["what"], parts["at"] or "") if parts else (error, "")
    if missing := re.fullmatch(r"Object missing required field `(.*)`", what):
        return f"{where}.{missing[1]} is missing".removeprefix(".")
    value = content
    try:
        for name, index in re.findall(r"(\w+)|\[(\d+|\.\.\.)\]", where):
            value = value[name] if name else value[int(index)]
    except (KeyError, IndexError, TypeError, ValueError):  # msgspec says [...] of a mapping
        return f"{quoted(where)}: {quoted(what)}"
    return misfit(where or "the document", value, quoted(what.removeprefix("Expected ")))


def misfit(where: str, value: Any, expected: str) -> str:
    """``captures[3].grid.nrow is 0, expected `int` >= 1``."""
    if isinstance(value, (list, dict)) and len(value) > _SHOWN:
        shown = f"{'a list' if isinstance(value, list) else 'an object'} of {len(value)}"
    else:
        try:
            shown = json.dumps(value, ensure_ascii=False)
        except ValueError:  # an integer of more digits than Python writes
            shown = "a number of too many digits"
    return f"{quoted(where)} is {quoted(shown, _SHOWN)}, expected {expected}"


# What one field says of another


def _of_rows(rows: list[Capture]) -> Iterator[str]:
    """In words, with the path of the field."""
    seen: dict[Place, int] = {}
    for n, row in enumerate(rows):
        for where, value, expected in _of_row(row):
            yield misfit(f"captures[{n}].{where}", value, expected)
        if (first := seen.setdefault(row.place, n)) != n:
            yield f"captures[{n}] is the same tensor as captures[{first}]"


def _of_row(row: Capture) -> Iterator[tuple[str, Any, str]]:
    """The field, its value, and what was expected."""
    for column, ends in _ENDS.items():
        name = getattr(row, column)
        if name is not None and not is_inside(name):
            yield column, name, "a file inside the image's folder"
        elif name is not None and not name.endswith(ends):
            yield column, name, f"a name that ends in {' or '.join(ends)}"
    channels, steps, (drawn, held) = row.channels, row.steps, row.slices or (1, 1)
    if channels is not None and max(channels) >= row.maps:
        yield "channels", max(channels), f"less than maps ({row.maps})"
    elif channels is not None and len(set(channels)) < len(channels):
        yield "channels", channels, "each channel once"
    if drawn > held:
        yield "slices", row.slices, "no more drawn than there are"
    if steps is not None and (len(steps) != drawn or sorted(set(steps)) != steps):
        yield "steps", steps, f"each of the {drawn} drawn slices once, in order"
    elif steps is not None and steps[-1] >= held:
        yield "steps", steps[-1], f"less than slices ({held})"
    leaders = set(row.drawn) if row.collapsed else set()
    for leader, group in (row.collapsed or {}).items():
        if not (leader.isascii() and leader.isdecimal() and int(leader[:9]) in leaders):
            yield "collapsed", leader, "drawn channels as names"
        elif max(group) >= row.maps:
            yield "collapsed", max(group), f"less than maps ({row.maps})"
    plan = row.plan
    if 0 in plan.map_size:
        yield "grid.scale", row.grid["scale"], f"no more than the tile {row.grid['tile']}"
    if max(row.size) > _LARGEST:
        yield "grid", by(row.size), f"a picture of at most {_LARGEST} pixels a side"
