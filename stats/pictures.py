"""Images gathered while masks pass by: rates, autocorrelation and spectrum, summed over the seeds of a p."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from stats.outcome import Array
from stats.sample import Sample

BINS = 64


@dataclass
class Images:
    """Sums over `count` masks of one p, standard normal a mask: rate and power by bin, autocorrelation to lag 64."""

    count: int
    rate: Array
    autocorrelation: Array
    spectrum: Array


@dataclass
class Gallery:
    """Images by p."""

    images: dict[float, Images] = field(default_factory=dict)

    def add(self, sample: Sample, p: float) -> None:
        """Add one mask."""
        size = sizes(sample.shape)
        rate = (binned(sample.dropped) - size * sample.p) / np.sqrt(size * sample.p * sample.q)
        rows, columns = min(BINS, sample.shape[0] // 2 - 1), min(BINS, sample.shape[1] // 2 - 1)
        lags = np.roll(sample.autocorrelation, (rows, columns), (0, 1))[: 2 * rows + 1, : 2 * columns + 1]
        ordinates = sizes(sample.power.shape)
        power = (binned(np.fft.fftshift(sample.power, axes=0)) / sample.dropped.size - ordinates) / np.sqrt(ordinates)
        if p not in self.images:
            self.images[p] = Images(0, np.zeros_like(rate), np.zeros_like(lags), np.zeros_like(power))
        images = self.images[p]
        images.count += 1
        images.rate += rate
        images.autocorrelation += lags
        images.spectrum += power


def binned(values: Array) -> Array:
    """Sums over a grid of 64 x 64 nearly equal bins."""
    edges = [np.arange(BINS) * length // BINS for length in values.shape]
    return np.add.reduceat(np.add.reduceat(values, edges[0], axis=0, dtype=float), edges[1], axis=1)


def sizes(shape: tuple[int, ...]) -> Array:
    """How many elements each bin of such an array holds: float (64, 64)."""
    high, wide = (np.diff(np.arange(BINS + 1) * length // BINS).astype(float) for length in shape)
    return np.outer(high, wide)
