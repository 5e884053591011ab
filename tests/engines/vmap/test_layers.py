"""Layers of stacked clients: torch's values and gradients, in the memory order of what they are of."""

import pytest
import torch
from torch.func import grad, vmap
from torch.nn import functional as F

from pfl_lightning.engines.vmap import layers

CLIENTS, N, IN, OUT = 3, 5, 4, 2


def stacks(bias=True, dtype=torch.float64):
    torch.manual_seed(0)
    shapes = [(CLIENTS, N, IN), (CLIENTS, OUT, IN), *([(CLIENTS, OUT)] if bias else [])]
    return [torch.randn(*shape, dtype=dtype, requires_grad=True) for shape in shapes]


def both(function, expected, tensors, **settings):
    """Outputs and gradients under vmap of one function and of the other."""
    results = []
    for each in (function, expected):
        output = vmap(each, **settings)(*tensors)
        wanted = [tensor for tensor in tensors if tensor.requires_grad]
        results.append((output, *torch.autograd.grad(output.square().sum(), wanted)))
    return results


@pytest.mark.parametrize("bias", [True, False])
def test_a_linear_layer_is_torch_s(bias):
    found, expected = both(layers.linear, F.linear, stacks(bias))
    torch.testing.assert_close(found, expected)


def test_gradients_lie_in_memory_as_their_parameters_do():
    tensors = stacks()
    output = vmap(layers.linear)(*tensors)
    gradients = torch.autograd.grad(output.sum(), tensors)
    assert [g.stride() for g in gradients] == [t.stride() for t in tensors]


def test_what_needs_no_gradient_gets_none():
    x, weight, bias = stacks()
    weight.requires_grad_(False)
    output = vmap(layers.linear)(x, weight, bias)
    assert torch.autograd.grad(output.sum(), [x, bias])[1].eq(N).all()


@pytest.mark.parametrize(
    ("in_dims", "shape"),
    [
        ((None, 0, 0), (N, IN)),
        ((1, 0, 0), (N, CLIENTS, IN)),
        ((0, 0, 0), (CLIENTS, 2, N, IN)),
        ((0, 0, 0), (CLIENTS, IN)),
    ],
    ids=["inputs of all", "another dimension", "sequences", "vectors"],
)
def test_other_inputs_go_vmap_s_way(in_dims, shape):
    _, weight, bias = stacks()
    x = torch.randn(*shape, dtype=torch.float64)
    found, expected = both(layers.linear, F.linear, [x, weight, bias], in_dims=in_dims)
    torch.testing.assert_close(found, expected)


def test_so_does_what_is_differentiated_or_mapped_once_more():
    x, weight, bias = (tensor.detach() for tensor in stacks())

    def loss(linear, weight, x, bias):
        return linear(x, weight, bias).square().sum()

    found, expected = (vmap(grad(lambda *a, f=f: loss(f, *a)))(weight, x, bias) for f in (layers.linear, F.linear))
    torch.testing.assert_close(found, expected)
    twice = [vmap(vmap(f, (0, None, None)))(x[:, :, None], weight, bias) for f in (layers.linear, F.linear)]
    torch.testing.assert_close(*twice)


def test_gradients_of_gradients_are_torch_s():
    results = []
    for linear in (layers.linear, F.linear):
        tensors = stacks()
        (first,) = torch.autograd.grad(vmap(linear)(*tensors).pow(3).sum(), tensors[1], create_graph=True)
        results.append(torch.autograd.grad(first.square().sum(), tensors))
    torch.testing.assert_close(*results)


@pytest.mark.parametrize("scale", [1, 1000])
def test_cross_entropy_is_torch_s(scale):
    torch.manual_seed(0)
    logits = scale * torch.randn(CLIENTS, N, OUT, dtype=torch.float64)
    target = torch.randint(OUT, (CLIENTS, N))
    found, expected = both(layers.cross_entropy, F.cross_entropy, [logits.requires_grad_(), target])
    torch.testing.assert_close(found, expected)


def test_a_diverged_client_is_nan_by_itself():
    logits = torch.randn(CLIENTS, N, OUT).index_fill_(0, torch.tensor(1), torch.nan)
    losses = vmap(layers.cross_entropy)(logits, torch.zeros(CLIENTS, N, dtype=torch.int64))
    assert losses.isnan().tolist() == [False, True, False]


def test_gradients_of_cross_entropy_s_gradients_are_refused():
    logits = torch.randn(CLIENTS, N, OUT, requires_grad=True)
    losses = vmap(layers.cross_entropy)(logits, torch.zeros(CLIENTS, N, dtype=torch.int64))
    with pytest.raises(RuntimeError, match="gradients of the gradients"):
        torch.autograd.grad(losses.sum(), logits, create_graph=True)


@pytest.mark.parametrize("log_target", [False, True])
@pytest.mark.parametrize("reduction", ["none", "sum", "mean", "batchmean", "size_average=False"])
def test_kl_divergence_is_torch_s_without_a_loop_over_clients(reduction, log_target):
    torch.manual_seed(0)
    known, z = torch.randn(2, CLIENTS, N, OUT, dtype=torch.float64)
    known = known.log_softmax(-1) if log_target else known.softmax(-1).mul(torch.tensor([1.0, 0.0]))
    settings = {"size_average": False} if "=" in reduction else {"reduction": reduction}
    wanted = [F.kl_div(a.log_softmax(1), b, log_target=log_target, **settings) for a, b in zip(z, known, strict=True)]
    z.requires_grad_()
    with layers.Layers():
        found = vmap(lambda a, b: F.kl_div(a.log_softmax(1), b, log_target=log_target, **settings))(z, known)
    torch.testing.assert_close(found, torch.stack(wanted))
    (gradient,) = torch.autograd.grad(found.sum(), z)
    (expected,) = torch.autograd.grad(
        sum(
            F.kl_div(a.log_softmax(1), b, log_target=log_target, **settings).sum()
            for a, b in zip(z, known, strict=True)
        ),
        z,
    )
    torch.testing.assert_close(gradient, expected)
