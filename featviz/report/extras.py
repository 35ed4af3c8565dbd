"""Pictures that stand with the maps of a layer: kernels, suspects of an audit,
exemplars."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import msgspec

from featviz.report.color_keys import ColorKey
from featviz.report.links import Links, PictureView
from featviz.rundir.studies import DrawnSuspect


class TileBox(NamedTuple):
    """A rectangle in pixels of a picture, as its file has them."""

    left: int
    top: int
    width: int
    height: int


class SuspectRow(NamedTuple):
    """A suspect, and what the colours of its maps mean."""

    suspect: DrawnSuspect
    key: ColorKey


class CaptionedTile(NamedTuple):
    """A tile of a picture, and what stands below it."""

    box: TileBox
    text: str


class TiledPicture(NamedTuple):
    """A picture of which a page shows the tiles alone."""

    view: PictureView
    tiles: Sequence[CaptionedTile]


@dataclass(frozen=True)
class Extra:
    """A picture that stands with the maps of a layer."""

    title: str
    text: str
    picture: PictureView
    boxes: Mapping[int, TileBox] = field(default_factory=dict)
    """Where channels are in the picture."""
    pictures: Mapping[int, TiledPicture] = field(default_factory=dict)
    """Pictures of single channels."""
    key: ColorKey | None = None
    tiles: Sequence[TileBox] = ()
    """What keeps its colours on a dark page, where the white paper around it is
    inverted."""
    suspects: Sequence[SuspectRow] = ()
    """Rows of a picture of suspects, which a page sets anew: the picture has white paper,
    and is wider than a phone."""

    def channels_json(self, links: Links) -> str:
        """What the script knows of the channels, as JSON: where they are in the picture, or
        the tiles of their own pictures, which a report of one file does not have.

        Args:
            links: of the report, which say where pictures are.
        """
        # a box is [left, top, width, height], a picture an object
        channels: dict[int, Any] = dict(self.boxes)
        # in one file each would be in base64, and a sheet shows them all already
        if not links.inline:
            for channel, picture in self.pictures.items():
                width, height = picture.view.size
                channels[channel] = {
                    "src": links.picture(picture.view),
                    "width": width,
                    "height": height,
                    "tiles": picture.tiles,
                }
        return msgspec.json.encode(channels).decode()
