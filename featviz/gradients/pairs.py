"""A layer's output together with its gradient, for what needs both."""

from __future__ import annotations

from dataclasses import replace
from typing import Protocol

from torch import Tensor

from featviz.hooks.capture import Sink
from featviz.records import KINDS, Site

CAPTURE = ("output", "grad")
"""What is captured for pairs."""


class PairSink(Protocol):
    """Takes an output and its gradient, of one shape."""

    def __call__(self, site: Site, tensor: Tensor, gradient: Tensor) -> None:
        """Take the pair of a call; `site` is that of the output.

        Raises:
            LayoutError: there is nothing to be drawn.
        """


def paired(take: PairSink) -> Sink:
    """A sink for hooks that capture CAPTURE, which hands each call's output on with its gradient.

    The output is copied when the layer gives it, since a later in-place operation may change it,
    and the copy goes when its gradient has come, or with the sink.
    """
    outputs: dict[Site, Tensor] = {}

    def sink(site: Site, tensor: Tensor) -> None:
        if not KINDS[site.kind].backward:
            outputs[site] = tensor.clone()
            return
        of = replace(site, kind=KINDS[site.kind].of)
        take(of, outputs.pop(of), tensor)

    return sink
