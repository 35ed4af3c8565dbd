"""Attention of transformers as a map of the image: what the class token attends to (or
all tokens on average), in one block, or through all blocks up to a layer (rollout).

Attention rollout (Abnar and Zuidema, arXiv 2005.00928) takes the mean A of the heads'
weights [T, T], adds the identity for the path around the attention, and multiplies the
blocks:

    R = (A_n + I) / 2 @ ... @ (A_1 + I) / 2        row t: how much token t has seen of each

The weights are taken from the functions of torch that every implementation of attention
calls. A fused function returns no weights, so it is called a second time to get them.
Neither the model nor its result changes."""

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
    """The attention of a forward pass up to the block that ran last."""

    last: Tensor | None = None
    """The mean over the heads of the last attention, float32 [T, T]."""
    rollout: Tensor | None = None
    """The product over the blocks, float32 [T, T]."""
    reason: str = ""
    """Why there is no product of all blocks; empty if nothing speaks against it so far."""

    def begin(self) -> None:
        """Begin a pass, and forget the one before."""
        self.last = None
        self.rollout = None
        self.reason = ""

    def add_block(self, weights: Tensor) -> None:
        """Add the attention weights of the next block. Weights that are not square (those of
        a pooling), or of one token only, are left out. Attention within windows cannot be a
        map of the image: it sets `reason`.

        Args:
            weights: [1, heads, T, T] or [heads, T, T]; for windows [windows, heads, T, T].
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
        """The attention up to a layer, as a value for each of the layer's tokens or
        positions.

        Args:
            site: the site of the layer's output.
            tensor: the layer's output; only its shape is read.
            book: the hints of this pass, which tell the layout of the output.
            method: `rollout`, or `attention` for the attention of only the last block.

        Returns:
            A tensor with as many axes as `tensor`. The axes of tokens or positions have the
            same length as in `tensor`, all other axes the length 1.

        Raises:
            LayoutError: no attention has run before the layer, or it has another number
                of tokens.
        """
        attention = self.last if method == "attention" else self.rollout
        # `attention` needs only the last block, so `reason` matters only if that has none
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
        # The first row, which is that of the class token. In a model without a class token,
        # which may have registers in front, the mean of the rows of the patches.
        prefix = arrangement.prefix
        if prefix and prefix[0] != "register_tokens":
            return attention[0].reshape(shape)
        end = len(attention) - len(arrangement.suffix)
        return attention[len(prefix) : end].mean(0).reshape(shape)


_QUERY_KEY_VALUE = ("query", "key", "value")
"""The first arguments of scaled_dot_product_attention."""


@contextmanager
def attended(path: AttentionPath) -> Iterator[None]:
    """Begin a path, and hand it the weights of each attention that runs in this block
    (`path.add_block`).

    `FunctionMode` calls each function below in place of one of torch's. It gets torch's
    function and the arguments, and must return the result of torch's function."""

    def fused(
        func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Any:
        """Stand in for scaled_dot_product_attention, which returns weights @ values. A second
        call with the identity as values returns the weights."""
        result = func(*args, **kwargs)
        with unwatched(), torch.no_grad():
            named = {**dict(zip(_QUERY_KEY_VALUE, args, strict=False)), **kwargs}
            key = named["key"]
            identity = torch.eye(key.shape[-2], dtype=key.dtype, device=key.device)
            named["value"] = identity.expand(*key.shape[:-1], key.shape[-2])
            # arguments after the values may be given by position, too
            first = [named.pop(name) for name in _QUERY_KEY_VALUE]
            path.add_block(func(*first, *args[3:], **named))
        return result

    def multi_head(
        func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Any:
        """Stand in for the function that nn.MultiheadAttention calls. No function mode sees
        the softmax inside it, so a second call asks for the weights."""
        result = func(*args, **kwargs)
        wanted = {**kwargs, "need_weights": True, "average_attn_weights": False}
        with unwatched(), torch.no_grad():
            path.add_block(func(*args, **wanted)[1])
        return result

    def softmax(
        func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Any:
        """Stand in for softmax, which attention in plain tensor operations calls. The softmax
        of classes is told apart by its shape."""
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
    """A sink for hooks that hands each output to `take`, with the attention up to it.

    Args:
        path: the attention of the current pass, see `attended`.
        book: the hints of this pass.
        method: `rollout`, or `attention` for the attention of only the last block.
        take: called with the site of each output, the output, and the result of
            `AttentionPath.map_at` for it; may raise LayoutError.
    """
    return lambda site, tensor: take(
        site, tensor, path.map_at(site, tensor, book, method)
    )
