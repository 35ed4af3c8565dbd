"""The answers of models, in which targets are looked up: boxes, regions, or values.

The model's family (`gradients.families`) reads an answer from the model's output. The
answer finds the number that a target means, and lists the targets of this image. Each
number is an element of the output's tensors, or computed from them, so that gradients
flow back from it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from featviz.errors import UsageError
from featviz.gradients.targets import Target, TargetValue, class_index
from featviz.records import Detection, RegionMap
from featviz.text import is_number, listed, percent

_BACKGROUNDS = ("background", "__background__")
_LISTED = 4
"""An error lists at most this many boxes or regions."""
_EXAMPLES = 2
"""A hint offers at most this many boxes or regions as targets."""


class NothingFoundError(UsageError):
    """The target is a box or a region that this image does not have, but another one
    may."""


class LabelledBox(NamedTuple):
    """A candidate of a detector: a box, taken for an object of one class. The tuple is an
    index into `Boxes.numbers` and `Boxes.scores`."""

    row: int
    """The box's row in `Boxes.corners`."""
    label: int
    """Index of the class."""


@dataclass
class Boxes:
    """All candidates of a detector, and which of them are objects. A candidate is a box with
    a class."""

    corners: Tensor
    """Left, top, right and bottom of each box in pixels of the input, [N, 4]."""
    numbers: Tensor
    """[N, C], with gradients: the logit of each box and class, or the score if the output
    has no logits."""
    scores: Tensor
    """[N, C], without gradients: the score of each box and class, 0..1; 0 for a class that
    the library does not report for the box."""
    kept: Sequence[LabelledBox]
    """The objects, the most confident one first: `box:N` is the one at index N."""
    threshold: float | None
    """A candidate whose score is above this is an object; None if it is not known."""
    names: Sequence[str] = ()
    """Names of the classes; empty if they are not known."""

    def __post_init__(self) -> None:
        """Leave out objects whose box is not finite: it could neither be drawn nor written
        as JSON."""
        finite = self.corners.isfinite().all(dim=1)
        self.kept = [candidate for candidate in self.kept if finite[candidate.row]]

    @property
    def detections(self) -> tuple[Detection, ...]:
        """The objects, in the order of `kept`."""
        return tuple(self._detection(candidate) for candidate in self.kept)

    @property
    def examples(self) -> list[str]:
        """Some targets of this image, for hints."""
        texts = [f"box:{number}" for number in range(len(self.kept))][:_EXAMPLES]
        strongest = self._strongest
        if strongest is None:
            return texts
        detection = self._detection(strongest)
        if self.kept and detection.name is not None:
            texts.append(f"box:{detection.name}")
        return [*texts, f"class:{detection.index}"]

    def value(self, target: Target) -> TargetValue | None:
        """The number that `box`, `box:N`, `box:NAME` or `class:NAME` means; None for a
        target of another kind.

        Raises:
            NothingFoundError: this image has no such box.
            UsageError: the detector has no such class.
        """
        if target.kind not in ("box", "class"):
            return None
        candidate = self._candidate_of(target)
        if candidate is None:
            raise self._nothing_found_error(target)
        detection = self._detection(candidate)
        score = percent(detection.score)
        if candidate not in self.kept and self.threshold is not None:
            # A candidate above the threshold may be no object, either: of two classes of one
            # box, or two boxes of one thing, the library keeps one.
            is_below = detection.score < self.threshold
            score += f", below {self.threshold:g}: no box" if is_below else ", no box"
        title = f"{detection.title} ({score})"
        return TargetValue(self.numbers[candidate], title, detection)

    def _candidate_of(self, target: Target) -> LabelledBox | None:
        """The candidate that a target of kind `box` or `class` means; None if this image
        has none.

        Raises:
            UsageError: the detector has no such class.
        """
        if not target.argument:
            if self.kept:
                return self.kept[0]
            # without --target, a picture of the strongest candidate is better than an error
            return self._strongest if target.is_default else None
        if target.kind == "box" and is_number(target.argument):
            number = int(target.argument)
            return self.kept[number] if number < len(self.kept) else None
        if not self.scores.numel():
            return None
        count = self.scores.shape[1]
        index = class_index(target, count, self.names, self.examples)
        # `class:dog` is the candidate with the highest score for dog, object or not;
        # `box:dog` is the most confident object that is a dog
        if target.kind == "class":
            row = int(self.scores[:, index].argmax())
            return LabelledBox(row, index) if self.scores[row, index] else None
        for candidate in self.kept:
            if candidate.label == index:
                return candidate
        return None

    @property
    def _strongest(self) -> LabelledBox | None:
        """The most confident object, or the candidate with the highest score if there is no
        object; None if there is no candidate."""
        if self.kept:
            return self.kept[0]
        if not self.scores.numel():
            return None
        return LabelledBox(*divmod(int(self.scores.argmax()), self.scores.shape[1]))

    def _detection(self, candidate: LabelledBox) -> Detection:
        """A candidate with its box in pixels of the input, its class and its score."""
        left, top, right, bottom = self.corners[candidate.row].tolist()
        index = candidate.label
        return Detection(
            box=(left, top, right, bottom),
            index=index,
            name=self.names[index] if index < len(self.names) else None,
            score=float(self.scores[candidate]),
        )

    @property
    def shortage(self) -> str:
        """Why there is no object: `no box above the threshold of 0.5; the highest score is
        0.04 (class 7)`. Only to be read if `kept` is empty."""
        threshold = "" if self.threshold is None else f" of {self.threshold:g}"
        message = f"no box above the threshold{threshold}"
        strongest = self._strongest
        if strongest is None:
            return message
        detection = self._detection(strongest)
        return (
            f"{message}; the highest score is {detection.score:.2g} ({detection.title})"
        )

    def _nothing_found_error(self, target: Target) -> NothingFoundError:
        """The error if an image does not have the box that a target means. The message says
        which boxes there are."""
        strongest = self._strongest
        if self.kept:
            boxes = [detection.text for detection in self.detections]
            message = (
                f"there is no such box among {len(boxes)} ({listed(boxes, _LISTED)})"
            )
        else:
            message = f"there is {self.shortage}"
        hint = "another image, or trained weights"
        if strongest is not None:
            hint = f"targets here: {', '.join(self.examples)}"
        return NothingFoundError(f"target {target.text!r}: {message}", hint)


@dataclass(frozen=True)
class Regions:
    """The scores of a segmentation, and the class that wins each pixel."""

    scores: Tensor
    """[C, h, w] in the output's own size, with gradients."""
    input_size: tuple[int, int]
    """Height and width of the input; `pixel:X,Y` is in its pixels."""
    names: tuple[str, ...] = ()
    """Names of the classes; empty if they are not known."""
    class_numbers: Tensor | None = None
    """[C], with gradients: the number of each class as a target. None for the sum of the
    class's scores over its region."""
    noun: str = "class"
    """The word for a channel without a name: `class` in `class 7`."""

    @property
    def winners(self) -> Tensor:
        """The class with the highest score at each pixel, [h, w]. If there is only one
        class, 0 where its score is above 0, and -1 elsewhere."""
        scores = self.scores.detach().float()  # torch compares no float8
        if len(scores) == 1:
            return (scores[0] > 0).long() - 1
        return scores.argmax(dim=0)

    @property
    def region_map(self) -> RegionMap:
        """The regions for pictures."""
        return RegionMap(self.winners.cpu().numpy(), self.names, self.noun)

    @property
    def examples(self) -> list[str]:
        """Some targets of this image, for hints."""
        texts = []
        for index in self.region_map.largest[:_EXAMPLES]:
            name = self.names[index] if index < len(self.names) else index
            texts.append(f"class:{name}")
        return [*texts, _middle_pixel(self.input_size)]

    def value(self, target: Target) -> TargetValue | None:
        """The number that `class:NAME`, `top1` (the largest region other than the
        background) or `pixel:X,Y` means; None for a target of another kind.

        Raises:
            NothingFoundError: the class wins no pixel of this image.
            UsageError: the model has no such class, or the input no such pixel.
        """
        if target.kind == "pixel":
            return self._at_pixel(target)
        if target.kind not in ("class", "top1"):
            return None
        regions = self.region_map
        if target.kind == "class":
            count = len(self.scores)
            index = class_index(target, count, self.names, self.examples)
        else:
            index = self._default_class(regions)
        inside = self.winners == index
        if not inside.any():
            shares = [regions.title(winner) for winner in regions.largest]
            message = f"target {target.text!r}: {regions.title(index)} wins no pixel"
            if shares:
                message += f"; here are {listed(shares, _LISTED)}"
            raise NothingFoundError(
                message, f"targets here: {', '.join(self.examples)}"
            )
        if self.class_numbers is not None:
            number = self.class_numbers[index]
        elif len(self.scores) == 1:
            # the mean, since a sum would grow with the region of a class without rivals
            number = self.scores[0][inside].mean()
        else:
            number = self.scores[index][inside].sum()
        return TargetValue(number, regions.title(index), inside.cpu().numpy())

    def _default_class(self, regions: RegionMap) -> int:
        """The class of the largest region other than the background, if there is another;
        0 if no class wins a pixel."""
        largest = regions.largest
        if not largest:
            return 0
        # without names, class 0 is taken for the background, as in the data set VOC
        first_name = self.names[0].lower() if self.names else _BACKGROUNDS[0]
        is_background = len(self.scores) > 1 and first_name in _BACKGROUNDS
        if is_background and largest[0] == 0 and len(largest) > 1:
            return largest[1]
        return largest[0]

    def _at_pixel(self, target: Target) -> TargetValue:
        """The score of the class that wins the pixel of a target `pixel:X,Y`, at this pixel.

        Raises:
            UsageError: the input has no such pixel.
        """
        row, column = _position(target, self.input_size, self.winners.shape)
        index = max(0, int(self.winners[row, column]))
        inside = torch.zeros_like(self.winners, dtype=torch.bool)
        inside[row, column] = True
        return TargetValue(
            self.scores[index, row, column],
            f"{self.region_map.title(index)} at {target.argument}",
            inside.cpu().numpy(),
        )


@dataclass(frozen=True)
class Values:
    """Numbers that are neither boxes nor regions: depth, heat maps, an embedding."""

    tensor: Tensor
    """With gradients: [1, K, h, w] for K heat maps, [1, h, w] for depth, any shape for an
    embedding."""
    kinds: Sequence[str]
    """The kinds of targets that this answer offers, the default first."""
    input_size: tuple[int, int]
    """Height and width of the input; `pixel:X,Y` is in its pixels."""

    @property
    def examples(self) -> list[str]:
        """Some targets, for hints."""
        texts = {"keypoint": "keypoint:0", "pixel": _middle_pixel(self.input_size)}
        return [texts.get(kind, kind) for kind in self.kinds]

    def value(self, target: Target) -> TargetValue | None:
        """The number that a target means: a reduction of all values (`mean`, `sum`,
        `norm`), the peak of a heat map (`keypoint`), or the value at a pixel (`pixel`).
        None for a target of another kind, and for a `keypoint` or `pixel` that is not in
        `kinds`.

        Raises:
            UsageError: there is no such keypoint or pixel.
        """
        if target.kind in ("mean", "sum", "norm"):
            return TargetValue(getattr(self.tensor, target.kind)(), target.text)
        if target.kind not in self.kinds:
            return None
        maps = self.tensor[0] if self.tensor.ndim == 4 else self.tensor
        if target.kind == "keypoint":
            return self._peak(target, maps)
        row, column = _position(target, self.input_size, maps.shape[1:])
        return TargetValue(maps[0, row, column], target.text)

    def _peak(self, target: Target, maps: Tensor) -> TargetValue:
        """The highest value of a heat map.

        Args:
            target: `keypoint:N`, or `keypoint` for the map with the highest value.
            maps: [K, h, w].

        Raises:
            UsageError: the model has no keypoint N.
        """
        index = int(maps.detach().flatten(1).amax(dim=1).argmax())
        if target.argument:
            index = int(target.argument)
        if index >= len(maps):
            raise target.error(
                f": the model has keypoints 0 to {len(maps) - 1}",
                f"targets here: {', '.join(self.examples)}",
            )
        return TargetValue(maps[index].max(), f"keypoint {index}")


Answer: TypeAlias = Boxes | Regions | Values


def _middle_pixel(input_size: tuple[int, int]) -> str:
    """The target of the pixel in the middle of the input, `pixel:112,112`."""
    height, width = input_size
    return f"pixel:{width // 2},{height // 2}"


def _position(
    target: Target, input_size: tuple[int, int], size: Sequence[int]
) -> tuple[int, int]:
    """The row and the column of a map at which a pixel of the input lies.

    Args:
        target: `pixel:X,Y`, in pixels of the input.
        input_size: height and width of the input.
        size: height and width of the map.

    Raises:
        UsageError: the input has no such pixel.
    """
    x, y = map(int, target.argument.split(","))
    height, width = input_size
    if x >= width or y >= height:
        raise target.error(
            f": the input has {width}×{height} pixels",
            f"targets here: {_middle_pixel(input_size)}",
        )
    return y * size[0] // height, x * size[1] // width
