"""Selectors, which choose layers: `Conv2d,layer1.*,!*.downsample.*`. This module does not
import torch.

The parts of a selector are:

    ! Conv2d @ layer1.* # ::2
    |    |       |         |
    |    |       |         index or slice into all that match, in model order
    |    |       qualified name: fnmatch, or a regular expression after `re:`
    |    name of the module's class or of one of its base classes
    these layers are left out
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
"""One selector in a list. A comma ends it, unless it is inside brackets (`re:(a,b)`,
`[a,b]*`); `\\(` is no bracket."""


@dataclass(frozen=True)
class Selector:
    """One selector, read from its text."""

    text: str
    matches: Callable[[Layer], bool]
    """Whether a layer fits the class and the name in the selector."""
    taken: slice
    """Which of the layers that match are chosen, in model order."""
    negative: bool
    """Whether the chosen layers are left out (`!`)."""

    def pick(self, layers: Iterable[Layer]) -> list[Layer]:
        """The layers that this selector chooses, in model order."""
        return [layer for layer in layers if self.matches(layer)][self.taken]


def parse(text: str) -> list[Selector]:
    """Read selectors separated by commas.

    Args:
        text: The selectors. A comma inside brackets belongs to a regular expression. If
            the name of a layer has a mark of selectors in it (`,`, `#`, `[`), the user
            writes `?` for the mark.

    Raises:
        UsageError: A selector cannot be read, or there is none.
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
    """The layers that at least one positive selector chooses and no negative one. If all
    selectors are negative, all other modules are chosen."""
    included: set[str] = set()
    excluded: set[str] = set()
    for selector in selectors:
        names = excluded if selector.negative else included
        names.update(layer.name for layer in selector.pick(layers))
    # functions are only chosen by a positive selector
    if all(selector.negative for selector in selectors):
        included = {layer.name for layer in layers if not layer.is_function}
    return [layer for layer in layers if layer.name in included - excluded]


def of_functions(selectors: Iterable[Selector]) -> list[Selector]:
    """The selectors that choose functions. For these, the functions of the model must be
    listed, too."""
    return [
        selector
        for selector in selectors
        if selector.text.lstrip("! ").startswith("fn:")
    ]


def types_present(layers: Iterable[Layer]) -> str:
    """The class names of layers with their counts, the most frequent first: `Conv2d 20,
    BatchNorm2d 20, ReLU 9`."""
    # without the model itself, which has no name
    counts = Counter(layer.type for layer in layers if layer.name)
    return ", ".join(f"{name} {count}" for name, count in counts.most_common())


def nearest(layers: Iterable[Layer], selectors: Iterable[Selector]) -> list[str]:
    """The names of classes and layers that misspelt selectors may mean, at most two for each
    selector. If a layer inside another one ends in the selector's name (`layer4` for
    `backbone.layer4`), it is named as a glob, `'*layer4'`, and in full."""
    names: set[str] = set()
    for layer in layers:
        names.update((layer.type, layer.name, *layer.aliases))
    by_lower = {name.lower(): name for name in sorted(names) if name}
    close = {}
    for selector in selectors:
        pattern = selector.text.lstrip("!").removeprefix(_REGULAR_EXPRESSION)
        # users copy names from tables, where a call of a layer is `relu.call1`
        name = re.split(r"[@#]|\.call\d", pattern)[0].strip().lower()
        # the model may be a part of another: `layer4` is `backbone.layer4`
        inner = [
            by_lower[lower] for lower in by_lower if name and lower.endswith(f".{name}")
        ]
        if inner:
            close.update(dict.fromkeys((f"'*{inner[0][-len(name) :]}'", inner[0])))
            continue
        matches = difflib.get_close_matches(name, by_lower, n=2, cutoff=0.7)
        close.update(dict.fromkeys(by_lower[match] for match in matches))
    return list(close)


def suggest(layers: Sequence[Layer], selectors: Iterable[Selector]) -> str:
    """A suggestion for selectors that choose no layer. If an index is too large, it names the
    indices that exist; else the most similar names. Empty if there are none."""
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
    """Warn of each selector that chooses no layer, since it may be misspelt. (If none of
    them chooses a layer, the caller raises an error with `remedy`.)

    Args:
        layers: The layers of the model or run.
        selectors: The selectors.
        where: What the layers are, for the message: `layer of the runs`.
        option: The option with the selectors and its text, for the message; empty for
            --layers.
    """
    beginning = f"{option}: " if option else ""
    for selector in selectors:
        if selector.pick(layers):
            continue
        message = f"selector {quoted(selector.text)!r} matches no {where}"
        suggestion = suggest(layers, [selector])
        ending = f"; {suggestion}" if suggestion else ""
        log.warning("%s%s%s", beginning, message, ending)


def remedy(layers: Sequence[Layer], selectors: Iterable[Selector], *facts: str) -> str:
    """The hint of an error for selectors that choose no layer: what they may mean, and the
    types and the first names of the modules. If there are no modules, those of functions.

    Args:
        layers: The layers of the model or run.
        selectors: The selectors, of which some choose nothing.
        facts: Further statements for the hint, which follow the suggestion.
    """
    question = suggest(
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
    """Read one selector: its `!`, its index, and its class or name.

    Raises:
        UsageError: It has no class or name, or a part of it cannot be read.
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
    """Read the index of a selector, `3`, `-1`, `::2` or `1:-1`, as a slice.

    Raises:
        UsageError: Where its step is 0.
    """
    # A single index becomes a slice, which may be empty without an error. After -1, the
    # end is None: 0 would be the beginning.
    if ":" not in text:
        return slice(int(text), int(text) + 1 or None)
    numbers = [int(number) if number else None for number in text.split(":")]
    if numbers[2:] == [0]:
        raise UsageError(f"slice #{text} has a step of 0", "for every second one: #::2")
    return slice(*numbers)


def _matcher(text: str, body: str) -> Callable[[Layer], bool]:
    """A function that says whether a layer fits a selector.

    Args:
        text: The selector, for messages.
        body: The selector without its `!` and index.

    Raises:
        UsageError: Where `body` is a regular expression that cannot be compiled.
    """
    # in a regular expression, @ does not separate class and name
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
        # the owner of a function has the same name: a name without a class is the owner's
        return is_of_class or (not layer.is_function and is_named(layer))

    return matches
