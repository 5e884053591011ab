"""Small files in the layout of real data sets, of random pixels and words."""

import csv
import pickle
import struct
from pathlib import Path

import numpy as np
from PIL import Image

RNG = np.random.default_rng(0)


def labels(n: int, classes: int = 10) -> np.ndarray:
    return (np.arange(n) % classes).astype(np.uint8)


def pixels(*shape: int) -> np.ndarray:
    return RNG.integers(0, 256, shape, np.uint8)


def write_idx(folder: Path, stem: str, x: np.ndarray, y: np.ndarray) -> None:
    """Writes images [n, 28, 28] and labels [n] as MNIST's file format."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{stem}-images-idx3-ubyte").write_bytes(struct.pack(">IIII", 2051, *x.shape) + x.tobytes())
    (folder / f"{stem}-labels-idx1-ubyte").write_bytes(struct.pack(">II", 2049, len(y)) + y.tobytes())


def write_mnist(root: Path, n: int, name: str = "MNIST") -> None:
    for stem, size in (("train", n - n // 4), ("t10k", n // 4)):
        write_idx(root / name / "raw", stem, pixels(size, 28, 28), labels(size))


def write_fashion_mnist(root: Path, n: int) -> None:
    write_mnist(root, n, "FashionMNIST")


def write_emnist(root: Path, n: int, split: str = "letters", classes: int = 26) -> None:
    for half, size in (("train", n - n // 4), ("test", n // 4)):
        # letters, and they alone, are counted from 1
        y = labels(size, classes) + np.uint8(split == "letters")
        write_idx(root / "EMNIST" / "raw", f"emnist-{split}-{half}", pixels(size, 28, 28), y)


def write_cifar10(root: Path, n: int) -> None:
    folder = root / "cifar-10-batches-py"
    folder.mkdir(parents=True)
    for name in [*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"]:
        batch = {"data": pixels(n // 6, 3072), "labels": labels(n // 6).tolist()}
        (folder / name).write_bytes(pickle.dumps(batch))
    (folder / "batches.meta").write_bytes(pickle.dumps({"label_names": [str(k) for k in range(10)]}))


def write_cifar100(root: Path, n: int) -> None:
    folder = root / "cifar-100-python"
    folder.mkdir(parents=True)
    for name, size in (("train", n - n // 6), ("test", n // 6)):
        batch = {"data": pixels(size, 3072), "fine_labels": labels(size, 100).tolist()}
        (folder / name).write_bytes(pickle.dumps(batch | {"coarse_labels": labels(size, 20).tolist()}))
    (folder / "meta").write_bytes(pickle.dumps({"fine_label_names": [str(k) for k in range(100)]}))


def write_images(root: Path, n: int) -> None:
    for split, size in (("train", n - n // 4), ("test", n // 4)):
        for k in range(10):
            folder = root / split / f"class{k}"
            folder.mkdir(parents=True)
            for i in range(size // 10):
                Image.fromarray(pixels(32, 32, 3)).save(folder / f"{i}.png")


def write_tiny_imagenet(root: Path, n: int) -> None:
    top = root / "tiny-imagenet-200"
    for k in range(200):
        folder = top / "train" / f"n{k:08}"
        (folder / "images").mkdir(parents=True)
        (folder / f"n{k:08}_boxes.txt").write_text("")
        for i in range(n // 200):
            Image.fromarray(pixels(64, 64, 3)).save(folder / "images" / f"n{k:08}_{i}.JPEG")
    # val has another layout: its classes, and boxes, are in a table
    (top / "val" / "images").mkdir(parents=True)
    table = [f"val_{i}.JPEG\tn{199 - i:08}\t0\t0\t63\t63\n" for i in range(n // 10)]
    (top / "val" / "val_annotations.txt").write_text("".join(table))
    for i in range(n // 10):
        Image.fromarray(pixels(64, 64, 3)).save(top / "val" / "images" / f"val_{i}.JPEG")


def write_ag_news(root: Path, n: int) -> None:
    folder = root / "ag_news"
    folder.mkdir(parents=True)
    for name, size in (("train", n - n // 4), ("test", n // 4)):
        rows = [
            (label + 1, "A title", " ".join(f"w{i}" for i in RNG.integers(0, 500, 30))) for label in labels(size, 4)
        ]
        with (folder / f"{name}.csv").open("w", newline="") as file:
            csv.writer(file).writerows(rows)


def write_heart(root: Path, n: int) -> None:
    folder = root / "heart_disease"
    folder.mkdir(parents=True)
    for number, name in enumerate(("cleveland", "hungarian", "switzerland", "va")):
        lines = []
        for i in range(n // 4):
            # three columns of gaps outside Cleveland, and one patient with a gap in another column
            gaps = ["?"] * 3 if number else ["1", "0", "3"]
            chol = "?" if i == n // 4 - 1 else 200 + 10 * number + i % 7
            ill = int(i > 1) if name == "switzerland" else i % 5
            lines.append(
                [40 + i % 30, i % 2, 1 + i % 4, 120 + i % 9, chol, 0, i % 3, 150 - i % 11, 0, i % 4, *gaps, ill]
            )
        (folder / f"processed.{name}.data").write_text("".join(",".join(map(str, line)) + "\n" for line in lines))


def write_brca(root: Path, n: int) -> None:
    folder = root / "tcga_brca"
    folder.mkdir(parents=True)
    regions = ("Northeast", "South", "West", "Midwest", "Europe", "Canada")
    with (folder / "centers.csv").open("w", newline="") as file:
        sites = [(f"A{k}", "A hospital", "A country", "", region) for k, region in enumerate(regions)]
        csv.writer(file).writerows([("TSS Code", "Source Site", "Country", "State", "Region"), *sites])
    patients = [f"TCGA-A{i % 6}-{i:04}" for i in range(n)]
    features = ["age_at_index", *(f"feature {k}, coded" for k in range(38))]
    with (folder / "brca.csv").open("w", newline="") as file:
        rows = [(p, 30 + i % 50, *RNG.integers(0, 2, 38), float(i % 3 == 0), 1.0 + i) for i, p in enumerate(patients)]
        csv.writer(file).writerows([("pid", *features, "E", "T"), *rows])
    with (folder / "train_test_split.csv").open("w", newline="") as file:
        # the last patient is in no fold
        folds = [(p, fold, f"{fold}_{i % 6}") for i, p in enumerate(patients[:-1]) for fold in [FOLDS[i // 6 % 4 == 0]]]
        csv.writer(file).writerows([("pid", "fold", "fold2"), *folds])


FOLDS = ("train", "test")


def write_chem97(root: Path, n: int) -> None:
    """Writes pupils of 30 schools in six authorities; each school's first pupil has the school's number of points."""
    folder = root / "chem97"
    folder.mkdir(parents=True)
    with (folder / "chem97.csv").open("w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(["rownames", "lea", "school", "student", "score", "gender", "age", "gcsescore", "gcsecnt"])
        for i in range(n):
            school, gcse = i % 30, 4 + i % 17 / 4
            score = school if i < 30 else 2 * (i % 6)
            rows.writerow([i + 1, school // 5 + 1, school + 1, i + 1, score, "FM"[i % 2], i % 12 - 6, gcse, gcse - 6])


def write_shakespeare(root: Path, n: int) -> None:
    """Writes speeches of ten roles, a line of 80 letters each, and of a role that says one word."""
    folder = root / "shakespeare"
    folder.mkdir(parents=True)
    lines = ["".join("etaoin shr"[i] for i in RNG.integers(0, 10, 79)) + "." for _ in range(n // 5)]
    speeches = [f"ROLE {i % 10}:\n{line}" for i, line in enumerate(lines)]
    (folder / "shakespeare.txt").write_text("\n\n".join([*speeches, "Messenger:\nAy."]) + "\n")


def write_digits_of_domains(root: Path, n: int) -> None:
    # four domains of 300 images
    write_mnist(root, max(n, 1600))


WRITERS = {
    "AGNews": write_ag_news,
    "AGNewsLetters": write_ag_news,
    "CIFAR10": write_cifar10,
    "CIFAR100": write_cifar100,
    "Chem97": write_chem97,
    "DigitDomains": write_digits_of_domains,
    "EMNIST": write_emnist,
    "FedHeartDisease": write_heart,
    "FedTcgaBrca": write_brca,
    "FashionMNIST": write_fashion_mnist,
    "ImageFolder": write_images,
    "MNIST": write_mnist,
    "Shakespeare": write_shakespeare,
    "TinyImageNet": write_tiny_imagenet,
}


def write(name: str, root: Path, n: int) -> Path:
    """Writes the files of a data set, if it has any; gives their folder."""
    if name in WRITERS and not root.exists():
        WRITERS[name](root, n)
    return root
