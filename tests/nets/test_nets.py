import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import nn

from pfl_lightning.nets import CNN, MLP, FastText, ResNet18


def size(net):
    return sum(parameter.numel() for parameter in net.parameters())


@pytest.mark.parametrize(
    ("net", "shape", "num_classes", "parameters"),
    [
        (CNN, (1, 28, 28), 10, 582_026),
        (CNN, (3, 32, 32), 10, 878_538),
        (CNN, (3, 32, 32), 100, 924_708),
        (CNN, (3, 64, 64), 200, 5_694_600),
        (ResNet18, (3, 64, 64), 200, 11_279_112),
        # the first convolution has 64 * 7 * 7 weights a channel
        (ResNet18, (1, 64, 64), 200, 11_279_112 - 2 * 3136),
        (FastText, (200,), 4, 3_157_508),
    ],
)
def test_nets_have_the_sizes_of_the_papers(net, shape, num_classes, parameters):
    assert size(net(shape, num_classes)) == parameters


@pytest.mark.parametrize(
    ("net", "shape", "d"),
    [(CNN, (3, 32, 32), 512), (MLP, (1, 8, 8), 64), (ResNet18, (1, 28, 28), 512), (FastText, (7,), 32)],
)
def test_a_net_is_features_and_a_classifier(net, shape, d):
    built = net(shape, 5).eval()
    x = torch.ones(2, *shape, dtype=torch.int64) if net is FastText else torch.rand(2, *shape)
    features = built.features(x)
    assert features.shape == (2, d)
    assert torch.equal(built(x), built.classifier(features))
    assert built(x).shape == (2, 5)
    assert size(built) == size(built.features) + size(built.classifier)
    assert size(built.classifier) == 5 * d + 5


def test_resnet_is_that_of_torchvision():
    from torchvision.models import resnet18

    torch.manual_seed(0)
    theirs = resnet18(num_classes=7)
    torch.manual_seed(0)
    ours = ResNet18((3, 64, 64), 7)
    x = torch.randn(2, 3, 64, 64)
    assert torch.equal(theirs(x), ours(x))


def test_fasttext_is_the_formula():
    net = FastText((4,), 3, vocab_size=6, width=5)
    words, hidden, last = net.features[0].weight, net.features[2], net.classifier[0]
    x = torch.tensor([[2, 5, 2, 0]])
    mean = (2 * words[2] + words[5]) / 4
    expected = last.weight @ (hidden.weight @ mean + hidden.bias) + last.bias
    assert torch.allclose(net(x)[0], expected, atol=1e-6)


def test_padding_is_not_learned():
    net = FastText((4,), 3, vocab_size=6)
    net(torch.tensor([[2, 5, 2, 0]])).sum().backward()
    words = net.features[0].weight
    assert not words[0].any()
    assert words.grad.any(1).tolist() == [False, False, True, False, False, True]


def test_a_last_log_softmax_would_change_neither_loss_nor_gradient():
    logits = torch.randn(6, 4, dtype=torch.float64, requires_grad=True)
    target = torch.tensor([0, 1, 2, 3, 0, 1])
    losses = [nn.functional.cross_entropy(x, target) for x in (logits, logits.log_softmax(1))]
    assert torch.allclose(*losses)
    assert torch.allclose(*(torch.autograd.grad(loss, logits)[0] for loss in losses))


@pytest.mark.parametrize("head", ["last", "all_fc"])
def test_fasttext_cuts_at_either_head(head):
    net = FastText((4,), 3, vocab_size=6, head=head)
    linear = [module for module in net.classifier.modules() if isinstance(module, nn.Linear)]
    assert len(linear) == {"last": 1, "all_fc": 2}[head]


@pytest.mark.parametrize(("net", "shape"), [(CNN, (200,)), (ResNet18, (200,)), (FastText, (1, 28, 28))])
def test_other_kinds_of_data_are_refused(net, shape):
    with pytest.raises(
        MisconfigurationException, match=rf"^net {net.__name__} takes .*, not input_shape=\({shape[0]},"
    ):
        net(shape, 10)


def test_word_numbers_are_refused_where_they_cannot_be_looked_up():
    with pytest.raises(MisconfigurationException, match=r"^net MLP takes no torch.int64 inputs; .*net FastText"):
        MLP((4,), 3)(torch.tensor([[2, 5, 2, 0]]))
    with pytest.raises(MisconfigurationException, match=r"^net FastText has vocab_size=5 .* set model.net.vocab_size"):
        FastText((4,), 3, vocab_size=5)(torch.tensor([[2, 5, 2, 0]]))
    with pytest.raises(MisconfigurationException, match=r"^net FastText: vocab_size=0 and width=32 must be at least 1"):
        FastText((4,), 3, vocab_size=0)


@pytest.mark.parametrize("hidden", [(-3,), (64, 0)])
def test_widths_below_1_are_refused(hidden):
    with pytest.raises(MisconfigurationException, match=r"^model\.net\.hidden=\[.*\] must be 1 or more each"):
        MLP((4,), 3, hidden=hidden)


def test_an_unknown_head_is_refused():
    with pytest.raises(MisconfigurationException, match=r"^model\.net\.head='first' must be one of last, all_fc"):
        MLP((4,), 3, head="first")
