"""The masks under CUDA graphs, streams, compiled CUDA graphs and replicated modules; see test_mechanisms.py."""

import gc

import pytest
import torch
from test_mechanisms import Masks, P, assert_mask, assert_step, call, distinct, drawn, leaves
from torch.utils.checkpoint import checkpoint

import xfused
from xfused import FusedMLP

pytestmark = pytest.mark.gpu
__all__ = ["drawn"]  # a fixture


@pytest.fixture(autouse=True)
def clean_up():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
        torch.cuda.empty_cache()


def warmed_up(function):
    """Runs it three times on a side stream, as a capture needs."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            function()
    torch.cuda.current_stream().wait_stream(stream)


def step(x, bias):
    y = call(x, bias)
    return y, *torch.autograd.grad(y, (x, bias), torch.ones_like(y))


def test_three_replays_of_a_graph_are_three_masks(drawn):
    """The seed lies in the graph's memory, where each replay writes a new one."""
    x, bias = leaves("cuda", (3, 200, 40))
    warmed_up(lambda: step(x, bias))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = step(x, bias)
    masks = []
    for _ in range(3):
        for output in outputs:
            output.detach().fill_(7)
        graph.replay()
        assert drawn[-1].is_cuda
        assert_step(drawn[-1].cpu(), x, bias, *outputs)
        masks.append(outputs[0] != 0)
    assert distinct(masks)


def test_a_graph_follows_the_generator():
    """manual_seed before a replay repeats its mask."""
    x, bias = leaves("cuda")
    warmed_up(lambda: step(x, bias))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y, dx, _ = step(x, bias)
    masks = []
    for seed in (1, 1, 2):
        torch.cuda.manual_seed(seed)
        graph.replay()
        assert torch.equal(y != 0, dx != 0)
        masks.append(y != 0)
    assert torch.equal(masks[0], masks[1]) and not torch.equal(masks[0], masks[2])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_graph_of_a_whole_step(drawn, dtype):
    """Forward, backward and optimiser of a FusedMLP under autocast, captured once."""
    mlp = FusedMLP(8, 40, 24, activation="gelu", dropout=P, output_dropout=0.3).cuda()
    masks, optimiser = Masks(mlp), torch.optim.SGD(mlp.parameters(), lr=1e-4)
    x = torch.randn(200, 8, device="cuda")

    def train():
        optimiser.zero_grad(set_to_none=False)
        with torch.autocast("cuda", dtype, enabled=dtype != torch.float32, cache_enabled=False):
            y = mlp(x)
        y.backward(torch.ones_like(y))
        optimiser.step()
        return y

    warmed_up(train)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = train()
    seen, weights = [], []
    for _ in range(3):
        graph.replay()
        masks.check([seed.cpu() for seed in drawn[-2:]], y)
        seen.append(y.detach() != 0)
        weights.append(mlp.fc1.weight.detach().clone())
    assert distinct(seen) and distinct(weights)


def test_graphed_callables():
    mlp = FusedMLP(40, 40, 40, activation="relu", dropout=P).cuda()
    with torch.no_grad():
        for layer in (mlp.fc1, mlp.fc2):
            layer.weight.copy_(torch.eye(40))
            layer.bias.zero_()
    x, _ = leaves("cuda", (200, 40))
    graphed = torch.cuda.make_graphed_callables(mlp, (x.detach().clone().requires_grad_(),))
    masks = []
    for _ in range(3):
        x.grad = None
        y = graphed(x)
        y.backward(torch.ones_like(y))
        assert torch.equal(y != 0, x.grad != 0)
        masks.append(y.detach() != 0)
    assert distinct(masks)


@pytest.mark.parametrize("mode", ["default", "reduce-overhead", "max-autotune"])
@pytest.mark.parametrize("inside", ["call", "checkpoint", "transposed"])
def test_compile_modes(mode, inside):
    """No mask comes twice, the backward has the forward's, and no column is another's copy."""

    def function(x, bias):
        if inside == "checkpoint":
            return checkpoint(lambda x, bias: call(x * 1.0, bias), x, bias, use_reentrant=False)
        return call(x.transpose(1, 2).contiguous() if inside == "transposed" else x, bias)

    run = torch.compile(function, fullgraph=True, mode=None if mode == "default" else mode)
    x = torch.rand(2, 64, 64, device="cuda").add(0.5).requires_grad_()
    bias = torch.rand(64, device="cuda").requires_grad_()
    masks = []
    for _ in range(5):
        torch.compiler.cudagraph_mark_step_begin()
        x.grad = bias.grad = None  # they lie in memory that the next replay writes
        y = run(x, bias)
        keep = (y.detach() != 0).clone()
        y.backward(torch.ones_like(y))
        dx = x.grad.transpose(1, 2) if inside == "transposed" else x.grad
        assert torch.equal(dx != 0, keep)
        torch.testing.assert_close(bias.grad, keep.flatten(0, -2).sum(0) / (1 - P), rtol=1e-5, atol=1e-4)
        assert len(torch.unique(keep.flatten(0, -2), dim=1).T) == 64
        masks.append(keep)
    assert distinct(masks)


@pytest.mark.parametrize("mode", [None, "reduce-overhead"])
def test_compile_modes_with_the_seed_as_an_output(mode):
    def function(x, bias):
        seed = xfused.new_seed(x.device)
        return call(x, bias, seed=seed), seed * 1

    run, (x, bias), seen = torch.compile(function, fullgraph=True, mode=mode), leaves("cuda", (200, 40)), []
    for _ in range(5):
        torch.compiler.cudagraph_mark_step_begin()
        x.grad = bias.grad = None
        y, seed = run(x, bias)
        value, seed = y.detach().clone(), seed.cpu()
        y.backward(torch.ones_like(y))
        assert_step(seed, x, bias, value, x.grad, bias.grad)
        seen.append(tuple(seed.tolist()))
    assert len(set(seen)) == 5


@pytest.mark.parametrize("budget", [0.0, 0.5])
def test_inductor_under_a_memory_budget(budget):
    def function(x, bias, seed):
        return call(x.sin().cos().exp(), bias, seed=seed).exp() - 1

    x, bias = leaves("cuda", (200, 40))
    with torch._functorch.config.patch(activation_memory_budget=budget):
        run = torch.compile(function, fullgraph=True)
        for seed in (xfused.new_seed("cuda"), xfused.new_seed("cuda")):
            y = run(x, bias, seed)
            assert_mask(seed.cpu(), y, *torch.autograd.grad(y, x, torch.ones_like(y)))


# ---------------------------------------------------------------------------------------------- streams and replicas


def test_two_streams_at_once(drawn):
    """Each call's forward and backward agree, and no two calls share a mask, where kernels of two streams overlap."""
    cases = [leaves("cuda", (4000 + 1000 * i, 512)) for i in range(2)]
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream() for _ in cases]
    results = []
    for _ in range(10):
        for stream, case in zip(streams, cases, strict=True):
            with torch.cuda.stream(stream):
                results.append((case, step(*case)))
    torch.cuda.synchronize()
    assert len({tuple(seed.tolist()) for seed in drawn}) == len(results) == 20
    for seed, ((x, bias), outputs) in zip(drawn, results, strict=True):
        assert_step(seed, x, bias, *outputs)


def test_a_backward_on_another_stream_than_its_forward(drawn):
    x, bias = leaves("cuda", (4000, 512))
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        y = call(x, bias)
    torch.cuda.current_stream().wait_stream(side)
    assert_step(drawn[0], x, bias, y, *torch.autograd.grad(y, (x, bias), torch.ones_like(y)))


def test_parallel_apply():
    """nn.DataParallel's way to run replicas: a thread each, here all on one device."""
    mlp = FusedMLP(8, 40, 24, dropout=P, output_dropout=0.3).cuda()
    x = torch.randn(16, 8, device="cuda")
    ys = torch.nn.parallel.parallel_apply([mlp] * 4, [(x,)] * 4, devices=[0] * 4)
    assert distinct([y != 0 for y in ys])
    sum(y.sum() for y in ys).backward()
    kept = sum((y.detach() != 0).sum(0) for y in ys)
    torch.testing.assert_close(mlp.fc2.bias.grad, kept / 0.7, rtol=1e-5, atol=1e-4)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_data_parallel():
    mlp = FusedMLP(8, 40, 24, dropout=P, output_dropout=0.3).cuda()
    torch.rand(5, device="cuda:1")  # replicas on generators in the same state draw the same, as PyTorch's dropout does
    half = torch.randn(16, 8, device="cuda")
    y = torch.nn.DataParallel(mlp, device_ids=[0, 1])(torch.cat([half, half]))
    kept = y.detach() != 0
    y.sum().backward()
    torch.testing.assert_close(mlp.fc2.bias.grad, kept.sum(0) / 0.7, rtol=1e-5, atol=1e-4)
    assert not torch.equal(kept[:16], kept[16:])
