"""Checks of sharded operations under torch.compile, for sharding_worker.py: one graph, the same masks."""

import copy

import torch
from sharding_checks import P, check, close, full, mesh_of, replica_seed, tensors
from sharding_checks_mlp import build, gather_sequence, tp_meshes
from sharding_checks_patch import patched, plans
from torch import nn

import xfused


def compiled(function, backend="aot_eager"):
    # of PyTorch's own layers DTensors with sizes that vary do not compile: a RecursionError, hence dynamic=False
    torch._dynamo.reset()
    return torch.compile(function, fullgraph=True, backend=backend, dynamic=False)


def transparent():
    """A FusedMLP whose output y and whose input's gradient show its mask: for x > 0, y / x and dx have `code`'s values.

    All models here have the same sizes: after others, PyTorch fails to compile layers with DTensor outputs.
    """
    mlp = xfused.FusedMLP(8, 16, activation="relu", dropout=P)
    with torch.no_grad():
        mlp.fc1.weight.copy_(torch.cat((torch.eye(8), torch.eye(8))))
        mlp.fc2.weight.copy_(torch.cat((torch.eye(8), 2 * torch.eye(8)), 1))
        mlp.fc1.bias.zero_()
        mlp.fc2.bias.zero_()
    return mlp


def code(mask):
    """Of a mask (..., 16), the sum that stands for a column and the one eight further on."""
    return mask[..., :8] + 2 * mask[..., 8:]


def decoded(t):
    return (t * (1 - P)).round().long()


def shards(mlp, mesh, plan, sequence):
    """The mlp in tensor parallel, and what makes a local x and a whole y."""
    from torch.distributed.tensor.parallel import parallelize_module

    def local(x):
        return (x.chunk(mesh.size(), 1)[mesh.get_local_rank()] if sequence else x).detach().clone().requires_grad_()

    return parallelize_module(copy.deepcopy(mlp), mesh, plan), local, gather_sequence(mesh) if sequence else full


@check
def compiled_masks():
    """Forward and backward use the mask that one device would draw; it is new in every call; the first rank's seeds."""
    line, part_of_grid = tp_meshes()
    cases = [*((line, plan) for plan in plans()), (part_of_grid, next(plans()))]
    for (mesh, replica), (plan, sequence) in cases:
        sharded, local, whole = shards(transparent(), mesh, plan, sequence)
        run = compiled(sharded)
        x, masks = tensors(3, 4, 8)[0].abs() + 1, []
        for seed in (1, 2):
            torch.manual_seed(seed)
            drawn = xfused.new_seed()
            mask = xfused.dropout_mask((3, 4, 16), P, replica_seed(drawn, replica) if replica else drawn)
            torch.manual_seed(seed + 100 * mesh.get_local_rank())
            x_local = local(x)
            y = whole(run(x_local))
            y.sum().backward()
            assert torch.equal(decoded(y / x), code(mask)), "mask of the forward"
            part = mask.chunk(mesh.size(), 1)[mesh.get_local_rank()] if sequence else mask
            assert torch.equal(decoded(x_local.grad), code(part)), "mask of the backward"
            masks.append(mask)
        assert not torch.equal(*masks)


def compiled_step(run, x, seed, whole):
    torch.manual_seed(seed)
    y = whole(run(x))
    y.square().mean().backward()
    return y.detach(), x.grad


def against_one_device(mlp, mesh, plan, backend):
    sharded, local, whole = shards(mlp, mesh, plan, False)
    x = tensors(3, 4, 8)[0].requires_grad_()
    want = compiled_step(compiled(mlp, backend), x, 3, full)
    got = compiled_step(compiled(sharded, backend), local(x), 3, whole)
    for a, b in zip(got, want, strict=True):
        close(a, b)
    for name, parameter in sharded.named_parameters():
        close(full(parameter.grad), mlp.get_parameter(name).grad)


@check
def compiled_gradients():
    (local_outputs, _), (dtensors, _), _ = plans()
    against_one_device(build(output_dropout=0.2), mesh_of(4), dtensors, "aot_eager")
    for bias in (True, False):
        against_one_device(patched(bias), mesh_of(4), local_outputs, "aot_eager")
    against_one_device(build(output_dropout=0.2), mesh_of(4), local_outputs, "inductor")


@check
def compiled_dtensors():
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    mesh = mesh_of(2, 2)
    shape = (3, 5, 7)
    for placements in ((Shard(0), Shard(1)), (Replicate(), Shard(2))):
        x, bias, dy = tensors(*shape)
        inputs = distribute_tensor(x, mesh, placements), distribute_tensor(bias, mesh, [Replicate()] * 2)
        inputs = [t.requires_grad_() for t in inputs]
        run = compiled(lambda x, bias: xfused.bias_act_dropout(x, bias, activation="silu", p=P, seed=42))
        y = run(*inputs)
        assert y.placements == placements
        y.backward(distribute_tensor(dy, mesh, placements))
        plain = [x.requires_grad_(), bias.requires_grad_()]
        want = xfused.bias_act_dropout(*plain, activation="silu", p=P, seed=42)
        want.backward(dy)
        assert torch.equal(full(y) != 0, xfused.dropout_mask(shape, P, 42))
        close(full(y), want)
        for a, b in zip(inputs, plain, strict=True):
            close(full(a.grad), b.grad)


@check
def compiled_evaluation():
    mlp = build(output_dropout=0.2).eval()
    sharded, *_ = shards(mlp, mesh_of(4), next(plans())[0], False)
    x = tensors(3, 4, 8)[0]
    state = torch.get_rng_state()
    with torch.no_grad():
        close(compiled(sharded)(x), mlp(x))
    assert torch.equal(torch.get_rng_state(), state)


@check
def compiled_step_of_a_larger_model():
    """Several layers, between others that are not sharded, in one graph: each draws a seed of its own."""
    from torch.distributed.tensor.parallel import parallelize_module

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 8)
            self.mlps = nn.ModuleList(xfused.FusedMLP(8, 16, dropout=P, output_dropout=0.2) for _ in range(2))

        def forward(self, x):
            x = self.first(x)
            for mlp in self.mlps:
                x = x + mlp(x)
            return self.last(x)

    model = Model()
    sharded = copy.deepcopy(model)
    for mlp in sharded.mlps:
        parallelize_module(mlp, mesh_of(4), next(plans())[0])
    x = tensors(3, 4, 8)[0].requires_grad_()
    want = compiled_step(model, x, 3, full)
    got = compiled_step(compiled(sharded), x.detach().clone().requires_grad_(), 3, full)
    for a, b in zip(got, want, strict=True):
        close(a, b)
    for name, parameter in sharded.named_parameters():
        close(full(parameter.grad), model.get_parameter(name).grad)
