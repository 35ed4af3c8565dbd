"""run.json as it grows, and the images of an earlier run that can be kept."""

from __future__ import annotations

import json
import logging
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from msgspec import structs

from featviz.errors import ImageError, StoreError
from featviz.files.urls import Url
from featviz.images import decode
from featviz.models.requirements import versions
from featviz.options import RunOptions
from featviz.records import ImageResult, Outcome, Sample, Shard
from featviz.run.prepare import Prepared
from featviz.rundir import RUN_FILE
from featviz.rundir.place import RUN, Earlier, check_free, holds_run, names_of_images
from featviz.rundir.read import read_json
from featviz.rundir.schema import GROWING, Failure, convert, fingerprint
from featviz.rundir.store import StoredRun, temporary
from featviz.rundir.unlike import differences
from featviz.rundir.write import ImageFolder, RunDirectory
from featviz.text import counted, listed, quoted, safe_way

log = logging.getLogger(__name__)


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
        self.failed = 0
        """How many images have failed by now, those of other shards included."""

    @property
    def fingerprint(self) -> str:
        """sha256 of the model and the options: what has the same was drawn in the same way."""
        return fingerprint(self.record)

    def write(self, store: RunDirectory) -> list[str]:
        """Write run.json, the images in their order, and return those that are missing.

        An earlier run or another shard may have left the manifests of other images, or their
        failures in run.json."""
        others = set(self.names) - self.errors.keys()
        errors: dict[str, str | None] = {}
        with suppress(StoreError, ValueError):
            rows = convert(read_json(store.root / RUN_FILE).get("failures"), list[Failure])
            errors = {row.image: row.error for row in rows if row.image in others}
        errors |= {name: None for name in others if store.image(name).is_complete}
        errors |= self.errors
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
        self.failed = len(failures)
        store.write_run({**self.record, "images": images, "failures": failures})
        return missing


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
        "options": recorded_options(prepared.options),
    }


def recorded_options(options: RunOptions) -> dict[str, Any]:
    """The options that decide what is drawn, as run.json has them."""
    inputs = structs.asdict(options.inputs)
    del inputs["transform"], inputs["forward_args"]  # which the preprocessing names
    return {
        "layers": options.layers,
        **structs.asdict(options.draw),
        "padding": options.draw.gap,
        "pad_value": options.draw.gap_grey,
        **inputs,
        **structs.asdict(options.passes),
    }


def check_destination(options: RunOptions) -> Earlier | None:
    """Say before the model is loaded that `out` cannot be written; the run that is there, and is to
    be replaced."""
    if isinstance(options.out, Url):
        if not options.resume and options.shard is None:
            with temporary(options.out.name) as folder:
                StoredRun(folder, options.out).check_free()
        return None
    there = (options.resume or options.shard is not None) and holds_run(options.out)
    if there or (options.resume and RunDirectory(options.out).complete):
        return None
    return check_free(options.out, RUN, options.overwrite)


def open_run(
    folder: Path, options: RunOptions, document: RunDocument, samples: Sequence[Sample]
) -> RunDirectory:
    """The run directory: a new one, or with `resume` the one that is there. Where its run.json is
    missing or broken, an image that was drawn in the same way is enough: run.json is written anew.
    A shard joins the run that the others write, if it has none of this shard's images yet.

    Args:
        folder: the run directory, or for a run in a store the empty folder for files on their way.
        samples: the images of this shard, or of the whole run.
    """
    record, before = document.record, None
    stored = StoredRun(folder, options.out) if isinstance(options.out, Url) else None
    if options.resume or options.shard is not None:
        there = read_json(folder / RUN_FILE) if stored is None and holds_run(folder) else None
        before = there if stored is None else stored.record()
    if before is not None:
        _check_same(before, record, options)
        run = stored or RunDirectory(folder)
        done = sum(run.image(sample.name).is_complete for sample in samples)
        if done and not options.resume:
            raise StoreError(
                f"--out {options.out} holds {counted(done, 'image')} of shard {options.shard}",
                "--resume goes on with it, --out names another place",
            )
        return run
    run = stored or RunDirectory(folder)
    for way in run.complete if options.resume else ():
        with suppress(StoreError):
            if run.folder(way).manifest().fingerprint == document.fingerprint:
                log.warning("%s/%s is written anew from the manifests", options.out, RUN_FILE)
                return run
    if stored is not None:
        stored.check_free()
        return stored
    if options.resume:
        check_free(folder, RUN, False)
    return RunDirectory.create(folder)


def name_gone(store: RunDirectory, names: Collection[str]) -> None:
    """Name the complete images that are no longer among the inputs."""
    known = {safe_way(name) for name in names}
    if gone := [quoted(way) for way in store.complete if way not in known]:
        log.warning("%s: stays, though no longer among the inputs", listed(gone, 3))


def _check_same(before: Mapping[str, Any], record: Mapping[str, Any], options: RunOptions) -> None:
    """Whether a run that is there is the one that is to go on."""
    plain = json.loads(json.dumps(record, default=str))
    old = {key: value for key, value in before.items() if key not in GROWING}
    if different := differences(old, plain):
        raise StoreError(
            f"{'--resume: ' if options.resume else '--out '}{options.out} holds another run; "
            f"{different[0]}",
            "give the same model and options, or another --out"
            + (f" (and {len(different) - 1} more differences)" if different[1:] else ""),
        )


def names_to_clear(
    store: RunDirectory, samples: Sequence[Sample], shard: Shard | None
) -> list[str]:
    """Images whose hidden folders no process is writing into: this shard's of the whole run's
    samples, and those that only an earlier run knew of."""
    share = [sample.name for sample in (shard or Shard()).of(samples)]
    with suppress(StoreError):
        earlier = names_of_images(read_json(store.root / RUN_FILE))
        share += set(earlier) - {sample.name for sample in samples}
    return share


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
