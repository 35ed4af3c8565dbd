"""Pictures that are shown with the maps of a layer: kernels, suspects of an audit,
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
    """A tile of a picture, and the text below it."""

    box: TileBox
    text: str


class TiledPicture(NamedTuple):
    """A picture of which a page shows only the tiles."""

    view: PictureView
    tiles: Sequence[CaptionedTile]


@dataclass(frozen=True)
class Extra:
    """A picture that is shown with the maps of a layer."""

    title: str
    text: str
    picture: PictureView
    boxes: Mapping[int, TileBox] = field(default_factory=dict)
    """Where channels are in the picture; of kernels."""
    pictures: Mapping[int, TiledPicture] = field(default_factory=dict)
    """Pictures of single channels; of exemplars."""
    key: ColorKey | None = None
    tiles: Sequence[TileBox] = ()
    """Where all tiles are. They keep their colours on a dark page, which inverts the white
    paper around them."""
    suspects: Sequence[SuspectRow] = ()
    """The rows of a picture of suspects. A page shows their tiles in place of the picture,
    which is white, and wider than a phone."""

    def channels_json(self, links: Links) -> str:
        """The channels as JSON for the script: by channel its box in the picture, [left,
        top, width, height], or an object with the picture of the channel and its tiles.

        Args:
            links: of the report, for the addresses of pictures.
        """
        channels: dict[int, Any] = dict(self.boxes)
        # in one file each picture would be text, and the sheet shows all channels anyway
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
