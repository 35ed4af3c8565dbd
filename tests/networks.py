"""Networks of a line or two."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn


class Net(nn.Module):
    """Modules of these names; `way(self, *inputs)` is what forward does with them."""

    def __init__(self, way: Callable[..., Any], **modules: nn.Module) -> None:
        super().__init__()
        self.way = way
        for name, module in modules.items():
            self.add_module(name, module)

    def forward(self, *inputs: Any) -> Any:
        return self.way(self, *inputs)
