"""The mask contract, version 1: which elements dropout keeps, on every device and in every shard.

    seed        two 64-bit words: key, offset                      (int64 tensor of shape (2,))
    T           round(p * 2**32), 0 <= T <= 2**32
    word        Philox4x32-10( key     = (key_lo, key_hi),
                               counter = (row // 8, offset_lo, col, offset_hi) )[ (row % 8) // 2 ]
    draw        word                    if row is odd
                rotate_left(word, 16)   if row is even
    keep(row, col)  <=>  draw >= T      (unsigned 32-bit comparison)
    scale       1 / (1 - p)             (p = 1: everything is dropped, the output is exactly 0)

`row` is the flattened index over all dimensions but the last, `col` the index in the last one, both global: an
`origin = (row0, col0)` is added first, so a shard draws exactly its slice of the whole mask.

Philox: Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC 2011.
This file holds the Triton half, the torch half, the threshold, and the drawing of seeds (the only state there is).
"""

import functools
import threading

import torch
import torch._functorch.config as functorch_config
from torch import Tensor

from ._triton import jit, tl

ROWS_PER_CALL = 8  # one Philox call gives four words, each word the draws of two rows
MAX_ROW = 2**35 - 1  # row // 8 is one 32-bit counter word
MAX_COL = 2**32 - 1

_M0, _M1 = 0xD2511F53, 0xCD9E8D57  # multipliers of Philox4x32
_W0, _W1 = 0x9E3779B9, 0xBB67AE85  # Weyl increments of its key: golden ratio, sqrt(3) - 1
_LOW = 0xFFFFFFFF
_CACHE_ELEMENTS = 2**15  # of a block of words on the CPU: its int64 temporaries stay in cache


# ---------------------------------------------------------------------------------------------- Triton half


@jit
def mul_wide(a, b: tl.constexpr, PTX: tl.constexpr):
    """(low, high) 32-bit words of a * b, a uint32: one 32x32->64 multiplication."""
    if PTX:
        low, high = tl.inline_asm_elementwise(
            "{ .reg .b64 t; mul.wide.u32 t, $2, $3; mov.b64 {$0, $1}, t; }",
            "=r,=r,r,n",
            [a, b],
            (tl.uint32, tl.uint32),
            True,
            1,
        )
    else:
        product = a.to(tl.uint64) * b
        low, high = product.to(tl.uint32), (product >> 32).to(tl.uint32)
    return low, high


@jit
def philox(c0, c1, c2, c3, k0, k1, PTX: tl.constexpr, ROUNDS: tl.constexpr = 10):
    """Philox4x32 on broadcastable uint32 counters (c0..c3) and key (k0, k1): four uint32 words."""
    for _ in tl.static_range(ROUNDS):
        lo0, hi0 = mul_wide(c0, 0xD2511F53, PTX)
        lo1, hi1 = mul_wide(c2, 0xCD9E8D57, PTX)
        c0, c1, c2, c3 = hi1 ^ c1 ^ k0, lo1, hi0 ^ c3 ^ k1, lo0
        k0 += 0x9E3779B9
        k1 += 0xBB67AE85
    return c0, c1, c2, c3


@jit
def draw_words(group, col, key, offset, PTX: tl.constexpr, ROUNDS: tl.constexpr = 10):
    """The contract's four words for row group `row // 8` (uint32) and column (uint32); key and offset 64-bit."""
    return philox(
        group,
        offset.to(tl.uint32),
        col,
        (offset >> 32).to(tl.uint32),
        key.to(tl.uint32),
        (key >> 32).to(tl.uint32),
        PTX,
        ROUNDS,
    )


@jit
def row_draw(words, K: tl.constexpr):
    """The 32-bit draw of row `8 * group + K`."""
    word = words[K // 2]
    return word if K % 2 == 1 else (word << 16) | (word >> 16)


@jit
def drop(y, words, K: tl.constexpr, last_dropped, PTX: tl.constexpr):
    """y (fp32) where row `8 * group + K` is kept, else 0; `last_dropped` = T - 1, so that T = 2**32 fits too."""
    draw = row_draw(words, K)
    if PTX:  # LLVM would select after packing to 16 bits, at three more instructions
        y = tl.inline_asm_elementwise(
            "{ .reg .pred p; setp.hi.u32 p, $2, $3; selp.f32 $0, $1, 0f00000000, p; }",
            "=f,f,r,r",
            [y, draw, last_dropped],
            tl.float32,
            True,
            1,
        )
    else:
        y = tl.where(draw > last_dropped, y, 0.0)
    return y


# ----------------------------------------------------------------------------------------------- torch half


def philox_torch(
    c0: Tensor, c1: Tensor, c2: Tensor, c3: Tensor, k0: int | Tensor, k1: int | Tensor, rounds: int = 10
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Philox4x32 in plain torch.

    Args:
        c0, c1, c2, c3: int64 tensors holding unsigned 32-bit counter words; they broadcast.
        k0, k1: unsigned 32-bit key words, ints or int64 tensors of one element.
        rounds: 10 by the contract.
    Returns:
        Four int64 tensors holding unsigned 32-bit words.
    """
    for _ in range(rounds):
        # int64 products wrap modulo 2**64, so both halves come out right
        product0, product1 = c0 * _M0, c2 * _M1
        c0, c1, c2, c3 = (
            ((product1 >> 32) & _LOW) ^ c1 ^ k0,
            product1 & _LOW,
            ((product0 >> 32) & _LOW) ^ c3 ^ k1,
            product0 & _LOW,
        )
        k0, k1 = (k0 + _W0) & _LOW, (k1 + _W1) & _LOW
    return c0, c1, c2, c3


def threshold(p: float) -> int:
    """T = round(p * 2**32), the count of 32-bit draws that drop; p * 2**32 is exact in float64."""
    return round(p * 2**32)


def keep_scale(p: float) -> float:
    """1 / (1 - p); 0 for p = 1, where nothing is kept."""
    return 0.0 if p == 1 else 1.0 / (1.0 - p)


def keep_mask_torch(
    rows: int, cols: int, p: float, seed: Tensor, origin: tuple[int, int], device: torch.device
) -> Tensor:
    """The contract's keep mask in plain torch: bool (rows, cols), on `device`; seed int64 (2,) there or on the CPU."""
    T = threshold(p)
    if T == 0 or T > _LOW or rows == 0 or cols == 0:
        return torch.full((rows, cols), T == 0, dtype=torch.bool, device=device)
    key, offset = seed.tolist() if seed.device.type == "cpu" else seed.unbind()  # no synchronisation for device seeds
    o0, o1 = (torch.as_tensor(word, device=device) for word in (offset & _LOW, (offset >> 32) & _LOW))
    row0, col0 = origin
    first = row0 // ROWS_PER_CALL
    groups = -(-(row0 + rows) // ROWS_PER_CALL) - first
    keep = torch.empty((groups, ROWS_PER_CALL, cols), dtype=torch.bool, device=device)
    col = (torch.arange(cols, dtype=torch.int64, device=device) + col0)[None, :]
    block = max(1, _CACHE_ELEMENTS // cols) if device.type == "cpu" else groups
    for start in range(0, groups, block):
        group = torch.arange(start, min(start + block, groups), dtype=torch.int64, device=device)[:, None] + first
        words = philox_torch(group, o0, col, o1, key & _LOW, (key >> 32) & _LOW)
        for k in range(ROWS_PER_CALL):
            word = words[k // 2]
            draw = word if k % 2 == 1 else ((word << 16) & _LOW) | (word >> 16)
            keep[start : start + block, k] = draw >= T
    skip = row0 % ROWS_PER_CALL
    whole = keep.view(-1, cols)
    return whole if len(whole) == rows else whole[skip : skip + rows].clone()  # no view: an operator's own output


# ---------------------------------------------------------------------------------------------------- seeds


def as_seed(seed: int | Tensor, device: torch.device) -> Tensor:
    """`seed` checked and as int64 (2,): an int is (key, offset 0), taken modulo 2**64.

    Raises:
        TypeError: seed is neither an int nor an int64 tensor.
        ValueError: its shape is not (2,), or it lies on a device that is neither `device` nor the CPU.
    """
    if isinstance(seed, Tensor):
        if seed.dtype != torch.int64:
            raise TypeError(f"seed: got a tensor of dtype {seed.dtype}, takes an int or an int64 tensor of shape (2,)")
        if seed.shape != (2,):
            raise ValueError(f"seed: got a tensor of shape {tuple(seed.shape)}, takes shape (2,): key, offset")
        if seed.device != device and seed.device.type != "cpu":
            raise ValueError(f"seed: got a tensor on {seed.device}, takes one on {device} or on the CPU")
        return seed
    if isinstance(seed, bool) or not isinstance(seed, int):
        raise TypeError(f"seed: got {type(seed).__name__}, takes an int or an int64 tensor of shape (2,)")
    key = (seed + 2**63) % 2**64 - 2**63  # the two's complement reading of the 64-bit word
    return torch.tensor((key, 0), dtype=torch.int64, device=device if torch.compiler.is_compiling() else None)


def _mix(word: int) -> int:
    """A bijection of 64-bit words (Stafford's variant 13 of MurmurHash3's finaliser, as in splitmix64)."""
    word = (word ^ (word >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    word = (word ^ (word >> 27)) * 0x94D049BB133111EB % 2**64
    return word ^ (word >> 31)


_DOMAIN = 0x7866757365640001  # "xfused", 1: keeps these keys apart from the plain mixed seed
_draw_lock = threading.Lock()  # get_offset and set_offset are two calls


def draw_seed(device: torch.device, generator: torch.Generator | None = None) -> Tensor:
    """The next seed of a generator (the device's default one if None): int64 (2,), on the CPU or on `device`.

    A CUDA generator is a seed and a counter. In eager mode both are read on the host, which launches nothing, and the
    counter is advanced; the key is a mixed form of the seed, since PyTorch's own kernels use the plain one. Under
    graph capture, compilation and vmap, and for every other generator, two random words are drawn on the device, so
    that each replay draws anew.
    """
    if device.type == "cuda" and not torch.compiler.is_compiling():
        words = draw_seed_words(device, generator)
        return torch.tensor(words, dtype=torch.int64) if isinstance(words, tuple) else words
    if torch.compiler.is_compiling() and torch.is_grad_enabled() and functorch_config.activation_memory_budget < 1:
        raise RuntimeError(
            "dropout in a compiled function with torch._functorch.config.activation_memory_budget < 1: PyTorch's "
            "partitioner may draw random numbers again in the backward, which would then use another mask. Draw the "
            "seed outside of the compiled function with xfused.new_seed() and pass it as seed=, or set the budget to 1"
        )
    return _random_words(device, generator)


def _random_words(device: torch.device, generator: torch.Generator | None) -> Tensor:
    return torch.randint(-(2**63), 2**63 - 1, (2,), dtype=torch.int64, device=device, generator=generator)


@functools.lru_cache(maxsize=64)
def _key_of(initial_seed: int) -> int:
    key = _mix((initial_seed ^ _DOMAIN) % 2**64)
    return key - 2**64 if key >= 2**63 else key


def draw_seed_words(device: torch.device, generator: torch.Generator | None = None) -> tuple[int, int] | Tensor:
    """`draw_seed` for a CUDA device outside of compilation: the two words, or a tensor where they are on the device."""
    if torch._C._are_functorch_transforms_active() or torch.cuda.is_current_stream_capturing():
        return _random_words(device, generator)
    if generator is None:
        torch.cuda.init()  # default_generators is empty before
        index = torch.cuda.current_device() if device.index is None else device.index
        generator = torch.cuda.default_generators[index]
    with _draw_lock:
        offset = generator.get_offset()
        generator.set_offset(offset + 4)  # PyTorch takes multiples of 4
    return _key_of(generator.initial_seed()), offset


def new_seed(device: torch.device | str | None = None, generator: torch.Generator | None = None) -> Tensor:
    """Draws the seed of one mask.

    Args:
        device: where the seed goes; default: the generator's device, else torch's default device.
        generator: drawn from; default: the default generator of `device`, so `torch.manual_seed` governs it.
    Returns:
        int64 tensor of shape (2,): key, offset.
    Raises:
        ValueError: the generator belongs to another type of device.
    """
    if device is None:
        device = generator.device if generator is not None else torch.get_default_device()
    device = torch.device(device)
    if generator is not None and generator.device.type != device.type:
        raise ValueError(f"generator: got one on {generator.device}, takes one on {device}")
    return draw_seed(device, generator).to(device)
