"""The mask contract, version 1, written again in numpy: the oracle that the package is compared with.

Nothing here comes from the package. The generator is Philox4x32 (Salmon, Moraes, Dror and Shaw, "Parallel random
numbers: as easy as 1, 2, 3", SC'11), checked against the known answers of Random123.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
Block = Callable[[Any, Any, Any, Any], Array]

GROUP = 8
"""Rows that share one Philox call."""

KNOWN_ANSWERS = (
    # rounds, counter, key, output: the kat_vectors file of Random123
    (7, "00000000 00000000 00000000 00000000", "00000000 00000000", "5f6fb709 0d893f64 4f121f81 4f730a48"),
    (7, "ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "5207ddc2 45165e59 4d8ee751 8c52f662"),
    (7, "243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "4dfccaba 190a87f0 c47362ba b6b5242a"),
    (10, "00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    (10, "ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    (10, "243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
)

_M0, _M1 = np.uint64(0xD2511F53), np.uint64(0xCD9E8D57)
_W0, _W1 = 0x9E3779B9, 0xBB67AE85
_LOW = np.uint64(0xFFFFFFFF)
_32 = np.uint64(32)
_CHUNK = 1 << 16


def as_words(value: Any) -> Array:
    """Any integers, negative ones as two's complement, as uint64."""
    if isinstance(value, int):
        return np.asarray(value % 2**64, np.uint64)
    return np.asarray(value).astype(np.uint64)


def threshold(p: float) -> int:
    """T = round(p * 2**32): an element is dropped when its draw is below T.

    Raises:
        ValueError: if p is outside [0, 1].
    """
    if not 0.0 <= p <= 1.0:
        raise ValueError(f"p must be between 0 and 1, got {p!r}")
    return round(p * 2**32)


def philox(counter: tuple[Any, Any, Any, Any], key: tuple[Any, Any], rounds: int = 10) -> tuple[Array, ...]:
    """Philox4x32: four words from four counter words and two key words.

    Args:
        counter, key: integers or integer arrays that broadcast; only the low 32 bits count.
        rounds: rounds, 10 in the contract.

    Returns:
        Four uint64 arrays of the broadcast shape holding 32-bit words.
    """
    c0, c1, c2, c3 = (as_words(word) & _LOW for word in counter)
    k0, k1 = (as_words(word) & _LOW for word in key)
    for turn in range(rounds):
        r0 = (k0 + np.uint64(turn * _W0 % 2**32)) & _LOW
        r1 = (k1 + np.uint64(turn * _W1 % 2**32)) & _LOW
        first, second = c0 * _M0, c2 * _M1
        c0, c1 = (second >> _32) ^ c1 ^ r0, second & _LOW
        c2, c3 = (first >> _32) ^ c3 ^ r1, first & _LOW
    return tuple(np.broadcast_arrays(c0, c1, c2, c3))


def block(seed: Any, offset: Any, group: Any, column: Any, rounds: int = 10) -> Array:
    """The four words of one call of the contract.

    Args:
        seed, offset: 64-bit integers or arrays of them.
        group: row // 8, its low 32 bits count.
        column: its low 32 bits count.

    Returns:
        uint32 array of the broadcast shape plus a last dimension of 4: word j belongs to rows 2j and 2j + 1.
    """
    key, position = as_words(seed), as_words(offset)
    words = philox((group, position & _LOW, column, position >> _32), (key & _LOW, key >> _32), rounds)
    return np.stack(words, -1).astype(np.uint32)


def rotate(words: Array) -> Array:
    """rotate_left(word, 16) of uint32 words."""
    return (words << np.uint32(16)) | (words >> np.uint32(16))


def draws(seed: int, offset: int, rows: Array, columns: Array, block: Block = block) -> Array:
    """The numbers that the contract compares with T.

    Args:
        seed, offset: 64-bit integers.
        rows, columns: 1-D int64 arrays of global indices, in any order.
        block: the generator, `contract.block` or a broken one with its signature.

    Returns:
        uint32 array (rows, columns).
    """
    rows, columns = np.asarray(rows, np.int64), np.asarray(columns, np.int64)
    out = np.empty((len(rows), len(columns)), np.uint32)
    groups, place = np.unique(rows // GROUP, return_inverse=True)
    order = np.argsort(place, kind="stable")
    step = max(1, _CHUNK // max(1, len(columns)))
    for start in range(0, len(groups), step):
        words = block(seed, offset, groups[start : start + step, None], columns[None, :])
        low, high = np.searchsorted(place[order], (start, start + step))
        chosen = order[low:high]
        word = words[place[chosen] - start, :, rows[chosen] % GROUP // 2]
        out[chosen] = np.where((rows[chosen] % 2 == 1)[:, None], word, rotate(word))
    return out


def mask(
    seed: int, offset: int, rows: int, columns: int, p: float, origin: tuple[int, int] = (0, 0), block: Block = block
) -> Array:
    """The keep mask of the contract: bool array (rows, columns), True where kept.

    Args:
        seed, offset: 64-bit integers.
        p: drop probability, 0 to 1.
        origin: global row and column of element (0, 0).
        block: the generator, as in `draws`.
    """
    limit = threshold(p)
    place = np.arange(rows, dtype=np.int64) + origin[0], np.arange(columns, dtype=np.int64) + origin[1]
    if limit == 2**32:
        return np.zeros((rows, columns), bool)
    return draws(seed, offset, *place, block=block) >= np.uint32(limit)


def shared_word(p: float) -> tuple[float, float]:
    """The two rows that share a word: how often both are dropped, and their correlation, exactly from T.

    With T = a * 2**16 + b, a word (high, low) drops its odd row when high < a, or high = a and low < b, and its even
    row when the halves change places. Counting the 2**32 words gives a**2 + 2 min(a, b) + [b > a] that drop both.

    Returns:
        (probability that both are dropped, correlation of the two; 0 at p = 0 and 1).
    """
    limit = threshold(p)
    a, b = divmod(limit, 2**16)
    both = a * a + 2 * min(a, b) + (b > a)
    variance = limit * (2**32 - limit)
    covariance = both * 2**32 - limit * limit
    return both / 2**32, covariance / variance if variance else 0.0
