"""One mask under test, with the intermediate results that several tests share."""

from __future__ import annotations

from functools import cached_property

import numpy as np
from scipy import fft

from stats import contract
from stats.outcome import Array


class Sample:
    """A mask drawn at one p.

    Attributes:
        dropped: bool array (rows, columns), True where dropped.
        p: the exact drop probability T / 2**32.
        contract: whether the mask claims to follow the mask contract.
    """

    def __init__(self, keep: Array, p: float, contract_mask: bool = False) -> None:
        self.dropped = ~keep
        self.contract = contract_mask
        self.p = contract.threshold(p) / 2**32

    @property
    def shape(self) -> tuple[int, int]:
        return self.dropped.shape

    @property
    def q(self) -> float:
        return 1 - self.p

    @cached_property
    def column_counts(self) -> Array:
        return self.dropped.sum(0, dtype=np.int64)

    @cached_property
    def row_counts(self) -> Array:
        return self.dropped.sum(1, dtype=np.int64)

    @cached_property
    def spectrum(self) -> Array:
        """complex64 rfft2 of the mask standardised by its own mean and variance.

        The sample's moments, not p's: with p's a perfect generator fails at p = 0.01.
        """
        mean = self.row_counts.sum() / self.dropped.size
        return fft.rfft2((self.dropped - np.float32(mean)) / np.float32(np.sqrt(mean * (1 - mean))))

    @cached_property
    def power(self) -> Array:
        """float32 array: squared modulus of the spectrum, of mean n."""
        return self.spectrum.real**2 + self.spectrum.imag**2

    @cached_property
    def autocorrelation(self) -> Array:
        """float32 array (rows, columns): correlation at every circular lag, times sqrt(n): standard normal each."""
        lags = fft.irfft2(self.power, s=self.shape) / np.float32(np.sqrt(self.dropped.size))
        rows, columns = self.shape
        # a lag that is its own negative counts every product twice: its variance is 2
        for row in {0, rows // 2} if rows % 2 == 0 else {0}:
            for column in {0, columns // 2} if columns % 2 == 0 else {0}:
                lags[row, column] /= np.float32(np.sqrt(2))
        lags[0, 0] = 0
        return lags
