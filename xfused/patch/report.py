"""What `patch` did, as data and as a table."""

import re
from dataclasses import dataclass


@dataclass(frozen=True)
class PatchEntry:
    """One place in a model.

    Attributes:
        module: the path of the module that holds it, as in `named_modules`; "" is the model itself.
        class_name: of that module.
        place: the calls, in their order: "fc1 > activation_fn > dropout".
        became: what they are now, or None where they were left as they are.
        reason: why they were left, or None.
    """

    module: str
    class_name: str
    place: str
    became: str | None = None
    reason: str | None = None


class PatchReport(list[PatchEntry]):
    """A list of PatchEntry that prints as a table, in which layers that differ in their number alone share a line."""

    @property
    def patched(self) -> list[PatchEntry]:
        return [entry for entry in self if entry.became is not None]

    @property
    def left(self) -> list[PatchEntry]:
        return [entry for entry in self if entry.became is None]

    def __str__(self) -> str:
        lines: dict[tuple[str, ...], int] = {}
        for entry in self:
            module = re.sub(r"(?<![^.])\d+(?![^.])", "*", entry.module) or "(model)"
            became = f"left: {entry.reason}" if entry.became is None else entry.became
            key = (module, entry.class_name, entry.place, became)
            lines[key] = lines.get(key, 0) + 1
        rows: list[tuple[str, ...]] = [("", "module", "class", "place", "became")]
        rows += [(f"{count} x", *key) for key, count in lines.items()]
        widths = [max(len(row[i]) for row in rows) for i in range(4)]
        table = ["  ".join([*(c.ljust(w) for c, w in zip(row, widths, strict=False)), row[4]]).rstrip() for row in rows]
        return "\n".join([*table, f"{len(self.patched)} places fused, {len(self.left)} left"])

    __repr__ = __str__
