"""Batches that are lists of samples, packed into tensors and back."""

import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor

from pfl_lightning.data.trees import take
from pfl_lightning.messages import tree_map
from pfl_lightning.nets.item_lists import are_items, packed, unpacked


def scene(height, width, boxes):
    target = {"boxes": torch.rand(boxes, 4), "labels": torch.arange(boxes), "image_id": 7 + boxes}
    return torch.rand(3, height, width), target


def same(one, other):
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return type(one) is type(other) and len(one) == len(other) and all(map(same, one, other))
    other = torch.as_tensor(other)
    return one.shape == other.shape and one.dtype == other.dtype and torch.equal(one, other)


SCENES = [scene(5, 7, 2), scene(6, 4, 0), scene(2, 9, 3)]


@pytest.mark.parametrize("kind", [list, tuple])
def test_lists_come_back_as_they_were(kind):
    images, targets = (kind(part) for part in zip(*SCENES, strict=True))
    for items in (images, targets, kind(SCENES)):
        assert same(unpacked(packed(items)), items)
    # a batch of both, and beside tensors
    batch = unpacked((packed(images), {"plain": torch.ones(3, 2)}))
    assert type(batch) is tuple and same(batch[0], images) and torch.equal(batch[1]["plain"], torch.ones(3, 2))


def test_each_tensor_has_a_row_for_each_sample():
    tree = packed([target for _, target in SCENES])
    leaves = []
    tree_map(leaves.append, tree)
    assert len(leaves) == 6 and all(len(leaf) == 3 for leaf in leaves)
    some = unpacked(take(tree, torch.tensor([2, 1])))
    assert same(some, [SCENES[2][1], SCENES[1][1]])


def test_subclasses_of_tensors_become_tensors():
    tv_tensors = pytest.importorskip("torchvision.tv_tensors", reason="needs torchvision")
    boxes = tv_tensors.BoundingBoxes(torch.rand(2, 4), format="XYXY", canvas_size=(5, 5))
    (back, empty) = unpacked(packed([boxes, torch.zeros(0, 4)]))
    assert type(back) is Tensor and torch.equal(back, boxes.as_subclass(Tensor)) and empty.shape == (0, 4)


def test_rows_of_a_batch_are_no_list_whatever_their_shape():
    image = torch.zeros(1, 8, 8)
    assert are_items((image,), (image, image)) and are_items([image], [image, image])
    assert not are_items((image,), (image.repeat(2, 1, 1),))
    assert not are_items((image, image), (image, image))
    assert not are_items({"a": image}, {"a": image})


@pytest.mark.parametrize(
    ("items", "sentence"),
    [
        ([{"a": 1}, {"b": 1}], "differ in the entries of their dicts"),
        ([{"a": 1}, 2], "differ in the entries of their dicts"),
        ([{"a": [1, 2]}, {"a": [1]}], r"the length of their lists\['a'\]; make tensors"),
        ([{"a": "cat"}, {"a": "dog"}], r"have a str in \['a'\]; give tensors and numbers"),
        ([{"a": torch.zeros(2, 4)}, {"a": torch.zeros(0)}], r"shapes \[0\], \[2, 4\] in \['a'\]; give all as many dim"),
    ],
)
def test_samples_that_make_no_tree_are_refused(items, sentence):
    with pytest.raises(MisconfigurationException, match=sentence):
        packed(items)
