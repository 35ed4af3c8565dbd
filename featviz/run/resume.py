"""Where a run is written: a place that no other run is written into, hidden where it is
to replace another run; run.json as it grows; images of an earlier run that can be
kept."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from typing import Any

from msgspec import structs

from featviz.errors import ImageError, StoreError
from featviz.files import real
from featviz.images import decode
from featviz.models.requirements import versions
from featviz.options import RunOptions
from featviz.records import Sample
from featviz.run.prepare import Prepared
from featviz.rundir import locks
from featviz.rundir.folder import Folder, reported
from featviz.rundir.image import Manifest
from featviz.rundir.ownership import holds_run
from featviz.rundir.place import RUN, check_free, replacing
from featviz.rundir.schema import differences, fingerprint, settings_of
from featviz.rundir.write import ImageFolder, RunDirectory
from featviz.text import counted, listed, quoted, safe_way

log = logging.getLogger(__name__)


@contextmanager
def held(options: RunOptions) -> Iterator[Folder]:
    """The folder to write into, which no other process has but for other shards of the
    run: `out`; or a hidden one, which takes its place at the end, where `out` holds a
    run that is to be replaced."""
    out = options.folder
    can_rename = not real(out).is_mount() and os.access(real(out).parent, os.W_OK)
    if options.overwrite and can_rename and holds_run(out):
        with replacing(out, RUN) as new:
            yield new
        return
    with locks.held(out, options.shard):
        # an earlier run is refused by `open_run`, when the layers are known: a misspelt
        # one is to be named first
        check_destination(options, overwrite=True)
        with reported(out):
            folder = Folder.open(out)
        yield folder


def check_destination(options: RunOptions, overwrite: bool) -> None:
    """Say before the model is loaded that `out` cannot be written.

    Args:
        overwrite: whether an earlier run may be there.
    """
    there = (options.resume or options.shard is not None) and holds_run(options.folder)
    if not there:
        check_free(options.folder, RUN, overwrite)


def together(options: RunOptions) -> AbstractContextManager[None]:
    """Be the only one of several shards that opens the place, or writes run.json."""
    if options.shard is None:
        return nullcontext()
    return locks.among_shards(options.folder)


class RunDocument:
    """The content of run.json: what runs, and what became of the images."""

    def __init__(self, record: Mapping[str, Any], samples: Sequence[Sample]) -> None:
        """`samples` are those of the whole run, whichever process or shard takes them."""
        self.record = dict(record)
        self.names = [sample.name for sample in samples]
        self.fingerprint = fingerprint(self.record)
        """sha256 of the model and the options: what has the same was drawn in the same
        way."""
        self.errors: dict[str, str | None] = {}
        """The error of each finished image, by its name; None for one without."""
        # how many images have failed by now, those of other shards included
        self.failed = 0

    def write(self, run: RunDirectory, options: RunOptions | None = None) -> list[str]:
        """Write run.json, the images in their order.

        An earlier run or another shard may have left manifests of other images, or
        failures in run.json.

        Args:
            options: at the end of the run, when a shard has to be the only one that
                writes.

        Returns:
            The names of the images that are missing.
        """
        with nullcontext() if options is None else together(options):
            _, earlier_errors = run.before()
            # of the images that are there, in their order
            errors: dict[str, str | None] = {}
            for name in self.names:
                if name in self.errors:
                    errors[name] = self.errors[name]
                elif run.image(name).is_complete:
                    errors[name] = None
                elif name in earlier_errors:
                    errors[name] = earlier_errors[name]
            missing = [name for name in self.names if name not in errors]
            complete = [name for name, error in errors.items() if error is None]
            failures = [
                {"image": n, "error": e} for n, e in errors.items() if e is not None
            ]
            images = {
                "total": len(self.names),
                "complete": complete,
                "missing": missing,
            }
            self.failed = len(failures)
            run.write_run({**self.record, "images": images, "failures": failures})
            return missing


def run_record(prepared: Prepared) -> dict[str, Any]:
    """All that decides what is drawn, and nothing else: no time, place or number of
    threads."""
    model = prepared.model
    options = prepared.options
    inputs = structs.asdict(options.inputs)
    for name in ("transform", "forward_args", "input"):  # which the preprocessing names
        del inputs[name]
    return {
        **versions(),
        "device": model.device.type,
        "model": model.source,
        "preprocessing": model.preprocess.words_for(),
        "layers": [layer.name for layer in prepared.layers],
        "options": {
            "layers": options.layers,
            **structs.asdict(options.draw),
            "padding": options.draw.gap,
            "pad_value": options.draw.gap_grey,
            **inputs,
            **structs.asdict(options.passes),
        },
    }


def open_run(
    folder: Folder, prepared: Prepared, document: RunDocument, samples: Sequence[Sample]
) -> RunDirectory:
    """The run directory in a folder that is `held`: a new one, the one that is there
    with `resume`, or the one that other shards write.

    Args:
        samples: the images of this shard.
    """
    options = prepared.options
    with together(options):
        run = RunDirectory(folder, options.mirror)
        record = run.record()
        joins = options.resume or options.shard is not None
        if record is not None and joins:
            _check_same(options, document, record)
            if not options.resume:
                _check_shard_is_empty(run, options, samples)
        elif options.resume or options.shard is None:
            earlier = check_free(folder.path, RUN, options.overwrite)
            if earlier is not None:
                run.clear(earlier)
        if options.resume:
            names = {safe_way(name) for name in document.names}
            surplus = [quoted(path) for path in run.complete if path not in names]
            if surplus:
                verb = "is" if len(surplus) == 1 else "are"
                log.warning(
                    "%s %s kept, though no longer among the inputs",
                    listed(surplus, 3),
                    verb,
                )
        # hidden folders that no process is writing into, also of images that are no
        # inputs any more
        earlier_names, _ = run.before()
        removed = {*earlier_names}.difference(document.names)
        run.clear_images([*(sample.name for sample in samples), *removed])
        document.write(run)
    return run


def _check_same(
    options: RunOptions, document: RunDocument, record: Mapping[str, Any]
) -> None:
    """Refuse to go on with another run, whose run.json is `record`."""
    if document.record["model"].get("parameters", "") is None:
        raise StoreError(
            f"{options.folder} holds a run, and this model's tensors do not tell their"
            " values",
            "--overwrite, or another --out",
        )
    # as JSON has it: lists for tuples, text for paths
    new = json.loads(json.dumps(document.record, default=str))
    different = differences(settings_of(record), new)
    if different:
        option = "--resume:" if options.resume else "--out"
        hint = "give the same model and options, or another --out"
        if len(different) > 1:
            hint += f" (and {len(different) - 1} more differences)"
        message = f"{option} {options.folder} holds another run; {different[0]}"
        raise StoreError(message, hint)


def _check_shard_is_empty(
    run: RunDirectory, options: RunOptions, samples: Sequence[Sample]
) -> None:
    """Refuse to draw the images of a shard twice."""
    done = sum(run.image(sample.name).is_complete for sample in samples)
    if done:
        raise StoreError(
            f"--out {options.folder} holds {counted(done, 'image')} of shard"
            f" {options.shard}",
            "--resume goes on with it, --out names another place",
        )


def kept_manifest(
    folder: ImageFolder, sample: Sample, fingerprint: str
) -> Manifest | None:
    """The manifest of an image that is complete, and fits the run and the file; else
    None."""
    if not folder.is_complete:
        return None
    with suppress(StoreError, ImageError):
        manifest = folder.manifest()
        if (
            manifest.fingerprint == fingerprint
            and manifest.image.sha256 == decode.digest(sample)
        ):
            return manifest
    return None
