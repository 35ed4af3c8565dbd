"""Pictures that stand with the maps of a layer: kernels, suspects of an audit,
exemplars."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import msgspec

from featviz.report.color_keys import ColorKey
from featviz.report.links import Links, PictureView


class TileBox(NamedTuple):
    """A rectangle in pixels of a picture, as its file has them."""

    left: int
    top: int
    width: int
    height: int


@dataclass(frozen=True)
class Extra:
    """A picture that stands with the maps of a layer."""

    title: str
    text: str
    picture: PictureView
    boxes: Mapping[int, TileBox] = field(default_factory=dict)
    """Where channels are in the picture."""
    pictures: Mapping[int, PictureView] = field(default_factory=dict)
    """Pictures of single channels."""
    key: ColorKey | None = None

    def channels_json(self, links: Links) -> str:
        """What the script knows of the channels, as JSON: where they are in the picture, or
        the addresses of their own pictures, which a report of one file does not have.

        Args:
            links: of the report, which say where pictures are.
        """
        # a box is [left, top, width, height], a picture an object
        channels: dict[int, Any] = dict(self.boxes)
        # in one file each would be in base64, and a sheet shows them all already
        if not links.inline:
            for channel, view in self.pictures.items():
                width, height = view.size
                channels[channel] = {
                    "src": links.picture(view),
                    "alt": view.alt,
                    "width": width,
                    "height": height,
                }
        return msgspec.json.encode(channels).decode()
