"""THE table of controls: broken generators that the suite must catch, and good ones that it must let pass."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from stats import contract
from stats.contract import as_words
from stats.outcome import Array
from stats.repeats import mix
from stats.sources import Source, from_block, pcg64, philox_rounds, reference

TILE = 64
_LOW = np.uint64(0xFFFFFFFF)


@dataclass(frozen=True)
class Control:
    """A generator whose verdict is known.

    Attributes:
        name: what is wrong with it.
        make: makes the source.
        caught: (test, p) of the tests that must fail on it, by id or by the start of a subtest's name, "L3" for any
            second-level value; none for a good generator.
        only: True if those are the only tests that may fail.
        masks: fewest masks that show it: more than one where the fault depends on the key.
    """

    name: str
    make: Callable[[], Source]
    caught: tuple[tuple[str, float], ...] = ()
    only: bool = False
    masks: int = 1

    @property
    def good(self) -> bool:
        return not self.caught

    def source(self) -> Source:
        """The source, under the control's name."""
        return replace(self.make(), name=self.name)


def wrong_threshold(limit: Callable[[float], int]) -> Callable[[], Source]:
    """The contract's draws against another threshold of p."""

    def masker(seed: int, offset: int, rows: int, columns: int, p: float) -> Array:
        return contract.draws(seed, offset, np.arange(rows), np.arange(columns)) >= np.uint32(limit(p))

    return lambda: Source("threshold", masker)


def wrong_index(
    row: Callable[[Array, int], Array] = lambda row, offset: row,
    column: Callable[[Array, int], Array] = lambda column, seed: column,
    seed: Callable[[int], int] = lambda seed: seed,
    offset: Callable[[int], int] = lambda offset: offset,
) -> Callable[[], Source]:
    """The contract's draws at other rows (of row and offset) and columns (of column and seed), seeds or offsets."""

    def bits(key: int, call: int, rows: int, columns: int) -> Array:
        return contract.draws(seed(key), offset(call), row(np.arange(rows), call), column(np.arange(columns), key))

    return lambda: Source("index", above(bits))


def wrong_counter(counter: Callable[[Array, Array], tuple[Any, Any]]) -> Callable[[], Source]:
    """One Philox call an element, at a counter made of row and column together."""

    def bits(seed: int, offset: int, rows: int, columns: int) -> Array:
        c0, c2 = counter(np.arange(rows)[:, None], np.arange(columns)[None, :])
        key, position = as_words(seed), as_words(offset)
        place = c0, position & _LOW, c2, position >> np.uint64(32)
        return contract.philox(place, (key & _LOW, key >> np.uint64(32)))[0].astype(np.uint32)

    return lambda: Source("counter", above(bits))


def wrong_block(block: contract.Block, bits: bool = True, exact: bool = False) -> Callable[[], Source]:
    """Another generator of words in the contract's layout."""
    return lambda: from_block("block", block, bits=bits, exact=exact)


def above(bits: Callable[[int, int, int, int], Array]) -> Callable[[int, int, int, int, float], Array]:
    """Masks of draws."""

    def masker(seed: int, offset: int, rows: int, columns: int, p: float) -> Array:
        return bits(seed, offset, rows, columns) >= np.uint32(contract.threshold(p))

    return masker


def drawn_seeds(width: int, tile: int = 1) -> contract.Block:
    """Streams whose seeds have `width` random bits, one a tile of columns, drawn by (seed, offset)."""

    def block(seed: Any, offset: Any, group: Any, column: Any) -> Array:
        column = as_words(column)
        name = mix(mix(mix(as_words(seed)) ^ as_words(offset)) ^ column // np.uint64(tile))
        return contract.block(name & np.uint64(2**width - 1), 0, group, column % np.uint64(tile))

    return block


def column_first(rounds: int) -> contract.Block:
    """Philox with the column in counter word 1, where it is only XORed in a round later."""

    def block(seed: Any, offset: Any, group: Any, column: Any) -> Array:
        key, position = as_words(seed), as_words(offset)
        counter = (group, column, position & _LOW, position >> np.uint64(32))
        return np.stack(contract.philox(counter, (key & _LOW, key >> np.uint64(32)), rounds), -1).astype(np.uint32)

    return block


def same_words(seed: Any, offset: Any, group: Any, column: Any) -> Array:
    """One word four times."""
    words = contract.block(seed, offset, group, column)
    return np.broadcast_to(words[..., :1], words.shape)


def lcg() -> Source:
    """The linear congruential generator x <- 65539 x mod 2**24, row after row: RANDU with a shorter state."""

    def bits(seed: int, offset: int, rows: int, columns: int) -> Array:
        start = np.uint32(int(mix(as_words(seed) ^ mix(as_words(offset)))) % 2**24 | 1)
        powers = np.multiply.accumulate(np.full(rows * columns, 65539, np.uint32), dtype=np.uint32)
        return (powers * start << np.uint32(8)).reshape(rows, columns)

    return Source("lcg", above(bits), bits)


def ragged_backward() -> Source:
    """The contract, but its gradient draws the last, incomplete tile of 128 columns from the next call."""
    good = reference()

    def backward(seed: int, offset: int, rows: int, columns: int, p: float) -> Array:
        mask = contract.mask(seed, offset, rows, columns, p)
        edge = columns // 128 * 128
        mask[:, edge:] = contract.mask(seed, offset + 1, rows, columns, p)[:, edge:]
        return mask

    return replace(good, backward=backward)


def at(p: float, *tests: str) -> tuple[tuple[str, float], ...]:
    return tuple((test, p) for test in tests)


def signed_threshold(p: float) -> int:
    """(p - 0.5) * 2**31 compared as signed: drops 0.25 + p / 2."""
    return int((p - 0.5) * 2**31) + 2**31


def masked(width: int) -> Callable[[Array, int], Array]:
    return lambda index, word: index & (2**width - 1)


def few_rounds(rounds: int) -> contract.Block:
    return lambda seed, offset, group, column: contract.block(seed, offset, group, column, rounds)


CONTROLS = (
    Control("signed threshold", wrong_threshold(signed_threshold), (("T1", 0.1), ("T1", 0.25), ("T1", 0.9))),
    Control(
        "threshold saturating above 0.5",
        wrong_threshold(lambda p: min(contract.threshold(p), 2**31)),
        (("T1", 0.75), ("T1", 0.9)),
    ),
    Control("p rounded to 8 bits", wrong_threshold(lambda p: int(p * 256) << 24), at(0.1, "T1")),
    Control("16-bit seed a column", wrong_block(drawn_seeds(16), bits=False), at(0.1, "T13")),
    Control("16-bit seed a 64-column tile", wrong_block(drawn_seeds(16, TILE), bits=False), at(0.1, "T13")),
    Control("32-bit seed a column", wrong_block(drawn_seeds(32), bits=False), at(0.5, "T13")),
    Control("linear congruential generator", lcg, at(0.5, "T5", "T8 tuples 1x8", "T10", "T12")),
    Control("row counter of 8 bits", wrong_index(row=masked(8)), at(0.1, "T5")),
    Control("column counter of 8 bits", wrong_index(column=masked(8)), at(0.1, "T5")),
    Control("four words of a call equal", wrong_block(same_words, bits=False), at(0.1, "T5")),
    Control(
        "four neighbouring columns equal", wrong_index(column=lambda column, seed: column // 4), at(0.1, "T5")
    ),
    Control("row r = row r + 127", wrong_index(row=lambda row, offset: row % 127), at(0.1, "T5", "T13")),
    Control("rows repeat every 32", wrong_index(row=masked(5)), at(0.1, "T5", "T13")),
    Control(
        "seed added to the column",
        wrong_index(column=lambda column, seed: (column + seed) % 2**32, seed=lambda seed: 0),
        at(0.1, "T16 next seed: cross-correlation"),
    ),
    Control(
        "offset added to the row",
        wrong_index(row=lambda row, offset: row + offset, offset=lambda offset: 0),
        at(0.1, "T16 next call: cross-correlation"),
    ),
    Control("same counter on the next call", wrong_index(offset=lambda offset: offset % 4), at(0.1, "T16", "T14")),
    Control("same counter in every layer", wrong_index(offset=lambda offset: offset // 4), at(0.1, "T16", "T14")),
    Control("same counter on every rank", wrong_index(seed=lambda seed: seed // 8), at(0.1, "T16", "T14")),
    Control("symmetric mask", wrong_counter(lambda row, column: (np.minimum(row, column), np.maximum(row, column))),
            at(0.1, "T15"), only=True),
    Control("counter row + column", wrong_counter(lambda row, column: (row + column, 0)), at(0.1, "T5", "T8", "T14")),
    Control("counter row xor column", wrong_counter(lambda row, column: (row ^ column, 0)), at(0.1, "T5", "T8", "T14")),
    *(
        Control(f"Philox with {rounds} rounds", wrong_block(few_rounds(rounds)), at(0.5, "T5", "T8", "T11"), masks=many)
        for rounds, many in ((1, 1), (2, 1), (3, 1), (4, 1), (5, 10))
    ),
    Control(
        "Philox with 6 rounds, column in word 1", wrong_block(column_first(6)), at(0.5, "T19", "T8", "L3"), masks=32
    ),
    Control(
        "key's high half ignored",
        wrong_block(lambda s, o, g, c: contract.block(as_words(s) & _LOW, o, g, c), exact=True),
        at(0.5, "T19", "L0"),
    ),
    Control(
        "offset's high half ignored",
        wrong_block(lambda s, o, g, c: contract.block(s, as_words(o) & _LOW, g, c), exact=True),
        at(0.5, "T19", "L0"),
    ),
    Control(
        "column cut to 16 bits",
        wrong_block(lambda s, o, g, c: contract.block(s, o, g, as_words(c) & np.uint64(0xFFFF)), exact=True),
        at(0.5, "T19", "L0"),
    ),
    Control("another mask in the backward at a ragged edge", ragged_backward, at(0.1, "L0"), only=True),
    Control("Philox with 7 rounds", lambda: philox_rounds(7)),
    Control("Philox with 10 rounds", reference),
    Control("PCG64", pcg64),
)  # fmt: skip
