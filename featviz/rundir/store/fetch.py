"""Runs in object stores, brought here for whoever reads them: into folders that go again.

A store is somebody else's: only objects with names that featviz gives are fetched, under names
that lead nowhere else, and no more of each than the store has said that there is.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

from featviz.errors import FeatvizError, StoreError
from featviz.files.urls import Url
from featviz.rundir import RUN_FILE
from featviz.rundir.atomic import reported
from featviz.rundir.ownership import is_own_name
from featviz.rundir.store.listing import StoredTree
from featviz.rundir.store.objects import ObjectStore
from featviz.text import quoted, safe_name

_THREADS = 16
"""Objects that are fetched at once."""
_SPARE = 64 * 2**20
"""Bytes of the temporary folder's disk that stay free."""


@contextmanager
def here(place: Path | Url) -> Iterator[Path]:
    """A run directory to read: itself, or a copy of the one below a URL, as long as the block
    lasts. Errors of the block speak of the URL.

    Raises:
        StoreError: there is no run, it cannot be read, or is larger than the disk has room for.
    """
    if isinstance(place, Path):
        yield place
        return
    store = ObjectStore(place)
    tree = StoredTree.of(store.sizes())
    check_run(place, tree)
    with files_here(store, tree.whole) as folder:
        yield folder


def check_run(url: Url, tree: StoredTree) -> None:
    """Whether there is a run below a URL, with or without its run.json.

    Raises:
        StoreError: there is none.
    """
    if RUN_FILE not in tree.run_files and not tree.complete:
        raise StoreError(
            f"{quoted(str(url))} is no run directory: it has no {RUN_FILE}",
            "give a URL to which `featviz run --out` wrote",
        )


@contextmanager
def files_here(store: ObjectStore, sizes: Mapping[str, int]) -> Iterator[Path]:
    """A folder with copies of some objects, as long as the block lasts. Errors of the block speak
    of the URL.

    Args:
        sizes: bytes of the objects by their names, all of which lead to places below the folder.

    Raises:
        StoreError: one cannot be read, or the disk has no room for them.
    """
    with temporary(store.url.name) as folder, _as_url(folder, store.url):
        _bring(store, sizes, folder)
        yield folder


def copy_image(url: Url, folder: str, root: Path) -> None:
    """Copy one image of a run in a store into an empty folder.

    Raises:
        StoreError: it cannot be read, or the disk has no room for it.
    """
    store = ObjectStore(url)
    inside = store.sizes(folder)
    sizes = {f"{folder}/{name}": size for name, size in inside.items() if is_own_name(name)}
    _bring(store, sizes, root)


def _bring(store: ObjectStore, sizes: Mapping[str, int], root: Path) -> None:
    free, needed = shutil.disk_usage(root).free - _SPARE, sum(sizes.values())
    if needed > free:
        raise StoreError(
            f"{quoted(str(store.url))} has {needed / 1e6:,.0f} MB, and {tempfile.gettempdir()} has "
            f"room for {max(free, 0) / 1e6:,.0f} MB",
            "TMPDIR names another folder for temporary files",
        )

    def copy(name: str) -> None:
        path = root / name
        with reported(path, "the run must fit into the folder for temporary files, TMPDIR"):
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("xb") as file:
                file.writelines(store.pieces(name, sizes[name]))

    with ThreadPoolExecutor(_THREADS, "featviz-fetch") as pool:
        for copied in [pool.submit(copy, name) for name in sizes]:
            copied.result()


@contextmanager
def temporary(name: str) -> Iterator[Path]:
    """A folder of this name in a temporary one, as long as the block lasts.

    Raises:
        StoreError: it cannot be made.
    """
    with reported(Path(tempfile.gettempdir()), "TMPDIR names another folder for temporary files"):
        above = Path(tempfile.mkdtemp(prefix="featviz-"))
    try:
        folder = above / safe_name(name)
        folder.mkdir()
        yield folder
    finally:
        shutil.rmtree(above, ignore_errors=True)


@contextmanager
def _as_url(folder: Path, url: Url) -> Iterator[None]:
    """Name the URL where an error names the folder that stands for it."""
    try:
        yield
    except FeatvizError as error:
        error.message = error.message.replace(str(folder), str(url))
        error.args = (error.message,)
        if error.hint is not None:
            error.hint = error.hint.replace(str(folder), str(url))
        raise
