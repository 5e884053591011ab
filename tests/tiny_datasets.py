"""Small files in the layout of real data sets, of random pixels."""

import pickle
import struct
from pathlib import Path

import numpy as np
from PIL import Image

RNG = np.random.default_rng(0)


def labels(n: int) -> np.ndarray:
    return (np.arange(n) % 10).astype(np.uint8)


def pixels(*shape: int) -> np.ndarray:
    return RNG.integers(0, 256, shape, np.uint8)


def write_mnist(root: Path, n: int) -> None:
    raw = root / "MNIST" / "raw"
    raw.mkdir(parents=True)
    for stem, size in (("train", n - n // 4), ("t10k", n // 4)):
        head = struct.pack(">IIII", 2051, size, 28, 28)
        (raw / f"{stem}-images-idx3-ubyte").write_bytes(head + pixels(size, 28, 28).tobytes())
        (raw / f"{stem}-labels-idx1-ubyte").write_bytes(struct.pack(">II", 2049, size) + labels(size).tobytes())


def write_cifar10(root: Path, n: int) -> None:
    folder = root / "cifar-10-batches-py"
    folder.mkdir(parents=True)
    for name in [*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"]:
        batch = {"data": pixels(n // 6, 3072), "labels": labels(n // 6).tolist()}
        (folder / name).write_bytes(pickle.dumps(batch))
    (folder / "batches.meta").write_bytes(pickle.dumps({"label_names": [str(k) for k in range(10)]}))


def write_images(root: Path, n: int) -> None:
    for k in range(10):
        folder = root / "train" / f"class{k}"
        folder.mkdir(parents=True)
        for i in range(n // 10):
            Image.fromarray(pixels(32, 32, 3)).save(folder / f"{i}.png")


WRITERS = {"MNIST": write_mnist, "CIFAR10": write_cifar10, "ImageFolder": write_images}


def write(name: str, root: Path, n: int) -> Path:
    """Writes the files of a data set, if it has any; gives their folder."""
    if name in WRITERS and not root.exists():
        WRITERS[name](root, n)
    return root
