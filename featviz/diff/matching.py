"""Compare the tensors that two runs have under the same image, layer, kind, call and
key."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from featviz.diff.compare import worst_first
from featviz.diff.comparison import (
    ChannelChanges,
    ChannelCount,
    ComparedTensor,
    Comparison,
    ImageChange,
    MissingCapture,
    OnlyIn,
    PredictionChange,
)
from featviz.diff.gates import check_gate, parse_gate
from featviz.diff.tensors import TensorChange, TensorPair, compare_pair
from featviz.errors import CompareError
from featviz.options.commands import DiffThresholds
from featviz.records import CaptureKey, finite
from featviz.rundir.image import DamagedError, ReadImage
from featviz.rundir.read import ReadRun, warn_of
from featviz.text import by, listed

_DEFAULTS = DiffThresholds()
# a tensor lists at most this many of its most changed channels
_MAX_LISTED = 5


def compare_runs(
    base: ReadRun, new: ReadRun, thresholds: DiffThresholds = _DEFAULTS
) -> Comparison:
    """Compare two runs. An image with a file that cannot be read is left out, with a
    warning.

    Args:
        base: the run before; the result has its order of images and layers.
        new: the run after; its layers have the names that they have in `base` (see
            `pairing.align`).
        thresholds: what counts as different, and gates.

    Raises:
        CompareError: the runs had different inputs, or share no image or no layer.
        UsageError: a gate of the thresholds cannot be read; no compared layer has the name
            in a gate; or the gate's number is known of none of them.
    """
    # before any file is read, so that a misspelt gate is refused at once
    gates = [parse_gate(text) for text in thresholds.fail_on]
    changes, damaged_base, damaged_new = _compare_images(
        base, new, thresholds.tolerance
    )
    # from here on, no run has an image that turned out to be damaged
    base = _without_damaged(base, damaged_base, "BASE")
    new = _without_damaged(new, damaged_new, "NEW")
    if not changes:
        raise _nothing_shared(
            "image", base.images, new.images, "compare runs of the same images"
        )
    keys = _capture_keys(base, changes)
    new_keys = _capture_keys(new, changes)
    if keys.keys().isdisjoint(new_keys):
        # each layer once, though it may have several captures
        base_layers = dict.fromkeys(key.layer for key in keys)
        new_layers = dict.fromkeys(key.layer for key in new_keys)
        raise _nothing_shared(
            "layer", base_layers, new_layers, "compare runs with the same --layers"
        )
    # All keys are entered first, in the order in which the model ran. The order of the
    # changes would not do, since some images may not have all layers.
    by_key: dict[CaptureKey, list[TensorChange]] = {key: [] for key in keys}
    for image_changes in changes.values():
        for change in image_changes:
            by_key[change.key].append(change)
    # a key that is not in NEW has no changes
    tensors = [compared_tensor(group) for group in by_key.values() if group]
    return Comparison(
        base=base.location,
        new=new.location,
        thresholds=thresholds,
        images=tuple(changes),
        layers=tuple(tensors),
        predictions=tuple(_predictions(base, new, changes)),
        gates=tuple(check_gate(gate, tensors) for gate in gates),
        only_in_base=_only_in(base, new, changes),
        only_in_new=_only_in(new, base, changes),
        incomplete={"base": tuple(base.left_out), "new": tuple(new.left_out)},
    )


class _ComparedImages(NamedTuple):
    """The images that both runs have."""

    changes: dict[str, list[TensorChange]]
    """By image; the changes of its tensors in the order of the model."""
    damaged_base: dict[str, str]
    """By image: why a file of the image in BASE cannot be read."""
    damaged_new: dict[str, str]


def _compare_images(base: ReadRun, new: ReadRun, tolerance: float) -> _ComparedImages:
    """Compare the tensors of all images that both runs have. An image with a damaged file
    is not in `changes`, but in `damaged_base` or `damaged_new`.

    Args:
        tolerance: the relative difference up to which values are equal, 0..1.

    Raises:
        CompareError: settings, files of images or inputs of the model differ.
    """
    images = [name for name in base.images if name in new.images]
    # If the runs share no image, the caller refuses them for that, even if their settings
    # differ, too.
    if images:
        _check_settings(base, new, images)
    compared = _ComparedImages({}, {}, {})
    for name in images:
        base_image = base.images[name]
        new_image = new.images[name]
        try:
            _check_input(base_image, new_image)
            pairs = TensorPair.read(base_image, new_image)
            compared.changes[name] = [compare_pair(pair, tolerance) for pair in pairs]
        except DamagedError as error:
            is_new = error.image is new_image
            damaged = compared.damaged_new if is_new else compared.damaged_base
            damaged[name] = error.message
    return compared


def _predictions(
    base: ReadRun, new: ReadRun, images: Iterable[str]
) -> Iterator[PredictionChange]:
    """The classes that both runs predicted for each image, from its manifests. An image
    without a prediction in one of the runs is passed over."""
    for name in images:
        before = base.images[name].manifest.prediction
        after = new.images[name].manifest.prediction
        if before and after:
            yield PredictionChange(name, before, after)


def _capture_keys(run: ReadRun, images: Iterable[str]) -> dict[CaptureKey, None]:
    """The keys of all captures of some images in the order in which the model ran, as a
    dict without values, which is an ordered set."""
    keys = {}
    for name in images:
        keys.update(dict.fromkeys(run.images[name].captures))
    return keys


def _without_damaged(run: ReadRun, damaged: Mapping[str, str], title: str) -> ReadRun:
    """A run without its damaged images. Each of them is warned of.

    Args:
        damaged: why each image cannot be read, by name of the image.
        title: BASE or NEW, for the warnings.
    """
    warn_of(damaged, f"{title}: ", ", and left out")
    readable = dict(run.images)
    for name in damaged:
        del readable[name]
    return replace(run, images=readable, damaged={**run.damaged, **damaged})


def _first_names(names: Iterable[str]) -> str:
    """The first three names for a message, and how many more there are; `none` if there is
    no name."""
    return listed(list(names), 3) or "none"


# Why runs cannot be compared


def _nothing_shared(
    noun: str, base_names: Iterable[str], new_names: Iterable[str], hint: str
) -> CompareError:
    """The error of two runs that share no image, or no layer.

    Args:
        noun: `image` or `layer`.
        base_names: the names of the images or layers that BASE has.
        new_names: the names of those that NEW has.
    """
    return CompareError(
        f"no {noun} is in both runs: BASE has {_first_names(base_names)}, NEW has"
        f" {_first_names(new_names)}",
        hint,
    )


def _incomparable_error(reason: str) -> CompareError:
    """The error of two runs with different settings or inputs, for a reason such as `the
    scale mode is 'map' in BASE and 'layer' in NEW`."""
    return CompareError(
        f"these runs cannot be compared: {reason}",
        "run both with the same images, preprocessing and --normalize",
    )


def _check_settings(base: ReadRun, new: ReadRun, images: Sequence[str]) -> None:
    """Refuse runs whose preprocessing, scale mode or files of images differ.

    Args:
        images: names of images that both runs have; at least one.

    Raises:
        CompareError: one of these differs.
    """
    for name, title in (
        ("preprocessing", "preprocessing"),
        ("normalize", "scale mode"),
    ):
        old = _setting(base, name)
        now = _setting(new, name)
        if old != now:
            raise _incomparable_error(
                f"the {title} is {old!r} in BASE and {now!r} in NEW"
            )
    # two different files of one name would make every layer differ
    replaced = []
    for name in images:
        old_sum = base.images[name].manifest.image.sha256
        if old_sum != new.images[name].manifest.image.sha256:
            replaced.append(name)
    if replaced:
        raise _incomparable_error(
            f"{_first_names(replaced)} is another file in NEW (its sha256 differs)"
        )


def _setting(run: ReadRun, name: str) -> object:
    """A value of run.json, from its top level (preprocessing) or else from its options;
    None if neither has it."""
    options = run.record.get("options") or {}
    return run.record.get(name, options.get(name))


def _check_input(base: ReadImage, new: ReadImage) -> None:
    """Refuse runs whose models got different inputs of an image.

    Raises:
        CompareError: the shapes of the inputs differ, or the pixels of input.png differ by
            more than one level.
        DamagedError: an input.png cannot be read.
    """
    old_size = by(base.manifest.input.shape)
    new_size = by(new.manifest.input.shape)
    if old_size != new_size:
        raise _incomparable_error(
            f"the input made of {base.name} is {old_size} in BASE and {new_size} in NEW"
        )
    old = base.shown().astype(np.int16)
    now = new.shown().astype(np.int16)
    # resizing on another machine may change a pixel by one level
    if old.shape != now.shape or abs(old - now).max(initial=0) > 1:
        raise _incomparable_error(
            f"what the model saw of {base.name} (input.png) has other pixels in NEW"
        )


def _only_in(run: ReadRun, compared_run: ReadRun, images: Iterable[str]) -> OnlyIn:
    """The images and captures that a run has and the other run has not.

    Args:
        run: the run that has them.
        compared_run: the run that does not have them; its records may say why.
        images: names of the compared images, whose captures are looked at.
    """
    lacking = {}
    for name in run.images:
        if name in compared_run.images:
            continue
        if name in compared_run.failures:
            lacking[name] = f"failed: {compared_run.failures[name]}"
        elif name in compared_run.left_out:
            lacking[name] = "incomplete"
        else:
            lacking[name] = "not there"
    captures = {}
    for name in images:
        counterpart = compared_run.images[name]
        for key, row in run.images[name].captures.items():
            if key not in counterpart.captures and key not in captures:
                captures[key] = MissingCapture(
                    key, row.type, _absence_reason(counterpart, key)
                )
    return OnlyIn(lacking, list(captures.values()))


def _absence_reason(image: ReadImage, key: CaptureKey) -> str:
    """Why an image has no capture of this key: the reason in its manifest, or `not there`
    if the manifest has none."""
    for skip in image.manifest.skipped:
        if (skip.layer, skip.kind, skip.call) == (key.layer, key.kind, key.call):
            return f"skipped: {skip.reason}"
    # --layers of that run may not have selected it
    return "never ran" if key.layer in image.manifest.never_ran else "not there"


# One tensor over all images


def compared_tensor(changes: Sequence[TensorChange]) -> ComparedTensor:
    """Join the changes of one tensor in all images. The worst image counts: differences
    are maxima over the images, cosine and SQNR are minima.

    If the tensors cannot be compared in an image, all its channels count as differing, and
    the image adds nothing to maxima and minima.

    Args:
        changes: at least one, of the same capture key, in the order of the images.
    """
    first = changes[0]
    worst = max(changes, key=lambda change: change.extent)
    # a channel differs if it does in one image; images may have different channel counts
    differs = np.zeros(max(len(change.differs) for change in changes), bool)
    for change in changes:
        differs[: len(change.differs)] |= change.differs
    in_each_image = np.concatenate([change.differs for change in changes])
    reasons = [change.reason for change in changes if change.reason is not None]
    comparable = [change for change in changes if change.reason is None]
    channels = _worst_of_channels(comparable)
    most_changed = worst_first(channels.relative, channels.unlike, differs)
    return ComparedTensor(
        key=first.key,
        type=first.type,
        index=first.index,
        by=sorted({change.by for change in changes}),
        reason=reasons[0] if reasons else None,
        images={change.image: _image_change(change) for change in changes},
        count=ChannelCount(int(differs.sum()), len(differs)),
        channel_images=ChannelCount(int(in_each_image.sum()), len(in_each_image)),
        channels=channels,
        cosine=_least([change.cosine for change in comparable]),
        sqnr=_least([change.sqnr for change in comparable]),
        most_changed=[] if reasons else most_changed[:_MAX_LISTED],
        newly_dead=_newly_dead(changes),
        image=worst.image,
        severity=worst.extent[0],
        change=np.where(worst.change.unlike > 0, 1.0, worst.change.relative),
        changed=worst_first(worst.change.relative, worst.change.unlike, worst.differs),
    )


def _least(values: Sequence[float]) -> float:
    """The smallest number, without NaN; NaN if there is no number."""
    return float(np.fmin.reduce(values, initial=math.nan))


def _newly_dead(changes: Sequence[TensorChange]) -> list[int]:
    """The channels of a tensor that are zero in every image of NEW, but not in every image
    of BASE. Empty for a single image, and if a zero channel need not be dead
    (`TensorChange.zero`).

    Args:
        changes: one for each image.
    """
    # many channels are zero in one image, but not in the next one
    if len(changes) == 1:
        return []
    lived = set()
    dead = set(range(len(changes[0].differs)))
    for change in changes:
        if change.zero is None:
            return []
        lived.update(np.flatnonzero(~change.zero.before).tolist())
        dead.intersection_update(np.flatnonzero(change.zero.after).tolist())
    return sorted(lived & dead)


def _image_change(change: TensorChange) -> ImageChange:
    """The change of a tensor in one image as numbers; only the number of channels if the
    tensors could not be compared."""
    differing = int(change.differs.sum())
    if change.reason is not None:
        return ImageChange(differing)
    return ImageChange(
        differing=differing,
        absolute=finite(float(change.change.absolute.max())),
        relative=finite(float(change.change.relative.max())),
        cosine=finite(change.cosine),
        sqnr=finite(change.sqnr),
    )


def _worst_of_channels(changes: Sequence[TensorChange]) -> ChannelChanges:
    """The largest differences and the smallest cosine of each channel over some images. If
    images have different channel counts, only the common channels are looked at; without
    images the arrays are empty.

    Args:
        changes: the changes of one tensor, one for each image, all without a `reason`.
    """
    common = min((len(change.differs) for change in changes), default=0)
    absolute = np.zeros(common)
    relative = np.zeros(common)
    unlike = np.zeros(common, np.int64)
    cosine = np.full(common, np.nan)
    for image_change in changes:
        change = image_change.change
        absolute = np.maximum(absolute, change.absolute[:common])
        relative = np.maximum(relative, change.relative[:common])
        unlike = np.maximum(unlike, change.unlike[:common])
        # fmin ignores NaN, which is the cosine of single numbers
        cosine = np.fmin(cosine, change.cosine[:common])
    return ChannelChanges(absolute, relative, unlike, cosine)
