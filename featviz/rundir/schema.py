"""The types and checks that all records of a run directory share, such as `Capture`, a row
of a manifest.

A record may come from anybody. msgspec checks types, ranges and lengths while it decodes:
this takes a third of the time of json and dataclasses, and its message names the first
field that does not fit. Contradictions between fields are found here."""

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
from featviz.rundir import EXEMPLARS_FILE, MANIFEST_FILE, RUN_FILE, SCHEMA_VERSION
from featviz.text import listed, printable, quoted

GROWING = ("images", "failures", "schema_version")
"""The keys of run.json that are not settings."""
MOST_RECORD = 64 * 2**20
"""The most bytes of a run.json or manifest: enough for half a million images, or rows."""
MOST_MAPS = 2**24
"""The most maps of a tensor: their statistics take 400 MB."""
_LARGEST = max(format.largest for format in FORMATS.values())
"""The largest width or height of a picture, in pixels."""

Text = Annotated[str, Meta(max_length=4096)]
"""A name, or a few words."""
Reason = Annotated[str, Meta(max_length=100_000)]
Count = Annotated[int, Meta(ge=0, le=2**53)]
Pixels = Annotated[int, Meta(ge=1, le=_LARGEST)]
Two = Meta(min_length=2, max_length=2)
Channel = Annotated[int, Meta(ge=0, lt=MOST_MAPS)]
Box = Annotated[
    list[Annotated[int, Meta(ge=0, le=_LARGEST)]], Meta(min_length=4, max_length=4)
]
"""Left, top, width and height in pixels of a picture."""
_Channels = Annotated[list[Channel], Meta(min_length=1)]
_Offset = Annotated[int, Meta(ge=-_LARGEST, le=_LARGEST)]
_SHOWN = 60
"""How many characters of a value a message shows."""
_SHOWN_BEFORE = 20
"""How many characters a message shows before the first one in which two values differ."""
_SUFFIXES = {"file": SUFFIXES, "tensor": (".npy",), "figure": (".png",)}
"""The fields of a row of `captures` that name a file, and the endings of these names."""


class SizeFields(TypedDict):
    """`size` of an image: the size of its file in pixels."""

    width: Annotated[int, Meta(ge=1, le=2**53)]
    height: Annotated[int, Meta(ge=1, le=2**53)]


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
    """How many maps the tensor holds, drawn or not."""
    file: Text
    grid: GridFields
    normalize: Text
    """The scale that was used. Maps of a single number never have a scale each: under
    `map`, too, they share that of the layer."""
    range: Annotated[list[float | None], Two] | None
    """The values that are drawn darkest and brightest; None if each map has its own, its
    min and max in `stats.npz`."""
    min: float | None
    max: float | None
    mean: float | None
    std: float | None
    zero_fraction: Annotated[float, Meta(ge=0, le=1)]
    nonfinite: Count
    channels: _Channels | None = None
    """The channels that were drawn, in tile order; None for all."""
    slices: Annotated[list[Pixels], Two] | None = None
    """How many slices of each channel are drawn, and how many there are. Slices are steps
    of a clip or regions of a batch; their tiles are side by side. None for one slice."""
    steps: list[Count] | None = None
    """The numbers of the drawn slices, from 0; None if all are drawn."""
    tensor: Text | None = None
    """The npy file of the tensor; None if the run did not keep it."""
    constant: Annotated[list[Pixels], Meta(min_length=3, max_length=3)] | None = None
    """Slices, height and width of each map, if all maps are constant: then the picture is
    one strip of their values."""
    collapsed: dict[Text, _Channels] | None = None
    """The channels that share a tile, by the channel that is drawn."""
    reduce: Text | None = None
    """The reduction by which all channels became one tile; None if each channel has a
    tile."""
    overlay: Annotated[float, Meta(ge=0, le=1)] | None = None
    """The opacity of maps over the input; None if they do not lie over it."""
    figure: Text | None = None
    """The file of the figure; None without one."""
    cmap: Text | None = None
    """The colormap of a picture of phases; None for the colormap of the run."""
    receptive_field: (
        Annotated[list[_Offset], Meta(min_length=6, max_length=6)] | None
    ) = None
    """[first, last, step] of rows, then of columns: row i of a map sees the rows of the
    input from first + step · i up to, not including, last + step · i, cut at the edges
    of the input. None if the receptive field is not known."""

    @property
    def capture_key(self) -> CaptureKey:
        """The key of the capture, by which the captures of two runs are matched."""
        return CaptureKey(self.layer, self.kind, self.call, self.key)

    @property
    def label(self) -> str:
        """The name of the layer: `layer1.0.conv1`; for the model itself, its class."""
        return self.layer or self.type

    @property
    def drawn(self) -> list[int]:
        """The channels that have a tile, in the order of the tiles; empty if all channels
        became one tile."""
        if self.reduce is not None:
            return []
        if self.channels is None:
            return [*range(self.maps)]
        return self.channels

    @property
    def slice_count(self) -> int:
        """How many tiles each channel has, side by side."""
        return self.slices[0] if self.slices else 1

    @property
    def drawn_slices(self) -> list[int]:
        """The numbers of the drawn slices, from 0."""
        if self.steps is None:
            return [*range(self.slice_count)]
        return self.steps

    @property
    def plan(self) -> GridPlan:
        """The geometry of the picture."""
        grid = self.grid
        channels = self.maps if self.channels is None else len(self.channels)
        if self.reduce is not None:
            channels = 1
        # a picture of all channels has one tile for each slice
        tiles = channels * self.slice_count
        # a single number is the factor of both directions
        scale = grid["scale"]
        if isinstance(scale, int):
            scale = [scale, scale]
        down, across = scale
        height, width = grid["tile"]
        return GridPlan(
            tiles,
            columns=grid["nrow"],
            rows=-(-tiles // grid["nrow"]),  # rounded up
            map_size=(height // down, width // across),
            scale=(down, across),
            padding=grid["padding"],
        )

    @property
    def size(self) -> tuple[int, int]:
        """Width and height of the picture, in pixels."""
        plan = self.plan
        return plan.width, plan.height

    @property
    def files(self) -> list[str]:
        """The files of the picture and, if they exist, of the tensor and of the figure."""
        names = [getattr(self, column) for column in _SUFFIXES]
        return [name for name in names if name is not None]


OPTIONAL = {field.name for field in fields(Capture) if field.default is None}
"""The fields that a row lacks if their value is None."""


def convert(content: Any, record_type: Any) -> Any:
    """Convert the content of a JSON document to a record.

    Args:
        content: the content, as a JSON reader returns it: objects, lists, text, numbers.
        record_type: a dataclass, or a generic type such as `list[str]`.

    Raises:
        ValueError: the content does not fit. The message, which is msgspec's, names the
            first misfit.
    """
    try:
        return msgspec.convert(content, record_type)
    except msgspec.ValidationError as error:
        raise ValueError(quoted(error)) from None


def check_version(content: Any, expected: int = SCHEMA_VERSION) -> None:
    """Refuse a document of another version than `expected`, or without a version. This
    must be the first check: fields of another version may mean other things.

    Args:
        content: the content of the document, of any JSON type.

    Raises:
        ValueError: the message does not name the document: the caller does.
    """
    version = None
    if isinstance(content, dict):
        version = content.get("schema_version")
    # `type`, since True is an instance of int, and equals 1
    if type(version) is not int:
        raise ValueError(
            f"cannot be read: its schema_version is {quoted(repr(version))}"
        )
    if version != expected:
        raise ValueError(f"has schema version {version}, this featviz reads {expected}")


def read_json(path: Path) -> dict[str, Any]:
    """Read a run.json or a manifest, of a run or of kernels.

    Raises:
        StoreError: the file is missing, a link, too large, not JSON, or of another
            version.
    """
    where = quoted(path)
    folder = quoted(path.parent)
    if path.parent.is_file():
        raise StoreError(
            f"{folder} is a file, not a run directory", "give a folder of `featviz run`"
        )
    # no link in a run directory is followed; the run directory itself may be a link
    if path.is_symlink():
        raise StoreError(
            f"{where} is a link, and links in run directories are not read"
        )
    try:
        content: dict[str, Any] = files.read_json(path, MOST_RECORD)
        check_version(content)
    except FileNotFoundError:
        hint = "give a folder that `featviz run` wrote"
        runs = [str(run.parent) for run in sorted(path.parent.glob(f"*/{RUN_FILE}"))]
        if runs:
            hint = f"give a run: {listed(runs, 4)}"
        if (path.parent / EXEMPLARS_FILE).exists():
            hint = (
                f"exemplars stand beside a run: featviz report RUN --exemplars {folder}"
            )
        if any(path.parent.glob(f"*/{MANIFEST_FILE}")):
            hint = (
                "the same `featviz run` with --resume writes it anew from the images'"
                " manifests"
            )
        raise StoreError(
            f"{folder} is no run directory: it has no {path.name}", hint
        ) from None
    except FileError as error:
        # most messages of FileError begin with the same words
        reason = error.message.removeprefix(f"{where} cannot be read: ")
        raise StoreError(f"{where} cannot be read: {reason}", error.hint) from error
    except ValueError as error:
        raise StoreError(f"{where} {error}") from None
    return content


def fingerprint(record: Mapping[str, Any]) -> str:
    """SHA-256 in hexadecimal of a run's settings. Images with the same fingerprint were
    drawn in the same way."""
    # sorted, so that the order of entries in run.json does not matter
    text = json.dumps(settings_of(record), sort_keys=True, default=str)
    return hashlib.sha256(text.encode("utf-8", "backslashreplace")).hexdigest()


def settings_of(record: Mapping[str, Any]) -> dict[str, Any]:
    """The settings in a run.json: the model, the options and the versions, which stay the
    same during a run."""
    return {key: value for key, value in record.items() if key not in GROWING}


def differences(old: Any, new: Any, where: str = "") -> list[str]:
    """The differences between the settings of two runs: a clause for each entry, options
    first.

    Args:
        old, new: the settings of both runs. This function calls itself with the values
            of one entry.
        where: the keys that lead to this entry, joined by dots; empty for the settings as
            a whole.
    """
    if isinstance(old, dict) and isinstance(new, dict):
        descriptions = []
        for key in dict.fromkeys((*old, *new)):
            entry = f"{where}.{key}".lstrip(".")
            descriptions += differences(old.get(key), new.get(key), entry)
        return sorted(descriptions, key=lambda text: not text.startswith("there "))
    if old == new:
        return []
    if where.startswith("options."):
        option = where.removeprefix("options.")
        return [f"there {_as_typed(option, old)}, here {_as_typed(option, new)}"]
    # the digits of checksums would tell a reader nothing
    if where.endswith(("sha256", ".parameters")):
        return [f"its {where} is another one"]
    old_text = json.dumps(old, ensure_ascii=False)
    new_text = json.dumps(new, ensure_ascii=False)
    # long values, such as a model's repr, are shown from shortly before the difference
    shared = len(commonprefix([old_text, new_text]))  # noqa: RUF071 - characters are meant
    begin = max(0, shared - _SHOWN_BEFORE)
    old_part = _shown_from(old_text, begin)
    return [
        f"its {printable(where)} is {old_part}, this one's"
        f" {_shown_from(new_text, begin)}"
    ]


def _shown_from(text: str, begin: int) -> str:
    """A text for a message: a short one as a whole, a long one from the position `begin`
    on. At most _SHOWN characters are shown."""
    if len(text) > _SHOWN and begin > 0:
        text = "…" + text[begin:]
    return quoted(text, _SHOWN)


def _as_typed(name: str, value: Any) -> str:
    """An option as a user types it: `--layers ReLU`; `the default` for a default value.

    Args:
        name: the name of the option in run.json, such as `tensor_layout`.
        value: its value in run.json.
    """
    # flags are off by default; only --marks is on
    if value is None or value == [] or value is (name == "marks"):
        return "the default"
    if isinstance(value, bool):
        return quoted(flag(name) if value else f"--no-{name}")
    values = value if isinstance(value, list) else [value]
    if name in ("ablate", "edit", "tensor_layout"):  # typed once for each value
        return quoted(" ".join(f"{flag(name)} {item}" for item in values))
    separator = "x" if name in ("size", "crop") else ","
    return quoted(f"{flag(name)} {separator.join(map(str, values))}")


def check_rows(rows: Sequence[Capture]) -> None:
    """Refuse rows of `captures` whose fields contradict one another, and two rows of one
    tensor.

    Raises:
        ValueError: the message names the first such field, its value and what was
            expected; or the two rows.
    """
    row_numbers: dict[CaptureKey, int] = {}
    for number, row in enumerate(rows):
        for field, expected in _misfits(row):
            value = json.dumps(getattr(row, field), ensure_ascii=False)
            raise ValueError(
                f"captures[{number}].{field} is {quoted(value, _SHOWN)}, expected"
                f" {expected}"
            )
        first = row_numbers.setdefault(row.capture_key, number)
        if first != number:
            raise ValueError(
                f"captures[{number}] is the same tensor as captures[{first}]"
            )


def _misfits(row: Capture) -> Iterator[tuple[str, str]]:
    """Find the fields of a row that contradict another field, or that name a file outside
    the image's folder or with a wrong ending.

    Yields:
        The name of the field, and what was expected, such as `each channel once`.
    """
    # a manifest from elsewhere must not lead a reader out of the image's folder
    for column, suffixes in _SUFFIXES.items():
        name = getattr(row, column)
        if name is None:
            continue
        if not files.is_inside(name):
            yield column, "a file inside the image's folder"
        if not name.endswith(suffixes):
            yield column, f"a name that ends in {' or '.join(suffixes)}"
    yield from _misfits_of_channels(row)
    yield from _misfits_of_slices(row)
    if 0 in row.plan.map_size:
        yield "grid", "a scale that is no more than the tile"
    if max(row.size) > _LARGEST:
        yield "grid", f"a picture of at most {_LARGEST} pixels a side"


def _misfits_of_channels(row: Capture) -> Iterator[tuple[str, str]]:
    """Find misfits, as `_misfits` does, in the fields on channels: a channel that does not
    exist, is drawn twice, or shares the tile of a channel that is not drawn."""
    channels = row.channels or [0]
    if max(channels) >= row.maps or len(set(channels)) < len(channels):
        yield "channels", f"each channel once, less than maps ({row.maps})"
    if row.collapsed is None:
        return
    # keys are compared as text: int() of thousands of digits would take long, or raise
    drawn = set(map(str, row.drawn))
    for name, group in row.collapsed.items():
        if name not in drawn or max(group) >= row.maps:
            yield "collapsed", f"drawn channels, and others less than maps ({row.maps})"


def _misfits_of_slices(row: Capture) -> Iterator[tuple[str, str]]:
    """Find misfits, as `_misfits` does, in the fields on slices: more slices are drawn than
    there are; `steps` has another count, or is not in rising order; or a step is none of
    the slices."""
    drawn, total = row.slices or (1, 1)
    if drawn > total:
        yield "slices", "no more drawn than there are"
    steps = row.steps
    if steps is not None and (len(steps) != drawn or sorted(set(steps)) != steps):
        yield "steps", f"each of the {drawn} drawn slices once, in order"
    elif steps and steps[-1] >= total:
        yield "steps", f"less than slices ({total})"
