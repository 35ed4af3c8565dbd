"""Selectors: which layers does `Conv2d,layer1.*,!*.downsample.*` take? Pure, knows no
torch.

A selector reads, from the outside in:

    ! Conv2d @ layer1.* # ::2
    |    |       |         |
    |    |       |         index or slice into all that match, in model order
    |    |       qualified name: fnmatch, or a regular expression behind `re:`
    |    class name, anywhere in the module's ancestry
    takes away
"""

from __future__ import annotations

import difflib
import fnmatch
import logging
import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from featviz.errors import UsageError
from featviz.records import Layer
from featviz.text import listed, quoted

log = logging.getLogger(__name__)

_INDEX = re.compile(
    r"(?P<body>.*)#(?P<index>-?\d{1,18}|-?\d{,18}:-?\d{,18}(:-?\d{,18})?)$"
)
_REGULAR_EXPRESSION = "re:"
_ITEM = re.compile(r"(?:\\.|\([^)]*\)|\[[^]]*\]|\{[^}]*\}|[^,])+", re.DOTALL)
"""What stands between two commas, with those inside brackets (`re:(a,b)`, `[a,b]*`);
`\\(` opens none."""


@dataclass(frozen=True)
class Selector:
    """One selector, read from its text."""

    text: str
    matches: Callable[[Layer], bool]
    """Whether it speaks of a layer, before the slice is taken."""
    taken: slice
    """Which of the layers that match, in model order."""
    negative: bool
    """Whether it takes layers away."""

    def pick(self, layers: Iterable[Layer]) -> list[Layer]:
        """The layers that this selector speaks of, in model order."""
        return [layer for layer in layers if self.matches(layer)][self.taken]


def parse(text: str) -> list[Selector]:
    """Read selectors separated by commas.

    Args:
        text: commas inside brackets belong to a regular expression. A name with a mark
            of selectors in it (`,`, `#`, `[`) is written with `?` in its place.

    Raises:
        UsageError: one of them cannot be read, or there is none.
    """
    items = [item.strip() for item in _ITEM.findall(text)]
    selectors = [_parse_one(item) for item in items if item]
    if not selectors:
        raise UsageError(
            f"the list {text!r} holds no selector",
            "for example Conv2d,ReLU or layer1.*",
        )
    return selectors


def select(layers: Sequence[Layer], selectors: Sequence[Selector]) -> list[Layer]:
    """The layers that some positive selector takes and no negative one takes away. Only
    negative ones mean all modules but these."""
    included: set[str] = set()
    excluded: set[str] = set()
    for selector in selectors:
        names = excluded if selector.negative else included
        names.update(layer.name for layer in selector.pick(layers))
    # functions are listed only where a selector speaks of them
    if all(selector.negative for selector in selectors):
        included = {layer.name for layer in layers if not layer.is_function}
    return [layer for layer in layers if layer.name in included - excluded]


def of_functions(selectors: Iterable[Selector]) -> list[Selector]:
    """The selectors that speak of functions, which must then be listed beside the
    modules."""
    return [
        selector
        for selector in selectors
        if selector.text.lstrip("! ").startswith("fn:")
    ]


def types_present(layers: Iterable[Layer]) -> str:
    """Class names with their counts, commonest first: `Conv2d 20, BatchNorm2d 20, ReLU
    9`."""
    # without the model itself, which has no name
    counts = Counter(layer.type for layer in layers if layer.name)
    return ", ".join(f"{name} {count}" for name, count in counts.most_common())


def nearest(layers: Iterable[Layer], selectors: Iterable[Selector]) -> list[str]:
    """Class and layer names that misspelt selectors may have meant, at most two for
    each selector; the first layer of that name inside another one, quoted as a glob and
    as it is, where there is one."""
    names: set[str] = set()
    for layer in layers:
        names.update((layer.type, layer.name, *layer.aliases))
    by_lower = {name.lower(): name for name in sorted(names) if name}
    close = {}
    for selector in selectors:
        pattern = selector.text.lstrip("!").removeprefix(_REGULAR_EXPRESSION)
        # tables name a call of a layer `relu.call1`
        name = re.split(r"[@#]|\.call\d", pattern)[0].strip().lower()
        # the model may stand inside another one: `layer4` is `backbone.layer4`
        inner = [
            by_lower[lower] for lower in by_lower if name and lower.endswith(f".{name}")
        ]
        if inner:
            close.update(dict.fromkeys((f"'*{inner[0][-len(name) :]}'", inner[0])))
            continue
        matches = difflib.get_close_matches(name, by_lower, n=2, cutoff=0.7)
        close.update(dict.fromkeys(by_lower[match] for match in matches))
    return list(close)


def meant(layers: Sequence[Layer], selectors: Iterable[Selector]) -> str:
    """What selectors that take no layer may have meant: the indices that there are,
    else the nearest names; empty where nothing is near."""
    unmatched = []
    outside = []
    for selector in selectors:
        count = sum(map(selector.matches, layers))
        body = selector.text.lstrip("! ").rpartition("#")[0]
        if not count:
            unmatched.append(selector)
        elif count == 1:
            outside.append(f"{body} has #0")
        else:
            outside.append(f"{body} has #0 to #{count - 1}")
    if outside:
        return "; ".join(outside)
    close = nearest(layers, unmatched)
    return f"did you mean {' or '.join(close)}?" if close else ""


def warn_of_unmatched(
    layers: Sequence[Layer],
    selectors: Iterable[Selector],
    where: str = "layer",
    option: str = "",
) -> None:
    """Warn of each selector that takes no layer, beside others that do: these are what
    was asked for, and that one is misspelt.

    Args:
        where: what it does not match, `layer of the runs`.
        option: that has the selectors, and its text; empty for --layers.
    """
    beginning = f"{option}: " if option else ""
    for selector in selectors:
        if selector.pick(layers):
            continue
        message = f"selector {quoted(selector.text)!r} matches no {where}"
        suggestion = meant(layers, [selector])
        ending = f"; {suggestion}" if suggestion else ""
        log.warning("%s%s%s", beginning, message, ending)


def remedy(layers: Sequence[Layer], selectors: Iterable[Selector], *facts: str) -> str:
    """A hint for an error where no layer matches: what may be meant, and the types of
    modules (of functions, where there are no modules) with the first names.

    Args:
        layers: that there are.
        selectors: of which some match nothing.
        facts: further statements, which stand between the two.
    """
    question = meant(
        layers, [selector for selector in selectors if not selector.pick(layers)]
    )
    modules = [layer for layer in layers if not layer.is_function] or layers
    names = [f"{layer.name} ({layer.type})" for layer in modules if layer.name]
    types_here = f"types here: {types_present(modules)}"
    statements = "; ".join((*facts, types_here, f"layers here: {listed(names, 3)}"))
    if not question:
        return statements
    return f"{question}{' ' if question.endswith('?') else '; '}{statements}"


def _parse_one(text: str) -> Selector:
    """Read a selector, from the outside in: its mark, its index, its body.

    Raises:
        UsageError: it names no layer, or its index or its body cannot be read.
    """
    negative = text.startswith("!")
    body = text.removeprefix("!").strip()
    taken = slice(None)
    indexed = _INDEX.fullmatch(body)
    if indexed is not None:
        body = indexed["body"]
        taken = _parse_index(indexed["index"])
    if not body:
        raise UsageError(
            f"selector {text!r} names no layer",
            "for example Conv2d, layer1.* or re:^layer[34]",
        )
    return Selector(text, _matcher(text, body), taken, negative)


def _parse_index(text: str) -> slice:
    """Read `3`, `-1`, `::2` or `1:-1`."""
    # a slice of one layer, which may be beyond the end; behind the last one is no number
    if ":" not in text:
        return slice(int(text), int(text) + 1 or None)
    numbers = [int(number) if number else None for number in text.split(":")]
    if numbers[2:] == [0]:
        raise UsageError(f"slice #{text} has a step of 0", "for every second one: #::2")
    return slice(*numbers)


def _matcher(text: str, body: str) -> Callable[[Layer], bool]:
    """What tells the layers of a selector without its mark and index; `text` is for
    messages.

    Raises:
        UsageError: it is a regular expression that cannot be compiled.
    """
    # a regular expression may hold an @ of its own
    class_name, at, pattern = body.partition("@")
    by_class_and_name = bool(at) and not body.startswith(_REGULAR_EXPRESSION)
    if not by_class_and_name:
        class_name = pattern = body
    try:
        if pattern.startswith(_REGULAR_EXPRESSION):
            fits = re.compile(pattern.removeprefix(_REGULAR_EXPRESSION)).search
        else:
            fits = re.compile(fnmatch.translate(pattern)).match
    except re.error as error:
        raise UsageError(
            f"selector {text!r} is no regular expression: {error}",
            "for example re:^layer[34]",
        ) from error

    def is_named(layer: Layer) -> bool:
        return any(fits(name) for name in (layer.owner, *layer.aliases))

    def matches(layer: Layer) -> bool:
        is_of_class = class_name in layer.classes
        if by_class_and_name:
            return is_of_class and is_named(layer)
        # a function has the owner's name, which a pattern alone speaks of as the module
        return is_of_class or (not layer.is_function and is_named(layer))

    return matches
