"""Streams of raw words on standard output, for batteries that read them."""

import os
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch

from stats.sources import signed
from xfused import _triton
from xfused.philox import draw_words, philox_torch

if _triton.HAS_TRITON:
    import triton
    import triton.language as tl

    jit = triton.jit
else:  # torch draws the words then
    tl, jit = _triton.tl, _triton.jit

ORDERS = ("column", "row", "call")
FORMATS = ("raw32", "raw16")
WIDTH = 1 << 12
"""Columns that a stream in row order walks along, groups that one in column order walks down, before they turn."""
CALL = 64
"""Words of one call before a stream in call order moves on to the next offset."""
BLOCK = 1 << 10
_LOW = 2**32 - 1


@jit
def words_kernel(
    out_ptr,
    key: "i64",  # type: ignore[name-defined]  # noqa: F821
    start: "i64",  # type: ignore[name-defined]  # noqa: F821
    ORDER: tl.constexpr,
    WIDTH: tl.constexpr,
    CALL: tl.constexpr,
    PTX: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The words of Philox calls start ... of a stream to out (calls, 4), or (calls / WIDTH, 4, WIDTH) in row order."""
    index = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    call = start + index
    offset = call * 0
    slot = index * 4
    between = 1
    if ORDER == "column":
        group, column = call % WIDTH, call // WIDTH
    elif ORDER == "row":
        group, column = call // WIDTH, call % WIDTH
        slot = index // WIDTH * (4 * WIDTH) + index % WIDTH
        between = WIDTH
    else:
        group, column, offset = call * 0, call % (CALL // 4), call // (CALL // 4)
    words = draw_words(group.to(tl.uint32), column.to(tl.uint32), key + tl.zeros_like(call), offset, PTX)
    for j in tl.static_range(4):
        tl.store(out_ptr + slot + j * between, words[j].to(tl.int32, bitcast=True))


def words_torch(seed: int, start: int, calls: int, order: str, device: str) -> torch.Tensor:
    """The same words by the package's Philox in torch: int32 tensor in stream order."""
    call = torch.arange(start, start + calls, dtype=torch.int64, device=device)
    zero = torch.zeros((), dtype=torch.int64, device=device)
    group, column, offset = {
        "column": lambda: (call % WIDTH, call // WIDTH, zero),
        "row": lambda: (call // WIDTH, call % WIDTH, zero),
        "call": lambda: (zero, call % (CALL // 4), call // (CALL // 4)),
    }[order]()
    key = signed(seed)
    found = philox_torch(group & _LOW, offset & _LOW, column & _LOW, offset >> 32, key & _LOW, key >> 32 & _LOW)
    words = torch.stack([word.expand(calls) for word in found], -1).to(torch.int32)
    if order == "row":  # a row of words at a time
        words = words.view(-1, WIDTH, 4).transpose(1, 2)
    return words.reshape(-1)


def words_triton(seed: int, start: int, calls: int, order: str, device: str) -> torch.Tensor:
    """The same words by the package's Philox in Triton."""
    out = torch.empty(4 * calls, dtype=torch.int32, device=device)
    ptx = _triton.has_ptx(out.device)
    words_kernel[(calls // BLOCK,)](out, signed(seed), start, order, WIDTH, CALL, ptx, BLOCK, num_warps=4)
    return out


def halves(words: torch.Tensor, order: str) -> torch.Tensor:
    """The leading half-words of the draws in order of the rows, as int16.

    Rows 2j and 2j + 1 lead with the low and the high half of word j. Down a column and along a call that is the order
    of a word's bytes in memory; along rows all low halves of a row of words come before its high halves.
    """
    half = words.view(torch.int16)
    return half.view(-1, WIDTH, 2).transpose(1, 2).reshape(-1) if order == "row" else half


def pieces(order: str, form: str, seed: int, device: str, calls: int) -> Iterator[torch.Tensor]:
    """Endless pieces of `calls` Philox calls, on the device."""
    draw = words_triton if _triton.runs_kernels(torch.device(device)) else words_torch
    start = 0
    while True:
        words = draw(seed, start, calls, order, device)
        yield halves(words, order) if form == "raw16" else words
        start += calls


def copied(order: str, form: str, seed: int, device: str, calls: int) -> Iterator[np.ndarray]:
    """The pieces on the host as bytes; from a GPU the next one is drawn and copied while the last is written."""
    if torch.device(device).type != "cuda":
        for piece in pieces(order, form, seed, device, calls):
            yield piece.numpy().view(np.uint8)
        return
    side = torch.cuda.Stream()
    buffers = [torch.empty(16 * calls, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
    ready: list[torch.cuda.Event] = []
    with torch.cuda.stream(side):
        for turn, piece in enumerate(pieces(order, form, seed, device, calls)):
            buffers[turn % 2].copy_(piece.view(torch.uint8), non_blocking=True)
            ready.append(torch.cuda.Event())
            ready[-1].record(side)
            if turn:
                ready.pop(0).synchronize()
                yield buffers[(turn - 1) % 2].numpy()


def write(order: str, form: str, seed: int, device: str, size: int | None = None, target: int | None = None) -> int:
    """Write a stream until `size` bytes are out or the reader closes the pipe; returns the bytes written.

    Args:
        order: "column" walks down 8 * WIDTH rows of one column after another, "row" along WIDTH columns of one row
            after another, "call" through the first words of one offset after another.
        form: "raw32" the words, "raw16" the leading half-words of the draws; both little-endian.
        target: a file descriptor, standard output by default.

    Raises:
        ValueError: for an unknown order or form.
    """
    if order not in ORDERS or form not in FORMATS:
        raise ValueError(f"order must be one of {', '.join(ORDERS)} and format one of {', '.join(FORMATS)}")
    target = sys.stdout.fileno() if target is None else target
    widen_pipe(target)
    calls = 1 << (22 if torch.device(device).type == "cuda" else 16)
    done = 0
    try:
        # the writer waits in a thread of its own, so that drawing goes on meanwhile
        with ThreadPoolExecutor(1) as writer:
            pending = None
            for piece in copied(order, form, seed, device, calls):
                data = piece.data[: None if size is None else size - done]
                if pending is not None:
                    pending.result()
                pending = writer.submit(write_all, target, data)
                done += len(data)
                if torch.device(device).type == "cuda" or done == size:
                    pending.result()
                if done == size:
                    break
    except BrokenPipeError:
        silence(target)
    return done


def write_all(target: int, data: memoryview) -> None:
    """os.write until everything is out."""
    while len(data):
        data = data[os.write(target, data) :]


def widen_pipe(target: int) -> None:
    """A pipe of 1 MiB, where the system allows it: fewer switches between writer and reader."""
    try:
        import fcntl

        fcntl.fcntl(target, fcntl.F_SETPIPE_SZ, 1 << 20)
    except (ImportError, AttributeError, OSError):
        pass


def silence(target: int) -> None:
    """Point standard output elsewhere, so that the interpreter's last flush does not complain of the broken pipe."""
    if target == 1:
        os.dup2(os.open(os.devnull, os.O_WRONLY), target)
