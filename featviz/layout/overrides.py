"""The hints for each layer: those of the model, overridden by `--tensor-layout`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

from torch import Tensor, nn

from featviz.errors import LayoutError, UsageError
from featviz.hooks import selectors
from featviz.hooks.functions import watching
from featviz.hooks.layers import list_layers
from featviz.layout import guess, model_hints, origins
from featviz.layout.tracing import Tracer
from featviz.records import KINDS, Hints, Layer, Origin, Site
from featviz.text import quoted


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
        self.input_shape = tuple(input_shape)
        self._by_module = model_hints.read(model, self.input_shape)
        self._overrides = [parse_override(text) for text in overrides]
        self._by_layer: dict[str, Hints] = {}
        self._tracer: Tracer | None = None
        self.is_traced = False
        """Whether a forward pass has been followed, or need not be."""
        self.depends_on_origins = False
        """Whether a tensor was asked for whose layout its origin decides."""

    def of(self, layer: Layer) -> Hints:
        """The hints for a layer's tensors, as far as its module gives them."""
        if layer.name not in self._by_layer:
            self._by_layer[layer.name] = self._look_up(layer)
        return self._by_layer[layer.name]

    def at(self, site: Site, tensor: Tensor) -> Hints:
        """The hints for one tensor of a layer, with what was followed in a forward pass."""
        if tensor.is_nested:  # has no shape
            return self.of(site.layer)
        shape = tensor.shape
        found = self._origins(site.layer, shape)
        origin = found.get((KINDS[site.kind].of, site.key))
        hints = self.of(site.layer)
        self.depends_on_origins |= origin is not None and origins.decides(shape, hints, origin)
        return hints if origin is None else replace(hints, origin=origin)

    def of_shape(self, layer: Layer, shape: Sequence[int], side: str = "output") -> Hints:
        """The hints for the first tensor of this shape that a layer gave, or took (`input`)."""
        found = self._origins(layer, shape)
        origins = (origin for (at, _), origin in found.items() if at == side)
        return replace(self.of(layer), origin=next(origins, None))

    def settle_as(self, other: HintBook) -> None:
        """Follow no pass of this shape, where one of another shape was followed and the layout of
        no layer depends on it."""
        self.is_traced = other.is_traced and not other.depends_on_origins

    @contextmanager
    def traced(self, model: nn.Module, layers: Sequence[Layer]) -> Iterator[None]:
        """Follow the image through the forward pass in this block, once for all passes.

        Hooks that ask for hints are placed inside the block, so that they are called later.

        Args:
            layers: those whose tensors will be asked for.
        """
        if self.is_traced:
            yield
            return
        wanted = {layer.name for layer in layers}
        mixers = {name for name, hints in self._by_module.items() if hints.tokens}
        self._tracer = tracer = Tracer(
            wanted, mixers, lambda layer: self._module_hints(layer).attention
        )
        modules = [x for x in list_layers(model) if x.name in wanted | mixers or not x.index]
        with watching(
            model, tracer.leave, tracer.enter, modules, lambda layer: True, lambda name, part: False
        ):
            yield
        self.is_traced = True

    def _origins(self, layer: Layer, shape: Sequence[int]) -> dict[tuple[str, str], Origin]:
        if self._tracer is None:
            return {}
        return self._tracer.origins.get((layer.name, tuple(shape)), {})

    def _module_hints(self, layer: Layer) -> Hints:
        return self._by_module.get(layer.owner, Hints())

    def _look_up(self, layer: Layer) -> Hints:
        hints = self._module_hints(layer)
        if layer.is_function:
            hints = replace(hints, channels=None, features_last=False)
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
        raise UsageError(
            f"--tensor-layout {quoted(repr(text))}: {error.message}", error.hint
        ) from None


def _without_index(text: str) -> list[selectors.Selector]:
    """Selectors that match a layer without knowing the others, as an index would have to."""
    parsed = selectors.parse(text)
    if indexed := [selector.text for selector in parsed if selector.index is not None]:
        raise UsageError(
            f"selector {indexed[0]!r} takes no index here", "name the layers, for example layer1.*"
        )
    return parsed
