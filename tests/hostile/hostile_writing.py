"""Destinations that are not what they look like: links, folders of others, guessed
names."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path

from hostile_harness import Attack, Sandbox
from hostile_rundirs import DRAWING, MANIFEST, at, place

DRAW = ["run", "{given}/net.pth", "{given}/photos", *DRAWING]
ROOM = "given/room"
NOTES = "{root}/bystander/notes.txt"
Change = Callable[[Sandbox], object]


def _with(*changes: Change) -> Change:
    """The honest runs, an empty folder `room`, and what the attack puts there."""

    def make(box: Sandbox) -> None:
        place(box)
        (box.given / "room").mkdir()
        for change in changes:
            change(box)

    return make


def _put(name: str, make: Callable[[Path], object]) -> Change:
    """Something in the room, in the place of what is called so."""

    def change(box: Sandbox) -> None:
        path = box.given / "room" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.unlink(missing_ok=True)
        make(path)

    return change


def _file(name: str, text: str = "mine") -> Change:
    return _put(name, lambda path: path.write_text(text))


def _link(name: str, target: str = NOTES) -> Change:
    return lambda box: _put(name, lambda path: path.symlink_to(box.filled(target)))(box)


def _ours(box: Sandbox) -> None:
    (box.given / "run").rename(box.given / "room" / "run")


def _unfinished(name: str) -> Change:
    """The same without a folder or file of an image, which is then not complete."""

    def change(box: Sandbox) -> None:
        _ours(box)
        image = box.given / "room/run/a.png"
        (image / name).rename(box.given / "gone")
        (image / "manifest.json").unlink(missing_ok=True)

    return change


FOREIGN = json.dumps({"name": "a project", "scripts": {"run": "make"}})
ALMOST = json.dumps(
    {"schema_version": 1, "name": "a project", "layers": [], "images": 3}
)
OUT = ["--out", "{given}/room/proj"]
RUN_OUT = ["--out", "{given}/room/run"]
MAKERS: dict[str, tuple[str, list[str]]] = {
    "run": ("run.json", [*DRAW, *OUT, "--overwrite"]),
    "diff": ("diff.json", ["diff", "{given}/run", "{given}/other", *OUT]),
    "merge": (
        "run.json",
        ["merge", "{given}/run", "{given}/other", *OUT, "--overwrite"],
    ),
    "audit": (
        "audit.json",
        ["audit", "{given}/net.pth", "{given}/photos", *OUT, "--overwrite"],
    ),
    "kernels": ("run.json", ["kernels", "{given}/net.pth", *OUT, "--overwrite"]),
    "report": ("index.html", ["report", "{given}/run", *OUT]),
}
"""Commands that write folders, and the file by which they know their own."""


def _project(command: str, title: str, text: str = "") -> Attack:
    """A command that is to write into a folder with somebody's files."""
    mark, line = MAKERS[command]
    files = {"proj/src/main.c": "mine"}
    if text:
        files[f"proj/{mark}"] = text
    return Attack(
        f"writing: {command} into a project {title}",
        _with(*(_file(name, content) for name, content in files.items())),
        [line],
        "refused",
        may_change=(ROOM,),
        keep=(f"{ROOM}/proj/src", *(f"{ROOM}/{name}" for name in files)),
    )


def _foreign_projects() -> Iterator[Attack]:
    for command, (mark, _) in MAKERS.items():
        yield _project(command, f"with a {mark} of another program", FOREIGN)
        yield _project(command, f"with a {mark} that looks like ours", ALMOST)
        yield _project(command, "of others")


_OVERWRITE = f"{' '.join(DRAW)} --overwrite --out"
INPUTS = {
    "run into the photos": f"{_OVERWRITE} {{given}}/photos",
    "run into what holds the photos": f"{_OVERWRITE} {{given}}",
    "run into the photos by another name": f"{_OVERWRITE} {{given}}/room/../photos",
    "run into a link to the photos": f"{_OVERWRITE} {{given}}/link",
    "kernels into the model's folder": (
        "kernels {given}/net.pth --out {given} --overwrite"
    ),
    "merge into a part": (
        "merge {given}/run {given}/other --out {given}/run --overwrite"
    ),
    "diff into a side": "diff {given}/run {given}/other --out {given}/run",
    "report into its run": "report {given}/run --out {given}/run",
}
"""Commands whose destination is what they read."""
READ_FILES = (
    "given/net.pth",
    "given/photos",
    "given/photos/a.png",
    "given/photos/b.png",
    "given/run/run.json",
    "given/run/a.png/manifest.json",
)


def _almost(box: Sandbox) -> None:
    (box.given / "photos" / "run.json").write_text(ALMOST)
    (box.given / "link").symlink_to(box.given / "photos")


def _inputs() -> Iterator[Attack]:
    for title, line in INPUTS.items():
        yield Attack(
            f"writing: {title}",
            _with(_almost),
            [line],
            "refused",
            may_change=("given",),
            keep=READ_FILES,
        )


def _leads_out(where: str, file: str) -> tuple[Change, ...]:
    """A run whose record names somebody else's file."""
    change = at(where, "../../../bystander/notes.txt", file)
    return (lambda box: change(box.given / "run"), _ours)


_BYSTANDER = "{root}/bystander"
OWN_RUNS: dict[str, tuple[Change, ...]] = {
    "with a folder that links outside": (_ours, _link("run/c.png", _BYSTANDER)),
    "whose image links outside": (_unfinished("."), _link("run/a.png", _BYSTANDER)),
    "whose layer's folder links outside": (
        _unfinished("001_0"),
        _link("run/a.png/001_0", _BYSTANDER),
    ),
    "whose run.json is a FIFO": (_ours, _put("run/run.json", os.mkfifo)),
    "whose picture is somebody else's file": _leads_out("captures.0.file", MANIFEST),
    "whose tensor is somebody else's file": _leads_out("captures.0.tensor", MANIFEST),
    "whose image is somebody else's file": _leads_out("images.complete.0", "run.json"),
}
"""Runs of ours that were changed."""


def _own_runs() -> Iterator[Attack]:
    overwrite = [*DRAW, *RUN_OUT, "--overwrite"]
    resume = [*DRAW, *RUN_OUT, "--resume"]
    for notes in ("notes.txt", "a.png/notes.txt"):
        yield Attack(
            f"writing: --overwrite of a run with {notes}",
            _with(_ours, _file(f"run/{notes}")),
            [overwrite],
            "refused",
            may_change=(ROOM,),
            keep=(f"{ROOM}/run/{notes}",),
        )
    for title, changes in OWN_RUNS.items():
        make = _with(*changes)
        name = f"of a run {title}"
        yield Attack(
            f"writing: --overwrite {name}", make, [overwrite], may_change=(ROOM,)
        )
        yield Attack(f"writing: --resume {name}", make, [resume], may_change=(ROOM,))


AUDIT = "audit {given}/net.pth {given}/photos --out out"
FILES = {
    "report.html": "report {given}/run --single-file --out {given}/room/report.html",
    "sheet.png": "sheet {given}/run --layers 0 --out {given}/room/sheet.png",
    "d.html": "diff {given}/run {given}/other --html {given}/room/d.html",
    "d.xml": "diff {given}/run {given}/other --junit {given}/room/d.xml",
    "a.xml": f"{AUDIT} --junit {{given}}/room/a.xml",
    "prune.json": f"{AUDIT} --prune-out {{given}}/room/prune.json",
}
"""Commands that write one file."""


def _links() -> Iterator[Attack]:
    for name, line in FILES.items():
        make = _with(_link(f".{name}.part"))
        title = f"writing: .{name}.part links outside"
        yield Attack(title, make, [line], may_change=("work", ROOM))
    run = [[*DRAW, *RUN_OUT, "--resume"]]
    for name in (".run.json.part", ".a.png.part", "a.png/.manifest.json.part"):
        make = _with(_unfinished("manifest.json"), _link(f"run/{name}"))
        title = f"writing: {name} in a run links outside"
        yield Attack(title, make, run, may_change=(ROOM,))
    report = "report {given}/room/run"
    yield Attack(
        "writing: the report's folder links outside",
        _with(_ours, _link("run/report", "{root}/bystander")),
        [report],
        may_change=(ROOM,),
    )
    yield Attack(
        "writing: the report's file links outside",
        _with(_ours, _link("run/report.html")),
        [f"{report} --single-file"],
        may_change=(ROOM,),
    )
    yield Attack(
        "writing: the report's folder holds notes",
        _with(_ours, _file("run/report/notes.txt")),
        [report],
        may_change=(ROOM,),
        keep=(f"{ROOM}/run/report/notes.txt",),
    )


def all_attacks() -> Iterator[Attack]:
    yield from _foreign_projects()
    yield from _inputs()
    yield from _own_runs()
    yield from _links()
    again = [[*DRAW, *RUN_OUT, "--overwrite"]]
    name = "control: an honest run is replaced"
    yield Attack(name, _with(_ours), again, "good", may_change=(ROOM,))
    new = [[*DRAW, *OUT], [*DRAW, *OUT, "--resume"], [*DRAW, *OUT, "--overwrite"]]
    name = "control: a run, resumed, replaced"
    yield Attack(name, _with(), new, "good", may_change=(ROOM,))
    for name, line in FILES.items():
        written = ("work", ROOM)
        yield Attack(
            f"control: {name} is written", _with(), [line], "good", may_change=written
        )
