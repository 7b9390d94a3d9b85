# SPDX-License-Identifier: Apache-2.0
"""Converts image files of any size and mode into the form that a vision model takes: upright, opaque, RGB, one size.

Pillow decodes and resizes by the method that transformers' image processors use, so that the pixels are the same. A
file is decoded within `DECODING_MEMORY`: one that needs more is reduced while it is decoded if its format allows that
(JPEG), else refused. Pillow is an optional dependency: import this module with `flownpu.errors.require`.
"""

import io
import warnings
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import ExifTags, Image, ImageOps, UnidentifiedImageError

from flownpu.errors import FlowNPUError

DECODING_MEMORY = 400 * 2**20
"""Bytes that decoding one file may take: two thirds of the 600 MB that a run may use beyond the weights."""

FORMATS = ("JPEG", "PNG", "WEBP", "AVIF", "GIF", "BMP", "TIFF")
# Peak bytes per pixel of Pillow 13 while it decodes a file. Four are the picture itself, in every mode of several
# channels. Some decoders hold more: a frame or two of their own (WebP's animation decoder two of four bytes per pixel,
# then a copy), TIFF's a strip, which may be the whole picture at 16 bits per channel, and the file
# (tests/cli/generate/test_images.py).
PICTURE_BYTES = 4
DECODER_BYTES = {"WEBP": 17, "AVIF": 16, "TIFF": 16}
# Bytes per pixel and channel of a progressive JPEG's coefficients: all are held, even if the JPEG is reduced.
COEFFICIENT_BYTES = 2
# The EXIF orientations that swap width and height.
EXCHANGED = range(5, 9)
# Pixels that are converted to RGB at a time, so that no step needs a copy of the whole picture.
BAND_PIXELS = 2**20


@dataclass(frozen=True)
class ImageSize:
    """The size in pixels of the images that a model's vision encoder takes."""

    width: int
    height: int
    interpolation: str = "BILINEAR"
    """Pillow's name of the interpolation with which transformers resizes for this model."""


@dataclass(frozen=True)
class PreparedImage:
    """One image, resized for the model."""

    path: Path
    width: int
    """Width of the file's picture in pixels, after it is turned by its EXIF orientation; so is `height`."""
    height: int
    kind: str
    """The file's format, such as "JPEG"."""
    png: bytes
    """The resized image, RGB, as a PNG file: lossless, and ORT GenAI's decoder reads it."""


def read_image(path: Path, size: ImageSize, content: bytes | None = None) -> PreparedImage:
    """Reads the first frame of an image file for a model.

    Transparent parts become white. A picture of up to 50 megapixels is resized in one step, and then has the pixels
    that transformers makes of it; a larger one is reduced by whole factors first.

    Args:
        path: the file.
        size: what the model takes.
        content: what the file holds; then no file is read, and `path` is only its name in errors.

    Raises:
        FlowNPUError: the file is missing, is no image, is damaged or takes more than `DECODING_MEMORY`; the message
            names the file.
    """
    if content is None:
        _check_file(path)
    try:
        with warnings.catch_warnings():
            # Pillow warns of sizes within DECODING_MEMORY, and of broken metadata; only the orientation is used.
            warnings.simplefilter("ignore")
            with Image.open(path if content is None else io.BytesIO(content), formats=FORMATS) as source:
                return _prepare(source, path, size)
    except FlowNPUError:
        raise
    except Image.DecompressionBombError as error:
        limit = 2 * (Image.MAX_IMAGE_PIXELS or 0) / 1e6
        raise FlowNPUError(
            f"{path} has more pixels than Pillow opens, {limit:.0f} megapixels: make the image smaller first"
        ) from error
    except UnidentifiedImageError as error:
        raise FlowNPUError(
            f"{path} is not an image that can be read; expected a file of one of {', '.join(FORMATS)}"
        ) from error
    except Exception as error:  # a decoder may raise anything at a damaged file
        raise FlowNPUError(
            f"{path} is damaged or cut short, or a kind of image that Pillow does not read: {error}"
        ) from error


def _check_file(path: Path) -> None:
    """Raises FlowNPUError unless there is a file with something in it."""
    if path.is_dir():
        raise FlowNPUError(f"{path} is a folder; expected an image file")
    if not path.exists():
        raise FlowNPUError(f"no such image file: {path}")
    if not path.is_file():
        raise FlowNPUError(f"{path} is not a regular file; expected an image file")
    if path.stat().st_size == 0:
        raise FlowNPUError(f"{path} is empty (0 bytes); expected an image file")


def _prepare(source: Image.Image, path: Path, size: ImageSize) -> PreparedImage:
    shown = source.size
    scale = _fit_in_memory(source, path, size)
    source.load()
    # Asked only after load(): some formats need decoded pixels for the orientation, and load() turns a TIFF.
    orientation = source.getexif().get(ExifTags.Base.Orientation, 1)
    picture = _rgb(source, (shown[0] / scale, shown[1] / scale), path, size)
    source.close()  # frees the decoder's memory before the picture is turned
    upright = _upright(picture, orientation)
    if orientation in EXCHANGED:
        shown = shown[::-1]
    small = upright.resize((size.width, size.height), Image.Resampling[size.interpolation])
    png = io.BytesIO()
    small.save(png, "PNG", compress_level=1)
    return PreparedImage(path, *shown, source.format or "", png.getvalue())


def _fit_in_memory(source: Image.Image, path: Path, size: ImageSize) -> int:
    """Makes Pillow reduce a large JPEG while it decodes it.

    Returns:
        The factor by which width and height are reduced: 1, 2, 4 or 8.

    Raises:
        FlowNPUError: the picture does not fit in DECODING_MEMORY.
    """
    pixels = source.width * source.height
    decoder = DECODER_BYTES.get(source.format or "", PICTURE_BYTES)
    held, scale = 0, 1
    if source.format in {"JPEG", "MPO"}:
        held = COEFFICIENT_BYTES * len(source.getbands()) * pixels if source.info.get("progressive") else 0
        if _is_large(source) or held + decoder * pixels > DECODING_MEMORY:
            width = source.width
            # At least twice as large as the model takes.
            source.draft(None, (2 * size.width, 2 * size.height))
            scale = round(width / source.width)
    needed = held + decoder * source.width * source.height
    if needed > DECODING_MEMORY:
        raise FlowNPUError(
            f"{path} has {pixels / 1e6:.0f} megapixels, and to decode it ({source.format}) takes {needed / 2**20:.0f} "
            f"MiB; the limit is {DECODING_MEMORY / 2**20:.0f} MiB, which is "
            f"{pixels / 1e6 * DECODING_MEMORY / needed:.0f} megapixels: make the image smaller first"
        )
    return scale


def _is_large(source: Image.Image) -> bool:
    """Whether the decoded picture and an RGB picture of the same size do not fit in memory together."""
    return 2 * PICTURE_BYTES * source.width * source.height > DECODING_MEMORY


def _rgb(source: Image.Image, extent: tuple[float, float], path: Path, size: ImageSize) -> Image.Image:
    """The decoded picture, opaque and in RGB.

    A large picture is reduced by whole factors. If these, or those of the decoder, do not divide its size, the result
    is resized to twice the model's size, without the part of the last row and column that is padding.

    Args:
        source: the decoded picture; a reduced JPEG may have padding in its last row and column.
        extent: width and height without the padding, in pixels of `source`.
        path: the file's name for errors.
        size: the model's size.
    """
    across, down = 1, 1
    if _is_large(source):
        across = max(1, source.width // (2 * size.width))
        down = max(1, source.height // (2 * size.height))
    picture = Image.new("RGB", (-(-source.width // across), -(-source.height // down)))
    rows = down * max(1, BAND_PIXELS // (source.width * down))
    for top in range(0, source.height, rows):
        band = source.crop((0, top, source.width, min(top + rows, source.height)))
        picture.paste(_opaque(band, path).reduce((across, down)), (0, top // down))
    right, bottom = extent[0] / across, extent[1] / down
    if right == picture.width and bottom == picture.height:
        return picture
    return picture.resize((2 * size.width, 2 * size.height), Image.Resampling.BILINEAR, (0, 0, right, bottom))


def _opaque(band: Image.Image, path: Path) -> Image.Image:
    """A picture in RGB, on a white background where it is transparent."""
    if band.mode in {"I", "F"}:
        raise FlowNPUError(
            f"{path} holds numbers of 32 bits, and nothing says which is black and which is white: save it with 8 or "
            "16 bits a channel"
        )
    mode: str = band.mode  # Pillow's type hints lack some modes
    if mode.startswith("I;16"):
        # Pillow's own conversion makes everything above 255 white. This one rounds: 65535 = 255 * 257.
        gray = (np.asarray(band).astype(np.uint32) + 128) // 257
        band = Image.fromarray(gray.astype(np.uint8))
    if band.has_transparency_data:
        white = Image.new("RGBA", band.size, "white")
        band = Image.alpha_composite(white, band.convert("RGBA"))
    return band.convert("RGB")


def _upright(picture: Image.Image, orientation: int) -> Image.Image:
    """The picture turned and mirrored according to its EXIF orientation, 1 to 8."""
    picture.getexif()[ExifTags.Base.Orientation] = orientation
    return ImageOps.exif_transpose(picture)
