"""run.json as it grows, and the images of an earlier run that can be kept."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from featviz.drawing.tensorboard import EVENTS
from featviz.errors import ImageError, StoreError
from featviz.images import decode
from featviz.models.files import checkpoint
from featviz.models.load import LoadedModel, ModelOptions
from featviz.models.requirements import versions
from featviz.models.sources import source_of
from featviz.pipeline.options import RunOptions
from featviz.pipeline.prepare import Prepared
from featviz.records import ImageResult, Outcome, Sample, Shard
from featviz.rundir import RUN_FILE
from featviz.rundir.archive import check_archive
from featviz.rundir.image import read_image
from featviz.rundir.ownership import holds_run, names_of_images
from featviz.rundir.read import image_folders, read_json
from featviz.rundir.schema import Manifest, check_failures
from featviz.rundir.store import run as stored
from featviz.rundir.store.listing import StoredTree
from featviz.rundir.store.objects import ObjectStore
from featviz.rundir.store.run import StoredFolder, StoredRun
from featviz.rundir.unlike import differences
from featviz.rundir.verify import faults_of
from featviz.rundir.write import ImageFolder, RunDirectory, check_free
from featviz.text import listed, quoted, safe_way

log = logging.getLogger(__name__)

_GROWING = ("images", "failures", "schema_version")
"""Keys of run.json that change while a run goes on."""


_SINCE_0_1_0 = {"marks": True, "flat": False, "titles": False}
"""Options that run.json names only where they are not as they were for runs of 0.1.0, which lack
them, and go on."""


class RunDocument:
    """The content of run.json: what runs, and what became of the images."""

    def __init__(self, record: Mapping[str, Any], samples: Sequence[Sample]) -> None:
        """`samples` are those of the whole run, whichever process or shard takes them."""
        self.record = dict(record)
        self.names = [sample.name for sample in samples]
        self.errors: dict[str, str | None] = {}
        """The error of each finished image, by its name; None for one without."""
        self.missing: Collection[str] = ()
        """Images that are neither complete nor failed at the end."""

    @property
    def fingerprint(self) -> str:
        """sha256 of the model and the options: what has the same was drawn in the same way."""
        text = json.dumps(self.record, sort_keys=True, default=str)
        return hashlib.sha256(text.encode("utf-8", "backslashreplace")).hexdigest()

    def add(self, result: ImageResult) -> None:
        """Note what became of an image."""
        self.errors[result.image] = result.error

    def write(self, store: RunDirectory) -> list[str]:
        """Write run.json, the images in their order, and return those that are missing.

        An earlier run or another shard may have left the manifests of other images, or their
        failures in run.json.

        Raises:
            StoreError: it cannot be written.
        """
        errors = {**_left(store, set(self.names) - self.errors.keys()), **self.errors}
        seen = [name for name in self.names if name in errors]
        missing = [name for name in self.names if name not in errors]
        images = {
            "total": len(self.names),
            "complete": [name for name in seen if errors[name] is None],
            "missing": missing,
        }
        failures = [
            {"image": name, "error": errors[name]} for name in seen if errors[name] is not None
        ]
        store.write_run({**self.record, "images": images, "failures": failures})
        return missing


def _left(store: RunDirectory, names: Collection[str]) -> dict[str, str | None]:
    """The images that an earlier run or another shard has finished, as RunDocument.errors."""
    try:
        rows = check_failures(read_json(store.root / RUN_FILE).get("failures"))
        failed = {row.image: row.error for row in rows}
    except (StoreError, ValueError):
        failed = {}
    failures = {name: failed[name] for name in names if name in failed}
    return failures | {name: None for name in names if store.image(name).is_complete}


def run_record(prepared: Prepared) -> dict[str, Any]:
    """All that decides what is drawn, and nothing else: no time, no place, no number of
    threads."""
    model = prepared.model
    return {
        **versions(),
        "device": model.device.type,
        "model": model.source,
        "preprocessing": model.preprocess.words,
        "layers": [layer.name for layer in prepared.layers],
        "options": _options(prepared.options),
    }


def _options(options: RunOptions) -> dict[str, Any]:
    inputs = options.inputs.as_record()
    del inputs["transform"], inputs["input"]  # which the preprocessing names, without folders
    draw = {
        **asdict(options.draw),
        "padding": options.draw.gap,
        "pad_value": options.draw.gap_grey,
    }
    for name, usual in _SINCE_0_1_0.items():
        if draw[name] == usual:
            del draw[name]
    return {
        "layers": options.layers,
        **draw,
        **inputs,
        **asdict(options.passes),
    }


def check_destination(model: ModelOptions | LoadedModel, options: RunOptions) -> None:
    """Say before the model is loaded that `out`, or the archive, cannot be written.

    Raises:
        StoreError: it holds another run, or something that featviz did not write.
        UsageError: there is no such model.
    """
    if options.archive is not None:
        check_archive(options.archive, options.overwrite)
    elif options.url is not None:
        if not options.resume:
            store = ObjectStore(options.url)
            stored.check_free(store, StoredTree.of(store.sizes()), *_known(model, options))
    elif not (options.resume and (holds_run(options.out) or complete_folders(options.out))):
        record, certain = _known(model, options)
        check_free(options.out, options.overwrite, record, besides(options), certain)


def _known(model: ModelOptions | LoadedModel, options: RunOptions) -> tuple[dict[str, Any], bool]:
    """What run.json will say, as far as it is known before the model is loaded, and whether that
    tells the run from all others."""
    known, certain = _foretold(model)
    return {**versions(), "model": known, "options": _options(options)}, certain


def besides(options: RunOptions) -> list[Path]:
    """Files that the user has named to be written beside the run, or that a board goes on with."""
    return [] if options.board is None else list(options.board.glob(EVENTS))


def complete_folders(root: Path) -> list[str]:
    """The folders of a run directory that have an image's manifest, whatever its run.json says."""
    if not root.is_dir():
        return []
    return [way for way, lacks in image_folders(root, {}) if lacks is None]


def _was_drawn_by(root: Path, fingerprint: str) -> bool:
    """Whether an image in a folder is of a run with this fingerprint."""
    for way in complete_folders(root):
        with suppress(StoreError):
            if read_image(root, way).manifest.fingerprint == fingerprint:
                return True
    return False


def forget_gone(store: RunDirectory, names: Collection[str], prune: bool) -> None:
    """Name the complete images that are no longer among the inputs, or remove them.

    Raises:
        StoreError: one cannot be removed.
    """
    known = {safe_way(name) for name in names}
    there = store.tree.complete if isinstance(store, StoredRun) else complete_folders(store.root)
    gone = [way for way in there if way not in known]
    for way in gone if prune else ():
        store.folder(way).discard()
    if gone:
        what = "removed" if prune else "stays; --prune removes what is"
        shown = listed([quoted(way) for way in gone], 3)
        log.warning("%s: %s, no longer among the inputs", shown, what)


def open_store(options: RunOptions, record: Mapping[str, Any], fingerprint: str) -> RunDirectory:
    """The run directory: a new one, or with `resume` the one that is there. Where its run.json is
    missing or broken, an image that was drawn in the same way is enough: run.json is written anew.

    Args:
        fingerprint: of the record.

    Raises:
        StoreError: it holds another run, or something that is none, or cannot be written.
    """
    apart = besides(options)
    if not options.resume or not holds_run(options.out):
        if options.resume and _was_drawn_by(options.out, fingerprint):
            log.warning("%s is written anew from the manifests", options.out / RUN_FILE)
            return RunDirectory(options.out).cleared()
        return RunDirectory.create(options.out, options.overwrite, record, apart)
    _check_same(read_json(options.out / RUN_FILE), record, options.target)
    return RunDirectory(options.out).cleared()


def open_stored(
    folder: StoredRun, options: RunOptions, record: Mapping[str, Any], fingerprint: str
) -> StoredRun:
    """Begin a run below a URL, or go on with the one that is there: as `open_store`.

    Raises:
        StoreError: there is another run, or something that is none, or it cannot be written.
    """
    before = folder.record() if options.resume else None
    if before is not None:
        _check_same(before, record, options.target)
        folder.brought(RUN_FILE)
        return folder
    if options.resume and folder.was_drawn_by(fingerprint):
        log.warning("%s/%s is written anew from the manifests", options.target, RUN_FILE)
        return folder
    stored.check_free(folder.store, folder.tree, record, True)
    return folder.cleared()


def _check_same(before: Mapping[str, Any], record: Mapping[str, Any], where: object) -> None:
    """Whether a run that is there is the one that is to go on.

    Raises:
        StoreError: names the first entry of run.json that differs.
    """
    plain = json.loads(json.dumps(record, default=str))
    old = {key: value for key, value in before.items() if key not in _GROWING}
    if different := differences(old, plain):
        raise StoreError(
            f"--resume: {where} holds another run; {different[0]}",
            "give the same model and options, or another --out"
            + (f" (and {len(different) - 1} more differences)" if different[1:] else ""),
        )


def names_to_clear(
    store: RunDirectory, samples: Sequence[Sample], shard: Shard | None
) -> list[str]:
    """Images whose hidden folders no process is writing into: this shard's, and those that only an
    earlier run knew of.

    Args:
        samples: the images of the whole run, in their order.
    """
    names = [sample.name for sample in samples]
    share = names if shard is None else [sample.name for sample in shard.of(samples)]
    try:
        earlier = names_of_images(read_json(store.root / RUN_FILE))
    except StoreError:
        earlier = []
    return [*share, *(set(earlier) - set(names))]


def _foretold(model: ModelOptions | LoadedModel) -> tuple[dict[str, Any], bool]:
    """What run.json will say of a model, as far as it is known before it is loaded, and whether
    that tells it from all others."""
    if isinstance(model, LoadedModel):
        return dict(model.source), True
    source = source_of(model.spec)
    file = next((name for name in (model.weights, model.spec) if name and Path(name).is_file()), "")
    known = source.record(model) | (checkpoint.record(Path(file)) if file else {})
    plain = replace(ModelOptions(model.spec, weights=model.weights), device=model.device)
    return known, source.certain and model == plain


def kept(
    folder: ImageFolder, sample: Sample, fingerprint: str, verify: bool = False
) -> ImageResult | None:
    """An image that is complete: its manifest is there, and fits the run and the file.

    Args:
        verify: read all of its files, too.
    """
    if not folder.is_complete:
        return None
    try:
        manifest = _manifest_of(folder, verify)
        if manifest.fingerprint != fingerprint or manifest.image.sha256 != decode.digest(sample):
            return None
        return _read_back(manifest, sample, folder)
    except (StoreError, ImageError):
        return None


def _manifest_of(folder: ImageFolder, verify: bool) -> Manifest:
    """The manifest of an image that its files fit.

    Raises:
        StoreError: one does not fit.
    """
    if isinstance(folder, StoredFolder):
        return folder.manifest(verify)
    image = read_image(folder.root, folder.name)
    for fault in faults_of(image) if verify else ():
        raise StoreError(fault)
    return image.manifest


def _read_back(manifest: Manifest, sample: Sample, folder: ImageFolder) -> ImageResult:
    return ImageResult(
        sample.name,
        folder.name,
        tuple(manifest.captures),
        tuple(manifest.skipped),
        tuple(manifest.never_ran),
        outcome=Outcome(tuple(manifest.prediction)),
        kept=True,
    )
