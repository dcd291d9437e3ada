"""DTensor rules: each rank runs the operation on its shard, with the shard's origin in the whole mask.

    x placed as            bias               gradient of the bias
    Shard(row dimension)   Replicate()        Partial(), reduced to the bias's own placement
    Shard(last dimension)  Shard(0)           Shard(0)
    Replicate()            Replicate()        Replicate()
    Partial()              an error: an activation of partial sums is not the sum of activations

Each dimension of the mesh has one of these, so any mesh works, and shards may be uneven or empty. A bias placed
otherwise is redistributed. Where no seed is given, the first rank of the mesh draws it, and the others receive its 16
bytes: generators that were seeded alike drift apart, as when PyTorch's own dropout runs on uneven shards. `seed=` saves
this communication; the only other one is the reduction of the bias's gradient.

A mesh that is part of a larger one, as tensor parallelism is inside data parallelism, belongs to a replica. The index
of the replica is mixed into the key of a drawn seed, so replicas draw different masks although their generators are
equal; the first replica draws what one device draws. Where no operand is a DTensor, as under FSDP alone, the mesh is
not known here, and masks differ as generators do: see `seed_replicas`.

Rows of a shard along an inner dimension, such as the sequence, are runs that lie apart in the mask: one launch each.
torch.compile traces all of this, the broadcast included. Dynamo does not know type(placement), placement == Shard(0),
max(..., default=) and math.prod of a generator: they are avoided here.

This module is imported when a DTensor arrives, as it imports torch.distributed.tensor.
"""

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from . import philox


@dataclass(frozen=True)
class Layout:
    """Where x (..., N) lies: the mesh, its placements there (one a mesh dimension), its global shape.

    Raises:
        ValueError: a placement that is not Shard or Replicate, or this rank is not in the mesh.
    """

    mesh: DeviceMesh
    placements: tuple[Placement, ...]
    shape: torch.Size

    def __post_init__(self) -> None:
        for placement in self.placements:
            if isinstance(placement, Partial):
                raise ValueError(
                    f"x: got a DTensor with placements {self.placements}. The activation of partial sums is not the "
                    "sum of activations: reduce x first, with x.redistribute to Replicate() or Shard(dim)"
                )
            if not isinstance(placement, (Shard, Replicate)):
                raise ValueError(f"x: got placement {placement}, takes Shard and Replicate; x.redistribute converts it")

    def local(self) -> tuple[list[int], list[int]]:
        """(first index, size) of this rank's shard in each dimension."""
        coordinate = self.mesh.get_coordinate()
        if coordinate is None:
            raise ValueError(f"x: this rank is not part of its mesh {self.mesh}")
        starts, sizes = [0] * len(self.shape), list(self.shape)
        for mesh_dim, placement in enumerate(self.placements):
            if isinstance(placement, Shard):
                dim, index = placement.dim, coordinate[mesh_dim]
                chunk = -(-sizes[dim] // self.mesh.size(mesh_dim))
                start = min(index * chunk, sizes[dim])
                starts[dim] += start
                sizes[dim] = min(chunk, sizes[dim] - start)
        return starts, sizes


# -------------------------------------------------------------------------------------------------------- seeds


@torch.compiler.assume_constant_result  # Dynamo cannot trace a mesh's root
def _replica(mesh: DeviceMesh) -> int:
    return _index_in(mesh, mesh._get_root_mesh())


@functools.lru_cache(maxsize=64)
def _index_in(mesh: DeviceMesh, root: DeviceMesh) -> int:
    """Which of the groups that share the mesh `root` this `mesh`, a part of it, is: 0 for the first, and for the whole.

    What tells them apart is where in `root` their ranks lie, in the dimensions that they do not fill; and for a `root`
    that does not hold rank 0, its first rank.
    """
    inside = torch.isin(root.mesh, mesh.mesh).nonzero()
    index = 0
    for dim, size in enumerate(root.mesh.shape):
        coordinates = set(inside[:, dim].tolist())
        if len(coordinates) < size:
            index = index * size + min(coordinates)
    return (int(root.mesh.min()) << 32) | index


def draw_seed(mesh: DeviceMesh, device: torch.device) -> Tensor:
    """`philox.draw_seed`, agreed upon by every rank of the mesh, and different from that of other replicas.

    Returns:
        int64 (2,), on `device` where ranks had to agree.
    """
    seed = philox.draw_seed(device)
    replica = _replica(mesh)
    if replica:
        mixed = philox._mix(replica)  # XORed into the key: the words of two replicas never meet
        seed = seed ^ torch.tensor((mixed - 2**64 if mixed >= 2**63 else mixed, 0), device=seed.device)
    dims = [dim for dim in range(mesh.ndim) if mesh.size(dim) > 1]
    if dims:
        seed = seed.to(device, non_blocking=True)
    for dim in dims:
        if torch.compiler.is_compiling():  # which can trace this one only
            seed = funcol.broadcast(seed, 0, mesh.get_group(dim))
        else:
            dist.broadcast(seed, group=mesh.get_group(dim), group_src=0)
    return seed


def seed_replicas(seed: int, mesh: DeviceMesh) -> None:
    """torch.manual_seed, another one on each data-parallel replica.

    Needed where replicas would draw the same masks: under FSDP or DDP without tensor parallelism, if all ranks called
    torch.manual_seed alike. Call it after the parameters are initialised, which must be equal.

    Args:
        seed: of the first replica; those of the others are derived.
        mesh: the data-parallel mesh, such as mesh["dp"]: ranks with the same coordinates in it get the same seed.
    Raises:
        ValueError: this rank is not in the mesh.
    """
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        raise ValueError(f"mesh: this rank is not part of {mesh}")
    index = 0
    for dim, i in enumerate(coordinate):
        index = index * mesh.size(dim) + i
    torch.manual_seed(philox._mix((seed + index * 0x9E3779B97F4A7C15) % 2**64) if index else seed)


# -------------------------------------------------------------------------------------------------- the operation


def _layout_of_output(x: Tensor, parameter: DTensor, fed: Tensor | None) -> Layout:
    """The layout of a plain x, a linear layer's local output, from the layer's bias (N,) or weight (N, K).

    Columns that the parameter shards, x has sharded too. On a mesh dimension where a weight is sharded along K, the
    layer was `fed` a tensor with all rows: x has them too, or a shard of them. Where the parameter is replicated, or
    the layer was fed a plain tensor that was not sharded along K, nothing tells.
    """
    mesh, last = parameter.device_mesh, x.dim() - 1
    given = {i: placement for i, placement in enumerate(parameter.placements) if mesh.size(i) > 1}
    summed = [i for i, placement in given.items() if placement.is_shard(1)]
    placements: list[Placement] = [
        Shard(last) if placement.is_shard(0) else Replicate() for placement in parameter.placements
    ]
    rows = x.shape[:-1]
    known = all(placement.is_shard(0) or placement.is_shard(1) for placement in given.values())
    if summed and fed is not None:
        rows = fed.shape[:-1]
        known &= isinstance(fed, DTensor) or fed.shape[-1] == parameter.to_local().shape[1]
    elif summed:
        known = False
    whole = torch.Size((*rows, parameter.shape[0]))
    candidates = [placements]
    if len(summed) == 1:
        for dim in range(x.dim()):
            candidates.append([Shard(dim) if i in summed else placement for i, placement in enumerate(placements)])
    if known and len(whole) == x.dim():
        for candidate in candidates:
            layout = Layout(mesh, tuple(candidate), whole)
            if layout.local()[1] == list(x.shape):
                return layout
    raise ValueError(
        f"x: got a plain tensor of shape {tuple(x.shape)} with a parameter of shape {tuple(parameter.shape)} and "
        f"placements {parameter.placements}, which does not tell how x is sharded. Pass a DTensor: the parallel styles "
        "of PyTorch put one out with use_local_output=False"
    )


def _local_bias(bias: Tensor, layout: Layout) -> Tensor:
    """The part of the bias (N,) that this rank's columns need; its gradient is reduced over the ranks that share it."""
    columns = len(layout.shape) - 1
    placements = [Shard(0) if placement.is_shard(columns) else Replicate() for placement in layout.placements]
    grad_placements = [
        Partial() if isinstance(placement, Shard) and not placement.is_shard(columns) else bias_placement
        for placement, bias_placement in zip(layout.placements, placements, strict=True)
    ]
    if not isinstance(bias, DTensor):
        bias = DTensor.from_local(bias, layout.mesh, [Replicate()] * layout.mesh.ndim, run_check=False)
    if bias.device_mesh != layout.mesh:
        raise ValueError(f"bias: got a DTensor on {bias.device_mesh}, takes one on {layout.mesh}, as x")
    if any(isinstance(placement, Partial) for placement in bias.placements):
        raise ValueError(f"bias: got a DTensor with placements {bias.placements}, takes Shard and Replicate: reduce it")
    return bias.redistribute(placements=placements).to_local(grad_placements=tuple(grad_placements))


def _call(
    function: Callable[..., Tensor], x: Tensor, bias: Tensor | None, layout: Layout, origin: Sequence[int]
) -> Tensor:
    """function(x, bias, origin=) on this rank's shard x: one call for each run of consecutive rows in it."""
    starts, sizes = layout.local()
    if list(x.shape) != sizes:
        raise ValueError(
            f"x: got a local tensor of shape {tuple(x.shape)}, takes {tuple(sizes)}, the shard of "
            f"{tuple(layout.shape)} for placements {layout.placements}"
        )
    row0, col0 = origin
    row_shape = layout.shape[:-1]
    strides = [math.prod(row_shape[dim + 1 :]) for dim in range(len(row_shape))]  # in rows
    row0 += sum(start * stride for start, stride in zip(starts, strides, strict=False))
    col0 += starts[-1]
    # rows of a shard are consecutive from its last sharded dimension on
    split = max([0, *(dim for dim in range(len(row_shape)) if sizes[dim] != row_shape[dim])])
    runs = math.prod(sizes[:split])
    if runs == 1 or x.numel() == 0:
        return function(x, bias, origin=(row0, col0))
    if bias is not None:  # its gradients are added up over the runs
        bias = bias.to(torch.promote_types(bias.dtype, torch.float32))
    ys = []
    for run, part in enumerate(x.flatten(0, split - 1).unbind()):
        row = row0
        for dim in reversed(range(split)):
            run, index = divmod(run, sizes[dim])
            row += index * strides[dim]
        ys.append(function(part, bias, origin=(row, col0)))
    return torch.stack(ys).view(sizes)


def on_shards(
    function: Callable[..., Tensor],
    x: Tensor,
    bias: Tensor | None,
    *,
    p: float,
    training: bool,
    seed: int | Tensor | None,
    origin: Sequence[int] = (0, 0),
    parameter: Tensor | None = None,
    fed: Tensor | None = None,
    **options: Any,
) -> Tensor:
    """function(x, bias, p=, training=, seed=, origin=, **options) where x or bias is a DTensor.

    Args:
        function: the operation on plain tensors: (..., N), (N,) -> (..., N), element by element.
        x: (..., N), a DTensor, or this rank's local tensor where its layout follows from `parameter`.
        bias: (N,), a DTensor or, the same on every rank, a plain tensor; or None.
        p, training, seed, origin, options: as `function` takes them; the same on every rank of the mesh.
        parameter: a DTensor with N as its first dimension, of the layer that put out a plain x; default: the bias.
        fed: (..., K), what that layer was called with.
    Returns:
        y (..., N), laid out as x; a DTensor if x is one.
    Raises:
        ValueError: x or bias is partial, or in a layout that is not known or not supported.
    """
    if isinstance(x, DTensor):
        if parameter is not None:  # a layer's output may be partial sums still, as torch's own activations take it
            summed = [Replicate() if isinstance(placement, Partial) else placement for placement in x.placements]
            x = x.redistribute(placements=summed)
        layout = Layout(x.device_mesh, tuple(x.placements), x.shape)
        local = x.to_local()
    else:
        like = bias if parameter is None else parameter
        assert isinstance(like, DTensor)
        layout, local = _layout_of_output(x, like, fed), x
    if isinstance(seed, DTensor):
        seed = seed.redistribute(placements=[Replicate()] * seed.device_mesh.ndim).to_local()
    if seed is None and training and p > 0:
        seed = draw_seed(layout.mesh, local.device)
    if bias is not None:
        bias = _local_bias(bias, layout)
    function = functools.partial(function, p=p, training=training, seed=seed, **options)
    y = _call(function, local, bias, layout, origin)
    if not isinstance(x, DTensor):
        return y
    stride = tuple(math.prod([max(size, 1) for size in x.shape[dim + 1 :]]) for dim in range(x.dim()))
    return DTensor.from_local(y, layout.mesh, layout.placements, run_check=False, shape=x.shape, stride=stride)


def _refuse(cls: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
    raise TypeError(
        f"{func}: got a DTensor; call xfused.bias_act_dropout, which gives each shard its origin in the mask"
    )


for _name in ("bias_act_dropout", "bias_act_dropout_backward"):
    torch.library.register_torch_dispatch(f"xfused::{_name}", DTensor, _refuse)
