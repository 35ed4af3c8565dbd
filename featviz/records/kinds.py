"""What can be captured of a layer: one record for each kind of tensor."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class CaptureKind:
    """One kind of tensor that can be captured of a layer."""

    name: str
    """As in `--capture`, in the manifest, and as the first part of file names (`Site.stem`)."""
    of: Literal["output", "input"]
    """The tensor that is captured, or at which the gradient is taken."""
    backward: bool
    """Whether it is a gradient, which needs a backward pass."""
    help: str
    """The name for help texts, explained where it needs to be."""
    normalize: str = "auto"
    """The normalisation that `auto` stands for; `auto` where the picture decides."""
    cmap: str = "auto"
    """The colormap that `auto` stands for; `auto` where the picture decides."""


_CLIPPED = "symmetric-percentile:99"
"""Of gradients, where a few large values would else leave all others white."""

SALIENCY = "saliency"
"""The key of the picture of all channels of a gradient of the image; its values have no sign."""

KINDS: dict[str, CaptureKind] = {
    kind.name: kind
    for kind in (
        CaptureKind("output", "output", False, "output"),
        CaptureKind("input", "input", False, "input"),
        CaptureKind(
            "grad", "output", True, "grad (the gradient at its output)", _CLIPPED, "coolwarm"
        ),
        CaptureKind(
            "grad-input",
            "input",
            True,
            "grad-input (the gradient at its input)",
            _CLIPPED,
            "coolwarm",
        ),
    )
}
"""By name, in the order of help texts. Gradients have zero in the middle of their colours, and a
colour for either sign."""


def is_gradient(kind: str) -> bool:
    """Whether a kind's name, which may be of no known kind (`kernel`), is that of a gradient."""
    return kind in KINDS and KINDS[kind].backward
