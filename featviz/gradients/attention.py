"""Attention of transformers as a map of the image: what the class token, or the mean
token, attends to in one block, and through all blocks up to a layer (rollout).

Attention rollout (Abnar and Zuidema, arXiv 2005.00928) takes the mean A of the heads'
weights [T, T], adds the identity for the path around the attention, and multiplies the
blocks:

    R = (A_n + I) / 2 @ ... @ (A_1 + I) / 2        row t: what token t has seen of each

The weights are got from the functions that every attention is made of, whoever wrote
it: fused kernels, which return no weights, are asked for them a second time. So neither
the model nor its result changes."""

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
    """The attention of a pass, as far as the pass has come."""

    last: Tensor | None = None
    """The mean over the heads of the last attention, float32 [T, T]."""
    rollout: Tensor | None = None
    """The product over the blocks, float32 [T, T]."""
    reason: str = ""
    """Why there is no product."""

    def begin(self) -> None:
        """Forget the pass before."""
        self.last = None
        self.rollout = None
        self.reason = ""

    def take(self, weights: Tensor) -> None:
        """Go on with the weights of a block.

        Args:
            weights: [1, heads, T, T], or without the first axis. What is not from all
                tokens to all, as the attention of a pooling, is left out; of windows
                there is no map, and `reason` says so.
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
        """The attention up to a layer, in the layout of its output with one channel.

        Args:
            tensor: the layer's output; only its shape counts.
            method: `rollout`, or `attention` for that of the last block alone.

        Raises:
            LayoutError: there is none.
        """
        attention = self.last if method == "attention" else self.rollout
        # `reason` says why the product of all blocks is missing; the last block may have
        # weights all the same
        if self.reason and (method != "attention" or attention is None):
            raise LayoutError(self.reason)
        if attention is None:
            raise LayoutError(
                "has no attention weights before it: no softmax or"
                " scaled_dot_product_attention of [1, heads, T, T] has run"
            )
        # all axes of length 1, but those along which the tokens stand
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
        # A prefix begins with the class token, but where a model has registers alone:
        # there the mean of the patches stands in for it.
        prefix = arrangement.prefix
        if prefix and prefix[0] != "register_tokens":
            return attention[0].reshape(shape)
        end = len(attention) - len(arrangement.suffix)
        return attention[len(prefix) : end].mean(0).reshape(shape)


_QUERY_KEY_VALUE = ("query", "key", "value")
"""The first arguments of scaled_dot_product_attention."""


@contextmanager
def attended(path: AttentionPath) -> Iterator[None]:
    """Watch the attention of a pass in this block: its weights go to `path.take`.

    Each function below stands in for one of torch's, which it calls as it was called."""

    def fused(
        func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Any:
        """scaled_dot_product_attention: weights @ values. Of the identity as values it
        returns the weights."""
        result = func(*args, **kwargs)
        with unwatched(), torch.no_grad():
            named = {**dict(zip(_QUERY_KEY_VALUE, args, strict=False)), **kwargs}
            key = named["key"]
            identity = torch.eye(key.shape[-2], dtype=key.dtype, device=key.device)
            named["value"] = identity.expand(*key.shape[:-1], key.shape[-2])
            # what stands behind the values may be given by position, too
            first = [named.pop(name) for name in _QUERY_KEY_VALUE]
            path.take(func(*first, *args[3:], **named))
        return result

    def multi_head(
        func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Any:
        """What nn.MultiheadAttention calls; it hides its softmax from function modes."""
        result = func(*args, **kwargs)
        wanted = {**kwargs, "need_weights": True, "average_attn_weights": False}
        with unwatched(), torch.no_grad():
            path.take(func(*args, **wanted)[1])
        return result

    def softmax(
        func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Any:
        """What attention in plain tensor operations calls; other softmaxes, as of
        classes, are told apart by their shape."""
        result = func(*args, **kwargs)
        dim = args[1] if len(args) > 1 else kwargs.get("dim")
        if result.ndim == 4 and dim in (-1, 3):
            path.take(result)
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
    """A sink that hands each output on with the attention up to it; `take` may raise
    LayoutError.

    Args:
        method: `rollout`, or `attention` for that of the last block alone.
    """
    return lambda site, tensor: take(
        site, tensor, path.map_at(site, tensor, book, method)
    )
