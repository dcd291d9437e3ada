"""One line of a CSV, and reading and writing them."""

import csv
import dataclasses
from collections.abc import Iterable
from pathlib import Path
from typing import IO


@dataclasses.dataclass(frozen=True)
class Row:
    """One provider in one mode. Milliseconds are the 20th, 50th and 80th percentile of a call.

    mode: "fwd" (under grad), "bwd" or "fwd+bwd", "copy" for the copy of x. bytes: what has to move at least.
    copy_share: share of the bandwidth that the copy had in the same run. over_copy: ratio of the medians. peak_bytes:
    beyond what was there before; -1 where there is no GPU; for "bwd", of forward and backward. timing: whose clock.
    """

    op: str
    provider: str
    mode: str
    dtype: str
    M: int
    N: int
    p: float
    activation: str
    ms_20: float
    ms_50: float
    ms_80: float
    bytes: int
    gb_per_s: float
    copy_share: float
    over_copy: float
    peak_bytes: int
    timing: str
    torch: str
    triton: str
    xfused: str
    gpu: str

    @property
    def shape(self) -> str:
        return f"{self.M}x{self.N}"

    @property
    def case(self) -> tuple[object, ...]:
        """What rows of one run of one case have in common."""
        return self.op, self.dtype, self.M, self.N, self.p, self.activation, self.timing, self.gpu


COLUMNS = [field.name for field in dataclasses.fields(Row)]
_KINDS: dict[str, type] = {field.name: field.type for field in dataclasses.fields(Row)}  # type: ignore[misc]


class Writer:
    """Writes rows as they come, so that an interrupted run leaves what it has measured."""

    def __init__(self, file: IO[str]) -> None:
        self._file = file
        self._writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        self._writer.writeheader()
        self._file.flush()

    def write(self, rows: Iterable[Row]) -> None:
        for row in rows:
            values = dataclasses.asdict(row)
            self._writer.writerow({k: f"{v:.6g}" if isinstance(v, float) else v for k, v in values.items()})
        self._file.flush()


def read(paths: Iterable[Path]) -> list[Row]:
    """The rows of all files.

    Raises:
        ValueError: a file that cannot be read, lacks a column, or holds something that is no number where one belongs.
    """
    rows = []
    for path in paths:
        try:
            with path.open(newline="", encoding="utf-8") as file:
                reader = csv.DictReader(file)
                if missing := [name for name in COLUMNS if name not in (reader.fieldnames or [])]:
                    raise ValueError(f"{path}: has no column {', '.join(missing)}")
                for line in reader:
                    try:
                        rows.append(Row(**{name: _KINDS[name](line[name]) for name in COLUMNS}))
                    except (TypeError, ValueError) as error:
                        raise ValueError(f"{path}, line {reader.line_num}: {error}") from None
        except (OSError, UnicodeDecodeError) as error:
            raise ValueError(f"{path}: cannot be read: {error}") from None
    return rows
