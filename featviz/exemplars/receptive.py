"""What the units of chosen layers see of the input, computed from the functions that run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn

from featviz.exemplars.collect import ExemplarSource
from featviz.exemplars.rules import FunctionCall, Reach, ReceptiveField, Seen, Sees, seen_by
from featviz.hooks.capture import leaves, tensors
from featviz.hooks.eval_mode import in_eval_mode
from featviz.hooks.forward import forward
from featviz.hooks.functions import unwatched, watching
from featviz.hooks.layers import function_in
from featviz.layout.layouts import LAYOUTS
from featviz.models.load import LoadedModel
from featviz.records import Layer

Box = tuple[int, int, int, int]
"""Left, top, right and bottom in pixels of the input, right and bottom excluded."""

How = Literal["computed", "unknown", "no place"]
"""How a receptive field is known: from the functions that ran; not at all; or the layer gives no
map of the input. In the last two cases a unit is shown with the whole input."""

_OTHER_FORM = (TypeError, ValueError, IndexError, AttributeError, LookupError)
"""What a rule raises on a form of the call that it does not know."""


class ReceptiveFields:
    """The receptive fields of layers of a model, for inputs of one shape."""

    def __init__(
        self, model: LoadedModel, targets: Sequence[ExemplarSource], args: Sequence[Tensor]
    ) -> None:
        """Follow one pass of the model.

        Args:
            args: the model's arguments, the image first. Values do not matter.

        Raises:
            ForwardError: the model cannot take them.
        """
        preprocess = model.preprocess
        self._is_picture = preprocess.frames is None and preprocess.inputs == 1
        height, width = args[0].shape[-2:]
        self._whole: Box = (0, 0, width, height)
        self._found: dict[tuple[str, int, str], Seen] = {}
        if self._is_picture:
            layers = {target.site.layer.name: target.site.layer for target in targets}
            blank = [torch.zeros_like(arg, device=model.device) for arg in args]
            walk = _Walk(model.module, layers, blank[0])
            self._found = walk.follow(model.module, list(layers.values()), blank)

    def how(self, target: ExemplarSource) -> How:
        """How the receptive fields of a tensor's units are known."""
        if not self._is_picture or not LAYOUTS[target.layout].aligned:
            return "no place"
        return "unknown" if self._seen(target) is Sees.UNKNOWN else "computed"

    def box(self, target: ExemplarSource, row: int, column: int) -> Box | None:
        """What a unit sees, clipped to the input; None where it sees only padding."""
        seen = self._seen(target)
        return seen.box(row, column) if isinstance(seen, ReceptiveField) else self._whole

    def size(self, target: ExemplarSource) -> tuple[int, int]:
        """Height and width of what a unit sees at most."""
        seen = self._seen(target)
        if isinstance(seen, ReceptiveField):
            return seen.rows.size, seen.columns.size
        return self._whole[3], self._whole[2]

    def _seen(self, target: ExemplarSource) -> Seen:
        """The table of a tensor that is a map, or that it sees all."""
        site, layout = target.site, LAYOUTS[target.layout]
        seen = self._found.get((site.layer.name, site.call, site.key), Sees.UNKNOWN)
        if isinstance(seen, ReceptiveField) and layout.aligned and layout.spatial_axes is not None:
            axes = tuple(axis - layout.dimensions[0] for axis in layout.spatial_axes)
            return seen if seen.axes == axes else Sees.UNKNOWN
        return Sees.ALL if seen is Sees.ALL else Sees.UNKNOWN


class _Walk:
    """One pass through a model that follows what every tensor sees of the input.

    Tensors are told apart by identity, and kept while the pass lasts. All functions are heard,
    those in torch's own modules too.
    """

    def __init__(self, model: nn.Module, names: Mapping[str, Layer], image: Tensor) -> None:
        self._names, self._calls = names, Counter[str]()
        self._found: dict[tuple[str, int, str], Seen] = {}
        """By name of a layer, number of its call, and path of a tensor in its output."""
        self._seen: dict[int, Seen] = {}
        self._alive: list[Tensor] = []
        for tensor in (*model.parameters(), *model.buffers()):
            self._note(tensor, Sees.NOTHING)
        rows, columns = map(Reach.of_input, image.shape[-2:])
        self._note(image, ReceptiveField(rows, columns))

    def follow(
        self, model: nn.Module, layers: Sequence[Layer], args: Sequence[Tensor]
    ) -> dict[tuple[str, int, str], Seen]:
        """What each tensor that these layers give sees of the image."""
        modules = [layer for layer in layers if not layer.is_function]
        every = watching(
            model, self._leave, self._enter, modules, lambda layer: True, lambda name, m: False
        )
        with in_eval_mode(model, gradients=True), torch.no_grad(), every:
            forward(model, args)  # unlike inference mode, no_grad tells views
        return self._found

    def _enter(self, layer: Layer, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """An assignment to a part of a tensor returns nothing, and mixes what was there before."""
        if function_in(layer.name) == "setitem":
            self._spoil(args[0])

    def _leave(
        self, layer: Layer, args: Sequence[Any], kwargs: Mapping[str, Any], output: Any
    ) -> None:
        """A function or a chosen module has returned."""
        with unwatched():
            if (function := function_in(layer.name)) is not None:
                self._apply(function, args, kwargs, output)
            if layer.name in self._names:
                call = self._calls[layer.name]
                self._calls[layer.name] += 1
                for key, value in leaves(output):
                    if isinstance(value, Tensor):
                        seen = self._seen.get(id(value), Sees.UNKNOWN)
                        self._found[layer.name, call, key] = seen

    def _apply(self, name: str, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any) -> None:
        given, gave = tensors([args, kwargs]), tensors(out)
        before = [self._seen.get(id(tensor), Sees.UNKNOWN) for tensor in given]
        known = tuple(seen for seen in before if isinstance(seen, ReceptiveField))
        try:
            seen = seen_by(FunctionCall(name, args, kwargs, known, gave[0]), before)
        except _OTHER_FORM:
            seen = Sees.UNKNOWN
        if given and gave[0] is given[0] and seen is not before[0]:
            self._spoil(given[0])  # in place: a tensor of which it is a view has changed, too
        for tensor in gave:
            fits = True
            if isinstance(seen, ReceptiveField):
                counts = [tensor.shape[axis] for axis in seen.axes if -axis <= tensor.dim()]
                fits = counts == [len(seen.rows), len(seen.columns)]
            self._note(tensor, seen if fits else Sees.UNKNOWN)

    def _note(self, tensor: Tensor, seen: Seen) -> None:
        self._seen[id(tensor)] = seen
        self._alive.append(tensor)

    def _spoil(self, tensor: Tensor) -> None:
        """A part of a tensor changes, and with it the tensor of which it is a part."""
        self._note(tensor, Sees.UNKNOWN)
        if tensor._is_view() and tensor._base is not None:
            self._note(tensor._base, Sees.UNKNOWN)
