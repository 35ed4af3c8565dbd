"""What a model that was lent out must have back: its state before and after."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


def state_of(model: nn.Module) -> dict[str, Any]:
    modules = list(model.modules())
    return {
        "training": [m.training for m in modules],
        "requires_grad": [p.requires_grad for p in model.parameters()],
        "grad": [p.grad for p in model.parameters()],
        "buffers": {name: (id(b), b.clone()) for name, b in model.named_buffers()},
        "hooks": sum(
            len(m._forward_hooks) + len(m._forward_pre_hooks) for m in modules
        ),
        "rng": torch.get_rng_state(),
        "threads": torch.get_num_threads(),
        "fast path": torch.backends.mha.get_fastpath_enabled(),
    }


def assert_same(before: dict[str, Any], after: dict[str, Any]) -> None:
    assert torch.equal(before.pop("rng"), after.pop("rng"))
    for name, (identity, value) in before.pop("buffers").items():
        assert identity == after["buffers"][name][0]
        assert torch.equal(value, after["buffers"][name][1])
    after.pop("buffers")
    assert before == after
