"""Video files: their frames as clips and as images, and what is refused."""

from __future__ import annotations

import struct
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import Run
from PIL import Image
from pixels import pixels_of
from runs import complete, refused
from torch import nn

import featviz as fv
from featviz.errors import ImageError
from featviz.images import arrays, decode, find
from featviz.records import Sample

LEVEL = 6
"""Grey levels from one frame to the next."""


def film(path: Path, count: int = 30, size: tuple[int, int] = (48, 32)) -> Path:
    """Frames of one grey each, lighter and lighter, their left half black; a key frame
    in ten."""
    av = pytest.importorskip("av", reason="PyAV is not installed")
    with av.open(str(path), "w") as file:
        stream = file.add_stream("mpeg4", rate=10)
        stream.width, stream.height = size
        stream.pix_fmt = "yuv420p"
        stream.gop_size = 10
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
    greys = [pixels_of(image)[:, -12:].astype(float).mean() for image in images]
    return [round((grey - 40) / LEVEL) for grey in greys]


@pytest.mark.medium
@pytest.mark.parametrize("name", ["a.mp4", "a.avi"])
def test_frames_are_evenly_spread(name: str, tmp_path: Path) -> None:
    """They go from the first to the last, in RGB and the video's size."""
    sample = Sample("a", (film(tmp_path / name),))
    images = decode.decode(sample, frames=5)[0]
    assert numbers(images) == [0, 7, 14, 22, 29]
    assert {(image.size, image.mode) for image in images} == {((48, 32), "RGB")}


@pytest.mark.medium
def test_frames_of_a_short_video_come_twice(tmp_path: Path) -> None:
    """A clip has as many frames as were asked for."""
    sample = Sample("a", (film(tmp_path / "a.mp4", 2),))
    assert numbers(decode.decode(sample, frames=4)[0]) == [0, 0, 1, 1]


def test_a_video_stands_upright(tmp_path: Path) -> None:
    """The matrix by which telephones turn their videos is heeded."""
    path = film(tmp_path / "a.mp4", 3)
    data = bytearray(path.read_bytes())
    unit = 1 << 16  # in fixed point
    upright = struct.pack(">9i", unit, 0, 0, 0, unit, 0, 0, 0, 1 << 30)
    quarter_right = struct.pack(">9i", 0, unit, 0, -unit, 0, 0, 0, 0, 1 << 30)
    start = data.index(upright, data.index(b"tkhd"))
    data[start : start + 36] = quarter_right
    path.write_bytes(data)
    (image,) = decode.decode(Sample("a", (path,)), quiet=True)[0]
    pixels = np.asarray(image)[..., 0]
    assert image.size == (32, 48)
    assert pixels[:20].mean() < 10 < 30 < pixels[-20:].mean()


@pytest.mark.slow
def test_a_model_of_images_takes_the_first_frame(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """One warning says so, with the option that takes more."""
    path = film(tmp_path / "a.mp4").rename(tmp_path / "a.MP4")
    result = fv.run(nn.Conv2d(3, 2, 3), path, "Conv2d", preset="none")
    assert numbers([result.images[0].input]) == [0]
    warnings = [message for message in caplog.messages if "frames" in message]
    assert warnings == [f"{path} has 30 frames; the first is taken (frames)"]


@pytest.fixture
def net(tmp_path: Path) -> str:
    """The MODEL string of a convolution."""
    text = "from torch import nn\ndef net(): return nn.Sequential(nn.Conv2d(3, 2, 3))"
    (tmp_path / "net.py").write_text(text)
    return "net.py:net"


@pytest.mark.parametrize(
    ("count", "first", "last"), [(9, "0", "8"), (10, "0", "9"), (11, "00", "10")]
)
@pytest.mark.parametrize("file", ["a.mp4", "A.MOV"])
def test_images_of_a_video_have_as_many_digits_as_the_last(
    file: str, count: int, first: str, last: str
) -> None:
    """So that names sort by number."""
    names = [
        still.name for still in find.split_videos([Sample(file, (Path(file),))], count)
    ]
    assert len(names) == count
    assert (names[0], names[-1]) == (f"{file}/{first}", f"{file}/{last}")
    assert names == sorted(names)


@pytest.mark.slow
def test_frames_of_a_video_are_images(featviz: Run, net: str, tmp_path: Path) -> None:
    """With --frames N there are N images, which --resume, verify and report know."""
    out = tmp_path / "out"
    options = ("--frames", "4", "--preset", "none", "-o", out)
    command = ("run", net, film(tmp_path / "a.mp4"), *options)
    done = featviz(*command)
    assert done.code == 0
    assert "the first" not in done.err
    assert complete(out) == ["a.mp4/0", "a.mp4/1", "a.mp4/2", "a.mp4/3"]
    assert numbers(sorted(out.rglob("input.png"))) == [0, 10, 19, 29]
    assert "4 were complete before" in featviz(*command, "--resume").err
    assert featviz("verify", out).code == featviz("report", out).code == 0


@pytest.mark.medium
def test_a_video_is_a_clip(tmp_path: Path) -> None:
    """A model of clips takes it as one, beside stills of its folder, which are another."""
    path = film(tmp_path / "a.mkv")
    for number in range(2):
        Image.new("RGB", (48, 32), (number, 0, 0)).save(tmp_path / f"{number}.png")
    net = nn.Sequential(nn.Conv3d(3, 2, 1))
    files = [str(path), *(str(tmp_path / f"{number}.png") for number in range(2))]
    result = fv.run(net, files, "Conv3d", preset="none", frames=3, tensors=True)
    assert [image.name for image in result.images] == ["a.mkv", tmp_path.name]
    maps = result.images[0].captures[0].tensor
    weight = net[0].weight[0].sum()
    bias = net[0].bias[0]
    greys = (maps[0, 0, :, :, -12:].mean((1, 2)) - bias) / weight * 255
    assert [round((float(grey.detach()) - 40) / LEVEL) for grey in greys] == [0, 14, 29]


@pytest.mark.medium
@pytest.mark.parametrize("name", ["cut.mp4", "noise.mkv"])
def test_what_is_no_whole_video_is_refused(
    name: str, featviz: Run, net: str, tmp_path: Path
) -> None:
    """The line names it, whether it was cut off or is something else."""
    whole_film = film(tmp_path / "a.mp4").read_bytes()
    contents = {
        "cut.mp4": whole_film[: len(whole_film) // 2],
        "noise.mkv": b"\x1aE\xdf\xa3" + bytes(range(256)) * 4,
    }
    (tmp_path / name).write_bytes(contents[name])
    done = featviz("run", net, name, "--size", "16", "-q")
    refused(done, 1, f"{name} is a video that cannot be read: it is damaged")


# else the frames would have 1 GB, or one of them as many pixels as no image may have
@pytest.mark.parametrize(
    ("limit", "value"),
    [
        ("_MAX_FRAME_BYTES", 2 * 48 * 32 * 3),
        ("Image.MAX_IMAGE_PIXELS", 48 * 32 // 2 - 1),
    ],
)
def test_too_many_frames_are_refused(
    limit: str, value: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The line has their number and size."""
    content = film(tmp_path / "a.mp4", 3).read_bytes()
    monkeypatch.setattr(f"featviz.images.arrays.{limit}", value)
    message = "has 3 frames of 48×32 pixels, which are too many"
    with pytest.raises(ImageError, match=message):
        arrays.read_frames(content, "mov", lambda count: range(3))


@pytest.mark.parametrize(
    "head", [b"\0\0\0\x18ftypisom", b"\x1aE\xdf\xa3", b"RIFF\0\0\0\0AVI LIST"]
)
def test_without_pyav_a_line_names_the_extra(
    head: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A video is known by its content."""
    monkeypatch.setitem(sys.modules, "av", None)
    path = tmp_path / "a.bin"
    path.write_bytes(head + bytes(64))
    with pytest.raises(ImageError, match=r"^a is a video") as caught:
        decode.decode(Sample("a", (path,)))
    assert caught.value.hint == "pip install 'featviz[video]'"


@pytest.mark.medium
@pytest.mark.parametrize("brand", [b"heic", b"avif"])
def test_pictures_that_begin_as_videos_do(brand: bytes) -> None:
    """HEIC and AVIF are no videos."""
    assert decode.format_of(b"\0\0\0\x18ftyp" + brand) is None
