"""What models return, by family, and how it is read as boxes, regions or values.

A family is one record of `FAMILIES`. It says how its output is recognised, how its output
is read, which target it has without `--target`, and which layers a class activation map is
made of. If decoding boxes takes more than a formula, the family's own library does it. The
number of a box is then looked up in the raw output:

    library's decoder, without gradients       raw output, with gradients
    anchors that survive, their boxes          logits [anchors, classes]
                      |                                |
                      +--- anchor, class ----> one number: the target
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from featviz.gradients import targets
from featviz.gradients.answers import Answer, Boxes, LabelledBox, Regions, Values
from featviz.gradients.targets import Target, TargetValue, output_at
from featviz.models.load import LoadedModel
from featviz.models.requirements import import_ultralytics
from featviz.records import Detection, RegionMap

_YOLO_CONFIDENCE = 0.25
"""The least score of a box. This and `_YOLO_OVERLAP` are the defaults of Ultralytics."""
_YOLO_OVERLAP = 0.7
"""Of two boxes of one class whose IoU is above this, the weaker one is dropped."""
_DETECTORS = "torchvision.models.detection."
"""The modules in which torchvision defines detectors have names that begin with this."""
_HF_CONFIDENCE = 0.5
"""The default of transformers' `post_process_object_detection`."""
_MOST_CLASSES = 32
"""Maps of a half or a quarter of the input's size are taken for scores of classes if they
are at most this many."""


class ModelOutput(NamedTuple):
    """What a model returned, and all that is needed to read it."""

    value: Any
    module: nn.Module
    input_size: tuple[int, int]
    """Height and width of the input, in pixels."""
    names: tuple[str, ...]
    """Names of the classes; empty if they are not known."""
    threshold: float | None
    """The score threshold of a detector of torchvision, if `weak_boxes_too` has taken it
    away; else None."""

    def tensor(self, key: str, ndim: int) -> Tensor | None:
        """The tensor at a key of the output, if it is a dense tensor of floats for one
        image, with `ndim` axes, [1, ...]; else None."""
        tensor = output_at(self.value, key)
        if not isinstance(tensor, Tensor) or not tensor.is_floating_point():
            return None
        if tensor.is_nested or tensor.layout is not torch.strided:
            return None
        if tensor.ndim != ndim or tensor.shape[0] != 1:
            return None
        return tensor


# Ultralytics


def _is_yolo(output: ModelOutput) -> bool:
    """Whether the model is a detector of Ultralytics other than RT-DETR."""
    bases = {
        base.__name__
        for base in type(output.module).__mro__
        if base.__module__ == "ultralytics.nn.tasks"
    }
    return "DetectionModel" in bases and "RTDETRDetectionModel" not in bases


def _yolo_layers(module: Any) -> list[str]:
    """Names of the layers whose maps the head takes."""
    # the head has their positions; -1 is the position before the head
    head = len(module.model) - 1
    return [f"model.{number % head}" for number in module.model[-1].f]


def _read_yolo(output: ModelOutput) -> Boxes:
    """Read Ultralytics' boxes.

    `y` [1, 4 + C (+ more), A] has for each of A anchors the decoded box, and the scores 0..1
    of C classes. Since Ultralytics 8.4 the output is a tuple of `y` and a dict with the
    logits [1, C, A]. A segmentation returns a tuple of `y` and its prototypes in place of
    `y`. A head that selects boxes itself (end to end) returns [1, 300, 6] in place of `y`."""
    y = output.value
    logits = {}
    if isinstance(y, tuple):
        logits = y[1] if isinstance(y[1], dict) else {}
        y = y[0][0] if isinstance(y[0], tuple) else y[0]
    head: Any = output.module.model[-1]  # type: ignore[index]
    if getattr(output.module, "end2end", False):
        return _read_end_to_end(output, y[0], logits)
    count = head.nc
    is_turned = type(head).__name__.startswith("OBB")
    boxes = y[0, :4].T.detach()
    scores = y[0, 4 : 4 + count].T
    nms = import_ultralytics("ultralytics.utils.nms")
    with torch.no_grad():
        # a copy, since NMS changes its argument
        (rows,), (anchors,) = nms.non_max_suppression(
            y.detach().clone(),
            conf_thres=_YOLO_CONFIDENCE,
            iou_thres=_YOLO_OVERLAP,
            nc=count,
            rotated=is_turned,
            return_idxs=True,
        )
    classes = rows[:, 5].long().tolist()
    return Boxes(
        corners=_bounds(boxes, y[0, -1].detach()) if is_turned else _corners(boxes),
        numbers=logits["scores"][0].T if "scores" in logits else scores,
        scores=scores.detach(),
        kept=list(map(LabelledBox, anchors.long().tolist(), classes)),
        threshold=_YOLO_CONFIDENCE,
        names=output.names,
    )


def _read_end_to_end(output: ModelOutput, rows: Tensor, logits: Any) -> Boxes:
    """Read boxes that a head has selected itself.

    The branch of the head that gives the boxes (one2one) is computed from detached maps,
    and has no gradients. So the anchor of each box is found, as the one with the same
    score. The number of the box is the logit of the other branch (one2many) there.

    Args:
        rows: the boxes [300, 6]: corners in pixels, score and class.
        logits: the raw output of both branches of the head, by name.
    """
    classes = rows[:, 5].long()
    with torch.no_grad():
        branch_scores = logits["one2one"]["scores"][0].sigmoid()
        anchors = (branch_scores[classes] - rows[:, 4:5]).abs().argmin(dim=1)
    numbers = logits["one2many"]["scores"][0].T[anchors]
    # the most confident box first
    kept = [
        LabelledBox(row, int(classes[row]))
        for row in rows[:, 4].argsort(descending=True).tolist()
        if rows[row, 4] > _YOLO_CONFIDENCE
    ]
    return Boxes(
        corners=rows[:, :4].detach(),
        numbers=numbers,
        scores=rows[:, 4:5].detach() * functional.one_hot(classes, numbers.shape[1]),
        kept=kept,
        threshold=_YOLO_CONFIDENCE,
        names=output.names,
    )


def _corners(boxes: Tensor) -> Tensor:
    """Left, top, right and bottom of boxes, [N, 4], which are given as centre, width and
    height, [N, 4]."""
    center = boxes[:, :2]
    size = boxes[:, 2:]
    return torch.cat((center - size / 2, center + size / 2), dim=1)


def _bounds(boxes: Tensor, angles: Tensor) -> Tensor:
    """The upright boxes around rotated boxes.

    Args:
        boxes: centre, width and height of each box before its rotation, [N, 4].
        angles: the rotations in radians, [N].

    Returns:
        Left, top, right and bottom, [N, 4].
    """
    cos = angles.cos().abs()
    sin = angles.sin().abs()
    width, height = boxes[:, 2:].unbind(dim=1)
    size = torch.stack((width * cos + height * sin, width * sin + height * cos), dim=1)
    return _corners(torch.cat((boxes[:, :2], size), dim=1))


# torchvision


def _is_torchvision_detector(output: ModelOutput) -> bool:
    """Whether the output is a list of one dict with boxes, labels and scores."""
    value = output.value
    if not isinstance(value, list) or len(value) != 1:
        return False
    return isinstance(value[0], dict) and {"boxes", "labels", "scores"} <= {*value[0]}


def _read_torchvision(output: ModelOutput) -> Boxes:
    """Read boxes that the model has decoded itself. Each box has a score for one class; its
    scores for other classes are 0."""
    (answer,) = output.value
    labels = answer["labels"]
    scores = answer["scores"]
    # at least one class more than the greatest label
    counts = (labels + 1).tolist()
    count = max(1, len(output.names), _class_count(output.module), *counts)
    names = output.names
    if len(names) == count - 1:  # a list that leaves out class 0, the background
        names = ("background", *names)
    numbers = scores[:, None] * functional.one_hot(labels, count)
    kept = []
    for row in scores.argsort(descending=True).tolist():
        if output.threshold is None or scores[row] > output.threshold:
            kept.append(LabelledBox(row, int(labels[row])))
    return Boxes(
        corners=answer["boxes"].detach(),
        numbers=numbers,
        scores=numbers.detach(),
        kept=kept,
        threshold=output.threshold,
        names=names,
    )


def _class_count(module: nn.Module) -> int:
    """How many classes a detector of torchvision has, the background among them; 0 for
    another model."""
    for submodule in module.modules():
        if not type(submodule).__module__.startswith(_DETECTORS):
            continue
        # the attributes of an R-CNN, of SSD, and of RetinaNet and FCOS
        for name in ("cls_score.out_features", "num_columns", "num_classes"):
            count = _at_path(submodule, name)
            if isinstance(count, int):
                return count
    return 0


@contextmanager
def weak_boxes_too(module: nn.Module) -> Iterator[float | None]:
    """In this block, let a detector of torchvision also return boxes below its threshold.

    Without them a model with random weights often returns no box, and there is nothing to
    take gradients of. The other boxes stay the same: of two boxes NMS keeps the stronger
    one, and only the strongest hundred are returned.

    Yields:
        The threshold that was taken away; None for other models.
    """
    thresholds: dict[Any, float] = {}
    for submodule in module.modules():
        if not type(submodule).__module__.startswith(_DETECTORS):
            continue
        # a region proposal network has a threshold for boxes that are not the output
        if type(submodule).__name__.startswith("RegionProposal"):
            continue
        threshold = getattr(submodule, "score_thresh", None)
        if isinstance(threshold, float):
            thresholds[submodule] = threshold
    try:
        for head in thresholds:
            head.score_thresh = 0.0
        yield next(iter(thresholds.values()), None)
    finally:
        for head, threshold in thresholds.items():
            head.score_thresh = threshold


# transformers


def _is_detr(output: ModelOutput) -> bool:
    has_logits = output.tensor("logits", 3) is not None
    return has_logits and output.tensor("pred_boxes", 3) is not None


def _read_detr(output: ModelOutput) -> Boxes:
    """Read boxes as `post_process_object_detection` of each family does.

    In DETR and YOLOS each query has a softmax over the classes and "no object", which is the
    last column. A query is at most one object. In RT-DETR and Deformable DETR each class has
    a sigmoid. A query may be several objects, of different classes, but in all there are at
    most as many objects as queries."""
    logits = output.value["logits"][0]
    # boxes are given as shares of the input's size
    height, width = output.input_size
    size = logits.new_tensor([width, height, width, height])
    config = getattr(output.module, "config", None)
    has_no_object = logits.shape[1] == getattr(config, "num_labels", 0) + 1
    if has_no_object:
        scores = logits.detach().softmax(dim=1)[:, :-1]
        logits = logits[:, :-1]
        best = functional.one_hot(scores.argmax(dim=1), logits.shape[1])
        ranked = (scores * best).flatten().sort(descending=True)
    else:
        scores = logits.detach().sigmoid()
        ranked = scores.flatten().sort(descending=True)
    count = min(int((ranked.values > _HF_CONFIDENCE).sum()), len(logits))
    kept = []
    for number in ranked.indices[:count].tolist():
        row, index = divmod(number, logits.shape[1])
        kept.append(LabelledBox(row, index))
    return Boxes(
        corners=_corners(output.value["pred_boxes"][0].detach()) * size,
        numbers=logits,
        scores=scores,
        kept=kept,
        threshold=_HF_CONFIDENCE,
        names=output.names,
    )


def _read_mask_queries(output: ModelOutput) -> Regions:
    """Read regions of MaskFormer and Mask2Former as `post_process_semantic_segmentation`
    does: each query has a mask, and scores of the classes and of "no object", which is last.

    The number of a class is a logit: that of the query that contributes most to the region
    of the class."""
    logits = output.value["class_queries_logits"][0]
    with torch.no_grad():
        classes = logits.softmax(dim=1)[:, :-1]
        masks = output.value["masks_queries_logits"][0].sigmoid()
        scores = torch.einsum("qc,qhw->chw", classes, masks)
        inside = functional.one_hot(scores.argmax(dim=0), len(scores)).float()
        weights = classes * torch.einsum("qhw,hwc->qc", masks, inside)
        queries = weights.argmax(dim=0)
    numbers = logits[queries, torch.arange(len(queries), device=queries.device)]
    return Regions(scores, output.input_size, output.names, numbers)


# Models of no library


def _is_plain_segmentation(output: ModelOutput) -> bool:
    """Whether the output is one tensor of scores of pixels: maps of the input's size, or at
    most _MOST_CLASSES maps of a half or a quarter of that size. Other maps are features."""
    scores = output.tensor("", 4)
    if scores is None:
        return False
    channels, height, width = scores.shape[1:]
    if (height, width) == output.input_size:
        return True
    scaled = [(height * factor, width * factor) for factor in (2, 4)]
    return channels <= _MOST_CLASSES and output.input_size in scaled


def _is_depth(output: ModelOutput) -> bool:
    """Whether the output is one map [1, h, w] of the input's size."""
    depth = output.tensor("", 3)
    return depth is not None and depth.shape[1:] == output.input_size


# The table


@dataclass(frozen=True)
class Family:
    """Models whose outputs are read in the same way."""

    title: str
    matches: Callable[[ModelOutput], bool]
    read: Callable[[ModelOutput], Answer]
    default: str
    """The target without `--target`, as a user would write it."""
    layers: Callable[[nn.Module], Sequence[str]] = field(default=lambda module: ())
    """Takes a model, and returns names of the layers whose maps enter its head, which `cam`
    shows; an empty list if `cam` is to choose layers by their shapes."""
    has_bottleneck: bool = False
    """Whether `cam` also shows the maps of the lowest resolution."""


def _at_path(module: nn.Module, path: str) -> Any:
    """The attribute of a module at a dotted path; None if there is none."""
    part: Any = module
    for name in path.split("."):
        part = getattr(part, name, None)
    return part


def _first_of(*names: str) -> Callable[[nn.Module], list[str]]:
    """Make a function for `Family.layers`. For a model, the function returns the first of
    these names that the model has; for an nn.ModuleList, which has no output, the names of
    its items; and an empty list if the model has none of the names.

    Args:
        *names: qualified names of modules, in order of preference.
    """

    def layers(module: nn.Module) -> list[str]:
        """Return the names of the layers in this model."""
        for name in names:
            part = _at_path(module, name)
            if isinstance(part, nn.ModuleList):
                return [f"{name}.{number}" for number in range(len(part))]
            if isinstance(part, nn.Module):
                return [name]
        return []

    return layers


def _has(key: str, ndim: int) -> Callable[[ModelOutput], bool]:
    """Make a function for `Family.matches`: whether an output has such a tensor (see
    `ModelOutput.tensor`)."""
    return lambda output: output.tensor(key, ndim) is not None


def _regions_family(
    title: str, key: str, matches: Callable[[ModelOutput], bool] | None = None
) -> Family:
    """A family of segmentations, whose output has the scores of pixels, [1, C, h, w], at a
    key.

    Args:
        key: the key; empty for the output itself.
        matches: `Family.matches`; None for any output with a tensor of four axes at the
            key.
    """

    def read(output: ModelOutput) -> Regions:
        """Read the regions of the image from its scores."""
        scores = output_at(output.value, key)[0]
        # without a key, one or three channels may be a picture, and no classes
        noun = "channel" if not key and len(scores) in (1, 3) else "class"
        return Regions(scores, output.input_size, output.names, noun=noun)

    return Family(title, matches or _has(key, 4), read, default="top1")


def _values_family(
    title: str,
    key: str,
    ndim: int,
    kinds: Sequence[str],
    matches: Callable[[ModelOutput], bool] | None = None,
) -> Family:
    """A family whose answer is one tensor of its output.

    Args:
        key: the key of the tensor in the output; empty for the output itself.
        ndim: how many axes the tensor has; the first one has the length 1.
        kinds: `Values.kinds`.
        matches: `Family.matches`; None for any output with such a tensor.
    """

    def read(output: ModelOutput) -> Values:
        return Values(output_at(output.value, key), kinds, output.input_size)

    return Family(title, matches or _has(key, ndim), read, default=kinds[0])


_OF_DEPTH = ("mean", "pixel")
# where encoders have their embeddings: the key in the output, and the number of axes
_EMBEDDINGS = (
    ("image_embeds", 2),
    ("pooler_output", 2),
    ("last_hidden_state", 3),
    ("last_hidden_state", 4),
    ("", 4),
    ("", 3),
    ("", 2),
)

FAMILIES = (
    Family("a detector of Ultralytics", _is_yolo, _read_yolo, "box", _yolo_layers),
    Family(
        "a detector of torchvision",
        matches=_is_torchvision_detector,
        read=_read_torchvision,
        default="box",
        layers=_first_of("backbone"),
    ),
    Family(
        "a detector of transformers",
        matches=_is_detr,
        read=_read_detr,
        default="box",
        layers=_first_of("model.decoder_input_proj", "model.input_projection"),
    ),
    Family(
        "a segmentation by queries",
        matches=_has("masks_queries_logits", 4),
        read=_read_mask_queries,
        default="top1",
    ),
    _regions_family("a segmentation of torchvision", "out"),
    _regions_family("a segmentation of transformers", "logits"),
    replace(
        _regions_family("a segmentation", "", _is_plain_segmentation),
        has_bottleneck=True,
    ),
    _values_family("a depth estimator", "predicted_depth", 3, _OF_DEPTH),
    _values_family("a depth estimator", "", 3, _OF_DEPTH, _is_depth),
    _values_family("an estimator of poses", "heatmaps", 4, ("keypoint", "mean")),
    *(
        _values_family("an encoder", key, ndim, ("norm", "mean"))
        for key, ndim in _EMBEDDINGS
    ),
)
"""In the order in which they are tried; the first family that matches reads the output. So
an output of four axes is taken for an encoder's only if it is no segmentation."""


class Reading(NamedTuple):
    """The answer that a family has read from an output."""

    family: Family
    answer: Answer

    def value(self, target: Target) -> TargetValue | None:
        """The number that a target means in this answer.

        Returns:
            None if `Target.value` has to find the number: the target names a key or a
            layer, or the answer has no such target, but the target is general.

        Raises:
            UsageError: no model of the family has such a target.
            NothingFoundError: this image does not have the target, but another one may.
        """
        if target.keys or target.layer is not None:
            return None
        if target.is_default:
            target = replace(targets.parse(self.family.default), is_default=True)
        value = self.answer.value(target)
        if value is None and (isinstance(self.answer, Boxes) or not target.is_general):
            raise target.error(
                f" is no target of {self.family.title}",
                f"targets here: {', '.join(self.answer.examples)}",
            )
        return value

    @property
    def detections(self) -> tuple[Detection, ...]:
        """The objects of a detector; empty for other models."""
        return self.answer.detections if isinstance(self.answer, Boxes) else ()

    @property
    def remark(self) -> str:
        """Why a detector has found no object; empty if it has found one, and for other
        models."""
        if isinstance(self.answer, Boxes) and not self.answer.kept:
            return self.answer.shortage
        return ""

    @property
    def regions(self) -> RegionMap | None:
        """The regions of a segmentation; None for other models."""
        return self.answer.region_map if isinstance(self.answer, Regions) else None

    @property
    def score_channels(self) -> int | None:
        """How many maps of scores, keypoints or depth the answer has; None if it has no
        maps. A last layer with as many channels returns the answer itself, and so no
        evidence for the answer."""
        answer = self.answer
        if isinstance(answer, Regions):
            return len(answer.scores)
        if isinstance(answer, Values) and "keypoint" in answer.kinds:
            return answer.tensor.shape[1]
        if isinstance(answer, Values) and "pixel" in answer.kinds:
            return 1
        return None


def read(
    model: LoadedModel, output: Any, arg: Tensor, threshold: float | None = None
) -> Reading | None:
    """Read a model's output by the model's family; None for a classifier, and for a model
    of no family.

    Args:
        output: the output of the model.
        arg: the model's first argument, [1, C, H, W]; only its height and width are read.
        threshold: what `weak_boxes_too` has yielded; None if it was not used.
    """
    if isinstance(output, Tensor) and output.ndim == 2 and model.scores is not None:
        return None
    height, width = arg.shape[-2:]
    model_output = ModelOutput(
        output, model.module, (height, width), tuple(model.categories), threshold
    )
    for family in FAMILIES:
        if family.matches(model_output):
            return Reading(family, family.read(model_output))
    return None
