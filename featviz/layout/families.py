"""One function for each shape family: from a tensor to its maps."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

import featviz.layout.grids as grids
from featviz.layout.guess import AXES, Form


@dataclass(frozen=True)
class Maps:
    """The maps of one tensor; `data` is float32 [C, S, H, W] and may be a view of the tensor.

    S is 1 but for clips (time steps) and batches (regions, items), whose slices stand side by side.
    """

    layout: str
    data: Tensor
    strip: bool = False
    """Drawn as one row without padding: the numbers of a vector."""


def nchw(tensor: Tensor, form: Form) -> Maps:
    """[1, C, H, W] to C maps: torchvision's [C, 1, H, W]."""
    return Maps(form.layout, tensor[0][:, None])


def nhwc(tensor: Tensor, form: Form) -> Maps:
    """[1, H, W, C], as in Swin."""
    return Maps(form.layout, tensor[0].permute(2, 0, 1).contiguous()[:, None])


def vector(tensor: Tensor, form: Form) -> Maps:
    """[F], [1, F] or [N, F] to F maps of N numbers, drawn as one strip of F columns and N rows."""
    rows = tensor.reshape(-1, tensor.shape[-1])
    return Maps(form.layout, rows.T.contiguous()[:, None, :, None], strip=True)


def tokens(tensor: Tensor, form: Form) -> Maps:
    """[1, T, D] (or [1, T, heads, D]) to maps of the grid that the tokens make."""
    return _from_channels(tensor[0].flatten(1).T, form)


def ncl(tensor: Tensor, form: Form) -> Maps:
    """[1, D, T]: tokens, with the channels first."""
    return _from_channels(tensor[0], form)


def heads(tensor: Tensor, form: Form) -> Maps:
    """[1, heads, T, D]: the channels of one head after those of another."""
    return _from_channels(tensor[0].permute(0, 2, 1).flatten(0, 1), form)


def _from_channels(channels: Tensor, form: Form) -> Maps:
    """[D, T] to maps, without the tokens in front of the grid."""
    grid = form.grid
    assert grid is not None
    own = channels[:, len(grid.prefix) :].contiguous()
    if form.unrolled is not None:
        own = grids.reroll(own, form.unrolled)
    return Maps(form.layout, own.view(len(own), grid.time, grid.height, grid.width))


def windows(tensor: Tensor, form: Form) -> Maps:
    """Windows of a map, put back where they were cut out."""
    assert form.grid is not None and form.windows is not None
    return Maps(form.layout, grids.join_windows(tensor, form.windows, form.grid)[:, None])


def attention(tensor: Tensor, form: Form) -> Maps:
    """[1, heads, T, T], [1, T, T] or [1, T, T, heads]: one map for each head, a row for each
    query."""
    if tensor.shape[-2] != tensor.shape[-1]:
        return Maps(form.layout, tensor[0].permute(2, 0, 1).contiguous()[:, None])
    return Maps(form.layout, tensor[0].reshape(-1, 1, *tensor.shape[-2:]))


def batch(tensor: Tensor, form: Form) -> Maps:
    """[N, C, H, W], as behind RoI pooling: N tiles side by side for each of the C channels; of
    [N, C, T, H, W] N · T tiles."""
    return Maps(form.layout, tensor.transpose(0, 1).flatten(1, -3).contiguous())


def ncthw(tensor: Tensor, form: Form) -> Maps:
    """[1, C, T, H, W], a clip: T tiles side by side for each of the C channels."""
    return Maps(form.layout, tensor[0])


def nthwc(tensor: Tensor, form: Form) -> Maps:
    """[1, T, H, W, C], a clip with the channels last, as in Swin3D."""
    return Maps(form.layout, tensor[0].permute(3, 0, 1, 2).contiguous())


FAMILIES: dict[str, Callable[[Tensor, Form], Maps]] = {
    "nchw": nchw,
    "nhwc": nhwc,
    "tokens": tokens,
    "ncl": ncl,
    "heads": heads,
    "windows": windows,
    "attention": attention,
    "vector": vector,
    "batch": batch,
    "ncthw": ncthw,
    "nthwc": nthwc,
}


def beside(tensor: Tensor, form: Form) -> dict[str, Maps]:
    """The tokens in front of the grid, each name a vector, or the rows of one."""
    axis = AXES[form.layout][1] if form.layout in AXES else None
    if form.grid is None or axis is None:
        return {}
    prefix = form.grid.prefix
    found: dict[str, Maps] = {}
    for name in dict.fromkeys(prefix):
        places = torch.tensor([i for i, other in enumerate(prefix) if other == name])
        rows = tensor.index_select(axis, places.to(tensor.device)).movedim(axis, 1)[0]
        found[name] = vector(rows.reshape(len(places), -1), Form("vector"))
    return found
