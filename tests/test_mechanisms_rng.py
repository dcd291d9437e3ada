"""The masks under generators, saved states and threads; see test_mechanisms.py."""

import threading

import torch
from test_mechanisms import P, assert_step, call, distinct, drawn, leaves, on_devices, rng_state, set_rng_state

import xfused
from xfused import FusedMLP

__all__ = ["drawn"]  # a fixture


def run(device, seed):
    """A short training run: losses, last output, parameters."""
    torch.manual_seed(seed)
    mlp = FusedMLP(6, 40, 24, dropout=P, output_dropout=0.3).to(device)
    optimiser = torch.optim.SGD(mlp.parameters(), lr=0.1)
    x, results = torch.linspace(-1, 1, 60, device=device).view(10, 6), []
    for _ in range(4):
        y = mlp(x)
        loss = y.square().mean()
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        results += [loss.detach(), y.detach()]
    return [*results, *(parameter.detach() for parameter in mlp.parameters())]


@on_devices
def test_manual_seed_repeats_a_run_bit_for_bit(device):
    first = run(device, 11)
    torch.rand(5, device=device)
    assert all(torch.equal(a, b) for a, b in zip(first, run(device, 11), strict=True))
    assert not torch.equal(first[1] != 0, run(device, 12)[1] != 0)


@on_devices
def test_a_saved_state_brings_the_masks_back(device, drawn):
    x, bias = leaves(device)
    call(x, bias)
    state = rng_state(device)
    first = [call(x, bias) for _ in range(3)]
    set_rng_state(device, state)
    again = [call(x, bias) for _ in range(3)]
    for a, b in zip(first, again, strict=True):
        assert torch.equal(a, b)
    assert [seed.tolist() for seed in drawn[1:4]] == [seed.tolist() for seed in drawn[4:]]
    for seed, y in zip(drawn[4:], again, strict=True):
        assert_step(seed, x, bias, y, *torch.autograd.grad(y, (x, bias), torch.ones_like(y)))
    assert distinct([y != 0 for y in first])


@on_devices
def test_fork_rng(device, drawn):
    """What is drawn inside is drawn again after it, and a seed set inside does not last."""
    x, bias = leaves(device)
    devices = [] if device == "cpu" else [torch.cuda.current_device()]
    with torch.random.fork_rng(devices=devices):
        inside = [call(x, bias) for _ in range(2)]
    outside = [call(x, bias) for _ in range(2)]
    state = rng_state(device)
    with torch.random.fork_rng(devices=devices):
        torch.manual_seed(1)
        seeded = call(x, bias)
    assert torch.equal(rng_state(device), state)
    for seed, y in zip(drawn, (*inside, *outside, seeded), strict=True):
        assert_step(seed, x, bias, y, *torch.autograd.grad(y, (x, bias), torch.ones_like(y)))
    assert all(torch.equal(a, b) for a, b in zip(inside, outside, strict=True))
    assert distinct([y != 0 for y in (*inside, seeded)])


@on_devices
def test_a_generator_of_ones_own(device):
    """Its draws neither move nor follow the default generator."""
    x, bias = leaves(device)
    generator = torch.Generator(device).manual_seed(3)
    state, own = rng_state(device), generator.get_state()
    seeds = [xfused.new_seed(generator=generator) for _ in range(3)]
    assert torch.equal(rng_state(device), state) and all(seed.device.type == device for seed in seeds)
    for seed in seeds:
        y = call(x, bias, seed=seed)
        assert_step(seed, x, bias, y, *torch.autograd.grad(y, (x, bias), torch.ones_like(y)))
    assert torch.equal(rng_state(device), state)
    torch.manual_seed(99)
    for restore in (lambda: generator.set_state(own), lambda: generator.manual_seed(3)):
        restore()
        assert all(torch.equal(xfused.new_seed(generator=generator), seed) for seed in seeds)
    assert len({tuple(seed.tolist()) for seed in seeds}) == 3


# ------------------------------------------------------------------------------------------------------- threads


@on_devices
def test_threads_at_once(device, drawn):
    """As nn.DataParallel runs its replicas: no two share a seed, and each backward has its forward's mask."""
    x, bias = leaves(device)
    start, outputs, errors = threading.Barrier(4), [], []

    def replica():
        try:
            start.wait()
            for _ in range(8):
                y = call(x, bias)
                outputs.append((y.detach(), *torch.autograd.grad(y, (x, bias), torch.ones_like(y))))
        except Exception as error:  # a thread's exception is lost else
            errors.append(error)

    threads = [threading.Thread(target=replica) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors and len({tuple(seed.tolist()) for seed in drawn}) == 32 == len(outputs)
    seed_of = {xfused.dropout_mask(x.shape, P, seed).cpu().numpy().tobytes(): seed for seed in drawn}
    for y, dx, dbias in outputs:
        assert_step(seed_of.pop((y != 0).cpu().numpy().tobytes()), x, bias, y, dx, dbias)
