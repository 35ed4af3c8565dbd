"""Samples of several files: the frames of clips, and images that a model takes together."""

from __future__ import annotations

import io
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import PurePath, PurePosixPath

from featviz.errors import UsageError
from featviz.files import real
from featviz.files.urls import Remote
from featviz.images import archives
from featviz.images.archives import Place
from featviz.images.find import told_apart
from featviz.images.formats import of_channels, open_image
from featviz.records import Sample
from featviz.text import is_number, safe_way


def clips(samples: Sequence[Sample]) -> list[Sample]:
    """Stills of one folder are the frames of one clip, in the order of the numbers in their
    names; an animation is a clip of its own, and so is an array, which is a volume."""
    folders: dict[PurePath, list[Sample]] = {}
    animations: list[Sample] = []
    for sample in samples:
        if _is_whole(sample.path):
            animations.append(sample)
        else:
            folders.setdefault(_spelt(sample.path).parent, []).append(sample)
    found = animations + [_clip(folder, frames) for folder, frames in folders.items()]

    def parts(number: int) -> tuple[str, ...]:
        path = _spelt(found[number].path)
        return (path.parent if len(found[number].paths) > 1 else path).parts[1:]

    names = told_apart({number: clip.name for number, clip in enumerate(found)}, parts)
    return [replace(clip, name=names[number]) for number, clip in enumerate(found)]


def together(samples: Sequence[Sample], count: int) -> list[Sample]:
    """Consecutive images in groups of `count`, named `a.png+b.png`.

    Raises:
        UsageError: some are left over.
    """
    if len(samples) % count:
        raise UsageError(
            f"the model takes {count} images at once, and there are {len(samples)}",
            f"give a multiple of {count}; --inputs says otherwise, and "
            "--forward-arg NAME=VALUE gives "
            "an argument that is no image",
        )
    joined = []
    for group in (samples[i : i + count] for i in range(0, len(samples), count)):
        names = [group[0].name, *(PurePosixPath(sample.name).name for sample in group[1:])]
        paths = tuple(path for sample in group for path in sample.paths)
        joined.append(Sample("+".join(names), paths))
    return joined


def unnested(samples: Sequence[Sample]) -> list[Sample]:
    """Rename samples whose folder would lie inside another sample's, or be the same: `a` beside
    `a/b` becomes `a~`."""

    def folder(name: str) -> str:  # that the name leads to, on any system
        return safe_way(name).casefold()

    taken = {folder(sample.name) for sample in samples}
    above = {str(parent) for path in taken for parent in PurePosixPath(path).parents}
    renamed: list[Sample] = []
    seen: set[str] = set()
    for sample in samples:
        name = sample.name
        if folder(name) in above or folder(name) in seen:
            while folder(name) in taken:
                name += "~"
            taken.add(folder(name))
        seen.add(folder(name))
        renamed.append(replace(sample, name=name))
    return renamed


def natural_key(name: str) -> list[tuple[int, str]]:
    """Sorts `frame2` before `frame10`, and both before `frames`."""
    return [(int(part), "") if is_number(part) else (-1, part) for part in re.split(r"(\d+)", name)]


def _clip(folder: PurePath, frames: Sequence[Sample]) -> Sample:
    ordered = sorted(frames, key=lambda frame: natural_key(frame.path.name))
    above = PurePosixPath(frames[0].name).parent
    name = frames[0].name if len(frames) == 1 else folder.name
    name = str(above) if above.name else name
    return Sample(name or "clip", tuple(frame.path for frame in ordered))


def _spelt(path: Place) -> PurePath:
    """One absolute spelling of where a file is, also in a store."""
    return PurePosixPath("/", path.place) if isinstance(path, Remote) else real(path)


def _is_whole(path: Place) -> bool:
    """Whether a file is a clip or a volume of its own, not one frame of a clip."""
    try:
        data = archives.read(path)
        known = of_channels(data)
        if known is not None and not known.pillow:
            return True
        with open_image(io.BytesIO(data)) as image:
            return getattr(image, "n_frames", 1) > 1 and image.format != "MPO"
    except Exception:  # whatever is wrong with it, reading it will say so
        return False
