"""What the records of a run directory hold: a row of a manifest, and what all of them have.

Whoever reads one has it from somebody else. msgspec checks types, ranges and lengths while it
decodes, in a third of the time of json and dataclasses, and says in its own words where something
does not fit; what one field says of another is checked here.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from os.path import commonprefix
from pathlib import Path
from typing import Annotated, Any, TypedDict

import msgspec
from msgspec import Meta

from featviz import files
from featviz.errors import FileError, StoreError
from featviz.options import flag
from featviz.records import FORMATS, SUFFIXES, CaptureKey, GridPlan
from featviz.rundir import MANIFEST_FILE, SCHEMA_VERSION
from featviz.text import by, printable, quoted

GROWING = ("images", "failures", "schema_version")
"""Keys of run.json that change while a run goes on."""
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
Pixels = Annotated[int, Meta(ge=1, le=_LARGEST)]
Two = Meta(min_length=2, max_length=2)
Channel = Annotated[int, Meta(ge=0, lt=MOST_MAPS)]
_Channels = Annotated[list[Channel], Meta(min_length=1)]
_SHOWN, _BEFORE = 60, 20
"""Characters of a value that a message shows, and those of them that stand before the first that
differs, where it is far behind."""
_ENDS = {"file": SUFFIXES, "tensor": (".npy",), "figure": (".png",)}
"""How the names in these fields of a row of `captures` end."""


class GridFields(TypedDict):
    """`grid` of a row of `captures`."""

    nrow: Pixels
    padding: Annotated[int, Meta(ge=0, le=_LARGEST)]
    tile: Annotated[list[Pixels], Two]
    scale: Pixels | Annotated[list[Pixels], Two]


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
    range: Annotated[list[float | None], Two] | None
    """Values drawn darkest and brightest; None where each map has its own (see `stats.npz`)."""
    min: float | None
    max: float | None
    mean: float | None
    std: float | None
    zero_fraction: Annotated[float, Meta(ge=0, le=1)]
    nonfinite: Count
    channels: _Channels | None = None
    slices: Annotated[list[Pixels], Two] | None = None
    """[drawn, held] tiles of each channel, side by side: steps of a clip, regions of a batch."""
    steps: list[Count] | None = None
    """The slices that are drawn, from 0, where not all are."""
    tensor: Text | None = None
    constant: Annotated[list[Pixels], Meta(min_length=3, max_length=3)] | None = None
    """Slices, height and width of each map, where all are constant: the picture is one strip of
    their values."""
    collapsed: dict[Text, _Channels] | None = None
    """The channels that share a tile, by the channel that is drawn."""
    reduce: Text | None = None
    overlay: Annotated[float, Meta(ge=0, le=1)] | None = None
    figure: Text | None = None
    cmap: Text | None = None
    """The colormap, where it is that of phases, whatever the run's is."""

    @property
    def place(self) -> CaptureKey:
        """What it is matched by."""
        return CaptureKey(self.layer, self.kind, self.call, self.key)

    @property
    def label(self) -> str:
        """`layer1.0.conv1`; its class for the model itself."""
        return self.layer or self.type

    @property
    def drawn(self) -> list[int]:
        """The channels that have a tile of their own, in tile order."""
        if self.reduce is not None:
            return []
        return [*range(self.maps)] if self.channels is None else self.channels

    @property
    def side(self) -> int:
        """Tiles side by side for each channel."""
        return self.slices[0] if self.slices else 1

    @property
    def beside(self) -> list[int]:
        """The slices side by side for each channel."""
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


def convert(content: Any, kind: Any) -> Any:
    """The content of a document, if it is one of this kind; else a ValueError in msgspec's words,
    which name the first misfit."""
    try:
        return msgspec.convert(content, kind)
    except msgspec.ValidationError as error:
        raise ValueError(quoted(str(error))) from None


def check_version(content: Any, known: int = SCHEMA_VERSION) -> None:
    """Refuse a document of another version than this featviz reads, or of none."""
    version = content.get("schema_version") if isinstance(content, dict) else None
    if type(version) is not int:
        raise ValueError(f"cannot be read: its schema_version is {quoted(repr(version))}")
    if version != known:
        raise ValueError(f"has schema version {version}, this featviz reads {known}")


def read_json(path: Path) -> dict[str, Any]:
    """The content of a run.json or manifest, of whatever kind it is."""
    where = quoted(str(path))
    if path.parent.is_file():
        name = quoted(str(path.parent))
        raise StoreError(f"{name} is a file, not a run directory", "give a folder of `featviz run`")
    if path.is_symlink():
        raise StoreError(f"{where} is a link, and links in run directories are not read")
    try:
        content: dict[str, Any] = files.read_json(path, MOST_RECORD)
        check_version(content)
    except FileNotFoundError:
        hint = "give a folder that `featviz run` wrote"
        if any(path.parent.glob(f"*/{MANIFEST_FILE}")):
            hint = "the same `featviz run` with --resume writes it anew from the images' manifests"
        words = f"{quoted(str(path.parent))} is no run directory: it has no {path.name}"
        raise StoreError(words, hint) from None
    except FileError as error:
        said = error.message.removeprefix(f"{where} cannot be read: ")
        raise StoreError(f"{where} cannot be read: {said}", error.hint) from error
    except ValueError as error:
        raise StoreError(f"{where} {error}") from None
    return content


def fingerprint(record: Mapping[str, Any]) -> str:
    """sha256 of what a run.json says of the model and the options: what has the same was drawn in
    the same way."""
    settings = {key: value for key, value in record.items() if key not in GROWING}
    text = json.dumps(settings, sort_keys=True, default=str)
    return hashlib.sha256(text.encode("utf-8", "backslashreplace")).hexdigest()


def differences(old: Any, new: Any, where: str = "") -> list[str]:
    """In words, what of two run.json is not the same; options come first."""
    found: list[str] = []
    if isinstance(old, dict) and isinstance(new, dict):
        for key in dict.fromkeys((*old, *new)):
            found += differences(old.get(key), new.get(key), f"{where}.{key}".lstrip("."))
    elif old != new and where.startswith("options."):
        there, here = (_as_typed(where.removeprefix("options."), value) for value in (old, new))
        found = [f"there {there}, here {here}"]
    elif old != new:
        texts = [json.dumps(value, ensure_ascii=False) for value in (old, new)]
        begin = max(0, len(commonprefix(texts)) - _BEFORE)  # noqa: RUF071 - characters are meant
        cut = "…" * bool(begin)
        there, here = (
            quoted(text if len(text) <= _SHOWN else cut + text[begin:], _SHOWN) for text in texts
        )
        found = [f"its {printable(where)} is {there}, this one's {here}"]
    return sorted(found, key=lambda words: not words.startswith("there "))


def _as_typed(name: str, value: Any) -> str:
    """An option as one types it: `--layers ReLU`; `none` where one types nothing."""
    if value is None or value == [] or value is (name == "marks"):
        return "none"
    if isinstance(value, bool):
        return quoted(flag(name) if value else f"--no-{name}")
    parts = value if isinstance(value, list) else [value]
    if name in ("ablate", "edit", "tensor_layout"):
        return quoted(" ".join(f"{flag(name)} {part}" for part in parts))
    separator = "x" if name in ("size", "crop") else ","
    return quoted(f"{flag(name)} {separator.join(map(str, parts))}")


def check_rows(rows: Sequence[Capture]) -> None:
    """Refuse rows of `captures` of which one field contradicts another."""
    seen: dict[CaptureKey, int] = {}
    for n, row in enumerate(rows):
        for where, value, expected in _of_row(row):
            shown = quoted(json.dumps(value, ensure_ascii=False), _SHOWN)
            raise ValueError(f"captures[{n}].{where} is {shown}, expected {expected}")
        if (first := seen.setdefault(row.place, n)) != n:
            raise ValueError(f"captures[{n}] is the same tensor as captures[{first}]")


def _of_row(row: Capture) -> Iterator[tuple[str, Any, str]]:
    """The field, its value, and what was expected."""
    for column, ends in _ENDS.items():
        name = getattr(row, column)
        if name is not None and not files.is_inside(name):
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
