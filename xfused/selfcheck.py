"""`python -m xfused`: versions, the device, and a self-check against the mask contract and against float64.

The contract is evaluated here once more, in plain Python integers, so that nothing of `xfused.philox` is trusted.
"""

import functools
import math
import os
import platform
import random
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor, wait
from multiprocessing import get_context
from typing import NamedTuple

import torch
from torch import Tensor

import xfused

from ._triton import HAS_TRITON, INTERPRET, runs_kernels
from .activations import TABLE

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
Z_BOUND = 6.0  # of a drop count, in standard errors: passed by chance with probability 2e-9

# counter, key, output of Philox4x32-10, from Random123's kat_vectors
KNOWN_ANSWERS = (
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
)


# --------------------------------------------------------------------------------- the contract, in Python integers


def philox4x32_10(counter: tuple[int, ...], key: tuple[int, ...]) -> tuple[int, ...]:
    """Four 32-bit words from four counter words and two key words."""
    a, b, c, d = counter
    k, l = key  # noqa: E741
    for _ in range(10):
        p, q = a * 0xD2511F53, c * 0xCD9E8D57
        a, b, c, d = (q >> 32) ^ b ^ k, q & 0xFFFFFFFF, (p >> 32) ^ d ^ l, p & 0xFFFFFFFF
        k, l = (k + 0x9E3779B9) & 0xFFFFFFFF, (l + 0xBB67AE85) & 0xFFFFFFFF  # noqa: E741
    return a, b, c, d


def split(word: int) -> tuple[int, int]:
    """(low, high) halves of a 64-bit word."""
    return word & 0xFFFFFFFF, word >> 32


@functools.lru_cache(4096)
def draw_words(group: int, col: int, key: int, offset: int) -> tuple[int, ...]:
    """The words of rows 8 * group to 8 * group + 7; key and offset unsigned."""
    low, high = split(offset)
    return philox4x32_10((group, low, col, high), split(key))


def draw(row: int, col: int, key: int, offset: int) -> int:
    """The 32 bits that decide about one element."""
    word = draw_words(row // 8, col, key, offset)[row % 8 // 2]
    return word if row % 2 == 1 else (word << 16 | word >> 16) & 0xFFFFFFFF


def keep_mask(shape: tuple[int, int], T: int, key: int, offset: int, origin: tuple[int, int]) -> Tensor:
    """The keep mask of a window: bool, of that shape, on the CPU."""
    (rows, cols), (row0, col0) = shape, origin
    return torch.tensor([[draw(row0 + i, col0 + j, key, offset) >= T for j in range(cols)] for i in range(rows)])


def seed_tensor(key: int, offset: int) -> Tensor:
    """Two unsigned 64-bit words as the int64 (2,) that xfused takes."""
    return torch.tensor([word - 2**64 if word >= 2**63 else word for word in (key, offset)])


# -------------------------------------------------------------------------------------------------------- checks


class Result(NamedTuple):
    held: bool
    detail: str


class Window(NamedTuple):
    """A part of a mask: where, how large, of which seed (unsigned words), at T / 2**32."""

    origin: tuple[int, int]
    shape: tuple[int, int]
    key: int
    offset: int
    T: int


def windows(count: int, rng: random.Random) -> list[Window]:
    """Random and boundary windows: near 0, 2**31, 2**32 and the last row and column, seeds of every sign and width."""
    rows = (0, 1, 7, 8, 2**31 - 3, 2**32 - 5, 2**34 - 9, 2**34 - 3, 2**35 - 24)
    cols = (0, 1, 2**31 - 5, 2**31, 2**32 - 16)
    words = (0, 1, 2**31, 2**32 - 1, 2**32, 2**63 - 1, 2**63, 2**64 - 1)
    thresholds = (1, 2**15, 2**16 + 1, round(0.1 * 2**32), 2**31 - 1, 2**31, 2**31 + 1, 2**32 - 2**16, 2**32 - 1)
    found = []
    for index in range(count):
        at_edge = index % 2 == 0
        found.append(
            Window(
                origin=(
                    rng.choice(rows) if at_edge else rng.randrange(2**35 - 24),
                    rng.choice(cols) if at_edge else rng.randrange(2**32 - 16),
                ),
                shape=(rng.randint(1, 24), rng.randint(1, 16)),
                key=rng.choice(words) if index % 3 == 0 else rng.getrandbits(64),
                offset=rng.choice(words) if index % 5 == 0 else rng.getrandbits(64),
                T=rng.choice(thresholds) if index % 4 else rng.randrange(1, 2**32),
            )
        )
    return found


def decides(row: int, col: int, key: int, offset: int, bits: int, device: torch.device) -> bool:
    """Whether the package's draw at (row, col) is exactly `bits`: T = bits keeps it, T = bits + 1 drops it."""
    seed = seed_tensor(key, offset)
    kept = [
        bool(xfused.dropout_mask((1, 1), T / 2**32, seed, origin=(row, col), device=device)) for T in (bits, bits + 1)
    ]
    return kept == [True, False]


def check_known_answers(device: torch.device) -> Result:
    wrong = 0
    for counter, key, words in KNOWN_ANSWERS:
        wrong += philox4x32_10(counter, key) != words
        group, low, col, high = counter
        for index, word in enumerate(words):  # an odd row's draw is the word as it is
            row, offset = 8 * group + 2 * index + 1, high << 32 | low
            wrong += not decides(row, col, key[1] << 32 | key[0], offset, word, device)
    return Result(wrong == 0, f"{len(KNOWN_ANSWERS)} vectors, {wrong} wrong")


def check_mask(device: torch.device) -> Result:
    wrong = elements = 0
    for w in windows(120, random.Random(1)):
        got = xfused.dropout_mask(w.shape, w.T / 2**32, seed_tensor(w.key, w.offset), origin=w.origin, device=device)
        wrong += int((got.cpu() != keep_mask(w.shape, w.T, w.key, w.offset, w.origin)).sum())
        elements += got.numel()
    return Result(wrong == 0, f"{elements} elements of 120 windows, {wrong} wrong")


def check_thresholds(device: torch.device) -> Result:
    rng = random.Random(2)
    wrong = 0
    for w in windows(60, rng):
        row, col = w.origin[0] + rng.randrange(8), w.origin[1]
        wrong += not decides(row, col, w.key, w.offset, draw(row, col, w.key, w.offset), device)
    return Result(wrong == 0, f"60 draws at the last bit of p, {wrong} wrong")


def check_layer_mask(device: torch.device) -> Result:
    """Of the layer's own forward and backward, in every dtype."""
    wrong = elements = 0
    for w in windows(12, random.Random(3)):
        keep = keep_mask(w.shape, w.T, w.key, w.offset, w.origin)
        scale = 1 / (1 - w.T / 2**32)
        for dtype in DTYPES:
            if scale > torch.finfo(dtype).max:
                continue  # what is kept is infinite
            x = torch.ones(w.shape, dtype=dtype, device=device, requires_grad=True)
            y = xfused.bias_act_dropout(x, p=w.T / 2**32, seed=seed_tensor(w.key, w.offset), origin=w.origin)
            (dx,) = torch.autograd.grad(y, x, torch.ones_like(y))
            exact = (keep.double() * scale).to(dtype)
            for got in (y, dx):
                wrong += int(((got.detach().cpu() != 0) != keep).sum())
                wrong += not torch.allclose(got.detach().cpu(), exact, rtol=2 * torch.finfo(dtype).eps, atol=0)
                elements += got.numel()
    return Result(wrong == 0, f"{elements} elements, forward and backward, {wrong} wrong")


def check_seeds(device: torch.device) -> Result:
    """Drawn anew by every call, and governed by torch.manual_seed, whose state this leaves as it was."""
    ones = torch.ones((64, 64), device=device)
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        runs = []
        for _ in range(2):
            torch.manual_seed(7)
            runs.append([xfused.bias_act_dropout(ones, p=0.5) for _ in range(2)])
    (first, second), again = runs
    repeats = torch.equal(first, again[0]) and torch.equal(second, again[1])
    differs = not torch.equal(first, second)
    return Result(
        repeats and differs,
        f"torch.manual_seed {'repeats' if repeats else 'DOES NOT repeat'} them, "
        f"two calls {'differ' if differs else 'DO NOT differ'}",
    )


def check_drop_rate(device: torch.device) -> Result:
    """The zeros in the layer's output against the binomial distribution with p = T / 2**32."""
    worst, rows, cols = 0.0, 1024, 256
    ones = torch.ones((rows, cols), device=device)
    for index, p in enumerate((0.001, 0.1, 0.5, 0.9)):
        dropped = sum(int((xfused.bias_act_dropout(ones, p=p, seed=1000 * index + key) == 0).sum()) for key in range(2))
        n, exact = 2 * ones.numel(), round(p * 2**32) / 2**32
        worst = max(worst, abs(dropped - n * exact) / math.sqrt(n * exact * (1 - exact)))
    return Result(
        worst < Z_BOUND, f"p = 0.001, 0.1, 0.5, 0.9: at most {worst:.1f} standard errors off, {Z_BOUND:.0f} allowed"
    )


CHECKS: dict[str, Callable[[torch.device], Result]] = {
    "known answers of Philox4x32-10": check_known_answers,
    "mask = contract": check_mask,
    "threshold = round(p * 2**32)": check_thresholds,
    "mask in the layer": check_layer_mask,
    "seeds": check_seeds,
    "drop rate": check_drop_rate,
}


# ------------------------------------------------------------------------------------------------ against float64

P, SEED, ORIGIN, SHAPE = 0.25, 11, (5, 3), (61, 37)


@functools.lru_cache(1)
def _keep() -> Tensor:
    return keep_mask(SHAPE, round(P * 2**32), SEED, 0, ORIGIN)


def errors(name: str, dtype: torch.dtype, device: torch.device) -> dict[str, float]:
    """The largest errors of y, dx and dbias against float64, as shares of what is allowed (1 = just allowed).

    Allowed: of y, 4 units in the last place (1 in 16-bit dtypes) of the larger of the value and the function's own
    scale, which is 1 times what the element is multiplied with. Of dx the same, times |x + bias| beyond 1 but in
    16-bit dtypes, since the derivatives multiply a rounded function with it. Of dbias, the sum over rows of what is
    allowed of dx; in 16-bit dtypes, where the sum is taken before dx is rounded, 2**-13 of its scale.
    """
    generator = torch.Generator().manual_seed(5)
    x, bias, dy = (3 * torch.randn(shape, generator=generator) for shape in (SHAPE, SHAPE[1:], SHAPE))
    x, dy = x.to(dtype), dy.to(dtype)
    bias = bias.to(torch.promote_types(dtype, torch.float32))

    x_d, bias_d = (t.to(device).requires_grad_() for t in (x, bias))
    y = xfused.bias_act_dropout(x_d, bias_d, activation=name, p=P, seed=SEED, origin=ORIGIN)
    dx, dbias = torch.autograd.grad(y, (x_d, bias_d), dy.to(device))

    keep, scale = _keep(), 1 / (1 - P)
    u = (x.double() + bias.double()).requires_grad_()
    exact_y = torch.where(keep, TABLE[name].forward(u, *TABLE[name].parameters.values()) * scale, 0.0)
    (exact_dx,) = torch.autograd.grad(exact_y, u, dy.double())
    exact_y = exact_y.detach()

    is_16_bit = dtype.itemsize == 2
    ulp = (1 if is_16_bit else 4) * torch.finfo(dtype).eps
    dx_scale = torch.maximum(exact_dx.abs(), scale * dy.double().abs())
    if not is_16_bit:
        dx_scale = dx_scale * u.detach().abs().clamp_min(1)
    allowed = {
        "y": (y, exact_y, ulp * exact_y.abs().clamp_min(scale)),
        "dx": (dx, exact_dx, ulp * dx_scale),
        "dbias": (dbias, exact_dx.sum(0), (2**-13 if is_16_bit else ulp) * (dx_scale * keep).sum(0)),
    }
    return {
        what: ((got.detach().cpu().double() - exact).abs() / bound.clamp_min(1e-300)).max().item()
        for what, (got, exact, bound) in allowed.items()
    }


# --------------------------------------------------------------------------------------------------------- report


def versions(device: torch.device) -> str:
    """Python, torch, Triton, xfused, the device, and the path each dtype takes on it."""
    triton = "none"
    if HAS_TRITON:
        import triton as module

        triton = module.__version__ + (" (TRITON_INTERPRET)" if INTERPRET else "")
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else f"{torch.get_num_threads()} threads"
    kernels = runs_kernels(device)
    paths = "float32, bfloat16, float16: Triton kernels; float64: torch" if kernels else "torch for every dtype"
    return (
        f"xfused {xfused.__version__}, Python {platform.python_version()}, torch {torch.__version__}, triton {triton}\n"
        f"device {device} ({name}), through {paths}"
    )


def cell(name: str, dtype: torch.dtype, device: torch.device) -> tuple[bool, str]:
    """Whether no error passes what is allowed, and the table's text for them."""
    try:
        shares = errors(name, dtype, device).values()
    except Exception as error:
        return False, f"FAILED {type(error).__name__}"
    held = all(share <= 1 for share in shares)  # False for NaN
    return held, ("" if held else "FAILED ") + " ".join(f"{share:.2f}" for share in shares)


def compile_row(name: str, device: torch.device) -> None:
    """Leaves an activation's kernels in Triton's cache on disk; whether they are right is not looked at."""
    for dtype in DTYPES:
        errors(name, dtype, device)


def run(device: torch.device) -> int:
    """Prints the report; returns 0 if every check held, else 1."""
    start = time.perf_counter()
    print(versions(device), flush=True)
    failed = []
    print()
    for name, check in CHECKS.items():
        try:
            result = check(device)
        except Exception as error:  # a broken installation is what this is to find
            result = Result(False, f"{type(error).__name__}: {error}")
        if not result.held:
            failed.append(name)
        print(f"{'ok' if result.held else 'FAILED':<7} {name:<31} {result.detail}", flush=True)

    names = xfused.activations()
    workers = min(8, os.cpu_count() or 1) if runs_kernels(device) else 0
    if workers:
        print("\ncompiling the kernels of every activation, which takes a while the first time", flush=True)
    print("\nlargest error of y, dx, dbias against float64, as a share of what is allowed (1 = just allowed)")
    print(" " * 16 + "".join(f" {str(dtype).removeprefix('torch.'):>21}" for dtype in DTYPES), flush=True)
    # Triton compiles under Python's lock, so other processes fill its cache; the errors are those found in this one
    with ProcessPoolExecutor(workers or 1, get_context("spawn")) as pool:
        compiled = [pool.submit(compile_row, name, device) for name in names] if workers else []
        for index, name in enumerate(names):
            if compiled:
                wait(compiled[index : index + 1])
            cells = [cell(name, dtype, device) for dtype in DTYPES]
            failed += [f"{name} in {dtype}" for dtype, (held, _) in zip(DTYPES, cells, strict=True) if not held]
            print(f"{name:<16}" + "".join(f" {text:>21}" for _, text in cells), flush=True)

    seconds = time.perf_counter() - start
    total = len(CHECKS) + len(DTYPES) * len(names)
    if failed:
        print(f"\nFAILED: {len(failed)} of {total} checks, in {seconds:.1f} s: {'; '.join(failed)}")
        return 1
    print(f"\nall {total} checks held, in {seconds:.1f} s")
    return 0
