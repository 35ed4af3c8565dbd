"""All channels of a layer in one picture: reductions, and class activation maps, which show where
in a layer's output the evidence for a target lies.

In the formulas A is the layer's output and G the gradient of the target there, both [C, S, H, W];
k counts channels, and sums and means over p are over all places of the S slices.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from featviz import records
from featviz.errors import LayoutError
from featviz.layout import Maps
from featviz.layout.layouts import LAYOUTS

COMPONENTS = len(records.REDUCTIONS["pca"].colors)
_NOTHING = 1e-6
"""A component whose deviation is below this share of the first one's is rounding, left out."""


REDUCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "mean": lambda data: data.mean(0, keepdim=True),
    "max": lambda data: data.amax(0, keepdim=True),
    "l2": lambda data: torch.linalg.vector_norm(data, dim=0, keepdim=True),
    "max-abs": lambda data: data.abs().amax(0, keepdim=True),
}
"""From [C, ...] to [1, ...]: those of `records.REDUCTIONS` with one component; `pca` has three and
is not among them."""


def principal_components(data: Tensor) -> Tensor:
    """[C, ...] to float32 [3, ...]: in standard deviations from the mean, along the directions in
    which the channels vary most; NaN where some channel is not finite, 0 where the channels do not
    vary in so many directions.

    The directions are eigenvectors of the channels' covariance over the finite pixels, got from the
    pixels' where these are fewer (they share their eigenvalues). The largest number of each is
    positive.
    """
    values = data.flatten(1).cpu().double()
    finite = torch.isfinite(values).all(0)
    count = max(int(finite.sum()), 1)
    average = torch.where(finite, values, 0.0).sum(1, keepdim=True) / count
    centred = (values - average)[:, finite]
    if len(values) <= count:
        powers, vectors = torch.linalg.eigh(centred @ centred.T / count)
    else:
        powers, pixels = torch.linalg.eigh(centred.T @ centred / count)
        vectors = centred @ pixels
    std = powers.flip(0)[:COMPONENTS].clamp_min(0).sqrt()
    directions = torch.nn.functional.normalize(vectors.T.flip(0)[:COMPONENTS], dim=1, eps=1e-300)
    largest = directions.gather(1, directions.abs().argmax(1, keepdim=True))
    scale = torch.where(std > _NOTHING * std[:1], std, torch.inf)[:, None]
    known = directions * largest.sign() / scale @ centred
    components = torch.full((COMPONENTS, values.shape[1]), torch.nan)
    components[:, finite] = 0.0
    components[: len(known), finite] = known.float()
    return components.reshape(COMPONENTS, *data.shape[1:])


# Class activation maps

_PLACES = (1, 2, 3)


def gradcam_plus_plus(output: Tensor, gradient: Tensor) -> Tensor:
    """ReLU(sum_k w_k A_k): Chattopadhyay et al., arXiv 1710.11063, equation 19.

    w_k = sum_p a_kp ReLU(G_kp), a = G² / (2 G² + sum_p(A_k) G³), which is 1 / (2 + sum_p(A_k) G)
    where G is not zero, without its rounding. The target is the exponential of the score, and a
    factor that all weights share is left out.
    """
    share = 2 + output.sum(_PLACES, keepdim=True) * gradient
    alpha = torch.where(share == 0, 0.0, 1 / share)
    return _weighted(output, (alpha * gradient.relu()).sum(_PLACES)).relu()


def xgradcam(output: Tensor, gradient: Tensor) -> Tensor:
    """sum_k w_k A_k with w_k = sum_p(G_k A_k) / sum_p(A_k): Fu et al., arXiv 2008.02312.

    A channel whose outputs add up to zero weighs nothing.
    """
    total = output.sum(_PLACES)
    weights = torch.where(total == 0, 0.0, (gradient * output).sum(_PLACES) / total)
    return _weighted(output, weights)


def _weighted(output: Tensor, weights: Tensor) -> Tensor:
    """sum_k w_k A_k: [C, S, H, W] and [C] to [1, S, H, W]."""
    total: Tensor = torch.tensordot(weights, output, 1)
    return total[None]


METHODS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    # ReLU(sum_k mean_p(G_k) A_k): Selvaraju et al., arXiv 1610.02391, equations 1 and 2
    "gradcam": lambda output, gradient: _weighted(output, gradient.mean(_PLACES)).relu(),
    "gradcam++": gradcam_plus_plus,
    # ReLU(sum_k ReLU(G_k) A_k), place by place: Jiang et al., LayerCAM, IEEE TIP 30 (2021),
    # doi 10.1109/TIP.2021.3089943
    "layercam": lambda output, gradient: (gradient.relu() * output).sum(0, keepdim=True).relu(),
    # ReLU(sum_k G_k A_k), place by place: Draelos and Carin, arXiv 2011.08891. The sum of the paper
    # has a sign, which gradxact shows; here, as with Grad-CAM, what speaks against the target is 0
    "hirescam": lambda output, gradient: (gradient * output).sum(0, keepdim=True).relu(),
    "xgradcam": xgradcam,
    # sum_k G_k A_k, place by place: gradient × input (Shrikumar et al., arXiv 1605.01713) at a
    # layer. Of a network that is linear from there on, each value is that place's share
    "gradxact": lambda output, gradient: (gradient * output).sum(0, keepdim=True),
}
"""The arithmetic of `records.CLASS_MAPS`: from output and gradient [C, S, H, W] to [1, S, H, W]."""


def check_places(maps: Maps) -> None:
    """Refuse maps without places of the image."""
    layout = LAYOUTS[maps.layout]
    what = "one value for each channel" if list(maps.data.shape[2:]) == [1, 1] else ""
    if not layout.aligned:
        what = f"the layout {layout.name} {layout.shape}"
    if what:
        raise LayoutError(f"has no places of the image: its output has {what}")


def class_map(method: str, output: Maps, gradient: Maps) -> Tensor:
    """The class activation map of a layer's output, float32 [1, S, H, W]."""
    check_places(output)
    if not gradient.data.any():
        raise LayoutError("has a gradient of zero at every place: the target does not depend on it")
    return METHODS[method](output.data, gradient.data)
