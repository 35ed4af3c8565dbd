"""Selectors: which layers does `Conv2d,layer1.*,!*.downsample.*` take? Pure, knows no torch."""

from __future__ import annotations

import difflib
import fnmatch
import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from featviz.errors import UsageError
from featviz.records import Layer

_INDEX = re.compile(r"(?P<body>.*)#(?P<index>-?\d{1,18}|-?\d{,18}:-?\d{,18}(:-?\d{,18})?)$")
_OPENING, _CLOSING = "([{", ")]}"


@dataclass(frozen=True)
class Selector:
    """One selector: what it matches, an index or slice into that, and whether it takes away."""

    text: str
    matches: Callable[[Layer], bool]
    index: int | slice | None = None
    negative: bool = False

    @property
    def from_the_end(self) -> bool:
        """Whether its index cannot be told before everything that it matches is known."""
        index = self.index
        parts = (index.start, index.stop, index.step) if isinstance(index, slice) else (index,)
        return any(part is not None and part < 0 for part in parts)

    def pick(self, layers: Iterable[Layer]) -> list[Layer]:
        """The layers this selector speaks of, in model order."""
        matching = [layer for layer in layers if self.matches(layer)]
        if isinstance(self.index, slice):
            return matching[self.index]
        if self.index is None:
            return matching
        return [matching[self.index]] if -len(matching) <= self.index < len(matching) else []


def parse(text: str) -> list[Selector]:
    """Read selectors separated by commas; commas inside brackets belong to a regular expression."""
    parts, depth, escaped = [""], 0, False
    for char in text:
        if not escaped:
            depth += (char in _OPENING) - (char in _CLOSING)
        escaped = char == "\\" and not escaped
        if char == "," and depth <= 0:
            parts.append("")
        else:
            parts[-1] += char
    selectors = [_parse_one(part.strip()) for part in parts if part.strip()]
    if not selectors:
        hint = "for example Conv2d,ReLU or layer1.*"
        raise UsageError(f"the list {text!r} holds no selector", hint)
    return selectors


def select(layers: Sequence[Layer], selectors: Sequence[Selector]) -> list[Layer]:
    """Take a layer if some positive selector matches it and no negative one does; only negative
    ones mean everything but these."""
    positive = [s for s in selectors if not s.negative]
    taken = {x.name for s in positive for x in s.pick(layers)}
    if not positive:
        taken = {layer.name for layer in layers if not layer.is_function}
    taken -= {x.name for s in selectors if s.negative for x in s.pick(layers)}
    return [layer for layer in layers if layer.name in taken]


def of_functions(selectors: Iterable[Selector]) -> list[Selector]:
    """Those that speak of functions, which must then be listed beside the modules."""
    return [s for s in selectors if s.text.lstrip("! ").startswith("fn:")]


def types_present(layers: Iterable[Layer]) -> str:
    """Class names with their counts, commonest first: `Conv2d 20, BatchNorm2d 20, ReLU 9`."""
    counts = Counter(layer.type for layer in layers if layer.name)
    return ", ".join(f"{name} {count}" for name, count in counts.most_common())


def nearest(layers: Iterable[Layer], selectors: Iterable[Selector]) -> list[str]:
    """Class and layer names that misspelt selectors may have meant, the nearest two of each."""
    names = {name for layer in layers for name in (layer.type, layer.name, *layer.aliases) if name}
    by_lower = {name.lower(): name for name in sorted(names)}
    wanted = [re.split(r"[@#]", s.text.lstrip("!").removeprefix("re:"))[0] for s in selectors]
    close = [difflib.get_close_matches(name.strip().lower(), by_lower, 2, 0.7) for name in wanted]
    return list(dict.fromkeys(by_lower[name] for group in close for name in group))


def meant(layers: Sequence[Layer], selectors: Iterable[Selector]) -> str:
    """What selectors that match no layer may have meant: the indices that there are, else the
    nearest names; empty where nothing is near."""
    counts = [(s, sum(map(s.matches, layers))) for s in selectors]
    if outside := [(s.text.lstrip("! ").rpartition("#")[0], n) for s, n in counts if n]:
        return "; ".join(f"{body} has #0" + f" to #{n - 1}" * (n > 1) for body, n in outside)
    close = nearest(layers, [s for s, _ in counts])
    return f"did you mean {' or '.join(close)}?" if close else ""


def remedy(layers: Sequence[Layer], selectors: Iterable[Selector] = (), *further: str) -> str:
    """What helps where no layer matches: what may be meant, `further` words, the types of modules
    (of functions, where there are no others)."""
    words = meant(layers, [s for s in selectors if not s.pick(layers)])
    between = " " if words.endswith("?") else "; " if words else ""
    modules = [layer for layer in layers if not layer.is_function] or layers
    return words + between + "; ".join((*further, f"types here: {types_present(modules)}"))


def _parse_one(text: str) -> Selector:
    body = text.removeprefix("!").strip()
    index: int | slice | None = None
    if indexed := _INDEX.fullmatch(body):
        body = indexed["body"]
        parts = [int(part) if part else None for part in indexed["index"].split(":")]
        if parts[2:] == [0]:
            words = f"slice #{indexed['index']} has a step of 0"
            raise UsageError(words, "for every second one: #::2")
        index = parts[0] if len(parts) == 1 and parts[0] is not None else slice(*parts)
    if not body:
        hint = "for example Conv2d, layer1.* or re:^layer[34]"
        raise UsageError(f"selector {text!r} names no layer", hint)
    class_name, at, pattern = body.partition("@")
    of_both = at and not body.startswith("re:")
    pattern = pattern if of_both else body
    try:
        fits = re.compile(fnmatch.translate(pattern)).match
        if pattern.startswith("re:"):
            fits = re.compile(pattern.removeprefix("re:")).search
    except re.error as error:
        words = f"selector {text!r} is no regular expression: {error}"
        raise UsageError(words, "for example re:^layer[34]") from error

    def matches(layer: Layer) -> bool:
        is_of_class = (class_name if of_both else body) in layer.classes
        if not of_both and (is_of_class or layer.is_function):
            return is_of_class
        named = any(fits(name) for name in (layer.owner, *layer.aliases))
        return named and (is_of_class or not of_both)

    return Selector(text, matches, index, negative=text.startswith("!"))
