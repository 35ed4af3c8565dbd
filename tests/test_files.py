"""Files and texts from outside: what is opened, what is refused, what a terminal gets
to see."""

from __future__ import annotations

import io
import json
import os
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from featviz import files, text
from featviz.errors import FileError
from featviz.files import npy


def test_a_regular_file_is_read(tmp_path: Path) -> None:
    """Its bytes, its text and its JSON value are those of the file, also below a folder."""
    path = tmp_path / "a" / "b.json"
    path.parent.mkdir()
    path.write_text('{"ä": [1, 2.5, null]}', "utf-8")
    assert files.read_bytes(path) == path.read_bytes()
    assert files.read_text(path) == '{"ä": [1, 2.5, null]}'
    assert files.read_json(path) == {"ä": [1, 2.5, None]}
    with files.ReadFolder(tmp_path) as folder:
        assert folder.read_json("a/b.json", 100) == {"ä": [1, 2.5, None]}


def test_a_fifo_does_not_block(tmp_path: Path) -> None:
    """A FIFO is named as no regular file, at once, and so are a folder and a device."""
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "folder").mkdir()
    for path in (tmp_path / "fifo", tmp_path / "folder", Path("/dev/zero")):
        with pytest.raises(FileError, match="it is no regular file"):
            files.read_bytes(path)
    for name in ("fifo", "folder"):
        regular = pytest.raises(FileError, match="it is no regular file")
        with files.ReadFolder(tmp_path) as folder, regular:
            folder.read(name, 100)


def test_links_below_a_folder_are_not_followed(tmp_path: Path) -> None:
    """Neither a linked file nor a linked folder on the way is opened; a link above the
    folder is followed."""
    (tmp_path / "secret").mkdir()
    (tmp_path / "secret" / "key").write_text("x")
    run = tmp_path / "run"
    run.mkdir()
    (run / "file").symlink_to(tmp_path / "secret" / "key")
    (run / "folder").symlink_to(tmp_path / "secret")
    (run / "own").write_text("mine")
    for name in ("file", "folder/key"):
        with (
            files.ReadFolder(run) as folder,
            pytest.raises(FileError, match="symbolic link"),
        ):
            folder.read(name, 100)
    (tmp_path / "linked").symlink_to(run)
    with files.ReadFolder(tmp_path / "linked") as folder:
        assert folder.read("own", 100) == b"mine"


def test_a_link_that_comes_after_the_look_is_not_followed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file that is swapped between the look at it and its opening is refused all the
    same."""
    (tmp_path / "secret").write_text("mine")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "a").write_text("yours")

    look = os.stat

    def swapped(name: str, **more: Any) -> os.stat_result:
        seen = look(name, **more)
        (tmp_path / "run" / "a").unlink()
        (tmp_path / "run" / "a").symlink_to(tmp_path / "secret")
        return seen

    with (
        files.ReadFolder(tmp_path / "run") as folder,
        pytest.raises(FileError, match="symbolic link"),
    ):
        monkeypatch.setattr(os, "stat", swapped)
        folder.open("a")


def test_a_path_outside_is_refused(tmp_path: Path) -> None:
    """`..` and an absolute path lead nowhere."""
    (tmp_path / "run").mkdir()
    (tmp_path / "key").write_text("x")
    for name in ("../key", "/etc/passwd"):
        with (
            files.ReadFolder(tmp_path / "run") as folder,
            pytest.raises(FileError, match="outside"),
        ):
            folder.read(name, 100)


def test_a_large_file_is_refused(tmp_path: Path) -> None:
    """One byte too many is named with the bound; the bound itself is read."""
    (tmp_path / "a").write_bytes(b"12345")
    assert files.read_bytes(tmp_path / "a", 5) == b"12345"
    with pytest.raises(FileError, match="more than the 4 bytes"):
        files.read_bytes(tmp_path / "a", 4)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"[" * 100_000, "levels inside one another"),
        (b'{"a":' * 101 + b"1" + b"}" * 101, "levels inside one another"),
        (b'{"a": NaN}', "JSON has no number NaN"),
        (b"[-Infinity]", "JSON has no number -Infinity"),
        (b"[" + b"9" * 10_000 + b"]", "digits"),
        (b"\xff\xfe", "utf-8"),
        (b'"' + b'\\"' * 500_000, "no JSON"),
        (b"", "no JSON"),
    ],
)
def test_what_is_no_plain_json_is_named(
    tmp_path: Path, content: bytes, message: str
) -> None:
    """Each has one clear error: never RecursionError, never a hang."""
    (tmp_path / "a.json").write_bytes(content)
    with pytest.raises(FileError, match=message):
        files.read_json(tmp_path / "a.json")


def test_brackets_in_strings_are_no_depth() -> None:
    """A string of brackets, escaped quotes among them, is one value; 100 levels are
    read."""
    value = ['[{"' * 200, "\\" * 3]
    assert files.parse_json(json.dumps(value)) == value
    assert files.parse_json("[" * 100 + "]" * 100) is not None


def test_control_characters_are_escaped() -> None:
    """A title sequence, a line break, a bidi override and a lone surrogate become
    visible."""
    wild = "a\x1b]0;x\x07\n\u202e\udcff"
    assert text.printable(wild) == r"a\x1b]0;x\x07\n\u202e\udcff"
    assert text.printable("Größe 7×7") == "Größe 7×7"
    assert text.quoted("ab\n" * 100, 6) == "ab\\nab\\n…"


def test_arrays_together_have_a_bound() -> None:
    """What an npz file unpacks to counts as a whole, however small each of its arrays
    is."""
    array = np.zeros(2000, np.uint8)
    single = io.BytesIO()
    pair = io.BytesIO()
    np.savez_compressed(single, array)
    np.savez_compressed(pair, array, array)
    assert npy.read_npz(single.getvalue()).nbytes == 2000
    with pytest.raises(ValueError, match="unpacks to more than 3,000 bytes"):
        npy.read_arrays(pair.getvalue(), max_bytes=3000)


def test_headers_of_arrays_are_read_one_at_a_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Two threads that read arrays do so one after the other: Python 3.11 fails to parse
    a header now and then, while another thread parses one."""
    stream = io.BytesIO()
    np.save(stream, np.zeros(3))
    reading: list[int] = []
    most: list[int] = []
    real = np.load

    def load(*arguments: Any, **options: Any) -> Any:
        reading.append(1)
        most.append(len(reading))
        time.sleep(0.01)
        reading.pop()
        return real(*arguments, **options)

    monkeypatch.setattr(np, "load", load)
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(npy.read_npy, [stream.getvalue()] * 8))
    assert max(most) == 1


@pytest.mark.parametrize(
    ("there", "typed", "meant"),
    [
        ("net.py", "net", "net.py"),
        ("cat.jpg", "Cta.jpg", "cat.jpg"),
        ("Cat.JPG", "cat.jpg", "Cat.JPG"),
        ("net.py", "net.py", None),
        ("net.py", "dog", None),
    ],
)
def test_a_path_may_mean_a_file_of_a_like_name(
    there: str, typed: str, meant: str | None, tmp_path: Path
) -> None:
    """Without its suffix, misspelt, or in another case; not the name itself."""
    (tmp_path / there).touch()
    expected = tmp_path / meant if meant else None
    assert files.similar_path(tmp_path / typed) == expected


def test_a_link_to_nowhere_on_the_way_is_no_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is there, so that the hint does not say that the folder lacks it."""
    monkeypatch.chdir(tmp_path)
    Path("gone").symlink_to("nowhere")
    hints = []
    for path in ("gone/qqqq/x.png", "other/qqqq/x.png"):
        hints.append(files.missing_file("no image", path).hint)
    assert hints == [
        "check the path: 'gone' is no folder",
        "check the path: the current folder has no 'other'",
    ]


def test_arrays_of_an_empty_file_are_none() -> None:
    """The message says that there is nothing."""
    empty = io.BytesIO()
    np.savez(empty)
    with pytest.raises(FileError, match=r"holds 0 arrays \(nothing\)"):
        npy.read_npz(empty.getvalue())
