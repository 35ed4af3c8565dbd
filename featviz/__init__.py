"""See what each layer of a PyTorch vision model makes of your images.

The public API; importing it costs nothing until one of the names is used.

    featviz.look(model, image)          draw one quick picture of what layers make of an image
    featviz.run(model, images)          draw the feature maps of images
    featviz.cam(model, images)          show where the evidence for a class lies
    featviz.capture(model)              keep the tensors of a forward pass
    featviz.grid(tensor)                draw one tensor
    featviz.layers(model)               list modules: shapes, parameters, MACs, calls
    featviz.kernels(model)              draw the kernels of convolutions
    featviz.audit(model, images)        find channels that do nothing
    featviz.exemplars(model, images)    find the images that excite each channel most
    featviz.field(model, images)        measure how far layers look
    featviz.diff(base, new)             compare two runs
    featviz.report(run)                 write an HTML gallery of a run
    featviz.sheet(runs)                 draw a figure or an animation of runs
    featviz.Watcher(model, images)      draw feature maps as a model is trained
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

from featviz.version import __version__

__all__ = [
    "Watcher",
    "__version__",
    "audit",
    "cam",
    "capture",
    "diff",
    "exemplars",
    "field",
    "grid",
]
__all__ += ["kernels", "layers", "look", "report", "run", "sheet"]

if TYPE_CHECKING:
    from featviz.api.running import diff, report, run, sheet
    from featviz.api.studies import audit, cam, exemplars, field, kernels, layers, look
    from featviz.api.tensors import capture, grid
    from featviz.api.watching import Watcher


class _Package(ModuleType):
    """The package: importing its subpackage `featviz.audit` does not take the place of
    the function of that name."""

    def __setattr__(self, name: str, value: Any) -> None:
        if not (isinstance(value, ModuleType) and name in __all__):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'featviz' has no attribute {name!r}")
    from featviz.models.requirements import require_torch

    require_torch()
    from featviz import api

    return getattr(api, name)


def __dir__() -> list[str]:
    return sorted(__all__)
