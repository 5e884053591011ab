import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException

from pfl_lightning.data import MNIST, DigitDomains, FolderData
from pfl_lightning.data.digit_domains import VIEWS
from pfl_lightning.tasks import Classification
from tiny_datasets import pixels, write


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return str(write("MNIST", tmp_path_factory.mktemp("data") / "mnist", 400))


def loaded(root, **settings):
    data = DigitDomains(root=root, download=False, **{"samples_per_client": 40, **settings})
    data.prepare_data()
    return data, data.load()


def test_each_client_has_images_of_its_domain(root):
    data, all_images = loaded(root)
    assert data.task == Classification(10) and data.input_shape == (1, 28, 28)
    rows = {bytes(image.flatten().tolist()): row for row, image in enumerate(MNIST(root=root).load()[0])}
    labels, drawn = MNIST(root=root).load()[1], set()
    undo = {"rotated": lambda x: x.rot90(-1, (1, 2)), "inverted": lambda x: 255 - x, "mnist": lambda x: x}
    for image, label, owner in zip(all_images.x, all_images.y, all_images.client, strict=True):
        if owner in undo:
            row = rows[bytes(undo[owner](image).flatten().tolist())]
            assert labels[row] == label
            drawn.add(row)
    # no image is at two clients
    assert len(drawn) == 120
    assert [all_images.client.count(domain) for domain in VIEWS] == [40] * 5


def test_a_blurred_pixel_is_the_mean_of_25():
    x = torch.zeros(1, 1, 7, 7, dtype=torch.uint8)
    x[0, 0, 3, 3] = 250
    assert VIEWS["blurred"](x)[0, 0].tolist() == [
        [10 if 1 <= min(r, c) and max(r, c) <= 5 else 0 for c in range(7)] for r in range(7)
    ]


def test_digits_of_scikit_learn_fill_the_image_and_need_no_files(tmp_path):
    _, images = loaded(str(tmp_path), domains=("digits",), samples_per_client=1797)
    assert images.x.shape == (1797, 1, 28, 28) and images.x.dtype == torch.uint8
    assert torch.bincount(images.y).tolist() == [178, 182, 177, 183, 181, 182, 181, 179, 174, 180]
    assert (images.x.min(), images.x.max()) == (0, 255)


def test_several_clients_of_a_domain_share_no_image(root):
    data, images = loaded(root, domains=("mnist", "digits"), clients_per_domain=3)
    data.setup()
    assert data.client_names == ["digits 1", "digits 2", "digits 3", "mnist 1", "mnist 2", "mnist 3"]
    of_mnist = images.x[[name.startswith("mnist") for name in images.client]]
    assert len(of_mnist.flatten(1).unique(dim=0)) == 120


def test_the_seed_draws(root):
    one, same, other = (loaded(root, seed=seed)[1].x for seed in (1, 1, 2))
    assert one.equal(same) and not one.equal(other)


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"domains": ("mnist", "svhn")}, r"data\.domains=\['mnist', 'svhn'\]"),
        ({"domains": ()}, r"data\.domains=\[\]"),
        ({"domains": ("mnist", "mnist")}, "each once"),
        ({"clients_per_domain": 0}, r"data\.clients_per_domain=0"),
        ({"samples_per_client": 0}, r"data\.samples_per_client=0"),
        ({"samples_per_client": 101}, r"data\.samples_per_client=101 .* 404 images .* 400"),
        ({"domains": ("digits",), "samples_per_client": 1798}, "1797"),
    ],
)
def test_what_cannot_be_is_refused(root, settings, says):
    with pytest.raises(MisconfigurationException, match=says):
        loaded(root, **settings)


def test_files_of_mnist_are_looked_for_before_the_run(tmp_path):
    with pytest.raises(MisconfigurationException, match="no usable MNIST files"):
        DigitDomains(root=str(tmp_path), download=False).prepare_data()


def test_domains_in_folders_are_clients_of_one_numbering_of_classes(tmp_path):
    """Digits-Five's and Office-Caltech's layout: a folder a domain, and in it a folder a class."""
    from PIL import Image

    for domain, classes, side in (("amazon", ("bike", "mug"), 30), ("webcam", ("mug",), 20)):
        for name in classes:
            (tmp_path / domain / name).mkdir(parents=True)
            for k in range(4):
                Image.fromarray(pixels(side, side, 3)).save(tmp_path / domain / name / f"{k}.png")
    data = FolderData(str(tmp_path), size=16)
    data.setup()
    assert data.client_names == ["amazon", "webcam"] and data.input_shape == (3, 16, 16)
    # a mug is class 1 in both, though it is webcam's only one
    assert {int(label) for split in ("train", "val", "test") for label in data.part(1, split).y} == {1}
