"""What models return, by family, and how it is read as boxes, regions or values.

A family is one record of `FAMILIES`. It says how its output is recognised, how it is
read, which number gradients are taken of without a target, and which layers a class
activation map is made of. Boxes are decoded by the family's own library where that has
more than a formula; the number behind a box is then looked up in the raw output:

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
"""What Ultralytics' predictors take by default, as the overlap."""
_YOLO_OVERLAP = 0.7
"""How much two boxes of one class may overlap (IoU); above, the weaker one goes."""
_DETECTORS = "torchvision.models.detection."
"""How the names of the modules begin in which torchvision defines detectors."""
_HF_CONFIDENCE = 0.5
"""The default of transformers' `post_process_object_detection`."""
_MOST_CLASSES = 32
"""Channels up to which maps of a half or a quarter of the input's size are scores of
classes."""


class ModelOutput(NamedTuple):
    """What a model returned, and what tells how to read it."""

    value: Any
    module: nn.Module
    input_size: tuple[int, int]
    """Height and width of the input, in pixels."""
    names: tuple[str, ...]
    """Names of the classes, as far as they are known."""
    threshold: float | None
    """The score threshold of a detector of torchvision, where `weak_boxes_too` has taken
    it away."""

    def tensor(self, key: str, ndim: int) -> Tensor | None:
        """The floats at a key of the output; None where there is no dense tensor
        [1, ...] of floats with `ndim` axes."""
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
    bases = {
        base.__name__
        for base in type(output.module).__mro__
        if base.__module__ == "ultralytics.nn.tasks"
    }
    return "DetectionModel" in bases and "RTDETRDetectionModel" not in bases


def _yolo_layers(module: Any) -> list[str]:
    # a head may count back from itself: -1 is the module before it
    head = len(module.model) - 1
    return [f"model.{number % head}" for number in module.model[-1].f]


def _yolo(output: ModelOutput) -> Boxes:
    """Read Ultralytics' boxes.

    `y` [1, 4 + C (+ more), A] holds the decoded box and the scores 0..1 of each anchor.
    Since 8.4 a dict beside it holds the logits [1, C, A]. A segmentation has a tuple of
    `y` and its prototypes in place of `y`. A head that selects boxes itself (end to
    end) gives [1, 300, 6]."""
    y = output.value
    logits = {}
    if isinstance(y, tuple):
        logits = y[1] if isinstance(y[1], dict) else {}
        y = y[0][0] if isinstance(y[0], tuple) else y[0]
    head: Any = output.module.model[-1]  # type: ignore[index]
    if getattr(output.module, "end2end", False):
        return _end_to_end(output, y[0], logits)
    count = head.nc
    is_turned = type(head).__name__.startswith("OBB")
    boxes = y[0, :4].T.detach()
    scores = y[0, 4 : 4 + count].T
    nms = import_ultralytics("ultralytics.utils.nms")
    with torch.no_grad():
        # NMS changes what it is given
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


def _end_to_end(output: ModelOutput, rows: Tensor, logits: Any) -> Boxes:
    """Read boxes that a head has selected itself.

    Args:
        rows: the boxes [300, 6]: corners in pixels, score and class.
        logits: the raw output of both branches, by name.

    The head's own branch (one2one) is made of detached maps, and has no gradients. The
    anchor of each box is the one that has its score there; its number is the logit of
    the other branch (one2many) at this anchor."""
    classes = rows[:, 5].long()
    with torch.no_grad():
        branch_scores = logits["one2one"]["scores"][0].sigmoid()
        anchors = (branch_scores[classes] - rows[:, 4:5]).abs().argmin(dim=1)
    numbers = logits["one2many"]["scores"][0].T[anchors]
    # `box:N` numbers them from the most confident one
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
    """Left, top, right and bottom of boxes [N, 4] of a centre, a width and a height."""
    center = boxes[:, :2]
    size = boxes[:, 2:]
    return torch.cat((center - size / 2, center + size / 2), dim=1)


def _bounds(boxes: Tensor, angles: Tensor) -> Tensor:
    """The upright boxes around boxes that are turned.

    Args:
        boxes: [N, 4] of a centre, a width and a height, before they are turned.
        angles: [N] in radians.

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
    value = output.value
    if not isinstance(value, list) or len(value) != 1:
        return False
    return isinstance(value[0], dict) and {"boxes", "labels", "scores"} <= {*value[0]}


def _torchvision_boxes(output: ModelOutput) -> Boxes:
    """Read boxes that the model has decoded itself: of each the score of its one class."""
    (answer,) = output.value
    labels = answer["labels"]
    scores = answer["scores"]
    count = max([0, *labels.tolist()]) + 1
    count = max(count, len(output.names), _class_count(output.module))
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
    """How many classes the head of a detector of torchvision tells apart, the
    background included; 0 for another model."""
    for submodule in module.modules():
        if not type(submodule).__module__.startswith(_DETECTORS):
            continue
        # of an R-CNN; of SSD; of RetinaNet and FCOS
        for name in ("cls_score.out_features", "num_columns", "num_classes"):
            count = _at_path(submodule, name)
            if isinstance(count, int):
                return count
    return 0


@contextmanager
def weak_boxes_too(module: nn.Module) -> Iterator[float | None]:
    """Let a detector of torchvision return weak boxes, too, in this block.

    It returns the boxes above its threshold alone: often none with random weights, and
    then there is nothing to take gradients of. Weak boxes change nothing of the others,
    since NMS keeps the stronger one of two, and the strongest hundred are returned.

    Yields:
        The threshold; None for other models.
    """
    heads: list[Any] = []
    for submodule in module.modules():
        if not type(submodule).__module__.startswith(_DETECTORS):
            continue
        # the threshold of a region proposal network is of other boxes
        if type(submodule).__name__.startswith("RegionProposal"):
            continue
        if isinstance(getattr(submodule, "score_thresh", None), float):
            heads.append(submodule)
    thresholds = [head.score_thresh for head in heads]
    try:
        for head in heads:
            head.score_thresh = 0.0
        yield thresholds[0] if thresholds else None
    finally:
        for head, threshold in zip(heads, thresholds, strict=True):
            head.score_thresh = threshold


# transformers


def _is_detr(output: ModelOutput) -> bool:
    has_logits = output.tensor("logits", 3) is not None
    return has_logits and output.tensor("pred_boxes", 3) is not None


def _detr(output: ModelOutput) -> Boxes:
    """Read boxes as `post_process_object_detection` of each family does.

    DETR and YOLOS have a softmax, whose last column is "no object", and one class for
    each query. RT-DETR and Deformable DETR have a sigmoid for each class, and as many
    boxes as queries at most."""
    logits = output.value["logits"][0]
    # boxes are shares of the input, whatever the library resized it from
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


def _mask_queries(output: ModelOutput) -> Regions:
    """Read regions of MaskFormer and Mask2Former as `post_process_semantic_segmentation`
    does: each query has a class and a mask; the last class is "no object".

    The number of a class is the logit of the query that gives its region most."""
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
    """Whether a model of no library returns scores of pixels: in the input's size, or a
    half or a quarter of it where there are few classes. Others are features."""
    scores = output.tensor("", 4)
    if scores is None:
        return False
    channels, height, width = scores.shape[1:]
    if (height, width) == output.input_size:
        return True
    scaled = [(height * factor, width * factor) for factor in (2, 4)]
    return channels <= _MOST_CLASSES and output.input_size in scaled


def _is_depth(output: ModelOutput) -> bool:
    """Whether a model of no library returns a number for each pixel."""
    depth = output.tensor("", 3)
    return depth is not None and depth.shape[1:] == output.input_size


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


def _at_path(module: nn.Module, path: str) -> Any:
    """What stands at a path of attributes, None where nothing does."""
    part: Any = module
    for name in path.split("."):
        part = getattr(part, name, None)
    return part


def _first_of(*names: str) -> Callable[[nn.Module], list[str]]:
    """How a family names the layers of its class activation maps: the first of some
    modules that a model has. Of an nn.ModuleList, which has no output, all items.

    Args:
        *names: qualified names of modules, in order of preference.

    Returns:
        A function for `Family.layers`; it returns an empty list for a model that has none
        of the modules.
    """

    def layers(module: nn.Module) -> list[str]:
        for name in names:
            part = _at_path(module, name)
            if isinstance(part, nn.ModuleList):
                return [f"{name}.{number}" for number in range(len(part))]
            if isinstance(part, nn.Module):
                return [name]
        return []

    return layers


def _has(key: str, ndim: int) -> Callable[[ModelOutput], bool]:
    return lambda output: output.tensor(key, ndim) is not None


def _of_regions(
    title: str, key: str, matches: Callable[[ModelOutput], bool] | None = None
) -> Family:
    """A family whose scores of pixels [1, C, h, w] stand at a key of its output.

    Args:
        key: empty for the output itself.
        matches: None for any output with four axes there.
    """

    def read(output: ModelOutput) -> Regions:
        scores = output_at(output.value, key)[0]
        # One or three channels that no library calls scores may be a picture.
        noun = "channel" if not key and len(scores) in (1, 3) else "class"
        return Regions(scores, output.input_size, output.names, noun=noun)

    return Family(title, matches or _has(key, 4), read, default="top1")


def _of_values(
    title: str,
    key: str,
    ndim: int,
    kinds: Sequence[str],
    matches: Callable[[ModelOutput], bool] | None = None,
) -> Family:
    """A family whose numbers are one tensor of its output.

    Args:
        key: of the tensor in the output; empty for the output itself.
        ndim: its axes, of which the first counts one image.
        kinds: targets that make sense, the default first.
        matches: None for any output with such a tensor.
    """

    def read(output: ModelOutput) -> Values:
        return Values(output_at(output.value, key), kinds, output.input_size)

    return Family(title, matches or _has(key, ndim), read, default=kinds[0])


_OF_DEPTH = ("mean", "pixel")
_OF_EMBEDDINGS = ("norm", "mean")

FAMILIES = (
    Family("a detector of Ultralytics", _is_yolo, _yolo, "box", _yolo_layers),
    Family(
        "a detector of torchvision",
        matches=_is_torchvision_detector,
        read=_torchvision_boxes,
        default="box",
        layers=_first_of("backbone"),
    ),
    Family(
        "a detector of transformers",
        matches=_is_detr,
        read=_detr,
        default="box",
        layers=_first_of("model.decoder_input_proj", "model.input_projection"),
    ),
    Family(
        "a segmentation by queries",
        matches=_has("masks_queries_logits", 4),
        read=_mask_queries,
        default="top1",
    ),
    _of_regions("a segmentation of torchvision", "out"),
    _of_regions("a segmentation of transformers", "logits"),
    replace(
        _of_regions("a segmentation", "", _is_plain_segmentation), has_bottleneck=True
    ),
    _of_values("a depth estimator", "predicted_depth", 3, _OF_DEPTH),
    _of_values("a depth estimator", "", 3, _OF_DEPTH, _is_depth),
    _of_values("an estimator of poses", "heatmaps", 4, ("keypoint", "mean")),
    _of_values("an encoder", "image_embeds", 2, _OF_EMBEDDINGS),
    _of_values("an encoder", "pooler_output", 2, _OF_EMBEDDINGS),
    _of_values("an encoder", "last_hidden_state", 3, _OF_EMBEDDINGS),
    _of_values("an encoder", "last_hidden_state", 4, _OF_EMBEDDINGS),
    _of_values("an encoder", "", 4, _OF_EMBEDDINGS),
    _of_values("an encoder", "", 3, _OF_EMBEDDINGS),
    _of_values("an encoder", "", 2, _OF_EMBEDDINGS),
)
"""In the order in which they are tried; the first that matches reads the output. An
output of four axes is an encoder's only where it is not a segmentation."""


class Reading(NamedTuple):
    """An output as its family reads it."""

    family: Family
    answer: Answer

    def value(self, target: Target) -> TargetValue | None:
        """The number that is the target; None where the family has no such target, but
        any model may have it.

        Raises:
            UsageError: no model of the family has such a target; a NothingFoundError
                where it is only this image that lacks it.
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
        """The boxes of a detector."""
        return self.answer.detections if isinstance(self.answer, Boxes) else ()

    @property
    def remark(self) -> str:
        """What a detector without a box has in its place."""
        if isinstance(self.answer, Boxes) and not self.answer.kept:
            return self.answer.shortage
        return ""

    @property
    def regions(self) -> RegionMap | None:
        """The regions of a segmentation."""
        return self.answer.region_map if isinstance(self.answer, Regions) else None

    @property
    def score_channels(self) -> int | None:
        """How many channels the answer has, where it is maps of scores, depth or
        keypoints; else None. A layer at the end with as many channels gives the answer
        itself, which is no evidence for it."""
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
    """Read a model's output as its family does; None for a classifier, and what nobody
    knows.

    Args:
        output: of the model.
        arg: its first argument, [1, C, H, W]; only its height and width count.
        threshold: of a detector of torchvision, where `weak_boxes_too` has taken it
            away.
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
