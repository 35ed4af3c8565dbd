"""A run directory in an object store, reached through fsspec: the same tree, each file an object.

A run is written image by image: each is built in a folder of this machine and then uploaded, its
manifest last, so that what has a manifest is complete. A run is read from a copy in a temporary
folder. A store is somebody else's: only objects with names that featviz gives are fetched, and no
more of each than the store has said that there is.
"""

from __future__ import annotations

import errno
import secrets
import shutil
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any, TypeVar

from featviz.errors import FeatvizError, FileError, StoreError, UploadError
from featviz.files import is_inside
from featviz.files.urls import Url, lacks_rights, tried
from featviz.records import Shard
from featviz.rundir import AUDIT_FILE, LOCK_FILE, MANIFEST_FILE, RUN_FILE, SHARDS_LOCK
from featviz.rundir import place as places
from featviz.rundir.atomic import reported
from featviz.rundir.place import is_lock, is_own_name
from featviz.text import quoted, safe_name

T = TypeVar("T")

_AT_ONCE = 16
"""Objects that are read or written at once."""
_PIECE = 8 * 2**20
"""Bytes that are read of an object at a time."""
_RIGHTS = "give credentials that may list, read, write and delete there (for s3: AWS_PROFILE)"


class Store:
    """The objects below a URL, by their names relative to it, with forward slashes."""

    def __init__(self, url: Url) -> None:
        """Find the library that speaks with the store; nothing is asked of the store yet."""
        self.url = url
        self._fs, self._root = url.filesystem(), url.key.rstrip("/")

    def sizes(self, folder: str = "") -> dict[str, int]:
        """Bytes of all objects in a folder, by their names, as the store tells them."""
        self._fs.invalidate_cache()
        path, above = self._path(folder).rstrip("/"), f"{self._root}/"
        found = self._asked("listed", folder, lambda: self._fs.find(path, detail=True), {})
        self._fs.invalidate_cache()  # which holds as much again
        return {
            path.removeprefix(above): int(info.get("size") or 0)
            for path, info in found.items()
            if path.startswith(above) and info.get("type") == "file" and not path.endswith("/")
        }

    def names(self) -> list[str]:
        """The objects and folders that are in no folder."""
        self._fs.invalidate_cache()
        found = self._asked("listed", "", lambda: self._fs.ls(self._root, detail=False), [])
        return [str(path).rpartition("/")[2] for path in found]

    def read(self, name: str, most: int) -> bytes:
        """The first bytes of an object, at most `most`; nothing where there is none."""
        read = partial(self._fs.cat_file, self._path(name), start=0, end=most)
        return bytes(self._asked("read", name, read, b""))

    def copy(self, sizes: Mapping[str, int], root: Path) -> None:
        """Copy objects, as far as these sizes go, into a folder of this machine."""

        def copy(name: str) -> None:
            path, size = root / name, sizes[name]
            with reported(path, "the run must fit into the folder for temporary files, TMPDIR"):
                path.parent.mkdir(parents=True, exist_ok=True)
                with path.open("xb") as file:
                    for start in range(0, size, _PIECE):
                        part = {"start": start, "end": min(start + _PIECE, size)}
                        read = partial(self._fs.cat_file, self._path(name), **part)
                        file.write(self._asked("read", name, read))

        _all_at_once(copy, sizes)

    def put(self, files: Mapping[str, Path]) -> None:
        """Write files of this machine as objects of these names, several at once; an UploadError
        where the store does not take one of them."""

        def put(name: str) -> None:
            task = partial(self._fs.put_file, str(files[name]), self._path(name))
            self._asked("written", name, task)

        try:
            _all_at_once(put, files)
        except StoreError as error:
            raise UploadError(error.message, error.hint) from error

    def create(self, name: str, data: bytes) -> bool:
        """Make an object; False where there is one. In S3, Google Cloud Storage and Azure that is
        one step; other stores are asked before."""
        path = self._path(name)
        self._fs.invalidate_cache()  # of listings, in which an object of another process is not
        if self._asked("read", name, lambda: self._fs.exists(path)):
            return False
        try:
            self._asked("written", name, lambda: self._fs.pipe_file(path, data, mode="create"))
        except FileExistsError:
            return False
        except StoreError as error:
            cause = error.__cause__  # of one that has no such step
            lacks_it = isinstance(cause, (NotImplementedError, TypeError))
            if not lacks_it and getattr(cause, "errno", None) != errno.ENOSYS:
                raise
            self._asked("written", name, lambda: self._fs.pipe_file(path, data))
        return True

    def remove(self, names: Iterable[str]) -> None:
        """Remove objects in this order; what is gone already is passed over."""
        for name in names:
            self._asked("removed", name, partial(self._fs.rm_file, self._path(name)), ())

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}"

    def _asked(self, what: str, name: str, task: Callable[[], T], missing: Any = None) -> T:
        """Ask the store for something, several times where it fails.

        Args:
            missing: the answer where there is no such object; without it that is an error.
        """
        cause: BaseException | None
        try:
            return tried(self.url, task)
        except FileNotFoundError as error:
            if missing is not None:
                return missing  # type: ignore[no-any-return]
            reason, cause = str(error), error
            hint = "make the bucket first" if what == "written" else "it was removed meanwhile"
        except FileError as error:
            reason, cause = error.message, error.__cause__
            hint = "what is complete stays complete; --resume when the store answers"
        where = quoted(f"{self.url}/{name}".rstrip("/"))
        reason = quoted(self.url.without_secrets(reason))
        hint = _RIGHTS if lacks_rights(cause) else hint
        raise StoreError(f"{where} cannot be {what}: {reason}", hint) from cause


def _all_at_once(task: Callable[[str], None], names: Iterable[str]) -> None:
    with ThreadPoolExecutor(_AT_ONCE, "featviz-store") as pool:
        for done in [pool.submit(task, name) for name in names]:
            done.result()


@contextmanager
def held(url: Url, shard: Shard | None) -> Iterator[None]:
    """Hold the place below a URL, or one shard of it, by an object that says who does."""
    store = Store(url)
    mine = LOCK_FILE if shard is None else places.name_of(shard)
    with _locked(store, mine):
        for name in store.names():
            together = shard is not None and name.endswith(f"-of-{shard.count}.lock")
            if is_lock(name) and name not in (mine, SHARDS_LOCK) and not together:
                raise _taken(store, name)
        yield


@contextmanager
def among_shards(url: Url) -> Iterator[None]:
    """Be the only shard that begins or ends, which takes a moment; the others wait."""
    with _locked(Store(url), SHARDS_LOCK, places.PATIENCE):
        yield


@contextmanager
def _locked(store: Store, name: str, patience: float = 0.0) -> Iterator[None]:
    words = f"{places.signature()} {secrets.token_hex(8)}\n".encode()
    end = time.monotonic() + patience
    while not store.create(name, words) and store.read(name, places.MOST_WORDS) != words:
        if time.monotonic() >= end:
            raise _taken(store, name)
        time.sleep(1.0)
    try:
        yield
    finally:
        with suppress(StoreError):
            store.remove([name])


def _taken(store: Store, name: str) -> StoreError:
    words = store.read(name, places.MOST_WORDS).decode("utf-8", "backslashreplace").split()
    holder = quoted(" ".join(words[:-1])) or "another process"
    lock = quoted(f"{store.url}/{name}")
    return StoreError(
        f"--out {quoted(str(store.url))} is being written by {holder}",
        f"wait until it is done; if it was killed, remove {lock} (`aws s3 rm` and the like) and "
        "give --resume",
    )


def files_of_images(sizes: Mapping[str, int]) -> dict[str, dict[str, int]]:
    """Bytes of the files of each image, by its folder and their names there; objects with other
    names than featviz gives, or names that lead outside, are left out."""
    images: dict[str, dict[str, int]] = {}
    for name, size in sizes.items():
        for folder in map(str, PurePosixPath(name).parents[:2] if is_inside(name) else ()):
            if folder != "." and is_own_name(own := name[len(folder) + 1 :]):
                images.setdefault(folder, {})[own] = size
    return images


@contextmanager
def here(place: Path | Url) -> Iterator[Path]:
    """A run directory to read: itself, or a copy of the one below a URL, as long as the block
    lasts. Errors of the block speak of the URL."""
    if isinstance(place, Path):
        yield place
        return
    store = Store(place)
    there = store.sizes()
    images = files_of_images(there).items()
    whole = [(folder, names) for folder, names in images if MANIFEST_FILE in names]
    own = [f"{folder}/{name}" for folder, names in whole for name in names]
    sizes = {name: there[name] for name in (RUN_FILE, AUDIT_FILE, *own) if name in there}
    if not sizes:
        raise StoreError(
            f"{quoted(str(place))} is no run directory: it has no {RUN_FILE}",
            "give a URL to which `featviz run --out` wrote",
        )
    with temporary(place.name) as folder:
        try:
            store.copy(sizes, folder)
            yield folder
        except FeatvizError as error:
            error.message = error.message.replace(str(folder), str(place))
            error.args = (error.message,)
            error.hint = error.hint and error.hint.replace(str(folder), str(place))
            raise


def copy_image(url: Url, folder: str, root: Path) -> None:
    """Copy one image of a run in a store into an empty folder."""
    store = Store(url)
    own = files_of_images(store.sizes(folder)).get(folder, {})
    store.copy({f"{folder}/{name}": size for name, size in own.items()}, root)


@contextmanager
def temporary(name: str) -> Iterator[Path]:
    """A folder of this name in a temporary one, as long as the block lasts."""
    with reported(Path(tempfile.gettempdir()), "TMPDIR names another folder for temporary files"):
        above = Path(tempfile.mkdtemp(prefix="featviz-"))
    try:
        folder = above / safe_name(name)
        folder.mkdir()
        yield folder
    finally:
        shutil.rmtree(above, ignore_errors=True)
