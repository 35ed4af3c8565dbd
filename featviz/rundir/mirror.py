"""The mirror of a run directory in an object store, reached by fsspec: each file is an
object.

A run is written into a folder of this machine as always. Whenever its run.json is
written, the complete images are put to the URL, the manifest of each last, and then
run.json. A command that reads the run by its URL reads a copy in a temporary folder. The
store is somebody else's: only files that run.json and the manifests list are fetched,
and no more bytes than they say."""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path

from featviz.errors import FeatvizError, FileError, StoreError
from featviz.files import is_inside, urls
from featviz.files.urls import Url
from featviz.rundir import MANIFEST_FILE, RUN_FILE
from featviz.rundir.folder import reported
from featviz.rundir.image import read_manifest
from featviz.rundir.read import read_record
from featviz.rundir.schema import MOST_RECORD
from featviz.text import quoted, safe_name, safe_path

_AT_ONCE = 8
"""How many images are fetched in parallel: a store takes a tenth of a second to answer."""


class Mirror:
    """The objects below a URL, to which a run directory is copied."""

    def __init__(self, url: Url, root: Path) -> None:
        """Make a mirror. This sends no request to the store.

        Args:
            url: the place of the copy in the store.
            root: the run directory on this machine.
        """
        self._url = url
        self._root = root
        self._store = url.filesystem()
        self._complete: set[str] = set()
        """Folders of images that the store has."""

    def put_run(self, folders: Iterable[str]) -> None:
        """Put images that the store does not have yet into it, then run.json.

        Args:
            folders: the folders of all complete images, relative to the run directory.

        Raises:
            StoreError: a file cannot be written into the store.
        """
        # run.json is written every few seconds: most images are in the store already
        for folder in folders:
            if folder not in self._complete:
                self._put_image(folder)
            self._complete.add(folder)
        self._put([RUN_FILE])

    def _put_image(self, folder: str) -> None:
        """Put an image into the store: the files that its manifest names, then the
        manifest. Nothing is put if the store already has the same manifest.

        Args:
            folder: the image's folder, relative to the run directory.

        Raises:
            StoreError: a file cannot be written into the store.
        """
        manifest = f"{folder}/{MANIFEST_FILE}"
        # --resume meets images that are in the store: the same manifest, the same files
        content = (self._root / manifest).read_bytes()
        # An error here means that the store has no such manifest, or that it fails. A
        # store that fails does so again below, where the error is reported.
        with suppress(FileError):
            if urls.read(_object(self._url, manifest), MOST_RECORD) == content:
                return
        # The manifest is the last file, as on a disk: whoever reads the store meanwhile
        # finds only complete images.
        self._put([f"{folder}/{file}" for file in read_manifest(content).named])
        self._put([manifest])

    def _put(self, names: list[str]) -> None:
        """Put files into the store; StoreError where one cannot be written.

        Args:
            names: the paths of the files, relative to the run directory.
        """
        sources = [str(self._root / name) for name in names]
        targets = [_object(self._url, name).key for name in names]
        try:
            urls.attempt(self._url, lambda: self._store.put(sources, targets))
        except (FileNotFoundError, FileError) as error:
            hint = (
                f"what is complete stays in {self._root}; --resume puts the rest there"
            )
            if isinstance(error, FileNotFoundError):
                hint = "make the bucket first"
            elif urls.is_access_denied(error.__cause__):
                hint = (
                    "give credentials that may read and write there (for s3:"
                    " AWS_PROFILE)"
                )
            # libraries put the whole URL into their messages, with keys in its query
            reason = self._url.without_secrets(
                f"{self._url} cannot be written: {error}"
            )
            raise StoreError(quoted(reason), hint) from error


@contextmanager
def copied(location: Path | Url) -> Iterator[Path]:
    """Give the block a folder in which it reads a run: `location` itself if it is a path;
    for a URL, a temporary copy of the run. Errors of the block then name the URL instead
    of the copy."""
    if isinstance(location, Path):
        yield location
        return
    with tempfile.TemporaryDirectory(
        prefix="featviz-", ignore_cleanup_errors=True
    ) as above:
        folder = Path(above, safe_name(location.name))
        try:
            with reported(folder, "TMPDIR names another folder for temporary files"):
                _copy_run(location, folder)
            yield folder
        except FeatvizError as error:
            error.message = error.message.replace(str(folder), str(location))
            raise


def _copy_run(url: Url, root: Path) -> None:
    """Copy run.json, and the images that it calls complete, into the folder `root`."""
    _copy(url, RUN_FILE, root, MOST_RECORD)
    complete = read_record(root).images.complete
    folders = [folder for folder in map(safe_path, complete) if is_inside(folder)]
    with ThreadPoolExecutor(_AT_ONCE, "featviz-copy") as pool:
        # a list, so that what a thread raised is raised here
        list(pool.map(partial(_copy_image, url, root=root), folders))


def _copy_image(url: Url, folder: str, root: Path) -> None:
    """Copy the manifest of an image, and the files that the manifest lists. A missing file
    or a damaged manifest is no error here: `read_run` reports it.

    Args:
        folder: the image's folder, relative to the run.
        root: the run directory that is the copy.

    Raises:
        StoreError: a file is larger than the manifest says, or cannot be read.
    """
    _copy(url, f"{folder}/{MANIFEST_FILE}", root, MOST_RECORD)
    with suppress(FileNotFoundError, ValueError):
        manifest = read_manifest((root / folder / MANIFEST_FILE).read_bytes())
        for row in manifest.files:
            _copy(url, f"{folder}/{row.file}", root, row.bytes)


def _copy(url: Url, name: str, root: Path, limit: int) -> None:
    """Copy one object into a file; no file is made where there is no object.

    Args:
        url: the run in the store.
        name: the object's path in the run, and the file's in `root`.
        root: the run directory that is the copy.
        limit: the most bytes that the object may have.

    Raises:
        StoreError: it is larger, or cannot be read.
    """
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        with path.open("xb") as file:
            urls.attempt(url, lambda: urls.copy(_object(url, name), file, limit))
    except FileNotFoundError:
        path.unlink()
    except FileError as error:
        where = quoted(f"{url}/{name}")
        raise StoreError(
            f"{where} cannot be read: {error.message}", error.hint
        ) from None


def _object(url: Url, name: str) -> Url:
    """The URL of a file of the run at `url`."""
    return url.at_key(f"{url.key.rstrip('/')}/{name}")
