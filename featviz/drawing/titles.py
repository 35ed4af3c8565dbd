"""A line of text above a grid, so that grids that were copied out of a run can be told apart."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from featviz.drawing import grid, labels
from featviz.drawing.levels import ValueLimits
from featviz.drawing.picture import GridPicture
from featviz.records import Site
from featviz.text import by, cut, printable

_GAP, _MARK = "  ", ".."
"""Between two parts of a title, and in place of the middle of a name."""
_SHORTEST = 16
"""Letters that a shortened name keeps before shape or scale is left out."""


def titled(
    picture: GridPicture, site: Site, shape: Sequence[int], format: str, image: str | None = None
) -> GridPicture:
    """The picture with a title above its tiles: image, layer, shape and scale.

    Names are shortened in the middle until the title fits the picture; where that is not enough,
    the scale is left out, then the shape, then the image. A letter that is not in Latin-1 becomes a
    question mark: Pillow's bitmap font has no others.

    Args:
        shape: of the tensor.
        format: of `records.FORMATS`, which the picture is written in.
        image: its name, where there is one.

    Raises:
        LayoutError: the picture is now larger than its format can hold.
    """
    plan = replace(picture.plan, top=labels.LINE)
    grid.check_held(plan, format)
    names = [*([] if image is None else [image]), _layer(site)]
    names = [_latin(printable(name)) for name in names]
    title = fitted(names, [by(shape), _scale(picture.limits)], (plan.width - 1) // labels.LETTER)
    return replace(picture, plan=plan, title=title)


def fitted(names: Sequence[str], further: Sequence[str], letters: int) -> str:
    """Names and further words in one line of at most so many letters; the last name is the
    last to be left out.

    Example:
        >>> fitted(["cat.jpg", "layer1.0.conv1"], ["1×64×56×56"], 40)
        'cat.jpg  layer1.0.conv1  1×64×56×56'
        >>> fitted(["a_photograph_of_a_cat.jpg", "layer1.0.conv1"], ["1×64×56×56"], 42)
        'a_pho..cat.jpg  layer1.0.conv1  1×64×56×56'
    """
    choices = [(names, further[:count], _SHORTEST) for count in range(len(further), 0, -1)]
    for chosen, rest, least in [*choices, (names, [], len(_MARK) + 2), (names[-1:], [], 0)]:
        gaps = len(_GAP) * (len(chosen) + len(rest) - 1)
        shares = _shares(list(map(len, chosen)), letters - sum(map(len, rest)) - gaps)
        pairs = list(zip(chosen, shares, strict=True))
        if all(share >= min(len(name), least) for name, share in pairs):
            break
    return _GAP.join([*(_short(name, share) for name, share in pairs), *rest])


def _shares(lengths: Sequence[int], room: int) -> list[int]:
    """The letters that each name gets: short ones all of theirs, long ones equal parts."""
    shares = [0] * len(lengths)
    order = sorted(range(len(lengths)), key=lambda place: lengths[place])
    for done, place in enumerate(order):
        shares[place] = max(0, min(lengths[place], room // (len(order) - done)))
        room -= shares[place]
    return shares


def _short(name: str, letters: int) -> str:
    if letters < len(_MARK) + 2:
        return name[:letters]
    return name if len(name) <= letters else cut(name, letters - len(_MARK), _MARK)


def _layer(site: Site) -> str:
    """`layer1.0.conv1`, with what else tells its tensor: `relu output.call1`, `conv1 grad`."""
    return site.layer.label if site.stem == "output" else f"{site.layer.label} {site.stem}"


def _scale(limits: ValueLimits) -> str:
    if limits.shared is None:
        return f"scale: {limits.mode}"
    low, high = limits.shared
    return f"scale: {limits.mode}, {low:.4g} to {high:.4g}"


def _latin(words: str) -> str:
    return words.encode("latin-1", "replace").decode("latin-1")
