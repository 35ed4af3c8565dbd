"""The mirror of a run directory in an object store, reached by fsspec: each file is an
object.

A run is written into a folder of this machine as always. Whenever its run.json is
written, the images that are complete are put to the URL, the manifest of each last, and
then run.json. Whoever reads the run by its URL reads a copy in a temporary folder. The
store is somebody else's: only files that run.json and the manifests list are fetched,
and no more bytes than the manifests say."""

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
from featviz.text import quoted, safe_name, safe_way

# images that are fetched at once: an answer of a store takes a tenth of a second
_AT_ONCE = 8


class Mirror:
    """The objects below a URL, to which a run directory is copied."""

    def __init__(self, url: Url, root: Path) -> None:
        """Connect to the store; nothing is asked of it yet."""
        self._url = url
        self._root = root
        self._store = url.filesystem()
        self._complete: set[str] = set()
        """Folders of images that are there."""

    def put_run(self, folders: Iterable[str]) -> None:
        """Put the images with these folders, as far as they are not there, and
        run.json."""
        # run.json is written every few seconds, and most images are there by then
        for folder in folders:
            if folder not in self._complete:
                self._put_image(folder)
            self._complete.add(folder)
        self._put([RUN_FILE])

    def _put_image(self, folder: str) -> None:
        """Put all files of an image, unless this very image is there."""
        name = f"{folder}/{MANIFEST_FILE}"
        # --resume meets images that are there already: the same manifest, the same files
        content = (self._root / name).read_bytes()
        with suppress(FileError):  # there is none, or the store says why when it is put
            if urls.read(_object(self._url, name), MOST_RECORD) == content:
                return
        # the manifest last, as on a disk: who reads meanwhile sees whole images
        self._put([f"{folder}/{name}" for name in read_manifest(content).named])
        self._put([name])

    def _put(self, names: list[str]) -> None:
        """Put files, relative to the run directory; StoreError where one cannot be
        written."""
        sources = [str(self._root / name) for name in names]
        targets = [_object(self._url, name).key for name in names]
        try:
            urls.tried(self._url, lambda: self._store.put(sources, targets))
        except (FileNotFoundError, FileError) as error:
            hint = (
                f"what is complete stays in {self._root}; --resume puts the rest there"
            )
            if isinstance(error, FileNotFoundError):
                hint = "make the bucket first"
            elif urls.lacks_rights(error.__cause__):
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
    """A run directory to read: the folder itself, or a copy of the one below a URL for
    as long as the block lasts. Errors of the block speak of the URL."""
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
    """Copy run.json, and the images that it calls complete."""
    _copy(url, RUN_FILE, root, MOST_RECORD)
    complete = read_record(root).images.complete
    folders = [folder for folder in map(safe_way, complete) if is_inside(folder)]
    with ThreadPoolExecutor(_AT_ONCE, "featviz-copy") as pool:
        # a list, so that what a thread raised is raised here
        list(pool.map(partial(_copy_image, url, root=root), folders))


def _copy_image(url: Url, folder: str, root: Path) -> None:
    """Copy the files that the manifest of an image lists, each up to the size that it
    says; what is missing or does not fit, the reader of runs names."""
    _copy(url, f"{folder}/{MANIFEST_FILE}", root, MOST_RECORD)
    with suppress(FileNotFoundError, ValueError):
        manifest = read_manifest((root / folder / MANIFEST_FILE).read_bytes())
        for row in manifest.files:
            _copy(url, f"{folder}/{row.file}", root, row.bytes)


def _copy(url: Url, name: str, root: Path, limit: int) -> None:
    """Copy an object of a run in a store into a folder; no file where there is no object.

    Args:
        url: the run.
        name: the object's path in the run, and the file's in `root`.
        limit: bytes that it may have.

    Raises:
        StoreError: it is larger, or cannot be read.
    """
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        with path.open("xb") as file:
            urls.tried(url, lambda: urls.copy(_object(url, name), file, limit))
    except FileNotFoundError:
        path.unlink()
    except FileError as error:
        where = quoted(f"{url}/{name}")
        raise StoreError(
            f"{where} cannot be read: {error.message}", error.hint
        ) from None


def _object(url: Url, name: str) -> Url:
    """The place in the store of a file below a run directory's URL."""
    return url.at_key(f"{url.key.rstrip('/')}/{name}")
