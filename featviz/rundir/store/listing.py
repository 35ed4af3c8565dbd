"""What is below a URL: the images of a run, each with its files, and what else there is."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import PurePosixPath

from featviz.files import is_inside
from featviz.rundir import AUDIT_FILE, BASES_FILE, LOCK_FILE, MANIFEST_FILE, RUN_FILE
from featviz.rundir.ownership import is_own_name

_OF_THE_RUN = (RUN_FILE, BASES_FILE, AUDIT_FILE)


@dataclass
class StoredTree:
    """The objects of a run, by the folders of its images."""

    images: dict[str, dict[str, int]] = field(default_factory=dict)
    """Bytes of the files of each image, by their names in its folder; whole or not."""
    run_files: dict[str, int] = field(default_factory=dict)
    """Bytes of run.json and its like."""
    strangers: list[str] = field(default_factory=list)
    """Objects that have no name that featviz gives, or a name that leads outside."""

    @classmethod
    def of(cls, sizes: Mapping[str, int]) -> StoredTree:
        """Sort objects by their names; the lock is left out."""
        tree = cls()
        last = f"/{MANIFEST_FILE}"
        whole = {name.removesuffix(last) for name in sizes if name.endswith(last)}
        for name, size in sizes.items():
            if name == LOCK_FILE:
                continue
            if name in _OF_THE_RUN:
                tree.run_files[name] = size
            elif is_inside(name) and (folder := _folder_of(name, whole)):
                tree.images.setdefault(folder, {})[name[len(folder) + 1 :]] = size
            else:
                tree.strangers.append(name)
        return tree

    @property
    def complete(self) -> list[str]:
        """Folders of images that have a manifest."""
        return [folder for folder, files in self.images.items() if MANIFEST_FILE in files]

    @property
    def all(self) -> dict[str, int]:
        """Bytes of all that is the run's."""
        return {**self.run_files, **self._of(self.images)}

    @property
    def whole(self) -> dict[str, int]:
        """Bytes of what belongs to complete images, and to the run as a whole."""
        return {**self.run_files, **self._of(self.complete)}

    def files_of(self, folder: str) -> dict[str, int]:
        """Bytes of the files of an image, by their names."""
        return self._of([folder])

    def folders(self, listed: Mapping[str, str]) -> dict[str, str | None]:
        """The folders of images that are complete, or that run.json lists as such, and what those
        that are not lack. The others are what an upload left that was ended too early."""
        return {
            folder: None if MANIFEST_FILE in files else f"it has no {MANIFEST_FILE}"
            for folder, files in self.images.items()
            if MANIFEST_FILE in files or folder in listed
        }

    def _of(self, folders: Iterable[str]) -> dict[str, int]:
        return {
            f"{folder}/{name}": size
            for folder in folders
            for name, size in self.images[folder].items()
        }


def _folder_of(name: str, whole: set[str]) -> str | None:
    """The folder of the image whose file this is: one that has a manifest; else, since its upload
    ended too early, one in which the file has a name that featviz gives."""
    above = [str(path) for path in reversed(PurePosixPath(name).parents)][1:]
    own = [folder for folder in above if is_own_name(name[len(folder) + 1 :])]
    found = next((folder for folder in above if folder in whole), None)
    if found is None:  # the outermost: `004_conv1/input.png` is a layer's file, no image's input
        return own[0] if own else None
    return found if found in own else None
