"""Where a run is written: a place that no other run is written into, hidden where it is to replace
another run; run.json as it grows; images of an earlier run that can be kept."""

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
from featviz.records import ImageResult, Outcome, Sample
from featviz.run.prepare import Prepared
from featviz.rundir import locks
from featviz.rundir.folder import Folder, reported
from featviz.rundir.ownership import holds_run
from featviz.rundir.place import RUN, check_free, replacing
from featviz.rundir.schema import GROWING, differences, fingerprint
from featviz.rundir.write import ImageFolder, RunDirectory
from featviz.text import counted, listed, quoted, safe_way

log = logging.getLogger(__name__)


@contextmanager
def held(options: RunOptions) -> Iterator[Folder]:
    """The folder to write into, which no other process has but for other shards of the run: `out`;
    or a hidden one, which takes its place at the end, where `out` holds a run that is to be
    replaced."""
    out, shard = options.folder, options.shard
    fixed = real(out).is_mount() or not os.access(real(out).parent, os.W_OK)
    if options.overwrite and not fixed and holds_run(out):
        with replacing(out, RUN) as new:
            yield new
        return
    with locks.held(out, shard):
        check_destination(options)
        with reported(out):
            folder = Folder.open(out)
        yield folder


def check_destination(options: RunOptions) -> None:
    """Say before the model is loaded that `out` cannot be written."""
    there = (options.resume or options.shard is not None) and holds_run(options.folder)
    if not there:
        check_free(options.folder, RUN, options.overwrite)


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
        """sha256 of the model and the options: what has the same was drawn in the same way."""
        self.errors: dict[str, str | None] = {}
        """The error of each finished image, by its name; None for one without."""
        self.failed = 0  # how many images have failed by now, those of other shards included

    def write(self, run: RunDirectory, options: RunOptions | None = None) -> list[str]:
        """Write run.json, the images in their order, and return those that are missing. An earlier
        run or another shard may have left manifests of other images, or failures in run.json; with
        options, at its end, a shard is the only one that writes."""
        with nullcontext() if options is None else together(options):
            others = set(self.names) - self.errors.keys()
            errors: dict[str, str | None] = {
                name: error for name, error in run.before()[1].items() if name in others
            }
            errors |= {name: None for name in others if run.image(name).is_complete}
            errors |= self.errors
            seen = [name for name in self.names if name in errors]
            missing = [name for name in self.names if name not in errors]
            complete = [name for name in seen if errors[name] is None]
            images = {"total": len(self.names), "complete": complete, "missing": missing}
            failures = [{"image": n, "error": errors[n]} for n in seen if errors[n] is not None]
            self.failed = len(failures)
            run.write_run({**self.record, "images": images, "failures": failures})
            return missing


def run_record(prepared: Prepared) -> dict[str, Any]:
    """All that decides what is drawn, and nothing else: no time, place or number of threads."""
    model, options = prepared.model, prepared.options
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
    """The run directory in a folder that is `held`: a new one, the one that is there with `resume`,
    or the one that other shards write; `samples` are the images of this shard."""
    options = prepared.options
    with together(options):
        joins = options.resume or options.shard is not None
        run = RunDirectory(folder, options.mirror)
        before = run.record()
        if before is not None and joins:
            _check_same(run, options, document, before, samples)
        elif options.resume or options.shard is None:
            earlier = check_free(folder.path, RUN, options.overwrite)
            if earlier is not None:
                run.clear(earlier)
        known = {safe_way(name) for name in document.names}
        complete = run.complete if options.resume else []
        if gone := [quoted(path) for path in complete if path not in known]:
            log.warning("%s: stays, though no longer among the inputs", listed(gone, 3))
        # hidden folders that no process is writing into
        old = {*run.before()[0]}.difference(document.names)  # no longer among the inputs
        run.clear_images([*(sample.name for sample in samples), *old])
        document.write(run)
    return run


def _check_same(
    run: RunDirectory,
    options: RunOptions,
    document: RunDocument,
    before: Mapping[str, Any],
    samples: Sequence[Sample],
) -> None:
    """Refuse to go on with another run; or, without `resume`, with a shard that has images."""
    if document.record["model"].get("parameters", "") is None:
        raise StoreError(
            f"{options.folder} holds a run, and this model's tensors do not tell their values",
            "--overwrite, or another --out",
        )
    old = {key: value for key, value in before.items() if key not in GROWING}
    if different := differences(old, json.loads(json.dumps(document.record, default=str))):
        where = f"{'--resume: ' if options.resume else '--out '}{options.folder}"
        more = f" (and {len(different) - 1} more differences)" if different[1:] else ""
        raise StoreError(
            f"{where} holds another run; {different[0]}",
            f"give the same model and options, or another --out{more}",
        )
    done = sum(run.image(sample.name).is_complete for sample in samples)
    if done and not options.resume:
        raise StoreError(
            f"--out {options.folder} holds {counted(done, 'image')} of shard {options.shard}",
            "--resume goes on with it, --out names another place",
        )


def kept(folder: ImageFolder, sample: Sample, fingerprint: str) -> ImageResult | None:
    """An image that is complete: its manifest is there, and fits the run and the file."""
    if not folder.is_complete:
        return None
    with suppress(StoreError, ImageError):
        manifest = folder.manifest()
        if manifest.fingerprint == fingerprint and manifest.image.sha256 == decode.digest(sample):
            rows, skipped = tuple(manifest.captures), tuple(manifest.skipped)
            said, idle = Outcome(tuple(manifest.prediction)), tuple(manifest.never_ran)
            name = folder.name
            return ImageResult(sample.name, name, rows, skipped, idle, outcome=said, kept=True)
    return None
