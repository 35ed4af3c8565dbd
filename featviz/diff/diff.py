"""The story of `diff`: read two runs, compare them, and write the page, the difference
maps, and the JUnit file."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from featviz.diff import maps, output
from featviz.diff.comparison import Comparison
from featviz.diff.matching import compare_runs
from featviz.diff.pairing import Alignment, align
from featviz.errors import UsageError
from featviz.files.urls import Url
from featviz.options.commands import DiffFiles, DiffThresholds
from featviz.rundir import DIFF_FILE
from featviz.rundir import place as outputs
from featviz.rundir.mirror import copied
from featviz.rundir.read import ReadRun, read_run, warn_of
from featviz.rundir.studies import junit
from featviz.rundir.write import write_record
from featviz.text import counted

log = logging.getLogger(__name__)

Render = Callable[
    [Comparison, ReadRun, ReadRun, Path, Path], tuple[str, Mapping[str, str]]
]
"""Takes a comparison, BASE, NEW, the path of the page and the folder of the maps. Returns
the text of the page, and by name the texts of the files that the page loads from the
folder of the maps."""


class OutputFile(NamedTuple):
    """A file outside of the folder of maps."""

    option: str
    """The option that names it: `--html`."""
    path: Path
    file_kind: outputs.FileKind


def diff(
    base: Path | Url,
    new: Path | Url,
    thresholds: DiffThresholds,
    files: DiffFiles,
    render: Render | None = None,
    titles: tuple[str, str] | None = None,
) -> Comparison:
    """Compare two runs, and write the files that the user asks for.

    Args:
        base: a run directory, or the URL of one, which is copied into a temporary folder.
        new: as `base`. If one of the two runs was made by another runtime (ONNX Runtime,
            say), the layers of `new` are paired with those of `base`.
        thresholds: what counts as different, and gates.
        files: where the page, the folder of maps and the JUnit file go; None for none.
        render: makes the page of `files.html`; None writes no page. It is an argument
            since `diff` may not import `report`, which makes pages.
        titles: the names of BASE and NEW in the result; None for the paths of their
            folders.

    Raises:
        CompareError: the runs had other inputs, or share no image or no layer.
        UsageError: a gate cannot be checked, or `files.html` goes with a URL.
        FeatvizError: a run cannot be read, or a file of `files` cannot be written.
    """
    _refuse_page_of_url((base, new), files)
    folder = _maps_folder(files)
    with copied(base) as base_root, copied(new) as new_root:
        # before the runs are read, which takes long
        output_files = checked_files(files, (base_root, new_root))
        aligned = align(_read("BASE", base_root, base), _read("NEW", new_root, new))
        result = replace(_compare_aligned(aligned, thresholds), out=folder)
        if titles is not None:
            result = replace(result, base=titles[0], new=titles[1])
        texts = {
            outputs.JUNIT: junit({str(result.new): output.verdicts(result)}, "diff")
        }
        if folder is not None:
            tensors, contents = maps.draw(result.layers, aligned.base, aligned.new)
            result = replace(result, layers=tensors)
            if files.html is not None and render is not None:
                page, assets = render(
                    result, aligned.base, aligned.new, files.html, folder
                )
                texts[outputs.PAGE] = page.encode("utf-8", "replace")
                for name, text in assets.items():
                    contents[name] = text.encode("utf-8", "replace")
            _write_folder(folder, result, contents)
        # after the pictures, which the page links
        for option, path, file_kind in output_files:
            with outputs.writing(path, file_kind, option, files.overwrite) as file:
                file.write(texts[file_kind])
    return result


def _compare_aligned(aligned: Alignment, thresholds: DiffThresholds) -> Comparison:
    """Compare two runs whose layers were given the same names. The result also has the
    names in NEW of layers that were paired."""
    result = compare_runs(aligned.base, aligned.new, thresholds)
    tensors = []
    for tensor in result.layers:
        tensors.append(replace(tensor, pair=aligned.pairs.get(tensor.key)))
    return replace(result, layers=tuple(tensors), folded=aligned.folded)


def _refuse_page_of_url(origins: Sequence[Path | Url], files: DiffFiles) -> None:
    """Refuse --html if a run is at a URL: the page links pictures in the run's folder.

    Args:
        origins: BASE and NEW.

    Raises:
        UsageError: `files.html` is set, and BASE or NEW is a URL.
    """
    for origin in origins:
        if isinstance(origin, Url) and files.html is not None:
            raise UsageError(
                "the page of --html shows pictures where they are, and"
                f" {origin} is no folder",
                "leave --html out, or copy the run here first",
            )


def checked_files(files: DiffFiles, runs: tuple[Path, Path]) -> list[OutputFile]:
    """Check all paths that are written, and return those outside of the folder of maps.

    Args:
        files: the paths that the user gave.
        runs: the folders of BASE and NEW.

    Raises:
        StoreError: a path is inside a run, or a file or folder is there that may not be
            replaced.
    """
    output_files = []
    if files.html is not None:
        output_files.append(OutputFile("--html", files.html, outputs.PAGE))
    if files.junit is not None:
        output_files.append(OutputFile("--junit", files.junit, outputs.JUNIT))
    for option, path, file_kind in output_files:
        outputs.check_apart(path, option, runs)
        outputs.check_file(path, file_kind, option, files.overwrite)
    folder = _maps_folder(files)
    if folder is not None:
        outputs.check_apart(folder, "--out", runs)
        # an earlier comparison is replaced even without --overwrite: the same command
        # makes it again
        outputs.check_free(folder, outputs.DIFF, True)
    return output_files


def _write_folder(
    folder: Path, result: Comparison, contents: Mapping[str, bytes]
) -> None:
    """Replace the folder of maps by one with the files of `contents` and diff.json.

    Args:
        contents: by name of the file: the pictures, and what the page loads.
    """
    with outputs.replacing(folder, outputs.DIFF) as hidden_folder:
        for name, content in contents.items():
            with hidden_folder.write(name) as file:
                file.write(content)
        write_record(hidden_folder, DIFF_FILE, result.document)


def _maps_folder(files: DiffFiles) -> Path | None:
    """The folder of the maps: `--out`, or without it PAGE-maps beside the page of `--html`;
    None if neither was given."""
    if files.out is not None or files.html is None:
        return files.out
    return files.html.with_name(f"{files.html.stem}-maps")


def _read(title: str, root: Path, origin: Path | Url) -> ReadRun:
    """Read a run, and warn of images that are left out, or that the run never reached.

    Args:
        title: BASE or NEW, for the warnings.
        root: the folder of the run or of its copy.
        origin: the folder or the URL that the user gave.

    Raises:
        FeatvizError: the run cannot be read.
    """
    run = replace(read_run(root), url=origin if isinstance(origin, Url) else None)
    warn_of(run.left_out, f"{title}: ", ", and left out")
    if run.missing:
        log.warning(
            "%s: the run did not come to %s", title, counted(run.missing, "more image")
        )
    return run
