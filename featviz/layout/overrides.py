"""Where a layer's tensor stands: what the model says of it, and what the user says."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from torch import nn

from featviz import layout
from featviz.errors import LayoutError, UsageError
from featviz.hooks import selectors as select
from featviz.layout import model_hints
from featviz.records import Hints, Layer


class HintBook:
    """The hints for each layer of a model that sees inputs of one shape."""

    def __init__(
        self, model: nn.Module, input_shape: Sequence[int], told: Sequence[str] = ()
    ) -> None:
        """Read the model.

        Args:
            input_shape: [1, C, H, W], or [1, C, T, H, W] for a clip.
            told: `--tensor-layout` values: `LAYOUT` or `SELECTORS=LAYOUT`.

        Raises:
            UsageError: no such layout, or a selector that cannot be read.
        """
        self._arrangement = model_hints.read(model, tuple(input_shape))
        self._told = [read_told(text) for text in told]
        self._known: dict[str, Hints] = {}

    def of(self, layer: Layer) -> Hints:
        """What is known of a layer's tensors."""
        if layer.name not in self._known:
            self._known[layer.name] = self._look_up(layer)
        return self._known[layer.name]

    def of_name(self, name: str) -> Hints:
        """What the model says of the module with this name."""
        return self._arrangement.hints(name)

    def _look_up(self, layer: Layer) -> Hints:
        found = self.of_name(layer.owner)
        if layer.is_function:
            found = replace(found, channels=None)
        for selectors, name in self._told:
            if selectors is None or select.select([layer], selectors):
                found = replace(found, layout=name)
        return found


def read_told(text: str) -> tuple[list[select.Selector] | None, str]:
    """Read `LAYOUT` (for all layers: None) or `SELECTORS=LAYOUT`.

    Raises:
        UsageError: no such layout, or a selector that cannot be read.
    """
    selectors, equals, name = text.rpartition("=")
    try:
        layout.check_layout(name)
        return (_anywhere(selectors) if equals else None), name
    except (LayoutError, UsageError) as error:
        raise UsageError(f"--tensor-layout {text!r}: {error.message}", error.hint) from None


def _anywhere(text: str) -> list[select.Selector]:
    """Selectors that say of one layer, without the others, whether they match it."""
    selectors = select.parse(text)
    if indexed := [selector.text for selector in selectors if selector.index is not None]:
        raise UsageError(
            f"selector {indexed[0]!r} takes no index here", "name the layers, for example layer1.*"
        )
    return selectors
