"""Checks of FusedMLP under tensor, sequence and data parallelism, for the processes of sharding_worker.py."""

import copy
import itertools
import re
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from sharding_checks import P, check, close, full, mesh_of, replica_seed, tensors
from torch import nn
from torch.utils.checkpoint import checkpoint

import xfused


def reference(mlp, x, seeds):
    """mlp(x) on one device with these seeds for its two dropouts; also the mask after the activation."""
    h = F.linear(x, mlp.fc1.weight)
    h = xfused.bias_act_dropout(h, mlp.fc1.bias, activation="gelu", p=mlp.dropout, seed=seeds[0])
    y = F.linear(h, mlp.fc2.weight, None if mlp.output_dropout else mlp.fc2.bias)
    if mlp.output_dropout:
        y = xfused.bias_act_dropout(y, mlp.fc2.bias, p=mlp.output_dropout, seed=seeds[1])
    return y, xfused.dropout_mask(h.shape, mlp.dropout, seeds[0])


def build(hidden=16, dtype=None, **options):
    torch.manual_seed(11)
    return xfused.FusedMLP(8, hidden, dropout=P, dtype=dtype, **options)


def drawn(seed, replica=0):
    """The first two seeds that a replica draws after torch.manual_seed(seed)."""
    torch.manual_seed(seed)
    seeds = [xfused.new_seed() for _ in range(2)]
    torch.manual_seed(seed)
    return [replica_seed(seed, replica) if replica else seed for seed in seeds]


def compare(mlp, sharded, x, x_local, mesh, replica=0, whole=lambda y: y, loss=lambda y: y.square().mean(), run=None):
    """Output, mask and every gradient of a tensor-parallel mlp against one device."""
    seeds = drawn(21, replica)
    hidden = []
    handle = sharded.fc2.register_forward_pre_hook(lambda module, args: hidden.append(args[0]), prepend=True)
    y_local = (sharded if run is None else run)(x_local)
    handle.remove()
    y, mask = reference(mlp, x, seeds)
    h = full(hidden[0])
    if h.shape != mask.shape:  # a local tensor: this rank's columns
        start = mesh.get_local_rank() * h.shape[-1]
        mask = mask[..., start : start + h.shape[-1]]
    assert torch.equal(h != 0, mask), "mask of the hidden layer"
    close(whole(y_local), y)
    loss(whole(y_local)).backward()
    loss(y).backward()
    for name, parameter in sharded.named_parameters():
        close(full(parameter.grad), mlp.get_parameter(name).grad)
    close(x_local.grad, x.grad if x_local.shape == x.shape else part(x.grad, mesh))


def part(x, mesh):
    return x.chunk(mesh.size(), dim=1)[mesh.get_local_rank()]


def gather_sequence(mesh):
    from torch.distributed.tensor import DTensor, Shard

    return lambda y: full(y if isinstance(y, DTensor) else DTensor.from_local(y, mesh, [Shard(1)]))


def options_of_mlp():
    for output_dropout, bias in itertools.product((0.0, 0.2), (True, False)):
        yield {"output_dropout": output_dropout, "bias": bias}


def tp_meshes():
    yield mesh_of(4), 0
    yield mesh_of(2, 2)["tp"], dist.get_rank() // 2


@check
def tensor_parallel():
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    for (mesh, replica), options in itertools.product(tp_meshes(), options_of_mlp()):
        mlp = build(**options)
        names = list(mlp.state_dict())
        sharded = parallelize_module(copy.deepcopy(mlp), mesh, {"fc1": ColwiseParallel(), "fc2": RowwiseParallel()})
        assert list(sharded.state_dict()) == names
        x = tensors(3, 4, 8)[0].requires_grad_()
        compare(mlp, sharded, x, x.detach().clone().requires_grad_(), mesh, replica)
        x_local = x.detach().clone().requires_grad_()
        x.grad = None
        mlp.zero_grad()
        sharded.zero_grad()
        compare(mlp, sharded, x, x_local, mesh, replica, run=lambda x, m=sharded: checkpoint(m, x, use_reentrant=False))


@check
def sequence_parallel():
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        PrepareModuleInput,
        RowwiseParallel,
        parallelize_module,
    )

    for (mesh, replica), options in itertools.product(tp_meshes(), options_of_mlp()):
        plans = [
            {"fc1": ColwiseParallel(input_layouts=Shard(1)), "fc2": RowwiseParallel(output_layouts=Shard(1))},
            {
                "": PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Replicate()),
                "fc1": ColwiseParallel(),
                "fc2": RowwiseParallel(output_layouts=Shard(1), use_local_output=False),
            },
        ]
        for plan in plans:
            mlp = build(**options)
            sharded = copy.deepcopy(mlp)
            for name, style in plan.items():
                parallelize_module(sharded.get_submodule(name), mesh, style)
            x = tensors(3, 4, 8)[0].requires_grad_()
            compare(
                mlp, sharded, x, part(x.detach(), mesh).clone().requires_grad_(), mesh, replica,
                whole=gather_sequence(mesh),
            )  # fmt: skip


@check
def sequence_parallel_module():
    """BiasActDropout under SequenceParallel: a replicated bias, activations sharded along the sequence."""
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor.parallel import SequenceParallel, parallelize_module

    mesh = mesh_of(4)
    x, _, dy = tensors(3, 8, 6)
    layer = xfused.BiasActDropout(6, p=P)
    nn.init.normal_(layer.bias, generator=torch.Generator().manual_seed(0))
    sharded = parallelize_module(copy.deepcopy(layer), mesh, SequenceParallel())
    torch.manual_seed(4)
    y = layer(x)
    y.backward(dy)
    torch.manual_seed(4)
    z = sharded(part(x, mesh))
    assert isinstance(z, DTensor) and torch.equal(z.full_tensor() != 0, y != 0)
    (z.full_tensor() * dy).sum().backward()
    close(sharded.bias.grad.full_tensor(), layer.bias.grad)


@check
def uneven_hidden_features():
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    mesh = mesh_of(4)
    mlp = build(hidden=10, output_dropout=0.2)
    plan = {"fc1": ColwiseParallel(use_local_output=False), "fc2": RowwiseParallel()}
    sharded = parallelize_module(copy.deepcopy(mlp), mesh, plan)
    x = tensors(7, 8)[0].requires_grad_()
    compare(mlp, sharded, x, x.detach().clone().requires_grad_(), mesh)


@check
def evaluation():
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    mlp = build(output_dropout=0.2).eval()
    plan = {"fc1": ColwiseParallel(), "fc2": RowwiseParallel()}
    sharded = parallelize_module(copy.deepcopy(mlp), mesh_of(4), plan)
    x = tensors(3, 4, 8)[0]
    state = torch.get_rng_state()
    with torch.no_grad():
        close(sharded(x), mlp(x))
    assert torch.equal(torch.get_rng_state(), state)


def mean_over(mesh, t):
    t = t.clone()
    dist.all_reduce(t, group=mesh.get_group())
    return t / mesh.size()


@check
def fully_sharded():
    """FSDP2 by itself, in mixed precision: each rank is a replica with a batch and a mask of its own."""
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    from xfused.sharding import seed_replicas

    mesh = mesh_of(4)
    mlp = build(output_dropout=0.2)
    names = list(mlp.state_dict())
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    sharded = fully_shard(copy.deepcopy(mlp), mesh=mesh, mp_policy=policy)
    assert list(sharded.state_dict()) == names
    x = tensors(4, 3, 8)[0][dist.get_rank()]

    seed_replicas(21, mesh)
    seeds = [xfused.new_seed() for _ in range(2)]
    seed_replicas(21, mesh)
    hidden = []
    sharded.fc2.register_forward_pre_hook(lambda module, args: hidden.append(args[0]))
    y = sharded(x)
    low = copy.deepcopy(mlp).bfloat16()
    want, mask = reference(low, x.bfloat16(), seeds)
    assert y.dtype == torch.bfloat16 and torch.equal(hidden[0] != 0, mask)
    close(y, want, torch.bfloat16)
    masks = [torch.empty_like(mask) for _ in range(4)]
    dist.all_gather(masks, mask)
    assert all(not torch.equal(a, b) for a, b in itertools.combinations(masks, 2))
    y.float().square().mean().backward()
    want.float().square().mean().backward()
    for name, parameter in sharded.named_parameters():
        assert parameter.grad.dtype == torch.float32
        close(parameter.grad.full_tensor(), mean_over(mesh, low.get_parameter(name).grad.float()), torch.bfloat16)


@check
def fully_sharded_and_tensor_parallel():
    """FSDP2 over dp, sequence and tensor parallel over tp; all ranks are seeded alike."""
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
    from torch.distributed.tensor import Shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    grid = mesh_of(2, 2)
    replica = dist.get_rank() // 2
    for dtype, sequence in itertools.product((torch.float32, torch.bfloat16), (False, True)):
        mlp = build(output_dropout=0.2)
        names = list(mlp.state_dict())
        layouts = {"input_layouts": Shard(1)}, {"output_layouts": Shard(1)}
        plan = {
            "fc1": ColwiseParallel(**layouts[0] if sequence else {}),
            "fc2": RowwiseParallel(**layouts[1] if sequence else {}),
        }
        sharded = parallelize_module(copy.deepcopy(mlp), grid["tp"], plan)
        policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
        fully_shard(sharded, mesh=grid["dp"], mp_policy=policy)
        assert list(sharded.state_dict()) == names
        x = tensors(2, 3, 4, 8)[0][replica]
        seeds = drawn(21, replica)
        hidden = []
        sharded.fc2.register_forward_pre_hook(lambda module, args, hidden=hidden: hidden.append(args[0]), prepend=True)
        y = sharded(part(x, grid["tp"]) if sequence else x)
        y = gather_sequence(grid["tp"])(y) if sequence else y
        low = copy.deepcopy(mlp).to(dtype)
        want, mask = reference(low, x.to(dtype), seeds)
        assert torch.equal(hidden[0] != 0, mask.chunk(2, -1)[grid["tp"].get_local_rank()])
        close(y, want, dtype)
        y.float().square().mean().backward()
        want.float().square().mean().backward()
        for name, parameter in sharded.named_parameters():
            close(full(parameter.grad), mean_over(grid["dp"], low.get_parameter(name).grad.float()), dtype)


@check
def readme_example():
    """The tensor-parallel example, in the process group that torchrun would give it."""
    text = (Path(__file__).parent.parent / "README.md").read_text(encoding="utf-8")
    examples = re.findall(r"^```py\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    (example,) = (example for example in examples if "parallelize_module" in example)
    exec(compile(example, "README.md", "exec"), {})
