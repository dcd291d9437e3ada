"""The masks under torch.compile, torch.utils.checkpoint, torch.export and AOTInductor; see test_mechanisms.py.

A function under test draws its seed inside, or passes on one that it was given. A seed drawn inside is found out ahead:
the same backend compiles the bare draw, from the same state of the generator.
"""

import functools

import pytest
import torch
from test_mechanisms import P, assert_mask, assert_step, call, distinct, leaves, on_devices, rng_state, set_rng_state
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import xfused
from xfused import FusedMLP, bias_act_dropout


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def compiled(function, backend="aot_eager", **options):
    return torch.compile(function, fullgraph=True, backend=backend, **options)


def next_seed(device):
    """What the next draw inside a compiled function gives; the generator is put back."""
    state = rng_state(device)
    seed = compiled(lambda like: xfused.new_seed(like.device))(torch.zeros(1, device=device)).cpu()
    set_rng_state(device, state)
    return seed


def transparent_mlp(device, **options):
    """A FusedMLP whose output and whose input's gradient show the mask: relu between two unit matrices."""
    mlp = FusedMLP(40, 40, 40, activation="relu", dropout=P, **options).to(device)
    with torch.no_grad():
        for layer in (mlp.fc1, mlp.fc2):
            layer.weight.copy_(torch.eye(40))
            layer.bias.zero_()
    return mlp


def gradients(y, *inputs):
    return torch.autograd.grad(y, inputs, torch.ones_like(y))


# ------------------------------------------------------------------------------------------------------- compile


@on_devices
def test_compile(device):
    """The seed is drawn once, inside the graph, anew a call; the backward has the same."""
    step, (x, bias), masks = compiled(call), leaves(device), []
    for _ in range(3):
        seed = next_seed(device)
        y = step(x, bias)
        assert_step(seed, x, bias, y, *gradients(y, x, bias))
        masks.append(y != 0)
    assert distinct(masks)


@on_devices
def test_compile_with_a_seed(device):
    step, (x, bias) = compiled(lambda x, bias, seed: call(x, bias, seed=seed)), leaves(device)
    for seed in (xfused.new_seed(), xfused.new_seed(), xfused.new_seed(device)):
        y = step(x, bias, seed)
        assert_step(seed.cpu(), x, bias, y, *gradients(y, x, bias))
    y = compiled(lambda x, bias: call(x, bias, seed=-3))(x, bias)
    assert_step(-3, x, bias, y, *gradients(y, x, bias))


@on_devices
def test_compile_with_dynamic_shapes(device):
    """One graph for all shapes, whose seed is drawn inside."""
    counter, graphs = CompileCounterWithBackend("aot_eager"), set()
    step = torch.compile(call, fullgraph=True, dynamic=True, backend=counter)
    for rows, cols in ((6, 40), (17, 24), (33, 57), (9, 40)):
        x, bias = leaves(device, (2, rows, cols))
        seed = next_seed(device)
        y = step(x, bias)
        assert_step(seed, x, bias, y, *gradients(y, x, bias))
        graphs.add(counter.frame_count)
    assert len(graphs) == 1


@on_devices
def test_compile_of_a_module_under_autocast(device):
    mlp = transparent_mlp(device)
    step, (x, _) = compiled(mlp), leaves(device)
    for dtype in (torch.bfloat16, torch.float16):
        seed = next_seed(device)
        with torch.autocast(device, dtype):
            y = step(x)
        (dx,) = gradients(y, x)
        assert y.dtype == dtype and dx.dtype == torch.float32
        assert_mask(seed, y, dx)


@on_devices
def test_compile_by_inductor(device):
    """Two draws in one graph, one of them behind a transposed copy, where compiled dropout repeats its numbers."""

    def function(x, bias):
        first = xfused.new_seed(x.device)
        second = xfused.new_seed(x.device)
        a = call(x, bias, seed=first)
        b = call(x.transpose(1, 2).contiguous(), None, seed=second)
        return a, b, call(x.transpose(1, 2).contiguous() * 1.5, None), first, second

    step, masks = compiled(function, "inductor"), []
    for _ in range(2):
        x, bias = leaves(device, (2, 64, 48))
        a, b, c, first, second = step(x, bias)
        assert_mask(first.cpu(), a, gradients_of(a, x))
        assert_mask(second.cpu(), b, gradients_of(b, x).transpose(1, 2))
        assert torch.equal(gradients_of(c, x).transpose(1, 2) != 0, c != 0)
        masks += [b != 0, c != 0]
        for mask in (b != 0, c != 0):
            assert len(torch.unique(mask.flatten(0, -2), dim=1).T) == mask.shape[-1]  # no column is another's copy
            assert len(torch.unique(mask.flatten(0, -2), dim=0)) == mask.shape[0] * mask.shape[1]
    assert distinct(masks)


def gradients_of(y, x):
    return torch.autograd.grad(y, x, torch.ones_like(y), retain_graph=True)[0]


@on_devices
@pytest.mark.parametrize("budget", [0.0, 0.5, 1.0])
def test_activation_memory_budget(device, budget):
    """Below 1 PyTorch would draw again in the backward: a draw inside is refused, a seed from outside is used."""

    def function(x, bias, seed=None):
        return call(x.sin().cos().exp(), bias, seed=seed).exp() - 1

    x, bias = leaves(device)
    with torch._functorch.config.patch(activation_memory_budget=budget, donated_buffer=False):
        if budget < 1:
            with pytest.raises(RuntimeError, match="activation_memory_budget < 1"):
                compiled(function)(x, bias)
        else:
            seed = next_seed(device)
            y = compiled(function)(x, bias)
            assert_mask(seed, y, *gradients(y, x))
        torch._dynamo.reset()
        step = compiled(function)
        for seed in (xfused.new_seed(), xfused.new_seed()):
            y = step(x, bias, seed)
            dx, dbias = gradients(y, x, bias)
            assert_mask(seed, y, dx)
            dense = torch.where(y != 0, (y + 1).detach() / (1 - P), 0.0)
            torch.testing.assert_close(dbias, dense.flatten(0, -2).sum(0), rtol=1e-4, atol=1e-4)


@on_devices
def test_compiled_autograd(device):
    """The backward is compiled by itself, too."""
    x, bias = leaves(device)

    def step(x, bias):
        y = call(x, bias)
        y.sum().backward()
        return y

    with torch._dynamo.config.patch(compiled_autograd=True):
        run = torch.compile(step, backend="aot_eager")
        for _ in range(2):
            x.grad = bias.grad = None
            seed = next_seed(device)
            y = run(x, bias)
            assert_step(seed, x, bias, y.detach(), x.grad, bias.grad)


def loss(x, bias):
    y = call(x, bias)
    return y.sum(), y


@on_devices
@pytest.mark.parametrize("batched", [False, True])
def test_func_grad_and_vmap_inside_compile(device, batched):
    grad = torch.func.grad(loss, (0, 1), has_aux=True)
    if batched:
        grad = torch.func.vmap(grad, in_dims=(0, None), randomness="different")
    x, bias = (leaf.detach() for leaf in leaves(device))
    (dx, _), y = compiled(lambda x, bias: grad(x, bias))(x, bias)
    assert y.count_nonzero() > 0
    assert torch.equal(dx != 0, y != 0)


# ---------------------------------------------------------------------------------------------------- checkpoints


@on_devices
@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("compile", [False, True])
def test_checkpoint(device, use_reentrant, compile):
    """The recomputed forward has the first one's mask, also where other numbers were drawn between."""
    outputs = []

    def block(x, bias):
        y = call(x * 1.0, bias)
        if not compile:
            outputs.append(y.detach())
        return y * y.detach().clamp(max=0.5)  # its gradient multiplies the recomputed mask with the backward's

    def step(x, bias):
        return checkpoint(block, x, bias, use_reentrant=use_reentrant)

    x, bias = leaves(device)
    run = compiled(step) if compile else step
    masks = []
    for _ in range(2):
        seed = next_seed(device) if compile else None
        y = run(x, bias)
        torch.rand(3, device=device)
        y.backward(torch.ones_like(y))
        dx, dbias, x.grad, bias.grad = x.grad, bias.grad, None, None
        if compile:
            # on CUDA a draw that is recomputed comes from a generator state that the compiled graph keeps for itself
            assert torch.equal(dx != 0, y != 0)
            if device == "cpu":
                assert_mask(seed, y)
        else:
            assert len(outputs) == 2 and torch.equal(*outputs)
            assert torch.equal(y != 0, outputs[0] != 0) and torch.equal(dx != 0, y != 0)
            outputs.clear()
        torch.testing.assert_close(dbias, dx.flatten(0, -2).sum(0), rtol=1e-4, atol=1e-4)
        masks.append(y != 0)
    assert distinct(masks)


@on_devices
@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpoint_gives_the_contracts_mask(device, use_reentrant):
    """With the seed as a second output."""

    def block(x, bias):
        seed = xfused.new_seed(x.device)
        return call(x * 1.0, bias, seed=seed), seed.clone()

    x, bias = leaves(device)
    y, seed = checkpoint(block, x, bias, use_reentrant=use_reentrant)
    torch.rand(3, device=device)
    y.backward(torch.ones_like(y))
    assert_step(seed.cpu(), x, bias, y, x.grad, bias.grad)


SAVED = {
    "nothing": [],
    "the operator": [torch.ops.xfused.bias_act_dropout.default],
    "the seed": [torch.ops.aten.randint.low, torch.ops.aten.randint.low_generator],
    "what is before it": [torch.ops.aten.mul.Tensor],
}


@on_devices
@pytest.mark.parametrize("saved", SAVED.values(), ids=SAVED.keys())
@pytest.mark.parametrize("compile", [False, True])
def test_selective_checkpoint(device, saved, compile):
    def policy(context, op, *args, **kwargs):
        return CheckpointPolicy.MUST_SAVE if op in saved else CheckpointPolicy.PREFER_RECOMPUTE

    def block(x, bias):
        return call(x * 1.0, bias).exp() - 1

    def step(x, bias):
        contexts = functools.partial(create_selective_checkpoint_contexts, policy)
        return checkpoint(block, x, bias, use_reentrant=False, context_fn=contexts)

    x, bias = leaves(device)
    run, masks = compiled(step) if compile else step, []
    for _ in range(2):
        seed = next_seed(device) if compile else None
        y = run(x, bias)
        torch.rand(3, device=device)
        dx, _ = gradients(y, x, bias)
        assert torch.equal(dx != 0, y != 0)
        torch.testing.assert_close(dx, torch.where(y != 0, (y + 1).detach() / (1 - P), 0.0))
        if compile and (device == "cpu" or saved == SAVED["the seed"]):
            assert_mask(seed, y)
        masks.append(y != 0)
    assert distinct(masks)


# --------------------------------------------------------------------------------------------------------- export


@on_devices
def test_export_for_training(device):
    """Every call of the exported program draws a new mask, and the gradient, where there is one, has it."""
    program = torch.export.export(transparent_mlp(device), (leaves(device)[0],))
    targets = [node.target for node in program.graph.nodes]
    assert targets.count(torch.ops.xfused.bias_act_dropout.default) == 1
    module, (x, _) = program.module(), leaves(device)
    masks = [module(x.detach()) != 0 for _ in range(3)]
    assert distinct(masks) and all(0.4 < mask.double().mean() < 0.8 for mask in masks)


@on_devices
def test_training_of_an_exported_program(device):
    module = torch.export.export(transparent_mlp(device), (leaves(device)[0],)).module()
    x, _ = leaves(device)
    y = module(x)
    (dx,) = gradients(y, x)
    assert torch.equal(dx != 0, y != 0)


@on_devices
def test_export_in_eval(device):
    """With any number of rows; no draw is left in the graph."""
    mlp = transparent_mlp(device).eval()
    program = torch.export.export(
        mlp, (torch.rand(16, 40, device=device),), dynamic_shapes=({0: torch.export.Dim.AUTO},)
    )
    assert not any("rand" in str(node.target) for node in program.graph.nodes)
    x = torch.rand(33, 40, device=device)
    assert torch.equal(program.module()(x), mlp(x)) and torch.equal(mlp(x), x)


def test_aot_inductor_in_eval(tmp_path):
    device = "cpu"  # on a GPU, loading the package has crashed in PyTorch 2.11's own code
    mlp = FusedMLP(40, 24, 8, activation="gelu", dropout=P).to(device).eval()
    x = torch.randn(16, 40, device=device)
    with torch.no_grad(), torch._inductor.config.patch({"aot_inductor.compile_wrapper_opt_level": "O0"}):
        program = torch.export.export(mlp, (x,), dynamic_shapes=({0: torch.export.Dim.AUTO},))
        path = torch._inductor.aoti_compile_and_package(program, package_path=str(tmp_path / "mlp.pt2"))
        run = torch._inductor.aoti_load_package(path)
        for rows in (16, 33):
            x = torch.randn(rows, 40, device=device)
            torch.testing.assert_close(run(x), mlp(x))


# ------------------------------------------------------------------------------------------------------- operators


@on_devices
@pytest.mark.parametrize("op", ["bias_act_dropout", "bias_act_dropout_backward", "dropout_mask"])
def test_opcheck(device, op):
    """With a seed on the device, as a compiled function passes it; test_op.py has every activation."""
    seed = torch.tensor([5, 6], device=device)
    x, bias = (leaf.detach() for leaf in leaves(device, (2, 9, 12)))
    options = "relu", [], P, 3, 1
    args = {
        "bias_act_dropout": (x, bias, seed, *options),
        "bias_act_dropout_backward": (torch.ones_like(x), x, bias, seed, *options),
        "dropout_mask": (seed, 18, 12, P, 3, 1, x.device),
    }[op]
    torch.library.opcheck(getattr(torch.ops.xfused, op).default, args)


def test_every_operator_is_checked():
    names = {name.split("::")[1] for name in torch._C._dispatch_get_all_op_names() if name.startswith("xfused::")}
    assert names == {"bias_act_dropout", "bias_act_dropout_backward", "dropout_mask"}


def test_no_seed_is_drawn_where_none_is_needed():
    """Compiled or not: eval, p = 0 and a given seed leave the generator alone."""
    x = torch.rand(4, 8)
    state = torch.get_rng_state()
    for options in ({"p": 0.5, "training": False}, {"p": 0.0}, {"p": 0.5, "seed": 4}):
        for function in (bias_act_dropout, compiled(bias_act_dropout)):
            function(x, **options)
        torch._dynamo.reset()
    assert torch.equal(torch.get_rng_state(), state)
