"""L0, the exact oracle: what can be checked bit for bit, with power 1 and no false alarm."""

from __future__ import annotations

import itertools

import numpy as np

from stats import contract
from stats.outcome import Outcomes, exact
from stats.run import Run

EDGES = (0, 1, 2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**32 + 1, 2**63, 2**64 - 1)
SHAPES = ((1, 1), (7, 3), (8, 129), (33, 257), (65, 1000), (129, 127))
RAGGED = ((1, 1), (5, 130), (67, 131), (129, 1000), (1000, 129))
PROBABILITIES = (2.0**-32, 2.0**-16, 0.1, 0.3, 0.5, 0.75, 0.9, 1 - 2.0**-32)
FAR_ROWS = (0, 8, 2**16, 2**31 - 8, 2**31, 2**32 - 8, 2**32, 2**34)
FAR_COLUMNS = (0, 255, 2**16 - 2, 2**16, 2**31 - 2, 2**31, 2**32 - 9)


def oracle(run: Run, index: int) -> Outcomes:
    """Every check that the source has the means for."""
    source = run.source
    if source.backward is not None:
        yield from _backward(run)
    if source.contract and source.block is not None:
        yield from _words(run)
    if source.contract:
        yield from _masks(run)
    if source.contract and source.shard is not None:
        yield from _shards(run)
    if source.block is not None:
        yield from _high_halves(run)


def _backward(run: Run) -> Outcomes:
    """The mask of the gradient is the mask of the output, at ragged edges too."""
    ps = (0.1, 0.5, 0.9) if run.source.p is None else (run.source.p,)
    wrong = total = 0
    for index, ((rows, columns), p) in enumerate(itertools.product(RAGGED, ps)):
        columns = run.source.columns or columns
        arguments = (run.seed("backward", p, index), index % 3, rows, columns, p)
        forward, backward = (run.source.draw(kind, *arguments) for kind in ("masker", "backward"))
        wrong += int((forward != backward).sum())
        total += forward.size
    yield exact("L0 backward", wrong, total)


def _words(run: Run) -> Outcomes:
    """Known answers, and words at random and boundary indices."""
    wrong = 0
    answers = [case for case in contract.KNOWN_ANSWERS if case[0] == 10]
    for _, counter, words_of_key, output in answers:
        c0, c1, c2, c3 = (int(word, 16) for word in counter.split())
        k0, k1 = (int(word, 16) for word in words_of_key.split())
        key, position = (np.array([value], np.uint64) for value in (k0 | k1 << 32, c1 | c3 << 32))
        words = run.block(key, position, np.array([c0]), np.array([c2]))
        wrong += int((words[0] != [int(word, 16) for word in output.split()]).sum())
    yield exact("L0 known answers", wrong, 4 * len(answers))

    rng = np.random.default_rng(run.base)
    anywhere = rng.integers(2**64, size=(4, 4096), dtype=np.uint64)
    edges = np.array(list(itertools.product(EDGES, EDGES, EDGES[:5], EDGES[:5])), np.uint64).T
    seed, offset, group, column = np.concatenate([anywhere, edges], axis=1)
    group, column = group & np.uint64(2**32 - 1), column & np.uint64(2**32 - 1)
    words = run.block(seed, offset, group, column)
    yield exact("L0 words", int((words != contract.block(seed, offset, group, column)).sum()), words.size)


def _masks(run: Run) -> Outcomes:
    """Masks at random and boundary seeds, offsets, shapes and thresholds; each leading half-word; p = 0 and 1."""
    rng = np.random.default_rng(run.base)
    seeds = [*EDGES, *(int(word) for word in rng.integers(2**64, size=7, dtype=np.uint64))]
    wrong = total = 0
    for index, (shape, p) in enumerate(itertools.product(SHAPES, PROBABILITIES)):
        arguments = (seeds[index % len(seeds)], seeds[(5 * index + 3) % len(seeds)], *shape, p)
        keep = run.draw(*arguments)
        wrong += int((keep != contract.mask(*arguments)).sum())
        total += keep.size
    yield exact("L0 masks", wrong, total)

    rows, columns = 1024, 1536
    draws = contract.draws(run.base, 0, np.arange(rows), np.arange(columns)).ravel()
    halves, first = np.unique(draws >> np.uint32(16), return_index=True)
    wrong = 0
    for p in PROBABILITIES:
        keep = run.draw(run.base, 0, rows, columns, p).ravel()
        high, low = divmod(contract.threshold(p), 2**16)
        # halves below T's high half drop, those above stay, and its own drops if what follows is below T's low half
        at = draws[first[halves == high]]
        expected = int((halves < high).sum()) + int(((at & np.uint32(0xFFFF)) < low).sum())
        wrong += abs(int((~keep[first]).sum()) - expected)
    yield exact("L0 leading half-words", wrong + 2**16 - len(halves), len(PROBABILITIES) * len(halves))

    ends = [(run.draw(seed, 3, 65, 130, p) != (p == 0)).sum() for seed in (0, 1, 2**63) for p in (0.0, 1.0)]
    yield exact("L0 p = 0 and p = 1", int(sum(ends)), 6 * 65 * 130)


def _shards(run: Run) -> Outcomes:
    """Slices are shards; every bit of a draw, at near and far indices, by thresholds on both sides of it."""
    wrong = total = 0
    rows, columns, p = 67, 301, 0.3
    whole = run.draw(run.base + 5, 2**40, rows, columns, p)
    for row, column in itertools.product((0, 1, 7, 8, 30), (0, 1, 127, 128, 200)):
        part = run.source.draw("shard", run.base + 5, 2**40, rows - row, columns - column, p, (row, column))
        wrong += int((part != whole[row:, column:]).sum())
        total += part.size
    yield exact("L0 slices are shards", wrong, total)

    wrong = total = 0
    for index, (row, column) in enumerate(itertools.product(FAR_ROWS, FAR_COLUMNS)):
        row += index % 8
        seed, offset = EDGES[index % len(EDGES)], EDGES[(index // 3) % len(EDGES)]
        draw = int(contract.draws(seed, offset, np.array([row]), np.array([column]))[0, 0])
        for limit, kept in ((draw, True), (draw + 1, False)):
            keep = run.source.draw("shard", seed, offset, 1, 1, limit / 2**32, (row, column))
            wrong += int(keep[0, 0] != kept)
            total += 1
    yield exact("L0 draws at far indices", wrong, total)


def _high_halves(run: Run) -> Outcomes:
    """seed and seed + 2**32, offset and offset + 2**32 differ."""
    seed, shape = run.seed("high", 0.5, 0) % 2**32, (64, 128)
    base = run.draw(seed, 0, *shape, 0.5)
    for name, words in (("seed", (seed + 2**32, 0)), ("offset", (seed, 2**32))):
        yield exact(f"L0 {name} + 2**32 differs", int(np.array_equal(base, run.draw(*words, *shape, 0.5))), 1)
