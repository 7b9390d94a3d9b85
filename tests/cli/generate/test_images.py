# SPDX-License-Identifier: Apache-2.0
"""Image files as a vision model takes them: the pixels equal transformers', and unreadable files are named."""

import io
import json
import os
import struct
import subprocess
import sys
import warnings
import zlib
from pathlib import Path

import numpy as np
import pytest
from PIL import ExifTags, Image

from flownpu.errors import FlowNPUError
from flownpu.generate import images
from flownpu.generate.images import ImageSize, read_image

SIZE = ImageSize(96, 96)
# Lossless and lossy formats, in the modes that they have.
MODES = [
    ("RGB", "png"),
    ("L", "png"),
    ("1", "png"),
    ("P", "png"),
    ("RGB", "jpg"),
    ("L", "jpg"),
    ("CMYK", "jpg"),
    ("CMYK", "tif"),
    ("RGB", "webp"),
    ("RGB", "avif"),
    ("P", "gif"),
    ("RGB", "bmp"),
    ("RGB", "tif"),
]


def pixels(path, size=SIZE):
    """The pixels that the model gets, uint8 [height, width, 3]."""
    return np.asarray(Image.open(io.BytesIO(read_image(path, size).png)))


def transformers_pixels(path, size=SIZE):
    """The pixels of transformers' processor for Gemma 3, before it scales them."""
    from transformers import Gemma3ImageProcessorPil
    from transformers.image_utils import load_image

    processor = Gemma3ImageProcessorPil(size={"height": size.height, "width": size.width})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        done = processor(load_image(str(path)), do_rescale=False, do_normalize=False, do_pan_and_scan=False)
    return np.moveaxis(np.asarray(done["pixel_values"][0]), 0, -1)


def colours(width, height, seed=0):
    """A picture of coarse colours under fine noise, so that a wrong filter shows."""
    generator = np.random.default_rng(seed)
    coarse = Image.fromarray(generator.integers(0, 256, (5, 7, 3), dtype=np.uint8)).resize((width, height))
    noise = generator.integers(0, 60, (height, width, 3), dtype=np.uint8)
    return Image.fromarray((np.asarray(coarse) // 2 + noise).astype(np.uint8))


@pytest.mark.parametrize(("mode", "suffix"), MODES)
def test_pixels_equal_transformers(tmp_path, mode, suffix):
    path = tmp_path / f"picture.{suffix}"
    colours(333, 217).convert(mode).save(path)
    with Image.open(path) as picture:
        assert picture.mode == mode
    np.testing.assert_array_equal(pixels(path), transformers_pixels(path))


@pytest.mark.parametrize("shape", [(1, 1), (1, 5000), (5000, 1), (96, 96), (40, 30), (3001, 77), (2400, 1800)], ids=str)
def test_random_shape_is_resized_as_in_transformers(tmp_path, shape):
    path = tmp_path / "picture.png"
    colours(*shape).save(path)
    np.testing.assert_array_equal(pixels(path), transformers_pixels(path))
    read = read_image(path, SIZE)
    assert (read.width, read.height, read.kind) == (*shape, "PNG")


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("suffix", ["jpg", "png", "tif"])
def test_rotated_photograph_is_upright(tmp_path, orientation, suffix):
    exif = Image.Exif()
    exif[ExifTags.Base.Orientation] = orientation
    path = tmp_path / f"picture.{suffix}"
    colours(200, 120).save(path, exif=exif)
    np.testing.assert_array_equal(pixels(path), transformers_pixels(path))
    read = read_image(path, SIZE)
    assert (read.width, read.height) == ((200, 120) if orientation <= 4 else (120, 200))


def test_transparent_parts_are_white(tmp_path):
    # transformers drops the alpha channel, and shows the colour below it. Compositing rounds twice, and so is within
    # one step of the sum in float64.
    picture = np.zeros((10, 40, 4), dtype=np.uint8)
    picture[:, :, :3] = 200, 30, 90
    picture[:, :, 3] = np.linspace(0, 255, 40)
    alpha = picture[:, :, 3:].astype(np.float64) / 255
    expected = alpha * picture[:, :, :3] + (1 - alpha) * 255
    for mode in ("RGBA", "LA"):
        Image.fromarray(picture).convert(mode).save(tmp_path / "picture.png")
        got = pixels(tmp_path / "picture.png", ImageSize(40, 10)).astype(np.float64)
        if mode == "RGBA":
            assert np.abs(got - expected).max() <= 1
        assert (got[:, 0] == 255).all()
        assert got[:, -1].max() < 255


@pytest.mark.parametrize("kind", ["palette", "colour key", "gif"])
def test_transparent_colour_becomes_white(tmp_path, kind):
    picture = Image.new("RGB", (8, 4), (255, 0, 0))
    picture.paste((0, 0, 255), (4, 0, 8, 4))
    path = tmp_path / ("picture.gif" if kind == "gif" else "picture.png")
    if kind == "colour key":
        picture.save(path, transparency=(0, 0, 255))
    else:
        picture = picture.quantize(2)
        blue = picture.getpixel((7, 0))
        picture.save(path, transparency=blue)
    got = pixels(path, ImageSize(8, 4))
    assert (got[:, :4] == (255, 0, 0)).all()
    assert (got[:, 4:] == 255).all()


@pytest.mark.parametrize("suffix", ["png", "tif"])
def test_16_bits_are_rounded_to_8(tmp_path, suffix):
    # Pillow's conversion, and so transformers, makes all but the darkest 256 of the 65536 values white.
    values = np.linspace(0, 65535, 512, dtype=np.uint16).reshape(16, 32)
    Image.fromarray(values).save(tmp_path / f"picture.{suffix}")
    got = pixels(tmp_path / f"picture.{suffix}", ImageSize(32, 16))
    np.testing.assert_array_equal(got, np.round(values / 257)[:, :, None].repeat(3, axis=2))


def test_16_bit_channel_is_rounded_to_8(tmp_path):
    values = np.random.default_rng(0).integers(0, 65536, (16, 32, 3), dtype=np.uint16)
    write_png(tmp_path / "picture.png", 32, 16, b"".join(b"\0" + row.astype(">u2").tobytes() for row in values), 16)
    got = pixels(tmp_path / "picture.png", ImageSize(32, 16))
    # Pillow takes the upper byte, which is below the rounded value by at most one step.
    assert np.abs(got - values / 257).max() <= 1


def test_animation_gives_first_frame(tmp_path):
    frames = [Image.new("RGB", (8, 8), colour) for colour in ((250, 0, 0), (0, 250, 0))]
    for name in ("a.gif", "a.webp", "a.png"):
        options = {"lossless": True} if name == "a.webp" else {}
        frames[0].save(tmp_path / name, save_all=True, append_images=frames[1:], **options)
        assert (pixels(tmp_path / name) == (250, 0, 0)).all()


def write_png(path, width, height, rows, bits=8, colour_type=2):
    """Writes a PNG file whose header and pixels are given; they need not fit one another."""

    def chunk(name, data):
        return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))

    header = struct.pack(">IIBBBBB", width, height, bits, colour_type, 0, 0, 0)
    path.write_bytes(
        b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")
    )


def cut(path):
    colours(64, 64).save(path, "PNG")
    path.write_bytes(path.read_bytes()[:-2000])


def cut_jpeg(path):
    colours(64, 64).save(path, "JPEG")
    path.write_bytes(path.read_bytes()[:900])


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda _path: None, "no such image file: {path}"),
        (lambda path: path.mkdir(), "{path} is a folder; expected an image file"),
        (lambda path: path.write_bytes(b""), "{path} is empty (0 bytes)"),
        (lambda path: path.write_text("a text"), "{path} is not an image that can be read; expected"),
        (os.mkfifo, "{path} is not a regular file"),
        (cut, "{path} is damaged or cut short"),
        (cut_jpeg, "{path} is damaged or cut short"),
        (lambda path: Image.new("F", (4, 4)).save(path, "TIFF"), "{path} holds numbers of 32 bits"),
        (lambda path: Image.new("I", (4, 4)).save(path, "TIFF"), "{path} holds numbers of 32 bits"),
        # A few bytes that claim to be a large picture.
        (lambda path: write_png(path, 30000, 30000, b""), "{path} has more pixels than Pillow opens, 179 megapixels"),
        (
            lambda path: write_png(path, 12000, 10000, b""),
            "{path} has 120 megapixels, and to decode it (PNG) takes 458",
        ),
        (lambda path: write_png(path, 0, 10, b""), "{path} "),
    ],
)
def test_unreadable_image_is_named(tmp_path, make, words):
    path = tmp_path / "picture"
    make(path)
    with pytest.raises(FlowNPUError) as caught:
        read_image(path, SIZE)
    assert str(caught.value).startswith(words.format(path=path))


def test_image_without_permission_is_named(tmp_path, monkeypatch):
    path = tmp_path / "picture.png"
    colours(4, 4).save(path)

    def refused(*_arguments, **_options):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Image, "open", refused)  # the tests may run as root, who may read any file
    with pytest.raises(FlowNPUError, match="Permission denied"):
        read_image(path, SIZE)


@pytest.mark.parametrize("suffix", ["png", "jpg"])
@pytest.mark.parametrize("shape", [(1900, 1500), (1501, 1203)], ids=str)
def test_large_picture_is_reduced_first(tmp_path, monkeypatch, suffix, shape):
    """Memory has room for one copy of the picture, but not for two."""
    path = tmp_path / f"picture.{suffix}"
    coarse = np.random.default_rng(0).integers(0, 256, (9, 12, 3), dtype=np.uint8)
    Image.fromarray(coarse).resize(shape, Image.Resampling.BICUBIC).save(path, quality=95)
    monkeypatch.setattr(images, "DECODING_MEMORY", 4 * shape[0] * shape[1])
    reduced = pixels(path).astype(np.int32)
    difference = np.abs(reduced - transformers_pixels(path))
    assert difference.max() > 0  # it was reduced: the steps round, and their filters are wider
    # A pixel of the model is some 16 of the picture's, whose areas of one colour are 125 to 170 pixels wide: over 16
    # pixels colours change by at most 256 * 16 / 125 * 1.5 = 50 (the slope of a cubic). A picture moved by a quarter of
    # the model's pixel, as a partial block in a wrong place would do, differs by 12 there; with a wider filter it
    # differs only by as much as the slope changes.
    assert difference.max() <= 8
    assert difference.mean() < 1


@pytest.mark.parametrize(
    ("suffix", "options", "pixel_bytes"),
    [
        ("png", {}, 4),
        ("jpg", {}, 4),
        ("jpg", {"progressive": True}, 4 + 3 * 2),
        ("webp", {}, 17),
        ("avif", {}, 16),
        ("tif", {}, 16),
    ],
)
def test_image_beyond_memory_is_refused(tmp_path, monkeypatch, suffix, options, pixel_bytes):
    """The bytes a pixel are those with which `test_image_memory_is_bounded` measures the largest files."""
    path = tmp_path / f"picture.{suffix}"
    colours(100, 80).save(path, **options)
    monkeypatch.setattr(images, "DECODING_MEMORY", pixel_bytes * 100 * 80)
    assert pixels(path).shape == (96, 96, 3)
    monkeypatch.setattr(images, "DECODING_MEMORY", pixel_bytes * 100 * 80 - 1)
    with pytest.raises(FlowNPUError, match=r"0 megapixels, and to decode it \(\w+\) takes .*: make the image smaller"):
        read_image(path, SIZE)


# 0.4 of the memory that the package allows, so that the files that fill it are as much smaller.
ALLOWED = 160 * 2**20
MEASURE = f"""
import json, resource, sys
from pathlib import Path
from flownpu.generate import images
from flownpu.errors import FlowNPUError
from flownpu.generate.images import ImageSize, read_image

images.DECODING_MEMORY = {ALLOWED}

def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

size = ImageSize(896, 896)
for warm in sys.argv[2:]:
    read_image(Path(warm), size)
before = peak()
try:
    read = read_image(Path(sys.argv[1]), size)
    done = [read.width, read.height]
except FlowNPUError as error:
    done = str(error)
print(json.dumps([done, peak() - before]))
"""


def measure(path, warm):
    """The result of reading a file, and the bytes that it adds to a process's peak after an earlier image."""
    command = [sys.executable, "-c", MEASURE, str(path), str(warm)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=Path(__file__).parents[3])
    return json.loads(done.stdout)


def large_png(path):
    # Zeros that are compressed at once: Pillow would take long to encode 40 megapixels.
    write_png(path, 8000, 5000, bytes(5000 * 32001), colour_type=6)


LARGE = {
    "jpeg of 40 megapixels": lambda path: Image.new("RGB", (8000, 5000), "red").save(path, "JPEG"),
    "png of 40 megapixels with alpha": large_png,
    "bmp of 20 megapixels": lambda path: Image.new("RGB", (5000, 4000)).save(path, "BMP"),
    "progressive jpeg of 20 megapixels": lambda path: Image.new("RGB", (5000, 4000)).save(
        path, "JPEG", progressive=True, subsampling=0
    ),
    "webp of 9 megapixels": lambda path: Image.new("RGB", (3000, 3000)).save(path, "WEBP", method=0),
    "avif of 10 megapixels": lambda path: Image.new("RGB", (4000, 2500)).save(path, "AVIF", speed=10),
    "tiff of 10 megapixels": lambda path: Image.new("RGB", (4000, 2500)).save(
        path, "TIFF", compression="tiff_lzw", strip_size=2**30
    ),
}


@pytest.mark.parametrize("kind", LARGE)
def test_image_memory_is_bounded(tmp_path, kind):
    path, warm = tmp_path / "large", tmp_path / "warm.png"
    LARGE[kind](path)
    colours(8, 8).save(warm)
    done, added = measure(path, warm)
    assert np.prod(done) == int(kind.split(" of ")[1].split()[0]) * 10**6
    # Beside the decoder's memory there are a band in RGBA and on white (4 times 4 MiB), the picture that is resized (at
    # most twice the model's size: 13 MiB, and 22 for an odd half), the encoded image, and what malloc keeps.
    assert added < ALLOWED + 64 * 2**20
