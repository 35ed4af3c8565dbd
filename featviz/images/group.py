"""Samples of several files: the frames of clips, and images that a model takes together."""

from __future__ import annotations

import io
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import PurePath, PurePosixPath

from featviz.errors import UsageError
from featviz.files import real
from featviz.files.stores import Remote
from featviz.images import archives
from featviz.images.archives import Place
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
    return _told_apart(animations + [_clip(folder, frames) for folder, frames in folders.items()])


def together(samples: Sequence[Sample], count: int) -> list[Sample]:
    """Consecutive images in groups of `count`, named `a.png+b.png`.

    Raises:
        UsageError: some are left over.
    """
    if len(samples) % count:
        raise UsageError(
            f"the model takes {count} images at once, and there are {len(samples)}",
            f"give a multiple of {count}; --inputs says otherwise, and --input NAME=VALUE gives "
            "an argument that is no image",
        )
    return [_join(samples[i : i + count]) for i in range(0, len(samples), count)]


def unnested(samples: Sequence[Sample]) -> list[Sample]:
    """Rename samples whose folder would lie inside another sample's, or be the same: `a` beside
    `a/b` becomes `a~`."""
    taken = {_folder(sample.name) for sample in samples}
    above = {str(parent) for way in taken for parent in PurePosixPath(way).parents}
    renamed: list[Sample] = []
    seen: set[str] = set()
    for sample in samples:
        way = _folder(sample.name)
        if way in above or way in seen:
            sample = replace(sample, name=_free(sample.name, taken))
            taken.add(_folder(sample.name))
        seen.add(way)
        renamed.append(sample)
    return renamed


def natural_key(name: str) -> list[tuple[int, str]]:
    """Sorts `frame2` before `frame10`, and both before `frames`."""
    return [(int(part), "") if is_number(part) else (-1, part) for part in re.split(r"(\d+)", name)]


def _folder(name: str) -> str:
    """The folder that a sample's name leads to, on any system."""
    return safe_way(name).casefold()


def _free(name: str, taken: set[str]) -> str:
    while _folder(name) in taken:
        name += "~"
    return name


def _clip(folder: PurePath, frames: Sequence[Sample]) -> Sample:
    ordered = sorted(frames, key=lambda frame: natural_key(frame.path.name))
    name = PurePosixPath(frames[0].name).parent
    without_folder = frames[0].name if len(frames) == 1 else folder.name
    return Sample(
        str(name if name.name else without_folder) or "clip", tuple(f.path for f in ordered)
    )


def _told_apart(samples: Sequence[Sample]) -> list[Sample]:
    """Names that clash get parent folders in front; what only case tells apart gets a number."""
    counts = Counter(sample.name.casefold() for sample in samples)
    longer = [s if counts[s.name.casefold()] == 1 else _longer(s) for s in samples]
    if all(count == 1 for count in counts.values()):
        return list(samples)
    if longer == list(samples):
        return [replace(s, name=f"{i}/{s.name}") for i, s in enumerate(samples)]
    return _told_apart(longer)


def _longer(sample: Sample) -> Sample:
    """The sample with one more real parent folder in its name, if there is one."""
    path = _spelt(sample.path)
    place = path.parent if len(sample.paths) > 1 else path
    return replace(sample, name="/".join(place.parts[1:][-(sample.name.count("/") + 2) :]))


def _spelt(path: Place) -> PurePath:
    """One absolute spelling of where a file is, also in a store."""
    return PurePosixPath("/", path.place) if isinstance(path, Remote) else real(path)


def _join(group: Sequence[Sample]) -> Sample:
    names = [group[0].name, *(PurePosixPath(sample.name).name for sample in group[1:])]
    return Sample("+".join(names), tuple(path for sample in group for path in sample.paths))


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
