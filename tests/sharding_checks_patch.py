"""Checks of patched models under tensor parallelism, for the processes of sharding_worker.py."""

import copy
import importlib
import importlib.util
import itertools
import tempfile

import torch
import torch.distributed as dist
from sharding_checks import P, check, close, full, mesh_of, raises, tensors
from sharding_checks_mlp import compare, gather_sequence, tp_meshes
from torch import nn
from torch.nn import functional as F

import xfused


class Mlp(nn.Module):
    """A FusedMLP as others write it."""

    def __init__(self, bias):
        super().__init__()
        torch.manual_seed(11)
        self.fc1, self.fc2 = nn.Linear(8, 16, bias=bias), nn.Linear(16, 8, bias=bias)
        self.act = nn.GELU()
        self.dropout, self.output_dropout = P, 0.2 if bias else 0.0

    def forward(self, x):
        h = self.act(self.fc1(x))
        h = F.dropout(h, p=self.dropout, training=self.training)
        return F.dropout(self.fc2(h), p=self.output_dropout, training=self.training)


def patched(bias):
    mlp = Mlp(bias)
    assert len(xfused.patch(mlp).patched) == 1 + bias
    return mlp


def plans():
    from torch.distributed.tensor import Shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

    yield {"fc1": ColwiseParallel(), "fc2": RowwiseParallel()}, False
    yield {"fc1": ColwiseParallel(use_local_output=False), "fc2": RowwiseParallel(use_local_output=False)}, False
    yield {"fc1": ColwiseParallel(input_layouts=Shard(1)), "fc2": RowwiseParallel(output_layouts=Shard(1))}, True


@check
def patched_and_tensor_parallel():
    """The layers have hooks then, so each adds its own bias: the fused call has none, as where the layer has none."""
    from torch.distributed.tensor.parallel import parallelize_module

    for (mesh, replica), bias, (plan, sequence) in itertools.product(tp_meshes(), (True, False), plans()):
        mlp = patched(bias)
        sharded = parallelize_module(copy.deepcopy(mlp), mesh, plan)
        x = tensors(3, 4, 8)[0].requires_grad_()
        x_local = x.detach().chunk(mesh.size(), 1)[mesh.get_local_rank()] if sequence else x.detach()
        whole = gather_sequence(mesh) if sequence else full
        compare(mlp, sharded, x, x_local.clone().requires_grad_(), mesh, replica, whole=whole)


@check
def patched_after_sharding_and_ranks_seeded_apart():
    from torch.distributed.tensor.parallel import parallelize_module

    mesh, x = mesh_of(4), tensors(3, 4, 8)[0]
    for bias in (True, False):
        mlp = patched(bias)
        sharded = parallelize_module(Mlp(bias), mesh, next(plans())[0])
        xfused.patch(sharded)
        torch.manual_seed(5 + dist.get_rank())
        y = sharded(x)
        torch.manual_seed(5)
        close(y, mlp(x))


@check
def patched_with_sharded_parameters_and_no_styles():
    """Bare layers: the fused call adds the biases, to partial sums after fc2."""
    from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

    mesh = mesh_of(4)
    mlp = patched(True)
    sharded = copy.deepcopy(mlp)
    places = {"fc1.weight": Shard(0), "fc1.bias": Shard(0), "fc2.weight": Shard(1), "fc2.bias": Replicate()}
    for name, place in places.items():
        layer, _, key = name.partition(".")
        shard = distribute_tensor(sharded.get_parameter(name).detach(), mesh, [place])
        sharded.get_submodule(layer).register_parameter(key, nn.Parameter(shard))
    x = tensors(3, 4, 8)[0].requires_grad_()
    x_shards = distribute_tensor(x.detach(), mesh, [Replicate()]).requires_grad_()
    torch.manual_seed(6)
    y = sharded(x_shards)
    torch.manual_seed(6)
    want = mlp(x)
    assert isinstance(y, DTensor)
    close(full(y), want)
    full(y).square().mean().backward()
    want.square().mean().backward()
    for name, parameter in sharded.named_parameters():
        close(full(parameter.grad), mlp.get_parameter(name).grad)
    close(full(x_shards.grad), x.grad)


@check
def patched_and_sharded_in_an_unknown_way_raises():
    """A mask that repeats over the ranks would be the worse outcome."""
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module

    mesh, x = mesh_of(4), tensors(12, 8)[0]
    for plan in (
        {"fc1": SequenceParallel(sequence_dim=0, use_local_output=True)},
        {"fc1": ColwiseParallel(output_layouts=Replicate())},
        {"fc1": RowwiseParallel(input_layouts=Shard(0), output_layouts=Shard(0))},
    ):
        sharded = parallelize_module(patched(True), mesh, plan)
        raises(ValueError, "use_local_output=False", sharded, x.chunk(4)[dist.get_rank()])


# ------------------------------------------------------------------------------------------------ transformers


def step(model, batch, seed, inner):
    """The loss of one training step, and the mask that a sharded layer's input shows."""
    seen = []
    handle = inner(model).register_forward_pre_hook(lambda module, args: seen.append(full(args[0]) != 0), prepend=True)
    torch.manual_seed(seed)
    loss = model.train()(**batch).loss
    handle.remove()
    loss.backward()
    return loss.detach(), seen[0]


def compare_models(model, sharded, batch, inner, mesh):
    loss, mask = step(model, batch, 9, inner)
    sharded_loss, sharded_mask = step(sharded, batch, 9, inner)
    assert torch.equal(sharded_mask, mask.chunk(mesh.size(), -1)[mesh.get_local_rank()]) and not mask.all()
    close(sharded_loss, loss)
    grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    for name, parameter in sharded.named_parameters():
        if name in grads:
            close(full(parameter.grad), grads[name])


@check
def patched_transformers_model():
    """T5's layers have no bias, BART's have one; both are patched, then sharded."""
    if importlib.util.find_spec("transformers") is None:
        return
    from patch_models import bart, t5
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    mesh = mesh_of(4)
    cases = (
        (t5, ("wi", "wo"), lambda model: model.encoder.block[1].layer[1].DenseReluDense.wo),
        (bart, ("fc1", "fc2"), lambda model: model.model.encoder.layers[1].fc2),
    )
    for build, names, inner in cases:
        torch.manual_seed(1)
        model, batch = build()
        assert len(xfused.patch(model).patched) == 4
        sharded = copy.deepcopy(model)
        for module in sharded.modules():
            children = dict(module.named_children())
            if names[0] in children and names[1] in children:
                styles = ColwiseParallel(), RowwiseParallel()
                parallelize_module(module, mesh, dict(zip(names, styles, strict=True)))
        compare_models(model, sharded, batch, inner, mesh)


@check
def transformers_own_tensor_parallelism():
    """A tp_plan, which replaces `forward` on the layers; the dropout stands after the row-wise one."""
    if importlib.util.find_spec("transformers") is None:
        return
    import transformers

    config = transformers.Starcoder2Config(
        vocab_size=64, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=4, max_position_embeddings=32, residual_dropout=P, attn_implementation="eager",
        pad_token_id=0, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    torch.manual_seed(1)
    model = transformers.Starcoder2ForCausalLM(config)
    folder = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(folder)
    if dist.get_rank() == 0:
        model.save_pretrained(folder[0])
    dist.barrier()
    options = {"tp_plan": "auto"}
    if hasattr(importlib.import_module("transformers.distributed"), "DistributedConfig"):  # its newer name
        options = {"distributed_config": transformers.distributed.DistributedConfig(tp_plan="auto")}
    sharded = transformers.AutoModelForCausalLM.from_pretrained(folder[0], attn_implementation="eager", **options)
    for part in (model, sharded):
        assert [entry.place for entry in xfused.patch(part).patched].count("c_proj > dropout") == 2
    shown = []
    batch = {"input_ids": torch.arange(3, 17).view(2, 7)}
    for part in (model, sharded):
        torch.manual_seed(9 if part is model else 9 + dist.get_rank())
        mlp = part.model.layers[0].mlp
        handle = mlp.register_forward_hook(lambda module, args, y: shown.append(y != 0))
        part.train()(**batch)
        handle.remove()
    assert torch.equal(*shown) and not shown[0].all()
