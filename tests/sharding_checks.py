"""Checks of `bias_act_dropout` on DTensors and of its seeds, for the processes of sharding_worker.py."""

import importlib
import itertools
import sys

import torch
import torch.distributed as dist

import xfused
from xfused import philox

CHECKS = {}
P = 0.3


def check(function):
    CHECKS[function.__name__] = function
    return function


def raises(kind, match, function, *args, **kwargs):
    try:
        function(*args, **kwargs)
    except kind as error:
        assert match in str(error), error
    else:
        raise AssertionError(f"{kind.__name__} was not raised")


def close(a, b, dtype=torch.float32):
    tolerance = {torch.float32: 1e-5, torch.bfloat16: 2e-2}[dtype]
    torch.testing.assert_close(a.float(), b.float(), rtol=tolerance, atol=tolerance)


def full(t):
    return t.full_tensor() if hasattr(t, "full_tensor") else t


def tensors(*shape):
    generator = torch.Generator().manual_seed(sum(shape))
    x, dy = (torch.randn(shape, generator=generator) for _ in "xy")
    return x, torch.randn(shape[-1], generator=generator), dy


def mesh_of(*sizes):
    from torch.distributed.device_mesh import init_device_mesh

    return init_device_mesh("cpu", sizes, mesh_dim_names=("dp", "tp")[-len(sizes) :])


def replica_seed(seed, replica):
    """What replica `replica` makes of a drawn seed."""
    key = philox._mix(replica)
    return seed ^ torch.tensor((key - 2**64 if key >= 2**63 else key, 0))


# ------------------------------------------------------------------------------------------------ the operation


@check
def without_rules_the_operators_raise():
    """Must come first: xfused.sharding is not imported yet."""
    from torch.distributed.tensor import Shard, distribute_tensor

    assert "xfused.sharding" not in sys.modules
    x = distribute_tensor(torch.randn(8, 8), mesh_of(4), [Shard(0)])
    for seed in (torch.tensor([1, 0]), None):
        args = (x, None, seed, "gelu", [], P if seed is not None else 0.0, 0, 0)
        raises((RuntimeError, NotImplementedError), "", torch.ops.xfused.bias_act_dropout, *args)
        raises((RuntimeError, NotImplementedError), "", torch.ops.xfused.bias_act_dropout_backward, x, *args)
    assert "xfused.sharding" not in sys.modules
    importlib.import_module("xfused.sharding")
    for seed in (torch.tensor([1, 0]), None):
        args = (x, None, seed, "gelu", [], P if seed is not None else 0.0, 0, 0)
        raises(TypeError, "call xfused.bias_act_dropout", torch.ops.xfused.bias_act_dropout, *args)
        raises(TypeError, "call xfused.bias_act_dropout", torch.ops.xfused.bias_act_dropout_backward, x, *args)


def one_placement(mesh, placements, shape, bias_as, origin):
    """Output, mask and gradients of a DTensor x in these placements against one device."""
    from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

    x, bias, dy = tensors(*shape)
    options = {"activation": "gelu", "p": P, "seed": 42, "origin": origin}
    inputs = [x.requires_grad_(), bias.requires_grad_()]
    if bias_as is None:
        inputs.pop()
    y = xfused.bias_act_dropout(*inputs, **options)
    y.backward(dy)
    mask = xfused.dropout_mask(shape, P, 42, origin=origin)

    shards = [distribute_tensor(x.detach(), mesh, placements).requires_grad_()]
    if bias_as == "plain":
        shards.append(bias.detach().clone().requires_grad_())
    elif bias_as is not None:
        bias_placements = [Replicate() if bias_as == "replicated" else Shard(0)] * mesh.ndim
        shards.append(distribute_tensor(bias.detach(), mesh, bias_placements).requires_grad_())
    y_shards = xfused.bias_act_dropout(*shards, **options)
    assert isinstance(y_shards, DTensor) and y_shards.placements == shards[0].placements
    assert y_shards.shape == y.shape and y_shards.stride() == y.stride()
    assert torch.equal(y_shards.full_tensor() != 0, mask), "mask"
    close(y_shards.full_tensor(), y)
    y_shards.backward(distribute_tensor(dy, mesh, placements))
    for whole, shard in zip(inputs, shards, strict=True):
        if isinstance(shard, DTensor) and all(size % 4 == 0 for size in shape):
            assert shard.grad.placements == shard.placements  # torch 2.11 replicates the gradients of uneven shards
        close(full(shard.grad), whole.grad)
    assert torch.equal(full(shards[0].grad) != 0, mask), "mask of the backward"


def every_placement(sizes, shapes):
    from torch.distributed.tensor import Replicate, Shard

    mesh = mesh_of(*sizes)
    bias_as = itertools.cycle(["replicated", "sharded", "plain", None])
    for shape in shapes:
        kinds = [Replicate(), *(Shard(dim) for dim in range(len(shape)))]
        for i, placements in enumerate(itertools.product(kinds, repeat=mesh.ndim)):
            kind = next(bias_as)
            try:
                one_placement(mesh, placements, shape, kind, ((0, 0), (13, 7))[i % 2])
            except AssertionError as error:
                raise AssertionError(f"{sizes}, {shape}, {placements}, bias {kind}") from error


@check
def every_placement_on_a_line():
    every_placement((4,), [(16, 8), (7, 10), (3, 5), (2, 9, 6), (3, 2, 6, 5), (10,)])


@check
def every_placement_on_a_grid():
    every_placement((2, 2), [(7, 10), (3, 5, 6)])


@check
def other_dtypes_and_strides():
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    mesh = mesh_of(4)
    x, bias, dy = tensors(3, 8, 12)
    for bias_dtype in (torch.float32, torch.bfloat16):
        inputs = x.bfloat16().requires_grad_(), bias.clone().to(bias_dtype).requires_grad_()
        xfused.bias_act_dropout(*inputs, activation="silu", p=P, seed=1).backward(dy.bfloat16())
        shards = (
            distribute_tensor(x.bfloat16(), mesh, [Shard(1)]).requires_grad_(),
            distribute_tensor(bias.to(bias_dtype), mesh, [Replicate()]).requires_grad_(),
        )
        y = xfused.bias_act_dropout(*shards, activation="silu", p=P, seed=1)
        assert y.dtype == torch.bfloat16
        y.backward(distribute_tensor(dy.bfloat16(), mesh, [Replicate()]))  # a gradient that is placed otherwise
        for whole, shard in zip(inputs, shards, strict=True):
            assert shard.grad.dtype == whole.dtype
            close(shard.grad.full_tensor(), whole.grad, torch.bfloat16)
    turned = distribute_tensor(x, mesh, [Shard(1)]).transpose(0, 2)
    y = xfused.bias_act_dropout(turned, p=P, seed=torch.tensor([5, 6]))
    assert torch.equal(y.full_tensor() != 0, xfused.dropout_mask((12, 8, 3), P, torch.tensor([5, 6])))


@check
def what_cannot_be_placed_raises():
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

    mesh, grid = mesh_of(4), mesh_of(2, 2)
    partial = DTensor.from_local(torch.randn(8, 8), mesh, [Partial()])
    raises(ValueError, "Partial", xfused.bias_act_dropout, partial, p=P)
    raises(ValueError, "reduce x first", xfused.bias_act_dropout, partial, training=False)
    grid_partial = DTensor.from_local(torch.randn(4, 8), grid, [Shard(0), Partial()])
    raises(ValueError, "reduce x", xfused.bias_act_dropout, grid_partial)
    x = distribute_tensor(torch.randn(8, 8), mesh, [Shard(0)])
    raises(ValueError, "bias", xfused.bias_act_dropout, x, DTensor.from_local(torch.randn(8), mesh, [Partial()]))
    raises(ValueError, "bias", xfused.bias_act_dropout, x, distribute_tensor(torch.randn(8), grid, [Replicate()] * 2))
    raises(ValueError, "bias", xfused.bias_act_dropout, x, distribute_tensor(torch.randn(9), mesh, [Replicate()]))
    replicated = distribute_tensor(torch.randn(8), mesh, [Replicate()])
    raises(ValueError, "use_local_output=False", xfused.bias_act_dropout, torch.randn(8, 8), replicated)
    raises(ValueError, "p: got 2", xfused.bias_act_dropout, x, p=2)
    raises(ValueError, "activation", xfused.bias_act_dropout, x, activation="none such")


# -------------------------------------------------------------------------------------------------------- seeds


@check
def ranks_agree_on_the_seed():
    from torch.distributed.tensor import Shard, distribute_tensor

    for sizes, placements in ((4,), [Shard(0)]), ((2, 2), [Shard(0), Shard(1)]), ((2, 2), [Shard(1), Shard(0)]):
        x = torch.ones(16, 12)
        shards = distribute_tensor(x, mesh_of(*sizes), placements)
        torch.manual_seed(dist.get_rank())
        masks = [xfused.bias_act_dropout(shards, p=P).full_tensor() for _ in range(2)]
        torch.manual_seed(0)  # the first rank's
        assert all(torch.equal(mask, xfused.bias_act_dropout(x, p=P)) for mask in masks)
        assert not torch.equal(*masks)


@check
def replicas_draw_different_masks():
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

    rank = dist.get_rank()
    grid = mesh_of(2, 2)
    line = mesh_of(4)
    pair = [rank // 2 * 2, rank // 2 * 2 + 1]
    meshes = [(grid["tp"], rank // 2), (grid["dp"], rank % 2), (grid._flatten("all"), 0), (line, 0)]
    if hasattr(line, "_unflatten"):
        meshes.append((line._unflatten(0, (2, 2), ("a", "b"))["b"], rank // 2 * 2))
    for mesh, replica in meshes:
        torch.manual_seed(3)
        mask = xfused.bias_act_dropout(distribute_tensor(torch.ones(16, 32), mesh, [Shard(1)]), p=P).full_tensor() != 0
        torch.manual_seed(3)
        seed = xfused.new_seed()
        want = replica_seed(seed, replica) if replica else seed
        assert torch.equal(mask, xfused.dropout_mask((16, 32), P, want)), (mesh, replica)
        everywhere = [torch.empty_like(mask) for _ in range(4)]
        dist.all_gather(everywhere, mask)
        different = {tuple(other.flatten().tolist()) for other in everywhere}
        assert len(different) == 4 // mesh.size()
    for mesh in DeviceMesh("cpu", [0, 1]), DeviceMesh("cpu", [2, 3]):  # not known to belong together
        if rank in mesh.mesh.tolist():
            torch.manual_seed(3)
            mask = xfused.bias_act_dropout(DTensor.from_local(torch.ones(16, 32), mesh, [Replicate()]), p=P).to_local()
            torch.manual_seed(3)
            assert torch.equal(mask, xfused.bias_act_dropout(torch.ones(16, 32), p=P)) == (pair[0] == 0)


@check
def seed_replicas_tells_replicas_apart():
    from xfused.sharding import seed_replicas

    grid = mesh_of(2, 2)
    seed_replicas(5, grid["dp"])
    mine = xfused.new_seed()
    everyone = [torch.empty_like(mine) for _ in range(4)]
    dist.all_gather(everyone, mine)
    assert torch.equal(everyone[0], everyone[1]) and torch.equal(everyone[2], everyone[3])
    assert not torch.equal(everyone[0], everyone[2])
    torch.manual_seed(5)
    assert torch.equal(everyone[0], xfused.new_seed())
