"""What models return, by family: boxes, regions, classes, depth, peaks, embeddings.

A family is one record of `FAMILIES`. It says how its output is recognised, how its
boxes or regions are read from it, by the family's own library where that has more than
a formula, which number gradients are taken of without a target, and which layers a
class activation map is made of:

    library's decoder, without gradients       raw output, with gradients
    anchors that survive, their boxes          logits [anchors, classes]
                      |                                |
                      +--- anchor, class ----> one number: the target

Every number of a target is an element or a sum of the output that the forward pass
made."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn import functional

from featviz.errors import UsageError
from featviz.gradients import targets
from featviz.gradients.targets import Target, TargetValue, class_index, output_at
from featviz.models.load import LoadedModel
from featviz.models.requirements import import_ultralytics
from featviz.records import Detection, RegionMap
from featviz.text import is_number, listed

_YOLO_CONFIDENCE = 0.25
_YOLO_OVERLAP = 0.7
"""Of two boxes of a class: what Ultralytics' predictors take by default, as the
confidence."""
_HF_CONFIDENCE = 0.5
"""The default of transformers' `post_process_object_detection`."""
_BACKGROUNDS = ("background", "__background__")
_MOST_CLASSES = 32
"""Channels up to which maps of a half or a quarter of the input's size are scores of
classes."""
_NAMED = 4
"""Names of classes that a hint lists."""


class NothingFoundError(UsageError):
    """The target is a box or a region, and this image has none; another one may have
    it."""


class ModelOutput(NamedTuple):
    """What a model returned, and what tells how to read it."""

    value: Any
    module: nn.Module
    height: int
    """Pixels of the input; so is the width."""
    width: int

    def tensor(self, key: str, ndim: int) -> Tensor | None:
        """The floats at a key of the output, if they have as many axes and are of one
        image."""
        tensor = output_at(self.value, key)
        if not isinstance(tensor, Tensor) or not tensor.is_floating_point():
            return None
        if tensor.is_nested or tensor.layout is not torch.strided:
            return None
        return tensor if tensor.ndim == ndim and tensor.shape[0] == 1 else None


# Boxes


@dataclass(frozen=True)
class Boxes:
    """The candidates of a detector, and which of them it takes for objects."""

    corners: Tensor
    """Left, top, right and bottom of each candidate in pixels of the input, [N, 4]."""
    numbers: Tensor
    """With gradients: the logit, else the score, of each candidate and class, [N, C].
    """
    scores: Tensor
    """The same as 0..1."""
    kept: Sequence[tuple[int, int]]
    """The candidate and the class of each box, the most confident one first."""
    threshold: float | None
    """The least score of a box; None where the library applies it unseen."""
    channels: None = None
    """No layer that gives maps gives boxes."""

    def detections(self, names: Sequence[str]) -> tuple[Detection, ...]:
        """The boxes, numbered as `box:N` counts."""
        return tuple(self._detection(at, names) for at in self.kept)

    def value(self, target: Target, names: Sequence[str]) -> TargetValue | None:
        """The number of `box`, `box:N`, `box:NAME` or `class:NAME`; None for other
        targets.

        Raises:
            NothingFoundError: no such box in this image.
        """
        if target.kind == "box":
            at = self._box(target, names)
        elif target.kind == "class":
            at = self._best(self._class(target, names))
            if not self.scores[at]:  # no candidate is of this class
                raise self._nothing(target, names)
        else:
            return None
        detection = self._detection(at, names)
        title = detection.text
        if at not in self.kept and self.threshold is not None:
            title += f" (below {self.threshold:g}: no box)"
        return TargetValue(self.numbers[at], title, detection)

    def examples(self, names: Sequence[str]) -> list[str]:
        """Targets that there are in this image."""
        detections = self.detections(names)
        texts = [f"box:{number}" for number in range(min(len(detections), 2))]
        if detections and detections[0].name is not None:
            texts.append(f"box:{detections[0].name}")
        if self.scores.numel():
            texts.append(f"class:{self._detection(self._strongest, names).index}")
        return texts

    @property
    def _strongest(self) -> tuple[int, int]:
        if self.kept:
            return self.kept[0]
        candidate, index = divmod(int(self.scores.argmax()), self.scores.shape[1])
        return candidate, index

    def _best(self, index: int) -> tuple[int, int]:
        return int(self.scores[:, index].argmax()), index

    def _detection(self, at: tuple[int, int], names: Sequence[str]) -> Detection:
        left, top, right, bottom = self.corners[at[0]].tolist()
        name = names[at[1]] if at[1] < len(names) else None
        return Detection(
            (left, top, right, bottom), at[1], name, float(self.scores[at])
        )

    def _class(self, target: Target, names: Sequence[str]) -> int:
        if not self.scores.numel():
            raise self._nothing(target, names)
        return class_index(target, self.scores.shape[1], names, self.examples(names))

    def _box(self, target: Target, names: Sequence[str]) -> tuple[int, int]:
        """The candidate and the class of the box that is meant."""
        if not target.argument:
            if self.kept:
                return self.kept[0]
            # a picture of the strongest candidate says more than a refusal of the
            # default
            if target.is_default and self.scores.numel():
                return self._strongest
            raise self._nothing(target, names)
        if is_number(target.argument):
            number = int(target.argument)
            if number < len(self.kept):
                return self.kept[number]
            raise self._nothing(target, names)
        index = class_index(target, self.scores.shape[1], names, self.examples(names))
        for at in self.kept:
            if at[1] == index:
                return at
        raise self._nothing(target, names)

    def _nothing(self, target: Target, names: Sequence[str]) -> NothingFoundError:
        """What there is in place of the box that is meant."""
        threshold = "" if self.threshold is None else f" of {self.threshold:g}"
        if self.kept:
            boxes = [detection.text for detection in self.detections(names)]
            message = (
                f": there is no such box among {len(boxes)} ({listed(boxes, _NAMED)})"
            )
        else:
            message = f": there is no box above the threshold{threshold}"
            if self.scores.numel():
                strongest = self._detection(self._strongest, names)
                message += (
                    f"; the highest score is {strongest.score:.2g} ({strongest.title})"
                )
        examples = self.examples(names)
        if examples:
            hint = f"targets here: {', '.join(examples)}"
        else:
            hint = (
                "a lower threshold keeps weaker boxes: --model-arg"
                " score_thresh=0.001, or "
            )
            hint += "box_score_thresh=0.001 of an R-CNN"
        return NothingFoundError(f"target {target.text!r}{message}", hint)


def _yolo(output: ModelOutput) -> Boxes:
    """Ultralytics' boxes: `y` [1, 4 + C (+ more), A] holds decoded boxes and scores
    0..1 of each anchor, and a dict beside it the logits [1, C, A]; an end-to-end head
    gives [1, 300, 6]."""
    y, extra = output.value if isinstance(output.value, tuple) else (output.value, None)
    # of a segmentation, whose second is prototypes
    y = y[0] if isinstance(y, tuple) else y
    logits = extra if isinstance(extra, dict) else {}
    # of an end-to-end head, whose own logits are made of detached maps
    logits = logits.get("one2many", logits)
    count = output.module.model[-1].nc  # type: ignore[index, union-attr]
    if getattr(output.module, "end2end", False):
        return _end_to_end(y[0], logits, extra["one2one"]["scores"][0])
    try:
        nms = import_ultralytics("ultralytics.utils.nms")
    except ImportError:  # before 8.3.200
        nms = import_ultralytics("ultralytics.utils.ops")
    rotated = type(output.module.model[-1]).__name__.startswith("OBB")  # type: ignore[index]
    with torch.no_grad():
        rows, kept = nms.non_max_suppression(
            y.detach().clone(),
            conf_thres=_YOLO_CONFIDENCE,
            iou_thres=_YOLO_OVERLAP,
            nc=count,
            rotated=rotated,
            return_idxs=True,
        )
    corners = _corners(y[0, :4].T.detach())
    scores = y[0, 4 : 4 + count].T
    if rotated:
        corners = _bounds(y[0, :4].T.detach(), y[0, -1].detach())
    return Boxes(
        corners=corners,
        numbers=logits["scores"][0].T if "scores" in logits else scores,
        scores=scores.detach(),
        kept=list(
            zip(kept[0].long().tolist(), rows[0][:, 5].long().tolist(), strict=True)
        ),
        threshold=_YOLO_CONFIDENCE,
    )


def _end_to_end(rows: Tensor, logits: Any, selected_from: Tensor) -> Boxes:
    """Boxes that a head has selected itself, in [300, 6] with score and class: the
    anchor of each is the one that has its score, and the logit is that of the head
    which has gradients."""
    classes = rows[:, 5].long()
    with torch.no_grad():
        apart = (selected_from.sigmoid()[classes] - rows[:, 4:5]).abs()
        anchors = apart.argmin(dim=1)
    numbers = logits["scores"][0].T[anchors]
    order = rows[:, 4].argsort(descending=True).tolist()
    chosen = functional.one_hot(classes, numbers.shape[1])
    return Boxes(
        corners=rows[:, :4].detach(),
        numbers=numbers,
        scores=rows[:, 4:5].detach() * chosen,
        kept=[(at, int(classes[at])) for at in order if rows[at, 4] > _YOLO_CONFIDENCE],
        threshold=_YOLO_CONFIDENCE,
    )


def _corners(boxes: Tensor) -> Tensor:
    """Left, top, right and bottom of boxes [N, 4] of a centre, a width and a height."""
    center = boxes[:, :2]
    size = boxes[:, 2:]
    return torch.cat((center - size / 2, center + size / 2), dim=1)


def _bounds(boxes: Tensor, angles: Tensor) -> Tensor:
    """The upright boxes around boxes that are turned by angles [N] in radians."""
    cos = angles.cos().abs()
    sin = angles.sin().abs()
    width, height = boxes[:, 2:].unbind(dim=1)
    size = torch.stack((width * cos + height * sin, width * sin + height * cos), dim=1)
    return _corners(torch.cat((boxes[:, :2], size), dim=1))


def _torchvision_boxes(output: ModelOutput) -> Boxes:
    """Boxes that the model has decoded itself; a class of no box has no number."""
    (found,) = output.value
    labels = found["labels"]
    count = int(labels.max()) + 1 if len(labels) else 0
    scores = found["scores"]
    order = scores.argsort(descending=True).tolist()
    numbers = (
        scores[:, None] * functional.one_hot(labels, count)
        if count
        else scores[:, None]
    )
    return Boxes(
        corners=found["boxes"].detach(),
        numbers=numbers,
        scores=numbers.detach(),
        kept=[(at, int(labels[at])) for at in order],
        threshold=None,
    )


def _detr(output: ModelOutput) -> Boxes:
    """Boxes of transformers' detectors, as their `post_process_object_detection` takes
    them: by softmax where the last column is "no object", else by sigmoid, each class
    for itself."""
    logits = output.value["logits"][0]
    boxes = output.value["pred_boxes"][0].detach()
    sides = boxes.new_tensor([output.width, output.height, output.width, output.height])
    count = getattr(getattr(output.module, "config", None), "num_labels", None)
    if count is not None and logits.shape[1] == count + 1:
        scores = logits.detach().softmax(dim=1)[:, :-1]
        logits = logits[:, :-1]
        best = functional.one_hot(scores.argmax(dim=1), count)
        ranked = (scores * best).flatten().sort(descending=True)
    else:
        scores = logits.detach().sigmoid()
        ranked = scores.flatten().sort(descending=True)
    count = int((ranked.values > _HF_CONFIDENCE).sum())
    kept = [
        divmod(at, logits.shape[1])
        for at in ranked.indices[: min(count, len(logits))].tolist()
    ]
    return Boxes(_corners(boxes) * sides, logits, scores, kept, _HF_CONFIDENCE)


# Regions


@dataclass(frozen=True)
class Regions:
    """The scores of a segmentation, and the class that wins each pixel."""

    scores: Tensor
    """With gradients: [C, h, w] in the output's own size."""
    input_size: tuple[int, int]
    """Height and width, in whose pixels `pixel:X,Y` counts."""
    class_numbers: Tensor | None = None
    """With gradients: a number for each class [C], in place of its scores' sum over its
    region."""

    @property
    def channels(self) -> int:
        """Of the layers that give the scores."""
        return len(self.scores)

    @property
    def winners(self) -> Tensor:
        """The class of each pixel, [h, w]; -1 for none, where there is one class alone."""
        scores = self.scores.detach().float()  # torch compares no float8
        if len(scores) == 1:
            return (scores[0] > 0).long() - 1
        return scores.argmax(dim=0)

    def region_map(self, names: Sequence[str]) -> RegionMap:
        """The regions for pictures."""
        return RegionMap(self.winners.cpu().numpy(), tuple(names))

    def value(self, target: Target, names: Sequence[str]) -> TargetValue | None:
        """The number of `class:NAME`, of the largest region, or of `pixel:X,Y`; None
        for others."""
        if target.kind not in ("class", "top1", "pixel"):
            return None
        regions = self.region_map(names)
        if target.kind == "pixel":
            return self._pixel(target, regions)
        index = self._class(target, regions)
        inside = self.winners == index
        if not inside.any():
            shares = [regions.title(other) for other in regions.largest]
            message = f": {regions.title(index)} wins no pixel"
            message += f"; here are {listed(shares, _NAMED)}" if shares else ""
            hint = f"targets here: {', '.join(self.examples(names))}"
            raise NothingFoundError(f"target {target.text!r}{message}", hint)
        if self.class_numbers is not None:
            number = self.class_numbers[index]
        else:
            scores = self.scores[index][inside]
            # one class has no rival, so that the size of its region is no evidence
            number = scores.mean() if len(self.scores) == 1 else scores.sum()
        return TargetValue(number, regions.title(index), inside.cpu().numpy())

    def examples(self, names: Sequence[str]) -> list[str]:
        """Targets that there are in this image."""
        regions = self.region_map(names)
        texts = []
        for index in regions.largest[:2]:
            texts.append(f"class:{names[index] if index < len(names) else index}")
        height, width = self.input_size
        return [*texts, f"pixel:{width // 2},{height // 2}"]

    def _class(self, target: Target, regions: RegionMap) -> int:
        """The class that is meant, by default the largest region besides the
        background."""
        if target.kind == "class":
            names = regions.names
            return class_index(target, len(self.scores), names, self.examples(names))
        largest = regions.largest
        if not largest:
            return 0  # the one class, which has no pixel
        first = regions.names[0].lower() if regions.names else _BACKGROUNDS[0]
        has_background = len(self.scores) > 1 and first in _BACKGROUNDS
        if has_background and largest[0] == 0 and len(largest) > 1:
            return largest[1]
        return largest[0]

    def _pixel(self, target: Target, regions: RegionMap) -> TargetValue:
        """The score of the class that wins a pixel, there."""
        x, y = (int(number) for number in target.argument.split(","))
        row, column = pixel_at(target, (x, y), self.input_size, self.winners.shape)
        index = max(0, int(self.winners[row, column]))
        inside = torch.zeros_like(self.winners, dtype=torch.bool)
        inside[row, column] = True
        title = f"{regions.title(index)} at {x},{y}"
        return TargetValue(self.scores[index, row, column], title, inside.cpu().numpy())


def pixel_at(
    target: Target,
    pixel: tuple[int, int],
    input_size: tuple[int, int],
    size: Sequence[int],
) -> tuple[int, int]:
    """The row and the column of a map of a size that a pixel of the input lies in."""
    x, y = pixel
    height, width = input_size
    if x >= width or y >= height:
        message = f": the input has {width}×{height} pixels"
        raise target.error(message, f"targets here: pixel:{width // 2},{height // 2}")
    return y * size[0] // height, x * size[1] // width


def _mask_queries(output: ModelOutput) -> Regions:
    """Regions of MaskFormer and Mask2Former, as `post_process_semantic_segmentation`
    makes them: each query has a class and a mask. The number of a class is the logit of
    the query that gives its region most; the last column is "no object"."""
    logits = output.value["class_queries_logits"][0]
    with torch.no_grad():
        classes = logits.softmax(dim=1)[:, :-1]
        masks = output.value["masks_queries_logits"][0].sigmoid()
        scores = torch.einsum("qc,qhw->chw", classes, masks)
        inside = functional.one_hot(scores.argmax(dim=0), len(scores)).float()
        weights = classes * torch.einsum("qhw,hwc->qc", masks, inside)
        queries = weights.argmax(dim=0)
    numbers = logits[queries, torch.arange(len(queries), device=queries.device)]
    return Regions(scores, (output.height, output.width), numbers)


def _regions_at(key: str, output: ModelOutput) -> Regions:
    return Regions(output_at(output.value, key)[0], (output.height, output.width))


# Depth, peaks and embeddings


@dataclass(frozen=True)
class Values:
    """Numbers that are neither boxes nor regions."""

    tensor: Tensor
    """With gradients."""
    kinds: Sequence[str]
    """The targets that make sense, the default first."""
    input_size: tuple[int, int]

    @property
    def channels(self) -> int | None:
        """Of the layers that give the maps of depth or of keypoints; None for an
        embedding, whose last map shows what it is made of."""
        if "keypoint" in self.kinds:
            return self.tensor.shape[1]
        return 1 if "pixel" in self.kinds else None

    def value(self, target: Target, names: Sequence[str]) -> TargetValue | None:
        """The number of a reduction, of the strongest peak of heat maps, or at a pixel."""
        if target.kind in ("mean", "sum", "norm"):
            return TargetValue(getattr(self.tensor, target.kind)(), target.text)
        if target.kind not in self.kinds:
            return None
        maps = self.tensor[0] if self.tensor.ndim == 4 else self.tensor
        if target.kind == "keypoint":
            return self._peak(target, maps)
        x, y = (int(number) for number in target.argument.split(","))
        row, column = pixel_at(target, (x, y), self.input_size, maps.shape[1:])
        return TargetValue(maps[0, row, column], target.text)

    def examples(self, names: Sequence[str]) -> list[str]:
        """Targets that there are."""
        height, width = self.input_size
        arguments = {"keypoint": ":0", "pixel": f":{width // 2},{height // 2}"}
        return [kind + arguments.get(kind, "") for kind in self.kinds]

    def _peak(self, target: Target, maps: Tensor) -> TargetValue:
        """The highest value of a heat map, by default of the one that has the highest
        of all."""
        index = int(maps.detach().flatten(1).amax(dim=1).argmax())
        if target.argument:
            index = int(target.argument)
            if index >= len(maps):
                message = f": the model has keypoints 0 to {len(maps) - 1}"
                raise target.error(
                    message, f"targets here: {', '.join(self.examples(()))}"
                )
        return TargetValue(maps[index].max(), f"keypoint {index}")


def _values(key: str, kinds: str, output: ModelOutput) -> Values:
    return Values(
        tensor=output_at(output.value, key),
        kinds=kinds.split(),
        input_size=(output.height, output.width),
    )


Answer: TypeAlias = Boxes | Regions | Values


# The table


@dataclass(frozen=True)
class Family:
    """Models whose outputs are read alike."""

    title: str
    matches: Callable[[ModelOutput], bool]
    read: Callable[[ModelOutput], Answer]
    default: str
    """The target that is taken without `--target`."""
    layers: Callable[[nn.Module], Sequence[str]] = field(default=lambda module: ())
    """Names of the layers whose maps enter the head, for `cam`; none where shapes tell
    them."""
    has_bottleneck: bool = False
    """Whether the maps of the lowest resolution are shown as well."""


def _is_yolo(output: ModelOutput) -> bool:
    for base in type(output.module).__mro__:
        if base.__name__ == "RTDETRDetectionModel":
            return False
        if (
            base.__module__ == "ultralytics.nn.tasks"
            and base.__name__ == "DetectionModel"
        ):
            return True
    return False


def _yolo_layers(module: nn.Module) -> list[str]:
    head = module.model[-1]  # type: ignore[index]
    return [f"model.{number}" for number in head.f]  # type: ignore[union-attr]


def _is_torchvision_detector(output: ModelOutput) -> bool:
    value = output.value
    is_single = (
        isinstance(value, list) and len(value) == 1 and isinstance(value[0], dict)
    )
    return is_single and {"boxes", "labels", "scores"} <= value[0].keys()


def _named(module: nn.Module, names: Sequence[str]) -> list[str]:
    """The first of these modules that the model has; of a list, which does not run, its
    items."""
    for name in names:
        part = _at_path(module, name)
        if isinstance(part, nn.ModuleList):
            return [f"{name}.{number}" for number in range(len(part))]
        if isinstance(part, nn.Module):
            return [name]
    return []


def _at_path(module: nn.Module, path: str) -> Any:
    """What stands at a path of attributes, None where nothing does."""
    part: Any = module
    for name in path.split("."):
        part = getattr(part, name, None)
    return part


def _has(key: str, ndim: int) -> Callable[[ModelOutput], bool]:
    return lambda output: output.tensor(key, ndim) is not None


def _is_detr(output: ModelOutput) -> bool:
    has_logits = output.tensor("logits", 3) is not None
    return has_logits and output.tensor("pred_boxes", 3) is not None


def _is_plain_segmentation(output: ModelOutput) -> bool:
    """Whether a model of no library returns scores of pixels: in the input's size, or a
    half or a quarter of it where there are few classes. Others are features."""
    scores = output.tensor("", 4)
    if scores is None:
        return False
    channels, height, width = scores.shape[1:]
    if (height, width) == (output.height, output.width):
        return True
    scaled = [(height * factor, width * factor) for factor in (2, 4)]
    return channels <= _MOST_CLASSES and (output.height, output.width) in scaled


def _is_depth(output: ModelOutput) -> bool:
    """Whether a model of no library returns a number for each pixel."""
    depth = output.tensor("", 3)
    return depth is not None and depth.shape[1:] == (output.height, output.width)


def _family_of_values(title: str, key: str, ndim: int, kinds: str) -> Family:
    """A family that is recognised by one tensor of its output."""
    return Family(
        title,
        matches=_has(key, ndim),
        read=lambda output: _values(key, kinds, output),
        default=kinds.split()[0],
    )


def _family_of_regions(
    title: str, key: str, matches: Callable[[ModelOutput], bool]
) -> Family:
    return Family(title, matches, lambda output: _regions_at(key, output), "top1")


FAMILIES = (
    Family("a detector of Ultralytics", _is_yolo, _yolo, "box", _yolo_layers),
    Family(
        "a detector of torchvision",
        matches=_is_torchvision_detector,
        read=_torchvision_boxes,
        default="box",
        layers=lambda module: _named(module, ("backbone",)),
    ),
    Family(
        "a detector of transformers",
        matches=_is_detr,
        read=_detr,
        default="box",
        layers=lambda module: _named(
            module, ("model.decoder_input_proj", "model.input_projection")
        ),
    ),
    Family(
        "a segmentation by queries",
        matches=_has("masks_queries_logits", 4),
        read=_mask_queries,
        default="top1",
    ),
    _family_of_regions("a segmentation of torchvision", "out", _has("out", 4)),
    _family_of_regions("a segmentation of transformers", "logits", _has("logits", 4)),
    replace(
        _family_of_regions("a segmentation", "", _is_plain_segmentation),
        has_bottleneck=True,
    ),
    _family_of_values("a depth estimator", "predicted_depth", 3, "mean pixel"),
    replace(
        _family_of_values("a depth estimator", "", 3, "mean pixel"), matches=_is_depth
    ),
    _family_of_values("an estimator of poses", "heatmaps", 4, "keypoint mean"),
    _family_of_values("an encoder", "pooler_output", 2, "norm mean"),
    _family_of_values("an encoder", "last_hidden_state", 3, "norm mean"),
    _family_of_values("an encoder", "last_hidden_state", 4, "norm mean"),
    _family_of_values("an encoder", "", 4, "norm mean"),
    _family_of_values("an encoder", "", 3, "norm mean"),
    _family_of_values("an encoder", "", 2, "norm mean"),
)
"""In the order in which they are tried."""


class Reading(NamedTuple):
    """An output as its family reads it."""

    family: Family
    answer: Answer
    names: Sequence[str]
    """Of the classes."""

    def value(self, target: Target) -> TargetValue | None:
        """The number that is the target; None where the target is not of this family."""
        if target.keys or target.layer is not None:
            return None
        if target.is_default:
            target = replace(targets.parse(self.family.default), is_default=True)
        value = self.answer.value(target, self.names)
        if value is None and (isinstance(self.answer, Boxes) or not target.is_general):
            message = f" is no target of {self.family.title}"
            raise target.error(message, f"targets here: {', '.join(self.examples)}")
        return value

    @property
    def examples(self) -> list[str]:
        """Targets that this output has."""
        return self.answer.examples(self.names)

    @property
    def detections(self) -> tuple[Detection, ...]:
        """The boxes of a detector."""
        return (
            self.answer.detections(self.names) if isinstance(self.answer, Boxes) else ()
        )

    @property
    def regions(self) -> RegionMap | None:
        """The regions of a segmentation."""
        return (
            self.answer.region_map(self.names)
            if isinstance(self.answer, Regions)
            else None
        )


def read(model: LoadedModel, output: Any, arg: Tensor) -> Reading | None:
    """Read a model's output as its family does; None for a classifier, and what nobody
    knows.

    Args:
        output: of the model.
        arg: its first argument, [1, C, H, W].
    """
    if isinstance(output, Tensor) and output.ndim == 2 and model.scores is not None:
        return None
    height, width = arg.shape[-2:]
    known = ModelOutput(output, model.module, height, width)
    for family in FAMILIES:
        if family.matches(known):
            return Reading(family, family.read(known), model.categories)
    return None
