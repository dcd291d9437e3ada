"""xfused::dropout_mask, the bare keep mask."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from .. import philox
from .._triton import has_ptx, runs_kernels
from ..kernels.bias_act_dropout import mask_kernel
from ._check import check_origin, check_p
from ._launch import cdiv, launch, origin_args, seed_args
from ._tiles import alignment, tile

torch.library.define(
    "xfused::dropout_mask",
    "(Tensor seed, SymInt rows, SymInt cols, float p, SymInt row0, SymInt col0, Device device) -> Tensor",
)


@torch.library.register_fake("xfused::dropout_mask")
def _fake(seed: Tensor, rows: int, cols: int, p: float, row0: int, col0: int, device: torch.device) -> Tensor:
    return torch.empty((rows, cols), dtype=torch.bool, device=device)


def _mask(seed: Tensor, rows: int, cols: int, p: float, row0: int, col0: int, device: torch.device) -> Tensor:
    T = philox.threshold(p)
    if not runs_kernels(device) or rows * cols == 0 or T == 0:
        return philox.keep_mask_torch(rows, cols, p, seed, (row0, col0), device)
    return launch_mask(seed, rows, cols, p, row0, col0, device)


torch.library.impl("xfused::dropout_mask", "CompositeExplicitAutograd")(_mask)


def launch_mask(seed: Tensor, rows: int, cols: int, p: float, row0: int, col0: int, device: torch.device) -> Tensor:
    """The kernel's mask; rows, cols and p above 0."""
    last_dropped = max(philox.threshold(p) - 1, 0)
    keep = torch.empty((rows, cols), dtype=torch.uint8, device=device)
    warps = 2
    block_g, block_n = tile(cols, 8, 256, 32 * warps)
    blocks_n = cdiv(cols, block_n)
    groups = cdiv(row0 % philox.ROWS_PER_CALL + rows, philox.ROWS_PER_CALL)
    args = (keep, *seed_args(seed), last_dropped, *origin_args(row0, col0), rows, cols, blocks_n)
    constants = has_ptx(device), alignment(8, cols), block_g, block_n
    launch(mask_kernel, blocks_n * cdiv(groups, block_g), args, constants, warps, 0)
    return keep.view(torch.bool)


def dropout_mask(
    shape: Sequence[int],
    p: float,
    seed: int | Tensor,
    *,
    origin: Sequence[int] = (0, 0),
    device: torch.device | str | None = None,
) -> Tensor:
    """The keep mask of the contract in `xfused.philox`: what dropout with this seed keeps of a tensor of this shape.

    Args:
        shape: of the tensor that is dropped, at least one dimension; rows are all dimensions but the last, flattened.
        p: probability that an element is dropped, 0 to 1.
        seed: an int (key; offset 0) or an int64 tensor of shape (2,): key, offset.
        origin: (row, column) of the first element in the whole mask, where `shape` is a shard of it.
        device: where the mask goes; default: the seed's device if it is a tensor, else torch's default device.
    Returns:
        bool tensor of that shape, True = kept. It does not depend on the device.
    Raises:
        TypeError, ValueError: an argument outside what is said above, by name.
    """
    shape = torch.Size(shape)
    if len(shape) == 0 or min(shape) < 0:
        raise ValueError(f"shape: got {tuple(shape)}, takes at least one dimension and no negative size")
    check_p(p)
    if device is None:
        device = seed.device if isinstance(seed, Tensor) else torch.get_default_device()
    device = torch.device(device)
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    seed = philox.as_seed(seed, device)
    rows, cols = math.prod(shape[:-1]), shape[-1]
    row0, col0 = check_origin(origin, rows, cols)
    return torch.ops.xfused.dropout_mask(seed, rows, cols, p, row0, col0, device).view(shape)
