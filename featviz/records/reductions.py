"""What can become of all channels of a layer in one picture: one record for each reduction."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Reduction:
    """One way to make one tile of all channels."""

    name: str
    """As in `--reduce` and in the manifest."""
    words: str
    """What its tile shows, in figures and in the report."""
    help: str
    """What a picture of all channels shows, in help texts."""
    unit: str = ""
    """What its values are counted in, where that is not the unit of the tensor."""
    colors: tuple[tuple[str, str], ...] = ()
    """Colours (`#rrggbb`) of its tile and what they stand for, one for each of its components; none
    where it has a single one, which is drawn in levels."""
    weighs: bool = False
    """Whether it weighs a layer's output by the gradient of a target there: a class activation map,
    which needs a backward pass and places of the image."""
    signed: bool = False
    """Whether its values are for or against something, so that zero is the middle of its colours.
    """


REDUCTIONS: dict[str, Reduction] = {
    reduction.name: reduction
    for reduction in (
        Reduction("mean", "mean", "their mean"),
        Reduction("max", "maximum", "their maximum"),
        Reduction("l2", "L2 norm", "their L2 norm"),
        Reduction("max-abs", "largest absolute value", "the largest of their absolute values"),
        Reduction(
            "pca",
            "principal components 1 to 3",
            "three principal components as red, green and blue",
            unit="standard deviations",
            colors=(
                ("#ff0000", "much of the first principal component"),
                ("#00ff00", "much of the second"),
                ("#0000ff", "much of the third"),
            ),
        ),
        Reduction(
            "gradcam", "Grad-CAM", "the class activation map Grad-CAM (see --target)", weighs=True
        ),
        Reduction("gradcam++", "Grad-CAM++", "Grad-CAM++", weighs=True),
        Reduction("layercam", "LayerCAM", "LayerCAM", weighs=True),
        Reduction("hirescam", "HiResCAM", "HiResCAM", weighs=True),
        Reduction("xgradcam", "XGrad-CAM", "XGrad-CAM, for and against", weighs=True, signed=True),
        Reduction(
            "gradxact",
            "gradient × activation",
            "the sum of gradient × activation, for and against",
            weighs=True,
            signed=True,
        ),
    )
}
"""By name, in the order of help texts; `--reduce`, figures and the report read it. The arithmetic
is `drawing.reduce.REDUCTIONS`, which has a function for each of one component, and
`drawing.class_maps.METHODS`, which has one for each that weighs."""

CLASS_MAPS = {name: reduction for name, reduction in REDUCTIONS.items() if reduction.weighs}
"""The class activation maps among them."""


def is_signed(name: str | None) -> bool:
    """Whether a reduction's name, which may be none or unknown, is one of values with a sign."""
    return name in REDUCTIONS and REDUCTIONS[name].signed
