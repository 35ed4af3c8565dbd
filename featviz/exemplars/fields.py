"""Receptive fields of the units whose exemplars are shown. A unit is one position of a
channel's map."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from featviz.exemplars.collect import ExemplarSource
from featviz.hooks.capture import forward
from featviz.hooks.eval_mode import in_eval_mode
from featviz.layout.layouts import LAYOUTS
from featviz.layout.tracing.fields import ReceptiveField
from featviz.layout.tracing.hints import HintBook
from featviz.models.load import LoadedModel
from featviz.records import CaptureSite


def is_map_of_input(model: LoadedModel, source: ExemplarSource) -> bool:
    """Whether the units of a tensor have positions in the input, and this is one image
    (not a clip, and not several inputs)."""
    one_image = model.preprocess.frames is None and model.preprocess.inputs == 1
    return one_image and LAYOUTS[source.layout].aligned


def receptive_fields(
    model: LoadedModel, sources: Sequence[ExemplarSource], args: Sequence[Tensor]
) -> dict[CaptureSite, ReceptiveField]:
    """Follow the pixels through one forward pass, to learn what each unit sees.

    Args:
        sources: tensors of the model; those that are not maps of the input are left
            out.
        args: arguments of the model; only their shapes count, so their device may be
            meta.

    Returns:
        The field of each tensor that is a map of the input. Fields that cannot be followed
        are missing.
    """
    aligned = [source for source in sources if is_map_of_input(model, source)]
    if not aligned:
        return {}
    book = HintBook(model.module, args[0].shape)
    layers = [source.site.layer for source in aligned]
    with in_eval_mode(model.module), book.traced(model.module, layers, fields=True):
        forward(
            model.module, [torch.zeros_like(arg, device=model.device) for arg in args]
        )
    fields = {source.site: book.receptive_field(source.site) for source in aligned}
    return {site: field for site, field in fields.items() if field is not None}
