"""Files to pictures as a person would see them, and arguments to samples."""

from __future__ import annotations

import hashlib
import io
import os
import struct
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
from conftest import DIGITS_MODEL, Run
from hostile_images import encoded
from PIL import Image
from pixels import pixels_of
from tiles import manifest

from featviz.errors import ImageError, UsageError
from featviz.images import arrays, decode, find
from featviz.images.arrays import ExpectedImage
from featviz.records import Raster, Sample


@pytest.fixture
def scene() -> np.ndarray:
    """uint8 [6, 8, 3]: red at the left, blue at the right, brighter towards the bottom."""
    pixels = np.zeros((6, 8, 3), np.uint8)
    pixels[:, :4, 0] = pixels[:, 4:, 2] = np.arange(100, 220, 20)[:, None]
    return pixels


def decoded(path: Path, **options: object) -> np.ndarray:
    """The pixels of a file."""
    (picture,) = decode.decode(Sample(path.name, (path,)), **options)[0]
    return np.asarray(picture)


def test_plain_picture_is_what_the_file_holds(
    tmp_path: Path, scene: np.ndarray
) -> None:
    """RGB stays as it is; size and hash are those of the file."""
    path = tmp_path / "plain.png"
    Image.fromarray(scene).save(path)
    (picture,), sha256 = decode.decode(Sample("plain.png", (path,)))
    assert np.array_equal(np.asarray(picture), scene)
    assert (picture.mode, picture.size) == ("RGB", (8, 6))
    assert sha256 == hashlib.sha256(path.read_bytes()).hexdigest()


@pytest.mark.parametrize("orientation", [1, 4, 6])
def test_exif_orientation(tmp_path: Path, scene: np.ndarray, orientation: int) -> None:
    """The picture is turned upright."""
    path = tmp_path / "turned.png"
    exif = Image.Exif()
    exif[0x0112] = orientation
    Image.fromarray(scene).save(path, exif=exif)
    upright = {1: scene, 4: scene[::-1], 6: np.rot90(scene, -1)}
    assert np.array_equal(decoded(path), upright[orientation])


@pytest.mark.parametrize("mode", ["RGBA", "LA", "P", "RGB", "L"])
def test_transparency_shows_the_background(tmp_path: Path, mode: str) -> None:
    """Colours hidden under alpha or a transparent colour do not show."""
    rgba = np.full((4, 4, 4), (40, 40, 40, 255), np.uint8)
    rgba[:2] = (0, 200, 0, 0)
    path = tmp_path / "hidden.png"
    if mode in ("RGBA", "LA"):
        Image.fromarray(rgba).convert(mode).save(path)
    else:
        opaque = Image.fromarray(rgba[..., :3])
        image = opaque.quantize(2) if mode == "P" else opaque.convert(mode)
        image.save(path, transparency=image.getpixel((0, 0)))
    (picture,) = decode.decode(Sample("h", (path,)), background="#ff8000")[0]
    pixels = np.asarray(picture.convert("RGB"))
    assert (pixels[:2] == (255, 128, 0)).all()
    assert (pixels[2:] == 40).all()


@pytest.mark.parametrize(
    ("mode", "background", "expected"),
    [
        ("LA", "#808080", ("L", 128)),
        ("LA", "#80808000", ("L", 128)),
        ("LA", "#808081", ("RGB", (128, 128, 129))),
        ("L", "#808080", ("L", 128)),
        ("L", "#808081", ("RGB", (128, 128, 129))),
        ("1", "#808080", ("L", 128)),
        ("RGBA", "#808080", ("RGB", (128, 128, 128))),
    ],
)
def test_grey_over_grey_stays_grey(
    mode: str, background: str, expected: tuple[str, object], tmp_path: Path
) -> None:
    """And is in colour over a colour."""
    path = tmp_path / "clear.png"
    options = {} if mode.endswith("A") else {"transparency": 0}
    Image.new(mode, (2, 2)).save(path, **options)
    (picture,) = decode.decode(Sample("clear", (path,)), background=background)[0]
    assert isinstance(picture, Image.Image)
    assert (picture.mode, picture.getpixel((0, 0))) == expected


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (["a", "a/b"], ["a~", "a/b"]),
        (["A", "a/b", "a~"], ["A~~", "a/b", "a~"]),
        (["a/b", "a", "a~/c"], ["a/b", "a~~", "a~/c"]),
        (["a", "ab"], ["a", "ab"]),
    ],
)
def test_no_folder_of_an_image_holds_that_of_another(
    names: list[str], expected: list[str]
) -> None:
    """Also where the file system makes no difference of case, and the new name is
    another's."""
    samples = [Sample(name, (Path(name),)) for name in names]
    assert [sample.name for sample in find.rename_nested(samples)] == expected


def test_half_transparent_colours_are_mixed(tmp_path: Path) -> None:
    """A fifth of the colour is left over black."""
    path = tmp_path / "half.png"
    Image.new("RGBA", (2, 2), (200, 0, 100, 51)).save(path)
    mixed = decoded(path, background="black").astype(int)
    assert np.abs(mixed - (40, 0, 20)).max() <= 1


RAW = ExpectedImage(3, raw=True)
"""A function of the user's own takes the picture."""


def numbers(path: Path, channels: int = 1) -> Raster:
    """The image of a file of more than 8 bits."""
    expected = ExpectedImage(channels)
    (image,) = decode.decode(Sample(path.name, (path,)), expected=expected)[0]
    assert isinstance(image, Raster)
    return image


def test_all_channels_are_turned_upright(tmp_path: Path) -> None:
    """Those of a model that takes four, too."""
    pixels = np.arange(6 * 8 * 4, dtype=np.uint8).reshape(6, 8, 4)
    exif = Image.Exif()
    exif[0x0112] = 6
    Image.fromarray(pixels).save(tmp_path / "turned.png", exif=exif)
    turned = numbers(tmp_path / "turned.png", 4).values
    upright = np.rot90(pixels, -1).transpose(2, 0, 1)
    assert np.array_equal(turned, upright.astype("f4") / np.float32(255))


@pytest.mark.parametrize(
    ("suffix", "dtype"),
    [("png", "<u2"), ("tif", "<u2"), ("tif", ">u2"), ("pgm", "<u2")],
)
def test_sixteen_bits_keep_all_of_them(tmp_path: Path, suffix: str, dtype: str) -> None:
    """They are divided by 65535, in either order of bytes: 12 bits have 4096 values."""
    scan = np.arange(4096, dtype=np.uint16).reshape(64, 64)
    path = tmp_path / f"scan.{suffix}"
    Image.fromarray(scan if suffix == "pgm" else scan.astype(dtype)).save(path)
    image = numbers(path)
    assert image.description == "uint16 / 65535"
    assert image.values.dtype == np.float32
    assert np.array_equal(image.values, scan[None].astype("f4") / np.float32(65535))
    assert np.array_equal(numbers(path, 3).values, np.repeat(image.values, 3, 0))


TWELVE_BITS = np.arange(2, 4034, dtype=np.uint16).reshape(63, 64)


def test_twelve_bits_in_sixteen_are_warned_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The warning names the values and the remedy, which is heeded."""
    Image.fromarray(TWELVE_BITS).save(tmp_path / "scan.png")
    numbers(tmp_path / "scan.png")
    (message,) = caplog.messages
    values = "scan.png has values 2 to 4,033 of 65,535, nearly black to the model"
    assert values in message
    assert "save them times 16, or give --mean and --std of that range" in message

    Image.fromarray(TWELVE_BITS * np.uint16(16)).save(tmp_path / "scaled.png")
    numbers(tmp_path / "scaled.png")
    assert len(caplog.messages) == 1

    bright = TWELVE_BITS + np.uint16(60_000)
    Image.fromarray(bright).save(tmp_path / "bright.png")
    numbers(tmp_path / "bright.png")
    remedy = "nearly one grey to the model; give --mean and --std of that range"
    assert f"has values 60,002 to 64,033 of 65,535, {remedy}" in caplog.messages[1]

    Image.fromarray(np.full((4, 4), 9, np.uint16)).save(tmp_path / "flat.png")
    numbers(tmp_path / "flat.png")
    assert len(caplog.messages) == 2, "one value needs no scale"


@pytest.mark.medium
def test_twelve_bits_in_sixteen_are_shown_stretched(
    tmp_path: Path, featviz: Run
) -> None:
    """input.png shows what nobody could see, and the manifest says so."""
    Image.fromarray(TWELVE_BITS).save("scan.png")
    done = featviz("run", DIGITS_MODEL, "scan.png", "--layers", "ReLU", "--out", "out")
    assert done.code == 0
    assert "nearly black" in done.err
    folder = tmp_path / "out" / "scan.png"
    levels = pixels_of(folder / "input.png")
    assert levels.min() == 0
    assert levels.max() == 255
    assert "shown stretched" in manifest(folder)["input"]["preprocessing"]


@pytest.mark.parametrize(
    ("dtype", "values"),
    [
        ("float32", [0.0, 0.5, 1.0]),
        ("float32", [100.0, 500.25, 900.0]),
        ("float32", [-1e9, 0.0, 1e9]),
        ("int32", [0, 65535]),
        ("int32", [-5, 70000]),
    ],
)
def test_wide_numbers_are_left_as_they_are(
    tmp_path: Path, dtype: str, values: list[float]
) -> None:
    """Two maps of heights that differ by a constant are not the same; two images of one
    series are read in one way."""
    Image.fromarray(np.array([values], dtype)).save(tmp_path / "wide.tif")
    image = numbers(tmp_path / "wide.tif")
    assert image.values.tolist() == [[values]]
    assert image.description == f"{dtype} values as they are"


@pytest.mark.parametrize(
    ("values", "greys"),
    [
        ([0.0, 0.25, 0.5], [0, 64, 128]),
        ([0.25, 0.5, 1.0], [64, 128, 255]),
        ([0.0, 1.0, 2.0], [0, 128, 255]),
        ([-2.0, 0.0, 2.0], [0, 128, 255]),
        ([7.0, 7.0, 7.0], [0, 0, 0]),
    ],
)
def test_a_function_gets_floats_as_a_picture(
    tmp_path: Path, values: list[float], greys: list[int]
) -> None:
    """Floats within 0..1 are scaled by 255, others by their own minimum and maximum."""
    path = tmp_path / "float.tif"
    Image.fromarray(np.array([values], np.float32)).save(path)
    assert decoded(path, expected=RAW).tolist() == [greys]


def test_a_function_gets_sixteen_bits_as_a_picture(tmp_path: Path) -> None:
    """They are scaled by their range, and are not white."""
    path = tmp_path / "deep.png"
    Image.fromarray(np.array([[0, 257, 32896, 65535]], np.uint16)).save(path)
    assert decoded(path, expected=RAW).tolist() == [[0, 1, 128, 255]]


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (IndexError("list index out of range"), "it is damaged"),
        (struct.error("unpack requires a buffer of 4 bytes"), "it is damaged"),
        (KeyError(277), "it is damaged"),
        (TypeError("'NoneType' object"), "it is damaged"),
        (OSError("decoder error -2"), "it is damaged"),
        (OSError("-9"), "it is damaged"),
        (OSError(), "it is damaged"),
        (OSError("broken data stream\nmore"), "broken data stream"),
        (OSError("decoder jpeg not available"), "decoder jpeg not available"),
    ],
    ids=repr,
)
def test_what_a_decoder_says_is_told_unless_it_is_of_its_code(
    error: Exception, reason: str
) -> None:
    """Numbers and names of its own help nobody."""
    assert arrays.reason(error) == reason


def test_cmyk_jpeg_is_not_inverted(tmp_path: Path, scene: np.ndarray) -> None:
    """A CMYK JPEG shows the colours of the RGB picture it was made of."""
    path = tmp_path / "print.jpg"
    large = Image.fromarray(scene).resize((64, 48), Image.Resampling.NEAREST)
    large.convert("CMYK").save(path, quality=95)
    assert np.abs(decoded(path).astype(int) - np.asarray(large)).mean() < 6


def test_a_palette_becomes_its_colours(tmp_path: Path, scene: np.ndarray) -> None:
    """Those of 64 are near those of the picture."""
    path = tmp_path / "palette.png"
    Image.fromarray(scene).quantize(64).save(path)
    assert np.abs(decoded(path).astype(int) - scene).max() < 20


def test_one_bit_becomes_black_and_white(tmp_path: Path) -> None:
    """There is no grey between."""
    bits = np.arange(48).reshape(6, 8) % 3 == 0
    path = tmp_path / "bits.png"
    Image.fromarray(bits).save(path)
    assert np.array_equal(decoded(path), bits * 255)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (encoded("PNG", (50, 50))[:4000], r"cannot be read: .*truncated\nhint: copy"),
        (encoded("JPEG", (50, 50))[:1500], "cannot be read: .*truncated"),
        (
            encoded("TIFF", (50, 50), compression="packbits")[:400],
            "TIFF.*damaged|damaged TIFF",
        ),
        (
            encoded("TIFF", (50, 50), compression="jpeg")[:-20],
            r"cannot be read: it is damaged\nhint: copy",
        ),
        (b"", "is empty"),
        (Path.mkdir, "it is no regular file"),
        (lambda path: None, "is no file"),
        (os.mkfifo, "it is no regular file"),
    ],
)
def test_broken_file_is_named(tmp_path: Path, content: Any, message: str) -> None:
    """What cannot be read is an ImageError that names the file, never another
    exception."""
    path = tmp_path / "fine.png"
    if isinstance(content, bytes):
        path.write_bytes(content)
    else:
        content(path)
    with pytest.raises(ImageError, match=rf"fine\.png.*({message})"):
        decoded(path)


# Samples


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory, to be filled with files that are only named."""
    root = tmp_path / "tree"
    root.mkdir()
    monkeypatch.chdir(root)
    return root


def touch(*paths: str) -> None:
    """Make empty files, each with its own folder."""
    for path in map(Path, paths):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()


def find_with_stdin(stdin: bytes, *arguments: str, nul: bool = False) -> list[Sample]:
    """The samples of arguments, where stdin holds these bytes."""
    with mock.patch.object(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin))):
        return find.find_samples(arguments, nul)


def names(*arguments: str, stdin: bytes = b"", nul: bool = False) -> list[str]:
    """Names of the samples, each of which must name its own file."""
    samples = find_with_stdin(stdin, *arguments, nul=nul)
    assert len({sample.path for sample in samples}) == len(samples)
    return [sample.name for sample in samples]


def test_folder_is_searched_recursively_in_order(tree: Path) -> None:
    """Images of all depths are found, sorted, by their paths in the folder; nothing else."""
    expected = ["a.PNG", "b.jpg", "sub/deep/c.webp", "sub.png/x.tif"]
    touch("in/notes.txt", *(f"in/{name}" for name in reversed(expected)))
    assert names("in") == names("in/") == names(str(tree / "in")) == expected


@pytest.mark.parametrize("argument", [".", "../tree", "in/..", "ABSOLUTE"])
def test_hidden_files_are_left_out(tree: Path, argument: str) -> None:
    """Files and folders within the argument that begin with a dot are left out; one
    that is named is searched, wherever it lies and however it is reached."""
    touch("x.png", ".h.png", ".cache/y.png", "sub/.z.png", "sub/w.png", "in/v.png")
    argument = str(tree) if argument == "ABSOLUTE" else argument
    assert names(argument) == ["in/v.png", "sub/w.png", "x.png"]
    os.chdir("in")
    assert names("../.cache") == names(str(tree / ".cache")) == ["y.png"]


def test_links_that_lead_out_of_a_folder_are_left_out(
    tree: Path,
    tmp_path_factory: pytest.TempPathFactory,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A folder of a stranger's may link to a picture of the user's; links inside are
    images, links to nowhere fail later, and whoever names a link means it."""
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    Image.new("RGB", (2, 2)).save(elsewhere / "private.png")
    (tree / "stolen.png").symlink_to(elsewhere / "private.png")
    (tree / "same.png").symlink_to(tree / "stolen.png")
    (tree / "gone.png").symlink_to(elsewhere / "nothing.png")
    touch(".kept/one.png")
    (tree / "inside.png").symlink_to(".kept/one.png")
    assert names(str(tree)) == ["gone.png", "inside.png"]
    (message,) = caplog.messages
    left_out = f"2 links that lead out of folder {str(tree)!r} are left out"
    assert message.startswith(left_out)
    assert names(str(tree / "stolen.png")) == ["stolen.png"]


def test_glob_names_are_relative_to_its_fixed_part(tree: Path) -> None:
    """A quoted glob finds files in order, named from where its magic begins."""
    touch(
        "in/a/1.png",
        "in/b/2.png",
        "in/b/3.jpg",
        "in/b/c/4.png",
        "5.png",
        "x[1].jpg",
        "x1.jpg",
    )
    assert names("x[1].jpg") == ["x[1].jpg"]  # which is there
    assert names("in/*/*.png") == ["a/1.png", "b/2.png"]
    assert names("in/**/*.png") == ["a/1.png", "b/2.png", "b/c/4.png"]
    assert names("in/b/[23].*") == ["2.png", "3.jpg"]
    assert names("./*.png") == ["5.png"]
    assert names(str(tree / "in" / "b" / "*.png")) == ["2.png"]


@pytest.mark.usefixtures("tree")
@pytest.mark.parametrize(
    ("nul", "stdin"),
    [(True, b"in/b.png\0in/a.png\0"), (False, b"in/b.png\r\n\nin/a.png")],
)
def test_list_on_stdin(nul: bool, stdin: bytes) -> None:
    """`-` reads paths, one a line or NUL-separated, in their order among the arguments."""
    touch("in/a.png", "in/b.png", "c.png")
    assert names("c.png", "-", stdin=stdin, nul=nul) == ["c.png", "b.png", "a.png"]


@pytest.mark.parametrize(
    ("nul", "paths"),
    [(True, [b" a .png ", b"b\n\xff.png"]), (False, [b" a .png ", b"b\xff.png"])],
)
def test_a_path_on_stdin_is_any_name(nul: bool, paths: list[bytes]) -> None:
    """Spaces belong to it, and bytes that are no UTF-8."""
    stdin = (b"\0" if nul else b"\n").join(paths)
    samples = find_with_stdin(stdin, "-", nul=nul)
    assert [os.fsencode(sample.path) for sample in samples] == paths


def test_a_list_on_stdin_names_members_of_archives(tree: Path) -> None:
    """Each by its own name, as a file."""
    lines = b"photos.zip::a/b/one.png\r\n\nc/two.png\n"
    samples = find_with_stdin(lines, "-")
    assert [sample.name for sample in samples] == ["one.png", "two.png"]
    assert samples[0].archive == str(tree / "photos.zip")
    with pytest.raises(UsageError, match="stdin lists no images"):
        find_with_stdin(b"\n\r\n", "-")


def test_three_images_of_the_same_name(tree: Path) -> None:
    """`a/x.jpg`, `b/x.jpg` and `a/x.png` are three images; a name takes as many folders
    as it needs."""
    touch("a/x.jpg", "b/x.jpg", "a/x.png")
    assert names("a/x.jpg", "b/x.jpg", "a/x.png") == ["a/x.jpg", "b/x.jpg", "x.png"]
    assert names("a", "b") == ["a/x.jpg", "x.png", "b/x.jpg"]
    touch("p/a/x.jpg", "q/a/x.jpg", "y.jpg")
    paths = ["p/a/x.jpg", "y.jpg", "q/a/x.jpg"]
    assert names(*paths) == paths


def different(names: list[str]) -> int:
    """How many names there are for a system that ignores case."""
    return len({name.casefold() for name in names})


@pytest.mark.usefixtures("tree")
def test_a_longer_name_does_not_clash_in_turn() -> None:
    """A folder that a name needs may be that of another image."""
    touch("a/x.jpg", "b/x.jpg", "c/a/x.jpg")
    assert different(names("a/x.jpg", "b/x.jpg", "c")) == 3


@pytest.mark.usefixtures("tree")
def test_names_that_differ_by_case_only_are_told_apart() -> None:
    """On a system that ignores case, two such names would be one folder."""
    touch("x.jpg", "d/X.JPG")
    assert different(names("x.jpg", "d")) == 2


def test_names_that_no_parent_tells_apart_are_numbered(tree: Path) -> None:
    """An absolute path is in no file."""
    touch("in/x.jpg", "in/X.jpg", "0/x.jpg")
    if len(list((tree / "in").iterdir())) < 2:
        pytest.skip("this file system ignores case")
    numbered = names("in", "0/x.jpg")
    assert different(numbered) == 3
    assert not any(tree.name in name.split("/") for name in numbered)


def test_same_file_named_twice_is_one_sample(tree: Path) -> None:
    """However often and by whatever way a file is named, it comes once, where it came
    first."""
    touch("in/a.png", "in/b.png")
    Path("link.png").symlink_to("in/a.png")
    arguments = ("in/b.png", "in", "in/*.png", "./in/a.png", "link.png")
    assert names(*arguments) == ["b.png", "a.png"]


def test_a_suffix_is_that_of_a_format_that_is_read() -> None:
    """Pillow, where it knows a suffix of the table, opens it as the format of that
    record."""
    Image.init()
    for name, suffixes in decode.FORMATS.items():
        for suffix in suffixes:
            if name in Image.OPEN:
                assert Image.EXTENSION[suffix] == name, suffix


@pytest.mark.parametrize(
    ("name", "is_hidden"),
    [
        ("a/.b/c.png", True),
        ("__MACOSX/c.png", True),
        ("a/__MACOSX/c.png", True),
        ("../c.png", False),
        ("a.b/c.png", False),
    ],
)
def test_what_macos_adds_is_hidden(name: str, is_hidden: bool) -> None:
    """As folders are that begin with a dot; `..` leads up."""
    assert decode.is_hidden(name) == is_hidden


@pytest.mark.parametrize(
    ("mode", "saved"),
    [("PA", "RGBA"), ("RGBa", "RGBA"), ("La", "LA"), ("CMYK", "RGB"), ("RGBA", "RGBA")],
)
def test_images_in_memory_keep_what_is_transparent(
    mode: str, saved: str, tmp_path: Path
) -> None:
    """In modes that a PNG lacks, too."""
    (path,) = arrays.to_files([Image.new(mode, (2, 3))], tmp_path)
    with Image.open(path) as picture:
        assert (picture.mode, picture.size) == (saved, (2, 3))


@pytest.mark.parametrize("shape", [(5,), (1, 5)])
def test_vectors_in_memory_are_files_of_numbers(
    shape: tuple[int, ...], tmp_path: Path
) -> None:
    """With an axis of images or without."""
    vector = np.arange(5, dtype=np.float32).reshape(shape)
    (path,) = arrays.to_files([vector], tmp_path)
    assert np.array_equal(np.load(path), vector)
