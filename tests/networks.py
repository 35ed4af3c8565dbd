"""Networks of a line or two."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch.nn import functional


class Net(nn.Module):
    """Modules of these names; `way(self, *inputs)` is what forward does with them."""

    def __init__(self, way: Callable[..., Any], **modules: nn.Module) -> None:
        super().__init__()
        self.way = way
        for name, module in modules.items():
            self.add_module(name, module)

    def forward(self, *inputs: Any) -> Any:
        return self.way(self, *inputs)


def attend(self: nn.Module, x: Tensor) -> Tensor:
    """A way of `Net`: each pixel of [1, C, H, W] looks at all of them."""
    tokens = x.flatten(2).transpose(1, 2)[:, None]
    output = functional.scaled_dot_product_attention(tokens, tokens, tokens)
    return output[:, 0].transpose(1, 2).reshape(x.shape)
