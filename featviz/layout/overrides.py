"""The hints for each layer: those of the model, overridden by `--tensor-layout`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from torch import nn

from featviz.errors import LayoutError, UsageError
from featviz.hooks import selectors
from featviz.layout import guess, model_hints
from featviz.records import Hints, Layer


class HintBook:
    """The hints for each layer of a model that sees inputs of one shape."""

    def __init__(
        self, model: nn.Module, input_shape: Sequence[int], overrides: Sequence[str] = ()
    ) -> None:
        """Read the hints of a model's modules.

        Args:
            input_shape: [1, C, H, W], or [1, C, T, H, W] for a clip.
            overrides: `--tensor-layout` values: `LAYOUT` or `SELECTORS=LAYOUT`.

        Raises:
            UsageError: there is no such layout, or a selector cannot be read.
        """
        self._by_module = model_hints.read(model, tuple(input_shape))
        self._overrides = [parse_override(text) for text in overrides]
        self._by_layer: dict[str, Hints] = {}

    def of(self, layer: Layer) -> Hints:
        """The hints for a layer's tensors."""
        if layer.name not in self._by_layer:
            self._by_layer[layer.name] = self._look_up(layer)
        return self._by_layer[layer.name]

    def _look_up(self, layer: Layer) -> Hints:
        hints = self._by_module.get(layer.owner, Hints())
        if layer.is_function:
            hints = replace(hints, channels=None)
        for chosen, name in self._overrides:
            if chosen is None or selectors.select([layer], chosen):
                hints = replace(hints, layout=name)
        return hints


def parse_override(text: str) -> tuple[list[selectors.Selector] | None, str]:
    """Read `LAYOUT` or `SELECTORS=LAYOUT` into selectors, None for all layers, and a layout.

    Raises:
        UsageError: there is no such layout, or a selector cannot be read.
    """
    layers, equals, name = text.rpartition("=")
    try:
        guess.check_layout(name)
        return (_without_index(layers) if equals else None), name
    except (LayoutError, UsageError) as error:
        raise UsageError(f"--tensor-layout {text!r}: {error.message}", error.hint) from None


def _without_index(text: str) -> list[selectors.Selector]:
    """Selectors that match a layer without knowing the others, as an index would have to."""
    parsed = selectors.parse(text)
    if indexed := [selector.text for selector in parsed if selector.index is not None]:
        raise UsageError(
            f"selector {indexed[0]!r} takes no index here", "name the layers, for example layer1.*"
        )
    return parsed
