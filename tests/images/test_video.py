"""Video files: their frames as clips and as images, and what is refused."""

from __future__ import annotations

import json
import logging
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import Run
from PIL import Image
from runs import refused
from torch import nn

import featviz as package
from featviz.errors import ImageError
from featviz.images import arrays, decode
from featviz.records import Sample

LEVEL = 6
"""Grey levels from one frame to the next."""


@pytest.fixture
def av() -> Any:
    return pytest.importorskip("av", reason="PyAV is not installed")


def film(path: Path, count: int = 30, size: tuple[int, int] = (48, 32)) -> Path:
    """Frames of one grey each, lighter and lighter, their left half black; a key frame
    in ten."""
    av = pytest.importorskip("av", reason="PyAV is not installed")
    with av.open(str(path), "w") as file:
        stream = file.add_stream("mpeg4", rate=10)
        stream.width, stream.height, stream.pix_fmt, stream.gop_size = (
            *size,
            "yuv420p",
            10,
        )
        stream.bit_rate = 4_000_000
        for number in range(count):
            pixels = np.full((size[1], size[0], 3), 40 + LEVEL * number, np.uint8)
            pixels[:, : size[0] // 2] = 0
            frame = av.VideoFrame.from_ndarray(pixels, format="rgb24")
            file.mux(stream.encode(frame))
        file.mux(stream.encode())
    return path


def numbers(images: Any) -> list[int]:
    """Which frames pictures are, by the grey of their right half."""
    greys = [np.asarray(image)[:, -12:].astype(float).mean() for image in images]
    return [round((grey - 40) / LEVEL) for grey in greys]


@pytest.mark.parametrize("name", ["a.mp4", "a.avi"])
def test_frames_are_evenly_spread(name: str, tmp_path: Path) -> None:
    """From the first to the last, some twice where there are fewer; RGB in the video's
    size."""
    sample = Sample("a", (film(tmp_path / name),))
    images = decode.decode(sample, frames=5)[0]
    assert numbers(images) == [0, 7, 14, 22, 29]
    assert {(image.size, image.mode) for image in images} == {((48, 32), "RGB")}
    short = Sample("b", (film(tmp_path / f"short-{name}", 2),))
    assert numbers(decode.decode(short, frames=4)[0]) == [0, 0, 1, 1]


def test_a_video_stands_upright(tmp_path: Path) -> None:
    """The matrix by which telephones turn their videos is heeded."""
    path = film(tmp_path / "a.mp4", 3)
    data = bytearray(path.read_bytes())
    fixed_point = 1 << 16
    at = data.index(
        struct.pack(">9i", fixed_point, 0, 0, 0, fixed_point, 0, 0, 0, 1 << 30),
        data.index(b"tkhd"),
    )
    data[at : at + 36] = struct.pack(
        ">9i", 0, fixed_point, 0, -fixed_point, 0, 0, 0, 0, 1 << 30
    )  # a quarter right
    path.write_bytes(data)
    (image,) = decode.decode(Sample("a", (path,)), quiet=True)[0]
    pixels = np.asarray(image)[..., 0]
    assert image.size == (32, 48)
    assert pixels[:20].mean() < 10 < 30 < pixels[-20:].mean()


@pytest.mark.slow
def test_a_model_of_images_takes_the_first_or_stills(
    featviz: Run, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """One warning, and the first frame; with --frames N images, kept by --resume."""
    path = film(tmp_path / "a.mp4")
    out = tmp_path / "out"
    net = nn.Sequential(nn.Conv2d(3, 2, 3))
    with caplog.at_level(logging.WARNING):
        result = package.run(net, path, "Conv2d", tmp_path / "one", preset="none")
    assert numbers([result.images[0].input]) == [0]
    assert [m for m in caplog.messages if "frames" in m] == [
        f"{path} has 30 frames; the first is taken (--frames)"
    ]
    (tmp_path / "net.py").write_text(
        "from torch import nn\ndef net(): return nn.Sequential(nn.Conv2d(3, 2, 3))"
    )
    command = (
        "run",
        tmp_path / "net.py:net",
        path,
        "--frames",
        "4",
        "--preset",
        "none",
        "-o",
        out,
    )
    done = featviz(*command)
    assert done.code == 0, done.err
    assert "the first" not in done.err, done.err
    names = json.loads((out / "run.json").read_text())["images"]["complete"]
    assert names == [f"a.mp4/{at}" for at in range(4)]
    shown = [Image.open(out / name / "input.png") for name in names]
    assert numbers(shown) == [0, 10, 19, 29]
    assert "4 were complete before" in featviz(*command, "--resume").err
    assert featviz("verify", out).code == featviz("report", out).code == 0


def test_a_video_is_a_clip(tmp_path: Path) -> None:
    """For a model of clips, beside stills of its folder, which are another one."""
    path = film(tmp_path / "a.mkv")
    for number in range(2):
        Image.new("RGB", (48, 32), (number, 0, 0)).save(tmp_path / f"{number}.png")
    net = nn.Sequential(nn.Conv3d(3, 2, 1))
    files = [str(path), *(str(tmp_path / f"{number}.png") for number in range(2))]
    result = package.run(net, files, "Conv3d", preset="none", frames=3, tensors=True)
    assert [image.name for image in result.images] == ["a.mkv", tmp_path.name]
    maps = result.images[0].captures[0].tensor
    weight = net[0].weight[0].sum()
    bias = net[0].bias[0]
    greys = (maps[0, 0, :, :, -12:].mean((1, 2)) - bias) / weight * 255
    assert [round((float(grey.detach()) - 40) / LEVEL) for grey in greys] == [0, 14, 29]


@pytest.mark.slow
def test_what_is_no_whole_video_is_refused(
    featviz: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In one line that names it; a video that was cut off, one without pictures, and
    too many frames of it."""
    film_bytes = film(tmp_path / "a.mp4").read_bytes()
    (tmp_path / "cut.mp4").write_bytes(film_bytes[: len(film_bytes) // 2])
    (tmp_path / "noise.mkv").write_bytes(b"\x1aE\xdf\xa3" + bytes(range(256)) * 4)
    (tmp_path / "net.py").write_text(
        "from torch import nn\ndef net(): return nn.Sequential(nn.Conv2d(3, 2, 3))"
    )
    for name in ("cut.mp4", "noise.mkv"):
        done = featviz(
            "run", tmp_path / "net.py:net", tmp_path / name, "--size", "16", "-q"
        )
        refused(done, 1, f"{name} is a video that cannot be read: it is damaged")
    monkeypatch.setattr(arrays, "_MAX_FRAME_BYTES", 2 * 48 * 32 * 3)
    with pytest.raises(
        ImageError, match="has 3 frames of 48×32 pixels, which are too many"
    ):
        arrays.read_frames(film_bytes, "mov", lambda count: range(3))


def test_without_pyav_a_line_names_the_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A video is told by its content; HEIC and AVIF, which begin alike, are none."""
    monkeypatch.setitem(__import__("sys").modules, "av", None)
    path = tmp_path / "a.bin"
    for head in (b"\0\0\0\x18ftypisom", b"\x1aE\xdf\xa3", b"RIFF\0\0\0\0AVI LIST"):
        path.write_bytes(head + bytes(64))
        with pytest.raises(ImageError, match=r"^a is a video") as caught:
            decode.decode(Sample("a", (path,)))
        assert caught.value.hint == "pip install 'featviz[video]'"
    assert decode.format_of(b"\0\0\0\x18ftypheic") is None
    assert decode.format_of(b"\0\0\0\x18ftypavif") is None
