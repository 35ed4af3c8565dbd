"""Further pictures that a page shows with the maps of a layer: kernels, suspects of an
audit, exemplars."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import msgspec

from featviz.report.color_keys import ColorKey
from featviz.report.links import Links, PictureView
from featviz.rundir.studies import DrawnSuspect


class TileBox(NamedTuple):
    """A rectangle in a picture, in pixels of its file."""

    left: int
    top: int
    width: int
    height: int


class SuspectRow(NamedTuple):
    """A suspect, and the colour key of its maps."""

    suspect: DrawnSuspect
    key: ColorKey


class CaptionedTile(NamedTuple):
    """A tile of a picture, and the text below it."""

    box: TileBox
    text: str


class TiledPicture(NamedTuple):
    """A picture of which a page shows only the tiles."""

    view: PictureView
    tiles: Sequence[CaptionedTile]


@dataclass(frozen=True)
class Extra:
    """A further picture that is shown with the maps of a layer."""

    title: str
    text: str
    """What the picture shows, for the line below the title."""
    picture: PictureView
    boxes: Mapping[int, TileBox] = field(default_factory=dict)
    """For kernels: the place of each channel in the picture."""
    pictures: Mapping[int, TiledPicture] = field(default_factory=dict)
    """For exemplars: the picture of each single channel."""
    key: ColorKey | None = None
    tiles: Sequence[TileBox] = ()
    """The places of all tiles. On a dark page, tiles keep their colours, while the white
    paper around them is inverted."""
    suspects: Sequence[SuspectRow] = ()
    """For suspects: the rows of the picture. A page shows the tiles of these rows instead
    of the picture, which is white, and wider than the screen of a phone."""

    def channels_json(self, links: Links) -> str:
        """The channels as JSON for the script. By channel, it has the place in the picture,
        [left, top, width, height]; or an object with the channel's own picture, and the
        tiles in it.

        Args:
            links: the addresses of pictures in the report.
        """
        channels: dict[int, Any] = dict(self.boxes)
        # a report in one file leaves out single channels, since the sheet shows them all
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
