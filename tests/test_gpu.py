"""What only a GPU shows: graphs, streams, threads, memory, synchronisation, tensors beyond 2**31 and 2**32 elements."""

import gc
import threading

import numpy as np
import oracle
import pytest
import torch

import xfused
from xfused import bias_act_dropout
from xfused.ops import _launch

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def free_memory():
    yield
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
        torch.cuda.empty_cache()


def step(x, bias, dy, p=0.5):
    """One forward and backward with a fresh mask: y, dx, dbias."""
    y = bias_act_dropout(x, bias, activation="relu", p=p)
    return y, *torch.autograd.grad(y, (x, bias), dy)


def inputs(m, n, dtype=torch.float32):
    x = torch.rand(m, n, device="cuda").add(0.5).to(dtype).requires_grad_()
    bias = torch.rand(n, device="cuda").requires_grad_()
    return x, bias, torch.rand(m, n, device="cuda").add(0.5).to(dtype)


# ------------------------------------------------------------------------------------------------------- graphs


def test_every_replay_of_a_graph_draws_a_mask_that_its_backward_shares():
    x, bias, dy = inputs(600, 256)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            step(x, bias, dy)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y, dx, dbias = step(x, bias, dy)
    masks = []
    for _ in range(3):
        y.fill_(7), dx.fill_(7), dbias.fill_(7)
        graph.replay()
        keep = y != 0
        assert torch.equal(dx != 0, keep) and abs(keep.float().mean() - 0.5) < 0.02
        torch.testing.assert_close(dx, torch.where(keep, dy * 2, 0.0))
        torch.testing.assert_close(dbias, dx.sum(0), rtol=1e-5, atol=1e-3)
        masks.append(keep)
    assert not any(torch.equal(masks[i], masks[j]) for i, j in ((0, 1), (1, 2), (0, 2)))
    # eager calls between replays neither disturb the graph nor are disturbed
    eager = step(x, bias, dy)
    graph.replay()
    assert torch.equal(dx != 0, y != 0) and torch.equal(eager[1] != 0, eager[0] != 0)
    assert not torch.equal(eager[0] != 0, y != 0)


def test_a_graph_with_a_given_seed_replays_its_mask():
    x = torch.ones(64, 128, device="cuda")
    seed = torch.tensor([3, 4], device="cuda")
    bias_act_dropout(x, p=0.5, seed=seed)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = bias_act_dropout(x, p=0.5, seed=seed)
    graph.replay()
    assert torch.equal(y.cpu() != 0, oracle.keep((3, 4), 64, 128, 0.5))
    seed += 1  # the graph reads the seed where it lies
    graph.replay()
    assert torch.equal(y.cpu() != 0, oracle.keep((4, 5), 64, 128, 0.5))


def test_replays_of_two_graphs_at_once_do_not_share_workspace():
    """Nor do two launches of one graph; and no replay has to zero anything."""
    x, bias, dy = inputs(4096, 1024)
    bias_act_dropout(x, bias, activation="gelu", p=0.1, seed=0).backward(dy)  # what is made once

    def backwards(seed):
        ys = [bias_act_dropout(x, bias, activation="gelu", p=0.1, seed=seed + i) for i in range(2)]
        return [torch.autograd.grad(y, (x, bias), dy) for y in ys]

    expected = [backwards(seed) for seed in (1, 3)]
    free = len(_launch._reserves[torch.cuda.current_device()])
    graphs, found = [torch.cuda.CUDAGraph() for _ in range(2)], []
    for graph, seed in zip(graphs, (1, 3), strict=True):
        with torch.cuda.graph(graph):
            found.append(backwards(seed))
    assert len(_launch._reserves[torch.cuda.current_device()]) < free, "the counters are zeroed in each replay"
    streams = [torch.cuda.Stream() for _ in graphs]
    for _ in range(50):
        for graph, stream in zip(graphs, streams, strict=True):
            with torch.cuda.stream(stream):
                graph.replay()
    torch.cuda.synchronize()
    for ours, theirs in zip(found, expected, strict=True):
        for (dx, dbias), (eager_dx, eager_dbias) in zip(ours, theirs, strict=True):
            assert torch.equal(dx, eager_dx) and torch.equal(dbias, eager_dbias)


def test_compile_with_cuda_graphs_draws_fresh_masks():
    torch._dynamo.reset()
    x, bias, dy = inputs(64, 128)
    run = torch.compile(
        lambda x, b: bias_act_dropout(x, b, activation="relu", p=0.5), fullgraph=True, mode="reduce-overhead"
    )
    masks = []
    for _ in range(5):
        torch.compiler.cudagraph_mark_step_begin()
        x.grad = bias.grad = None  # they lie in memory that the next replay writes
        y = run(x, bias)
        keep = y.detach() != 0
        y.backward(dy)
        assert torch.equal(x.grad != 0, keep)
        masks.append(keep.clone())
    assert not any(torch.equal(a, b) for i, a in enumerate(masks) for b in masks[:i])
    torch._dynamo.reset()


# ------------------------------------------------------------------------------------------- seeds on the host


def test_the_host_drawn_seed_follows_the_cuda_generator():
    x = torch.ones(64, 64, device="cuda")
    generator = torch.cuda.default_generators[torch.cuda.current_device()]
    state = generator.get_state()
    first, second = (bias_act_dropout(x, p=0.5) for _ in range(2))
    generator.set_state(state)
    assert torch.equal(bias_act_dropout(x, p=0.5), first) and torch.equal(bias_act_dropout(x, p=0.5), second)
    assert not torch.equal(first, second)
    torch.cuda.set_rng_state(state.cpu() if state.is_cuda else state)
    assert torch.equal(bias_act_dropout(x, p=0.5), first)
    own = torch.Generator("cuda").manual_seed(5)
    before = generator.get_state()
    seeds = [xfused.new_seed(generator=own) for _ in range(2)]
    assert torch.equal(generator.get_state(), before) and not torch.equal(*seeds)
    assert torch.equal(xfused.new_seed(generator=own.manual_seed(5)), seeds[0])


def test_a_draw_moves_pytorchs_own_numbers_on_and_column_0_does_not_replay_them():
    torch.cuda.manual_seed(7)
    plain = torch.rand(64, device="cuda")
    torch.cuda.manual_seed(7)
    seed = xfused.new_seed("cuda")
    assert not torch.equal(torch.rand(64, device="cuda"), plain)
    torch.cuda.manual_seed(7)
    assert int(seed[0]) != torch.cuda.initial_seed()


def test_nothing_synchronises_in_eager_mode():
    x, bias, dy = inputs(256, 256)
    step(x, bias, dy)
    device_seed = torch.tensor([1, 2], device="cuda")
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step(x, bias, dy)
        y = bias_act_dropout(x, bias, activation="relu", p=0.5, seed=device_seed)
        torch.autograd.grad(y, (x, bias), dy)
        xfused.dropout_mask((256, 256), 0.5, device_seed)
        bias_act_dropout(x.double(), p=0.5, seed=device_seed)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_deterministic_mode_leaves_nothing_unwritten():
    """It fills torch.empty with NaN."""
    torch.use_deterministic_algorithms(True)
    for m, n in ((1, 1), (7, 3), (600, 257), (1000, 64)):
        x, bias, dy = inputs(m, n)
        y, dx, dbias = step(x, bias, dy)
        assert not y.isnan().any() and not dx.isnan().any() and not dbias.isnan().any()
        assert torch.equal(dx != 0, y != 0)
    assert xfused.dropout_mask((9, 9), 0.5, 1, device="cuda").sum() == oracle.keep((1, 0), 9, 9, 0.5).sum()


# ------------------------------------------------------------------------------------------ streams and threads


def _hammer(result, key, x, bias, dy, expected, rounds=30):
    """Backward passes on a stream of their own; notes how many column sums came out wrong."""
    with torch.cuda.stream(torch.cuda.Stream()):
        torch.cuda.current_stream().wait_stream(torch.cuda.default_stream())
        wrong = torch.zeros((), device="cuda")
        for _ in range(rounds):
            y = bias_act_dropout(x, bias, activation="relu", p=0.25, seed=3)
            _, dbias = torch.autograd.grad(y, (x, bias), dy)
            wrong += ~(dbias == expected).all()
        torch.cuda.current_stream().synchronize()
        result[key] = int(wrong)


def _expected(x, bias, dy):
    y = bias_act_dropout(x, bias, activation="relu", p=0.25, seed=3)
    return torch.autograd.grad(y, (x, bias), dy)[1]


def test_two_streams_at_once_do_not_share_workspace():
    cases = [inputs(20_000, 512), inputs(16_384, 512)]
    expected = [_expected(*case) for case in cases]
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream() for _ in cases]
    wrong = torch.zeros((), device="cuda")
    for stream in streams:
        stream.wait_stream(torch.cuda.current_stream())
    results = []
    for _ in range(30):
        for stream, (x, bias, dy) in zip(streams, cases, strict=True):
            with torch.cuda.stream(stream):
                y = bias_act_dropout(x, bias, activation="relu", p=0.25, seed=3)
                results.append(torch.autograd.grad(y, bias, dy)[0])
    torch.cuda.synchronize()
    for i, dbias in enumerate(results):
        wrong += (dbias != expected[i % 2]).any()
    assert int(wrong) == 0


def test_threads_on_streams_of_their_own():
    cases = [inputs(5000 + 256 * i, 512) for i in range(4)]
    expected = [_expected(*case) for case in cases]
    torch.cuda.synchronize()
    result = {}
    threads = [
        threading.Thread(target=_hammer, args=(result, i, *case, want))
        for i, (case, want) in enumerate(zip(cases, expected, strict=True))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert result == dict.fromkeys(range(4), 0)


def test_threads_never_draw_the_same_seed():
    seeds = []

    def draw():
        for _ in range(500):
            seeds.append(tuple(xfused.new_seed("cuda").tolist()))

    threads = [threading.Thread(target=draw) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(seeds) == 4000 and len(set(seeds)) == 4000


def test_the_counters_are_left_at_zero_on_the_gpu():
    x, bias, dy = inputs(3000, 1000)
    step(x, bias, dy)
    torch.cuda.synchronize()
    assert _launch._workspaces, "no counter is kept for the stream"
    assert not any(counters.any() for counters, _ in _launch._workspaces.values())


def test_more_column_blocks_than_counters_are_kept_for():
    n = 128 * (2**16 + 3)
    x = torch.ones(9, n, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    bias = torch.zeros(n, device="cuda", requires_grad=True)
    (dbias,) = torch.autograd.grad(bias_act_dropout(x, bias), bias, torch.ones_like(x))
    assert (dbias == 9).all()


# ------------------------------------------------------------------------------------------------------- memory


@pytest.mark.parametrize("activation", ["gelu", "identity"])
def test_peak_memory_is_the_tensors_and_one_percent(activation):
    m, n = 8192, 16384
    x = torch.randn(m, n, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    bias = torch.zeros(n, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    dy = torch.randn(m, n, device="cuda", dtype=torch.bfloat16)
    warm = torch.ones(9, n, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    bias_act_dropout(warm, bias, activation=activation, p=0.1).sum().backward()
    bias.grad = None
    torch.cuda.synchronize()
    size = x.numel() * 2
    torch.cuda.reset_peak_memory_stats()
    start = torch.cuda.memory_allocated()
    y = bias_act_dropout(x, bias, activation=activation, p=0.1)
    after_forward = torch.cuda.memory_allocated() - start
    assert size <= after_forward < size * 1.001  # y alone: no mask, no second copy
    y.backward(dy)
    peak = torch.cuda.max_memory_allocated() - start
    assert peak <= 2 * size + 2 * n + 0.01 * size, f"{peak / size:.4f} of x beside x and dy"  # y, dx, dbias, workspace


@pytest.mark.parametrize(
    "m, n",
    [(2**18 + 3, 2**13 + 8), (2**20 + 5, 2**12 + 8), (3, 2**30 + 2**29 + 5), (2**31 + 11, 2)],
    ids=["2**31 elements", "2**32 elements", "long rows", "2**31 rows"],
)
def test_more_than_2_to_the_31_elements(m, n):
    need = 4 * 2 * m * n + 2**31
    if torch.cuda.mem_get_info()[0] < need:
        pytest.skip(f"needs {need / 2**30:.0f} GiB")
    seed, p, key = torch.tensor([12, 34]), 0.5, (12, 34)
    x = torch.ones(m, n, device="cuda", dtype=torch.bfloat16)
    bias = torch.ones(n, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    x.requires_grad_()
    y = bias_act_dropout(x, bias, activation="relu", p=p, seed=seed)
    dx, dbias = torch.autograd.grad(y, (x, bias), torch.ones((), device="cuda", dtype=torch.bfloat16).expand(m, n))
    limit = 2**31 // n
    near = (limit - 1, limit, limit + 1, 2 * limit - 1, 2 * limit, 2 * limit + 1)
    rows = sorted({row for row in (0, 1, 7, 8, m // 2, m - 9, m - 2, m - 1, *near) if 0 <= row < m})
    columns = np.arange(n, dtype=np.uint64)
    if n > 2**20:  # the ends and the neighbourhoods of 2**30 and 2**31 bytes
        places = [0, n - 512, 2**29 - 256, 2**30 - 256]
        columns = np.concatenate([np.arange(start, start + 512) for start in places]).astype(np.uint64)
    index = torch.from_numpy(columns.astype(np.int64)).cuda()
    keep = torch.from_numpy(oracle.keep_at(*key, np.array(rows, dtype=np.uint64), columns, p))
    for row, want in zip(rows, keep, strict=True):
        assert torch.equal(y[row][index].cpu(), want * torch.tensor(4.0).bfloat16()), f"y, row {row}"
        assert torch.equal(dx[row][index].cpu(), want * torch.tensor(2.0).bfloat16()), f"dx, row {row}"
    # every element was written: all are 0 or 4 (0 or 2), half of each; in blocks, to keep temporaries small
    kept, flat = 0, y.detach().view(-1)
    for part, gradient in zip(flat.split(2**28), dx.view(-1).split(2**28), strict=True):
        ones = part == 4
        assert bool((ones | (part == 0)).all()) and torch.equal(gradient == 2, ones)
        kept += int(ones.sum())
    assert abs(kept - m * n / 2) < 6 * (m * n / 4) ** 0.5
    if m * 2 < 2**24:  # the fp32 sum is exact
        part = slice(0, min(n, 4096))
        assert torch.equal(dbias[part].float(), (dx[:, part] != 0).sum(0).mul(2).to(torch.bfloat16).float())


def test_big_masks():
    rows, cols = 2**19 + 1, 2**12 + 1  # beyond 2**31 bytes
    mask = xfused.dropout_mask((rows, cols), 0.3, 9, device="cuda")
    picks = np.array([0, 1, rows // 2, rows - 2, rows - 1], dtype=np.uint64)
    expected = torch.from_numpy(oracle.keep_at(9, 0, picks, np.arange(cols, dtype=np.uint64), 0.3))
    assert torch.equal(mask[torch.from_numpy(picks.astype(np.int64)).cuda()].cpu(), expected)


# ------------------------------------------------------------------------------------- launches by cached handle


def test_alignment_and_widths_that_alternate_do_not_reuse_a_kernel_wrongly():
    """A launcher that caches compiled kernels must tell aligned pointers, widths and strides from others."""
    base = torch.randn(40 * 70, device="cuda")
    for offset, n, stride in (
        (0, 64, 64),
        (1, 64, 64),
        (0, 64, 67),
        (0, 48, 64),
        (0, 33, 64),
        (1, 1, 1),
        (0, 64, 64),
        (3, 64, 65),
    ):
        x = base[offset : offset + 16 * stride].view(16, stride)[:, :n]
        dy = base.flip(0)[: 16 * stride].view(16, stride)[:, :n]
        bias = base[offset + 5 : offset + 5 + n]
        keep = oracle.keep((n, 2), 16, n, 0.25).cuda()
        a, b = x.detach().requires_grad_(), bias.detach().requires_grad_()
        y = bias_act_dropout(a, b, activation="relu", p=0.25, seed=torch.tensor([n, 2]))
        grads = torch.autograd.grad(y, (a, b), dy)
        expected = oracle.exact("relu", x, bias, dy, keep=keep, scale=4 / 3)
        for ours, true in zip((y, *grads), expected, strict=True):
            torch.testing.assert_close(ours.double(), true, rtol=1e-5, atol=1e-5)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_tensors_on_a_device_that_is_not_the_current_one():
    x = torch.ones(64, 128, device="cuda:1", requires_grad=True)
    y = bias_act_dropout(x, p=0.5, seed=1)
    y.sum().backward()
    expected = oracle.keep((1, 0), 64, 128, 0.5)
    assert torch.equal(y.cpu() != 0, expected) and torch.equal(x.grad.cpu() != 0, expected)
    assert xfused.dropout_mask((64, 128), 0.5, 1, device="cuda:1").device == x.device
