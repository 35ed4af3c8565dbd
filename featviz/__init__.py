"""See what each layer of a PyTorch vision model makes of your images.

The public API; importing it costs nothing until one of the names is used.

    featviz.run(model, images, layers=..., out=...)   draw into a run directory
    featviz.capture(model, layers)                    keep the tensors of a forward pass
    featviz.grid(tensor, ...)                         one tensor as a picture
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from featviz.version import __version__

__all__ = ["__version__", "capture", "grid", "run"]

if TYPE_CHECKING:
    from featviz.api import capture, grid, run


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'featviz' has no attribute {name!r}")
    from featviz.models.requirements import require_torch

    require_torch()
    from featviz import api

    return getattr(api, name)


def __dir__() -> list[str]:
    return sorted(__all__)
