"""Destinations that are not what they look like: links, folders of others, guessed names."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator

from hostile_harness import Attack, Sandbox
from hostile_rundirs import DRAWING, edit, place, put

DRAW = ["run", "{given}/net.pth", "{given}/photos", *DRAWING]
ROOM = "given/room"
Change = Callable[[Sandbox], object]


def _with(*changes: Change) -> Callable[[Sandbox], None]:
    """The honest runs, an empty folder `room`, and what the attack puts there."""

    def make(box: Sandbox) -> None:
        place(box)
        (box.given / "room").mkdir()
        for change in changes:
            change(box)

    return make


def _file(name: str, text: str = "mine") -> Change:
    def make(box: Sandbox) -> None:
        path = box.given / "room" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    return make


def _link(name: str, target: str = "{root}/bystander/notes.txt") -> Change:
    def make(box: Sandbox) -> None:
        path = box.given / "room" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.symlink_to(box.filled(target))

    return make


def _ours(box: Sandbox) -> None:
    """The honest run is moved into the room."""
    (box.given / "run").rename(box.given / "room" / "run")


def _before(change: Change) -> Change:
    """Change `given/run`, and move it into the room."""

    def make(box: Sandbox) -> None:
        change(box)
        _ours(box)

    return make


FOREIGN = json.dumps({"name": "a project", "scripts": {"run": "make"}})
ALMOST = json.dumps({"schema_version": 1, "name": "a project", "layers": [], "images": 3})
OUT = ["--out", "{given}/room/proj"]
RUN_OUT = ["--out", "{given}/room/run"]
MAKERS: dict[str, tuple[str, list[str]]] = {
    "run": ("run.json", [*DRAW, *OUT]),
    "diff": ("diff.json", ["diff", "{given}/run", "{given}/other", *OUT]),
    "merge": ("run.json", ["merge", "{given}/run", "{given}/other", *OUT]),
    "audit": ("audit.json", ["audit", "{given}/net.pth", "{given}/photos", *OUT]),
    "kernels": ("run.json", ["kernels", "{given}/net.pth", *OUT]),
    "report": ("index.html", ["report", "{given}/run", *OUT]),
}
"""Commands that write folders, and the file by which they know their own."""


def _foreign_projects() -> Iterator[Attack]:
    for command, (mark, line) in MAKERS.items():
        for words, text in (("of another program", FOREIGN), ("that looks like ours", ALMOST)):
            make = _with(_file(f"proj/{mark}", text), _file("proj/src/main.c"))
            keep = (f"{ROOM}/proj/{mark}", f"{ROOM}/proj/src", f"{ROOM}/proj/src/main.c")
            lines = [line] if command in ("diff", "report") else [[*line, "--overwrite"]]
            name = f"writing: {command} into a project with a {mark} {words}"
            yield Attack(name, make, lines, "refused", (ROOM,), keep)
        make = _with(_file("proj/src/main.c"))
        keep = (f"{ROOM}/proj/src/main.c",)
        lines = [line] if command in ("diff", "report") else [[*line, "--overwrite"]]
        name = f"writing: {command} into a project of others"
        yield Attack(name, make, lines, "refused", (ROOM,), keep)


PHOTOS = ("given/photos", "given/photos/a.png", "given/photos/b.png")


def _inputs() -> Iterator[Attack]:
    run = ["run", "{given}/net.pth", "{given}/photos", *DRAWING]
    mark = _with(lambda b: (b.given / "photos" / "run.json").write_text(ALMOST))
    for words, out in (
        ("the photos", "{given}/photos"),
        ("what holds the photos", "{given}"),
        ("the photos by another name", "{given}/room/../photos"),
    ):
        line = [[*run, "--out", out, "--overwrite"]]
        yield Attack(f"writing: --out is {words}", mark, line, "refused", ("given",), PHOTOS)
    linked = _with(
        lambda b: (b.given / "photos" / "run.json").write_text(ALMOST),
        lambda b: (b.given / "link").symlink_to(b.given / "photos"),
    )
    line = [[*run, "--out", "{given}/link", "--overwrite"]]
    yield Attack("writing: --out links to the photos", linked, line, "refused", ("given",), PHOTOS)
    model = ["given/net.pth", *PHOTOS]
    line = [["kernels", "{given}/net.pth", "--out", "{given}", "--overwrite"]]
    yield Attack(
        "writing: kernels into the model's folder",
        _with(),
        line,
        "refused",
        ("given",),
        tuple(model),
    )
    parts = tuple(f"given/{n}" for n in ("run/run.json", "run/a.png/manifest.json"))
    line = [["merge", "{given}/run", "{given}/other", "--out", "{given}/run", "--overwrite"]]
    yield Attack("writing: merge into a part", _with(), line, "refused", ("given",), parts)
    line = [["diff", "{given}/run", "{given}/other", "--out", "{given}/run"]]
    yield Attack("writing: diff into a side", _with(), line, "refused", ("given",), parts)
    line = [["report", "{given}/run", "--out", "{given}/run"]]
    yield Attack("writing: report into its run", _with(), line, "refused", ("given",), parts)


def _own_runs() -> Iterator[Attack]:
    over = [[*DRAW, *RUN_OUT, "--overwrite"]]
    resume = [[*DRAW, *RUN_OUT, "--resume"]]
    notes = (f"{ROOM}/run/notes.txt",)
    yield Attack(
        "writing: --overwrite of a run with notes beside the images",
        _with(_ours, _file("run/notes.txt")),
        over,
        "refused",
        (ROOM,),
        notes,
    )
    yield Attack(
        "writing: --overwrite of a run with notes in an image's folder",
        _with(_ours, _file("run/a.png/notes.txt")),
        over,
        "refused",
        (ROOM,),
        (f"{ROOM}/run/a.png/notes.txt",),
    )
    listed = "../../../bystander/notes.txt"
    for where, name in (
        ("captures.0.file", "a.png/manifest.json"),
        ("captures.0.tensor", "a.png/manifest.json"),
        ("images.complete.0", "run.json"),
    ):
        change = _before(edit(name, lambda d, where=where: put(d, where, listed)))
        for words, lines in (("--overwrite", over), ("--resume", resume)):
            yield Attack(
                f"writing: {words} of a run whose {where} is somebody else's file",
                _with(change),
                lines,
                "any",
                (ROOM,),
            )
    for words, lines in (("--overwrite", over), ("--resume", resume)):
        yield Attack(
            f"writing: {words} of a run with a folder that links outside",
            _with(_ours, _link("run/c.png", "{root}/bystander")),
            lines,
            "any",
            (ROOM,),
        )
        yield Attack(
            f"writing: {words} of a run whose image folder links outside",
            _with(_unfinished, _link("run/a.png", "{root}/bystander")),
            lines,
            "any",
            (ROOM,),
        )
        yield Attack(
            f"writing: {words} of a run whose layer's folder links outside",
            _with(_ours, _unlayered, _link("run/a.png/001_0", "{root}/bystander")),
            lines,
            "any",
            (ROOM,),
        )
        yield Attack(
            f"writing: {words} of a run whose run.json is a FIFO",
            _with(_ours, _fifo("run/run.json")),
            lines,
            "any",
            (ROOM,),
        )


def _unfinished(box: Sandbox) -> None:
    _ours(box)
    (box.given / "room" / "run" / "a.png").rename(box.given / "gone")


def _unlayered(box: Sandbox) -> None:
    image = box.given / "room" / "run" / "a.png"
    (image / "001_0").rename(box.given / "gone")
    (image / "manifest.json").unlink()


def _fifo(name: str) -> Change:
    def make(box: Sandbox) -> None:
        (box.given / "room" / name).unlink()
        os.mkfifo(box.given / "room" / name)

    return make


FILES: dict[str, list[str]] = {
    "report.html": ["report", "{given}/run", "--single-file", "--out", "{given}/room/report.html"],
    "sheet.png": ["sheet", "{given}/run", "--layer", "0", "--out", "{given}/room/sheet.png"],
    "d.html": ["diff", "{given}/run", "{given}/other", "--html", "{given}/room/d.html"],
    "d.xml": ["diff", "{given}/run", "{given}/other", "--junit", "{given}/room/d.xml"],
    "a.xml": [
        *("audit", "{given}/net.pth", "{given}/photos", "--out", "out"),
        *("--junit", "{given}/room/a.xml"),
    ],
    "prune.json": [
        *("audit", "{given}/net.pth", "{given}/photos", "--out", "out"),
        *("--prune-out", "{given}/room/prune.json"),
    ],
    "run.zip": [*DRAW, "--archive", "{given}/room/run.zip"],
}
"""Commands that write one file."""


def _links() -> Iterator[Attack]:
    for name, line in FILES.items():
        make = _with(_link(f".{name}.part"))
        yield Attack(f"writing: .{name}.part links outside", make, [line], "any", ("work", ROOM))
        make = _with(_link(f".{name}.part", "{root}/bystander/new.txt"))
        yield Attack(
            f"writing: .{name}.part links to what is not there", make, [line], "any", ("work", ROOM)
        )
    run = [[*DRAW, *RUN_OUT, "--resume"]]
    for name in (".run.json.part", ".a.png.part", "a.png/.manifest.json.part"):
        both = _with(_unlisted, _link(f"run/{name}"))
        yield Attack(f"writing: {name} in a run links outside", both, run, "any", (ROOM,))
    room = _with(_file(".run.zip.run/notes.txt"))
    keep = (f"{ROOM}/.run.zip.run/notes.txt",)
    line = [FILES["run.zip"]]
    yield Attack(
        "writing: the folder of an archive's run is mine", room, line, "any", (ROOM,), keep
    )
    linked = _with(_link(".run.zip.run", "{root}/bystander"))
    yield Attack("writing: the folder of an archive's run links", linked, line, "any", (ROOM,))
    inner = _with(_ours, _link("run/report", "{root}/bystander"))
    line = [["report", "{given}/room/run"]]
    yield Attack("writing: the report's folder links outside", inner, line, "any", (ROOM,))
    page = _with(_ours, _link("run/report.html"))
    line = [["report", "{given}/room/run", "--single-file"]]
    yield Attack("writing: the report's file links outside", page, line, "any", (ROOM,))
    mine = _with(_ours, _file("run/report/notes.txt"))
    line = [["report", "{given}/room/run"]]
    keep = (f"{ROOM}/run/report/notes.txt",)
    yield Attack("writing: the report's folder holds notes", mine, line, "any", (ROOM,), keep)


def _unlisted(box: Sandbox) -> None:
    """The run is ours, and one image is not complete."""
    _ours(box)
    (box.given / "room/run/a.png/manifest.json").unlink()


def all_attacks() -> Iterator[Attack]:
    """All of this file."""
    yield from _foreign_projects()
    yield from _inputs()
    yield from _own_runs()
    yield from _links()
    again = [[*DRAW, *RUN_OUT, "--overwrite"]]
    yield Attack("control: an honest run is replaced", _with(_ours), again, "good", (ROOM,))
    new = [[*DRAW, *OUT], [*DRAW, *OUT, "--resume"], [*DRAW, *OUT, "--overwrite"]]
    yield Attack("control: a run, resumed, replaced", _with(), new, "good", (ROOM,))
    for name, line in FILES.items():
        yield Attack(f"control: {name} is written", _with(), [line], "good", ("work", ROOM))
