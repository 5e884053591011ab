"""Image files that can't be decoded as they are meant."""

import struct
import zlib

import numpy as np
import pytest
from lightning.fabric.utilities.exceptions import MisconfigurationException
from PIL import Image

from pfl_lightning.data.images import checked_size, image_size, read_image

PIXELS = np.random.default_rng(0).integers(0, 256, (6, 5, 3)).astype(np.uint8)


def chunk(kind, content):
    return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))


def bomb(path):
    header = struct.pack(">IIBBBBB", 60_000, 60_000, 8, 2, 0, 0, 0)
    parts = chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(b"0")) + chunk(b"IEND", b"")
    path.write_bytes(b"\x89PNG\r\n\x1a\n" + parts)


def truncated(path):
    Image.fromarray(PIXELS).save(path)
    path.write_bytes(path.read_bytes()[:80])


def broken(path):
    Image.fromarray(PIXELS).save(path)
    content = path.read_bytes()
    path.write_bytes(content[:45] + b"XXXX" + content[49:])


@pytest.mark.parametrize("write", [bomb, truncated, broken, lambda path: path.write_text("text")])
def test_a_damaged_image_is_refused(write, tmp_path):
    write(tmp_path / "0.png")
    with pytest.raises(MisconfigurationException, match=r"0\.png cannot be read as an image"):
        read_image(tmp_path / "0.png", 3, None)


def test_the_size_of_a_bomb_is_refused_too(tmp_path):
    bomb(tmp_path / "0.png")
    with pytest.raises(MisconfigurationException, match=r"0\.png cannot be read as an image"):
        image_size(tmp_path / "0.png")


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize(("kind", "suffix"), [(np.uint16, "png"), (np.int32, "tif"), (np.float32, "tif")])
def test_pixels_of_more_than_8_bits_are_refused(kind, suffix, channels, tmp_path):
    path = tmp_path / f"0.{suffix}"
    Image.fromarray(PIXELS[..., 0].astype(kind) * 3).save(path)
    with pytest.raises(MisconfigurationException, match="more than 8 bits"):
        read_image(path, channels, None)


@pytest.mark.parametrize("mode", ["1", "L", "P", "RGB", "RGBA"])
def test_other_pixels_are_read(mode, tmp_path):
    Image.fromarray(PIXELS).convert(mode).save(tmp_path / "0.png")
    assert read_image(tmp_path / "0.png", 3, (4, 4)).shape == (4, 4, 3)


@pytest.mark.parametrize("size", [0, -3, (0, 4), (4,), (4, 4, 4), "4", 4.0])
def test_a_size_of_less_than_a_pixel_is_refused(size):
    with pytest.raises(MisconfigurationException, match=r"data\.size="):
        checked_size(size)


def test_a_size_is_a_square_or_a_pair():
    assert checked_size(4) == (4, 4) and checked_size([4, 5]) == (4, 5) and checked_size(None) is None
