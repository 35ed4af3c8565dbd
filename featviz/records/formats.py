"""The formats of picture files, one record each."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class PictureFormat:
    """A format in which pictures of feature maps are written and read back."""

    name: str
    """What `--format` takes, and the ending of its files."""
    pillow: str
    """Pillow's name of it."""
    mime: str
    largest: int
    """Pixels that a picture may have in one direction."""
    save: Mapping[str, object] | None
    """Options with which Pillow writes it; None for PNG, which our own encoder writes."""
    lossless: bool = True
    grey: bool = True
    """Whether a picture of greys is written as such, instead of as RGB."""
    levels: bool = False
    """Whether the pixels that are read back are the levels that were drawn."""
    comment: str | None = None
    """Pillow's option for a text in the file; None where it has no place for one."""
    needs: str = ""
    """Which Pillow writes it, where an older one does not."""

    @property
    def suffix(self) -> str:
        """`.png`"""
        return f".{self.name}"

    @property
    def words(self) -> str:
        """For help texts."""
        return "lossless" if self.lossless else "with losses"


_LISTED = (
    PictureFormat("png", "PNG", "image/png", 2**31 - 1, save=None, levels=True),
    PictureFormat(
        *("webp", "WEBP", "image/webp", 16_383),
        save={"lossless": True},
        grey=False,
    ),
    PictureFormat(
        *("jpg", "JPEG", "image/jpeg", 65_500),
        save={"quality": 95, "subsampling": 0},
        lossless=False,
        comment="comment",
    ),
    PictureFormat(
        *("avif", "AVIF", "image/avif", 32_768),  # what libavif reads
        save={"quality": 95, "subsampling": "4:4:4", "speed": 8},
        lossless=False,
        needs="pip install 'pillow>=11.3'",
    ),
)
FORMATS = {format.name: format for format in _LISTED}
"""By name; `--format`, the encoder, the reader of run directories and the report read it."""

SUFFIXES = tuple(format.suffix for format in FORMATS.values())
