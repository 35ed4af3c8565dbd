"""Match two runs: what both have, what only one has, and whether they may be compared at all.

Images are matched by name, tensors by layer, kind, call and key.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from featviz.errors import CompareError
from featviz.records import Place
from featviz.rundir.image import DamagedError, ReadImage
from featviz.rundir.read import ReadRun
from featviz.rundir.schema import CaptureRow
from featviz.text import by, listed

_NAMED = 3
"""How many images or layers a refusal names."""


@dataclass(frozen=True)
class TensorPair:
    """One tensor in both runs."""

    image: str
    place: Place
    base: CaptureRow
    new: CaptureRow


@dataclass(frozen=True)
class OnlyIn:
    """The images and layers that one run has and the other has not."""

    images: Mapping[str, str] = field(default_factory=dict)
    """What became of each image, by name, in the other run."""
    places: Mapping[tuple[Place, str], str] = field(default_factory=dict)
    """What became of each (place, type of the layer) in the other run."""

    def __bool__(self) -> bool:
        return bool(self.images or self.places)


@dataclass(frozen=True)
class Pairing:
    """The images and places of two runs, matched."""

    images: tuple[str, ...]
    """Names of the images that both have, in the order of BASE."""
    order: tuple[Place, ...]
    """Places of BASE in the order in which the model came to them."""
    only_in_base: OnlyIn
    only_in_new: OnlyIn


def pair_up(base: ReadRun, new: ReadRun) -> Pairing:
    """Match two runs.

    Raises:
        CompareError: they have no image or no layer in common.
    """
    images = tuple(name for name in base.images if name in new.images)
    if not images:
        raise CompareError(
            f"no image is in both runs: BASE has {_few(base.images)}, NEW has {_few(new.images)}",
            "compare runs of the same images",
        )
    order = _places(base, images)
    both = set(_places(new, images)) & set(order)
    if not both:
        raise CompareError(
            f"no layer is in both runs: BASE has {_few(_layers(base, images))}, "
            f"NEW has {_few(_layers(new, images))}",
            "compare runs with the same --layers",
        )
    return Pairing(images, order, _only_in(base, new, images), _only_in(new, base, images))


def tensor_pairs(base: ReadImage, new: ReadImage) -> Iterator[TensorPair]:
    """The tensors of an image that both runs have."""
    for place, row in base.captures.items():
        if place in new.captures:
            yield TensorPair(base.name, place, row, new.captures[place])


def check_alike(base: ReadRun, new: ReadRun) -> list[DamagedError]:
    """Check that two runs showed their models the same pictures, and drew on the same scale.

    Returns:
        The errors of images whose input.png cannot be read, and so cannot be checked.

    Raises:
        CompareError: the runs differ in one of these; names it.
    """
    damage: list[DamagedError] = []
    for reason in (*_unlike_options(base, new), *_unlike_images(base, new, damage)):
        raise CompareError(
            f"these runs cannot be compared: {reason}",
            "run both with the same images, preprocessing and --normalize",
        )
    return damage


def _unlike_options(base: ReadRun, new: ReadRun) -> Iterator[str]:
    for name, what in (("preprocessing", "preprocessing"), ("normalize", "scale mode")):
        old, now = (_option(run, name) for run in (base, new))
        if old != now:
            yield f"the {what} is {old!r} in BASE and {now!r} in NEW"


def _option(run: ReadRun, name: str) -> object:
    value: object = run.record.get(name, (run.record.get("options") or {}).get(name))
    return value


def _unlike_images(base: ReadRun, new: ReadRun, damage: list[DamagedError]) -> Iterator[str]:
    """Why images cannot be compared, one reason after the other."""
    both = [(one, new.images[name]) for name, one in base.images.items() if name in new.images]
    other = [a.name for a, b in both if a.manifest.image.sha256 != b.manifest.image.sha256]
    if other:
        yield f"{_few(other)} is another file in NEW (its sha256 differs)"
    for a, b in both:
        old, now = a.manifest.input, b.manifest.input
        if old.shape != now.shape:
            yield f"the input made of {a.name} is {_shape(a)} in BASE and {_shape(b)} in NEW"
        if old.preprocessing != now.preprocessing:
            yield (
                f"the preprocessing of {a.name} is {old.preprocessing!r} in BASE "
                f"and {now.preprocessing!r} in NEW"
            )
        try:
            unlike = _unlike_pixels(a.shown(), b.shown())
        except DamagedError as error:
            damage.append(error)
            continue
        if unlike:
            yield f"what the model saw of {a.name} (input.png) has other pixels in NEW"


def _unlike_pixels(base: np.ndarray, new: np.ndarray) -> bool:
    """Whether pixels differ by more than the one level that resizing varies by between machines."""
    if base.shape != new.shape:
        return True
    return bool(np.abs(base.astype(np.int16) - new).max(initial=0) > 1)


def _only_in(one: ReadRun, other: ReadRun, images: Iterable[str]) -> OnlyIn:
    lacking = {name: _fate(other, name) for name in one.images if name not in other.images}
    places: dict[tuple[Place, str], str] = {}
    for name in images:
        there = other.images[name]
        for place, row in one.images[name].captures.items():
            if place not in there.captures:
                places.setdefault((place, row.type), _reason(there, place))
    return OnlyIn(lacking, places)


def _fate(run: ReadRun, image: str) -> str:
    if image in run.failures:
        return f"failed: {run.failures[image]}"
    return "incomplete" if image in run.left_out else "not there"


def _reason(image: ReadImage, place: Place) -> str:
    for skip in image.manifest.skipped:
        if (skip.layer, skip.kind, skip.call) == (place.layer, place.kind, place.call):
            return f"skipped: {skip.reason}"
    return "never ran" if place.layer in image.manifest.never_ran else "not there"


def _places(run: ReadRun, images: Sequence[str]) -> tuple[Place, ...]:
    return tuple(dict.fromkeys(p for name in images for p in run.images[name].captures))


def _layers(run: ReadRun, images: Sequence[str]) -> list[str]:
    return list(dict.fromkeys(place.layer for place in _places(run, images)))


def _few(names: Iterable[str]) -> str:
    return listed(list(names), _NAMED) or "none"


def _shape(image: ReadImage) -> str:
    return by(image.manifest.input.shape)
