"""Attention of transformers as a map of the image: what the class token attends to (or
all tokens on average), in one block, or through all blocks up to a layer (rollout).

Attention rollout (Abnar and Zuidema, arXiv 2005.00928) takes the mean A of the heads'
weights [T, T], adds the identity for the path around the attention, and multiplies the
blocks:

    R = (A_n + I) / 2 @ ... @ (A_1 + I) / 2        row t: what token t has seen of each

The weights come from the functions of torch that all attention is made of, whoever wrote
it. Fused kernels return no weights, and are called a second time for them. Neither the
model nor its result changes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from featviz.errors import LayoutError
from featviz.hooks.capture import Sink
from featviz.hooks.functions import FunctionMode, unwatched
from featviz.layout.layouts import LAYOUTS
from featviz.layout.tracing.guess import recognise
from featviz.layout.tracing.hints import HintBook
from featviz.records import CaptureSite


@dataclass
class AttentionPath:
    """The attention of a forward pass, as far as the pass has come."""

    last: Tensor | None = None
    """The mean over the heads of the last attention, float32 [T, T]."""
    rollout: Tensor | None = None
    """The product over the blocks, float32 [T, T]."""
    reason: str = ""
    """Why there is no product of all blocks; empty where there may be one."""

    def begin(self) -> None:
        """Begin a pass, and forget the one before."""
        self.last = None
        self.rollout = None
        self.reason = ""

    def add_block(self, weights: Tensor) -> None:
        """Go on with the attention weights of the next block. Weights that are not square
        (of a pooling), or of one token, are left out. Windows have no map of the image: `reason`
        then says so.

        Args:
            weights: [1, heads, T, T] or [heads, T, T]; of windows [windows, heads, T, T].
        """
        if weights.ndim < 4:
            weights = weights[None]
        if weights.shape[-1] != weights.shape[-2] or weights.shape[-1] == 1:
            return
        if len(weights) != 1:
            self.reason = (
                f"has attention within {len(weights)} windows, not of all tokens"
            )
            self.last = None
            return
        self.last = weights[0].detach().float().mean(0)
        step = (self.last + torch.eye(len(self.last), device=weights.device)) / 2
        if self.rollout is None:
            self.rollout = step
        elif len(step) == len(self.rollout):
            self.rollout = step @ self.rollout
        else:
            self.reason = (
                f"has {len(step)} tokens behind a block of {len(self.rollout)}"
            )

    def map_at(
        self, site: CaptureSite, tensor: Tensor, book: HintBook, method: str
    ) -> Tensor:
        """The attention up to a layer, as a value for each of its tokens or positions.

        Args:
            site: of the layer's output.
            tensor: the layer's output; only its shape counts.
            book: the hints of this pass, which tell the layout of the output.
            method: `rollout`, or `attention` for that of the last block alone.

        Returns:
            A tensor of as many axes as `tensor`. Those along which tokens or positions
            stand have its length, all others the length 1.

        Raises:
            LayoutError: no attention has run before the layer, or it has another number
                of tokens.
        """
        attention = self.last if method == "attention" else self.rollout
        # without a product of all blocks the last block may still have weights
        if self.reason and (method != "attention" or attention is None):
            raise LayoutError(self.reason)
        if attention is None:
            raise LayoutError(
                "has no attention weights before it: no softmax or"
                " scaled_dot_product_attention of [1, heads, T, T] has run"
            )
        hints = book.of_tensor(site, tensor)
        arrangement = recognise(tensor.shape, hints)
        layout = LAYOUTS[arrangement.layout]
        shape = [1] * tensor.ndim
        for axis in layout.spatial_axes or (layout.token_axis or 0,):
            shape[axis] = tensor.shape[axis]
        if torch.Size(shape).numel() != len(attention):
            raise LayoutError(
                f"has {torch.Size(shape).numel()} places and tokens, and its attention"
                f" {len(attention)}"
            )
        # The row of the class token, which is the first. A model without one, maybe with
        # registers, has the mean of the rows of its patches.
        prefix = arrangement.prefix
        if prefix and prefix[0] != "register_tokens":
            return attention[0].reshape(shape)
        end = len(attention) - len(arrangement.suffix)
        return attention[len(prefix) : end].mean(0).reshape(shape)


_QUERY_KEY_VALUE = ("query", "key", "value")
"""The first arguments of scaled_dot_product_attention."""


@contextmanager
def attended(path: AttentionPath) -> Iterator[None]:
    """Watch the attention of a forward pass in this block: its weights go to
    `path.add_block`, after `path.begin`.

    Each function below takes the place of one of torch's, as `FunctionMode` has it: it
    gets that function with its arguments, and returns what it returns."""

    def fused(
        func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Any:
        """For scaled_dot_product_attention, which returns weights @ values: with the
        identity as values it returns the weights."""
        result = func(*args, **kwargs)
        with unwatched(), torch.no_grad():
            named = {**dict(zip(_QUERY_KEY_VALUE, args, strict=False)), **kwargs}
            key = named["key"]
            identity = torch.eye(key.shape[-2], dtype=key.dtype, device=key.device)
            named["value"] = identity.expand(*key.shape[:-1], key.shape[-2])
            # what stands behind the values may be given by position, too
            first = [named.pop(name) for name in _QUERY_KEY_VALUE]
            path.add_block(func(*first, *args[3:], **named))
        return result

    def multi_head(
        func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Any:
        """For what nn.MultiheadAttention calls, whose softmax no function mode sees."""
        result = func(*args, **kwargs)
        wanted = {**kwargs, "need_weights": True, "average_attn_weights": False}
        with unwatched(), torch.no_grad():
            path.add_block(func(*args, **wanted)[1])
        return result

    def softmax(
        func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Any:
        """For attention in plain tensor operations. Other softmaxes, as of classes, do not
        have its shape."""
        result = func(*args, **kwargs)
        dim = args[1] if len(args) > 1 else kwargs.get("dim")
        if result.ndim == 4 and dim in (-1, 3):
            path.add_block(result)
        return result

    replacements = {
        "scaled_dot_product_attention": fused,
        "multi_head_attention_forward": multi_head,
        "softmax": softmax,
    }
    path.begin()
    with FunctionMode(replacements=replacements):
        yield


def with_attention(
    path: AttentionPath,
    book: HintBook,
    method: str,
    take: Callable[[CaptureSite, Tensor, Tensor], None],
) -> Sink:
    """A sink for hooks that hands each output on with the attention up to it.

    Args:
        path: of the pass under way, see `attended`.
        book: the hints of this pass.
        method: `rollout`, or `attention` for that of the last block alone.
        take: called with the site of each output, the output, and what
            `AttentionPath.map_at` returns for it; may raise LayoutError.
    """
    return lambda site, tensor: take(
        site, tensor, path.map_at(site, tensor, book, method)
    )
