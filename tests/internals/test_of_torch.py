"""Each private name of torch that the package uses: it is there, and does what the package relies on."""

import warnings

import pytest
import torch
from torch import nn
from torch.func import grad, vmap
from torch.nn import functional as F
from torch.optim import SGD
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.profiler import ProfilerActivity, profile

from pfl_lightning.internals import of_torch as names

ROWS = torch.arange(6.0).reshape(3, 2)


@pytest.mark.parametrize("name", sorted(name for name in dir(nn) if "BatchNorm" in name))
def test_all_batch_norm_layers_have_one_base(name):
    assert issubclass(getattr(nn, name), names.BatchNorm)


@pytest.mark.parametrize("layer", [nn.GroupNorm, nn.LayerNorm, nn.InstanceNorm2d, nn.Linear])
def test_other_layers_do_not(layer):
    assert not issubclass(layer, names.BatchNorm)


@pytest.mark.parametrize("kind", ["forward", "forward_pre", "full_backward", "full_backward_pre"])
def test_hooks_of_a_module_or_of_all(kind):
    layer = nn.Linear(2, 2)
    assert not names.has_hooks(layer)
    for register in (
        getattr(layer, f"register_{kind}_hook"),
        getattr(nn.modules.module, f"register_module_{kind}_hook"),
    ):
        handle = register(lambda *_: None)
        assert names.has_hooks(layer)
        handle.remove()
        assert not names.has_hooks(layer)


@pytest.mark.parametrize("own", [True, False])
def test_a_step_with_its_hooks(own):
    weight, other = (torch.ones(2, requires_grad=True) for _ in range(2))
    optimizers = [SGD([tensor], lr=0.5, momentum=0.9) for tensor in (weight, other)]
    called = []
    for round in range(2):
        for tensor in (weight, other):
            tensor.grad = torch.full((2,), round + 1.0)
        names.take_step(optimizers[0])
        optimizers[1].step()
    assert torch.equal(weight, other) and torch.is_grad_enabled()
    register = optimizers[0].register_step_post_hook if own else register_optimizer_step_post_hook
    handle = register(lambda *_: called.append(1))
    names.take_step(optimizers[0])
    handle.remove()
    names.take_step(optimizers[0])
    assert called == [1]


class Halving(SGD):
    """Takes half of each step."""

    def step(self, closure=None):
        """Take the step."""
        with torch.no_grad():
            for parameter in self.param_groups[0]["params"]:
                parameter -= parameter.grad / 2


def test_a_step_of_an_optimizer_s_own():
    weight = torch.ones(2, requires_grad=True)
    optimizer = Halving([weight], lr=1.0)
    weight.grad = torch.ones(2)
    names.take_step(optimizer)
    assert weight.tolist() == [0.5, 0.5]
    optimizer.step = lambda: weight.data.zero_()
    names.take_step(optimizer)
    assert weight.tolist() == [0.0, 0.0]


def test_a_level_of_vmap():
    names.load_decompositions()
    level = names.enter_vmap(3, "error")
    try:
        row = names.row_of(ROWS, 0, level)
        assert row.shape == (2,) and names.is_wrapped(row)
        assert names.unwrapped(row).data_ptr() == ROWS.data_ptr()
        assert (names.row_dimension(row), names.level_of(row)) == (0, level)
        assert names.row_dimension(ROWS) == -1 and not names.is_wrapped(ROWS)
        sums = names.stack_of(row.sum(), level, 3, 0)
        repeated = names.stack_of(torch.tensor(2.0), level, 3, 0)
    finally:
        names.leave_vmap()
    assert torch.equal(sums, ROWS.sum(1)) and torch.equal(repeated, torch.full((3,), 2.0))
    assert names.enter_vmap(3, "error") == level
    names.leave_vmap()


def test_rows_in_another_dimension():
    seen = []
    vmap(lambda row: seen.append(names.row_dimension(row)) or row, in_dims=1)(ROWS)
    assert seen == [1]


def test_levels_refuse_random_functions():
    names.enter_vmap(3, "error")
    try:
        with pytest.raises(RuntimeError, match="random"):
            torch.rand(2)
    finally:
        names.leave_vmap()


def test_operations_have_rules_once_they_are_loaded():
    # without a rule, nll_loss computes row by row, and warns of it
    names.load_decompositions()
    names.load_decompositions()
    logits, target = torch.randn(3, 4, 5), torch.tensor([[0, 1, 2, 3]] * 3)
    level = names.enter_vmap(3, "error")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            loss = F.nll_loss(names.row_of(logits, 0, level), names.row_of(target, 0, level))
        losses = names.stack_of(loss, level, 3, 0)
    finally:
        names.leave_vmap()
    torch.testing.assert_close(losses, torch.stack(list(map(F.nll_loss, logits, target))))


def test_outside_of_all_levels_autograd_takes_a_function_s_own_backward():
    class Double(torch.autograd.Function):
        @staticmethod
        def forward(ctx, stack):
            shapes.append(tuple(stack.shape))
            return 2 * stack

        @staticmethod
        def backward(ctx, gradient):
            shapes.append(tuple(gradient.shape))
            return 2 * gradient

    shapes: list[tuple[int, ...]] = []

    def doubled(row):
        with names.outside_vmap():
            stack = Double.apply(names.unwrapped(row))
        return names.row_of(stack, 0, names.level_of(row))

    stack = ROWS.clone().requires_grad_()
    vmap(doubled)(stack).sum().backward()
    # the stack of all clients, and not a row
    assert shapes == [(3, 2), (3, 2)] and torch.equal(stack.grad, torch.full((3, 2), 2.0))


def test_tensors_under_grad_are_wrapped_too():
    seen = []
    grad(lambda row: seen.append(names.is_wrapped(row)) or row.sum())(ROWS)
    assert seen == [True]


def test_a_module_s_tables_are_the_module_s_own():
    layer = nn.BatchNorm1d(2)
    parameters, buffers = names.entry_tables(layer)
    assert parameters.keys() == {"weight", "bias"} and "running_mean" in buffers
    parameters["weight"] = torch.full((2,), 5.0)
    buffers["running_mean"] = None
    assert layer.weight is parameters["weight"] and layer.running_mean is None
    # an entry of None keeps its place, which named_parameters() leaves out
    assert names.entry_tables(nn.Linear(2, 2, bias=False))[0]["bias"] is None


@pytest.mark.skipif(names.update_flat_weights is None, reason="recurrent layers of this torch keep their first weights")
def test_recurrent_layers_list_exchanged_weights_anew():
    layer, weight = nn.GRU(2, 3), nn.Parameter(torch.zeros(9, 2))
    layer._parameters["weight_ih_l0"] = weight
    names.update_flat_weights(layer)
    assert layer._flat_weights[0] is weight


def test_tensors_are_copied_into_others_of_another_type_in_one_operation():
    rows, sent = torch.zeros(2, 3, dtype=torch.float64), [torch.ones(3), torch.full((3,), 2.0)]
    with profile(activities=[ProfilerActivity.CPU]) as seen:
        names.copy_each([*rows], sent)
    assert rows.equal(torch.stack(sent).double())
    assert [event.name for event in seen.events() if event.cpu_parent is None][-1] == "aten::_foreach_copy_"


def test_changes_in_place_are_counted():
    tensor = torch.zeros(2)
    before = names.version(tensor)
    tensor.add_(1)
    assert names.version(tensor) == before + 1
    # a view's changes are those of its base, and new values of another tensor none
    tensor[0] = 3
    _ = tensor + 1
    assert names.version(tensor) == before + 2


def test_inference_tensors_have_no_count():
    with torch.inference_mode():
        tensor = torch.zeros(2)
    assert names.version(tensor) == -1


def test_a_scaler_counts_good_steps():
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    assert scaler.state_dict()[names.GROWTH_TRACKER] == 0
    weight = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    scaler.scale(weight.sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    assert scaler.state_dict()[names.GROWTH_TRACKER] == 1
    other = torch.amp.GradScaler("cpu")
    other.load_state_dict({**scaler.state_dict(), names.GROWTH_TRACKER: 7})
    assert other.state_dict()[names.GROWTH_TRACKER] == 7


def test_a_schedule_keeps_its_last_rates():
    schedule = torch.optim.lr_scheduler.ExponentialLR(torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.5), 0.1)
    assert schedule.state_dict()[names.LAST_RATES] == [0.5]


def test_backends_of_the_compiler():
    graphs = []

    def counted(graph, inputs):
        graphs.append(graph)
        return names.compiler_backend("eager")(graph, inputs)

    double = torch.compile(lambda x: x * 2, backend=counted)
    assert torch.equal(double(ROWS), ROWS * 2) and torch.equal(double(ROWS), ROWS * 2)
    assert len(graphs) == 1
    assert names.compiler_backend(counted) is counted
    assert callable(names.compiler_backend("inductor"))


def test_settings_of_the_compiler_hold_inside_a_context():
    from torch._inductor import config

    with names.inductor_settings({"triton.cudagraphs": True}):
        assert config.triton.cudagraphs is True
        with names.inductor_settings({"triton.cudagraphs": False}):
            assert config.triton.cudagraphs is False
        assert config.triton.cudagraphs is True


def test_a_backward_pass():
    x, other = torch.arange(3.0, requires_grad=True), torch.ones(1, requires_grad=True)
    factors = torch.tensor([1.0, 10.0, 100.0])
    found = names.run_backward(
        (x**2,), (factors,), False, False, (x, other), allow_unreachable=True, accumulate_grad=False
    )
    assert torch.equal(found[0], 2 * x.detach() * factors) and found[1] is None
    assert x.grad is None


def test_tensors_of_shapes_alone_have_no_memory_and_work_beside_others():
    with names.shapes_alone():
        huge = torch.zeros(2**40, 8)
    assert (huge[torch.tensor([3])] @ torch.ones(8, 2)).shape == (1, 2)


def test_a_mode_sees_operations_of_the_backward_pass():
    class Seen(names.DispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.append(str(func))
            return func(*args, **(kwargs or {}))

    seen, x = [], torch.ones(2, requires_grad=True)
    with Seen():
        x.exp().sum().backward()
    assert seen[0] == "aten.exp.default" and "aten.mul.Tensor" in seen
