"""From outcomes to a verdict: pooling over seeds, the second level (L3), and the error budget."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
from scipy import stats

from stats.outcome import FIRST, Outcome, binomial, chisquare, normal_effect, sidak, two_sided

if TYPE_CHECKING:
    from stats.assess import Record

SECOND = 1e-9
"""A second-level p-value below this fails; at most SECOND_MOST of them."""
SECOND_MOST = 100
FIRST_MOST = 8000
SUSPICIOUS = 1e-5
"""A value below this is drawn again with four times the data."""
STAYS = 1e-6
"""Drawn again, a value below this fails."""
CLEARED = 1e-3
"""Drawn again, a value above this passes; between, the verdict is "suspicious"."""
STRUCTURE = 1e-12
"""Chance of a false alarm of an exact structure test."""
SECOND_LEAST = 32
"""Fewest p-values for the second level."""


@dataclass(frozen=True)
class Row:
    """One judged value.

    Attributes:
        name: subtest; test: its id; property: in words; layer; p (None where there is none or over all p).
        kind: "exact", "one", "worst" of the seeds by Sidak, "pooled" counts, "stouffer", "ks", "cvm".
        statistic, pvalue, n, effect, unit: as in Outcome; count: of p-values behind it.
        adjusted: Benjamini-Hochberg's p-value over the run, a label that does not gate.
        again: p-value after drawing again, where that was done.
        status: "pass", "suspicious", "fail".
    """

    name: str
    test: str
    property: str
    layer: str
    p: float | None
    kind: str
    statistic: float
    pvalue: float
    n: int
    effect: float
    unit: str
    count: int
    adjusted: float = 1.0
    again: float | None = None
    status: str = "pass"


@dataclass(frozen=True)
class Verdicts:
    verdict: str
    failures: list[str]
    rows: list[Row]
    bound: float
    cauchy: float


def rows_of(records: Mapping[Any, Record]) -> list[Row]:
    """Every value to be judged: per p the worst seed, pooled counts and Stouffer's sum; over all p the second level."""
    rows: list[Row] = []
    second: dict[str, list[Record]] = defaultdict(list)
    for (name, p), record in records.items():
        outcomes = record.outcomes
        if outcomes[0].exact:
            faults = sum(outcome.statistic for outcome in outcomes)
            first = outcomes[0]
            total = sum(outcome.n for outcome in outcomes)
            whole = replace(first, statistic=faults, pvalue=float(faults == 0), n=total)
            rows.append(_row(record, p, "exact", whole, 1))
            continue
        worst = min(outcomes, key=lambda outcome: outcome.pvalue)
        if len(outcomes) == 1:
            rows.append(_row(record, p, "one", worst, 1))
        else:
            combined = replace(worst, pvalue=sidak(worst.pvalue, len(outcomes)))
            rows.append(_row(record, p, "worst", combined, len(outcomes)))
            rows += [
                replace(_row(record, p, kind, outcome, len(outcomes)), layer="L3")
                for kind, outcome in _pooled(name, record)
            ]
        second[name].append(record)
    for group in second.values():
        rows += _second_level(group)
    return rows


def _row(record: Record, p: float | None, kind: str, outcome: Outcome, count: int) -> Row:
    test = record.test
    values = (outcome.statistic, outcome.pvalue, outcome.n, outcome.effect, outcome.unit)
    return Row(outcome.name, test.id, test.property, test.layer, p, kind, *values, count)


def _pooled(name: str, record: Record) -> Iterable[tuple[str, Outcome]]:
    outcomes = record.outcomes
    trials = [outcome.trials for outcome in outcomes if outcome.trials is not None]
    if len(trials) == len(outcomes):
        successes, sizes, probabilities = zip(*trials, strict=True)
        yield "pooled", binomial(name, sum(successes), sum(sizes), probabilities[0], outcomes[0].unit)
    if record.cells is not None:
        outcome = chisquare(name, *record.cells)
        if outcome:
            yield "pooled", outcome
    uppers = [outcome.upper for outcome in outcomes if outcome.upper is not None]
    if len(uppers) == len(outcomes):
        result = stats.combine_pvalues(np.clip(uppers, 1e-300, 1 - 1e-16), method="stouffer")
        pvalue = two_sided(float(result.pvalue), float(stats.norm.cdf(result.statistic)))
        n = sum(outcome.n for outcome in outcomes)
        # a sum of squares moves with the square of the effect
        effect = outcomes[0].effect * len(outcomes) ** -0.25
        yield "stouffer", Outcome(name, float(result.statistic), pvalue, n, float(effect), outcomes[0].unit)


def _second_level(group: list[Record]) -> Iterable[Row]:
    """L3: Kolmogorov-Smirnov (exact) and Cramer-von Mises of a subtest's p-values over seeds and p."""
    pvalues = np.array([outcome.pvalue for record in group for outcome in record.outcomes])
    if len(pvalues) < SECOND_LEAST:
        return
    ks = stats.kstest(pvalues, "uniform", method="exact")
    cvm = stats.cramervonmises(pvalues, "uniform")
    effect = np.sqrt(-np.log(SECOND / 2) / 2 / len(pvalues)) + stats.norm.isf(0.01) / 2 / np.sqrt(len(pvalues))
    p = group[0].p if len(group) == 1 else None
    for kind, result in (("ks", ks), ("cvm", cvm)):
        pvalue = float(np.clip(result.pvalue, 0, 1))
        name = group[0].outcomes[0].name
        outcome = Outcome(name, float(result.statistic), pvalue, len(pvalues), float(effect), "D of p-values")
        yield replace(_row(group[0], p, kind, outcome, len(pvalues)), layer="L3")


def judge(rows: list[Row], again: Callable[[Row], list[Row]] | None) -> Verdicts:
    """Give each value its status.

    Args:
        rows: from `rows_of`.
        again: draws a row's test once more with four times the data and returns its rows; None leaves suspicious
            values suspicious.

    Raises:
        ValueError: if there are more values than the error budget allows.
    """
    first = [row for row in rows if row.kind not in ("exact", "ks", "cvm")]
    second = [row for row in rows if row.kind in ("ks", "cvm")]
    bound = budget(len(first), len(second), sum(row.layer == "L1" for row in rows))
    pvalues = np.array([row.pvalue for row in first])
    cauchy = float(stats.cauchy.sf(stats.cauchy.isf(np.clip(pvalues, 1e-300, 1 - 1e-9)).mean())) if len(first) else 1.0
    adjusted = dict(zip(map(id, first), stats.false_discovery_control(pvalues) if len(first) else (), strict=True))
    judged: list[Row] = []
    cache: dict[tuple[str, float | None], list[Row]] = {}
    for row in rows:
        gate = {"exact": 0.5, "ks": SECOND, "cvm": SECOND}.get(row.kind, FIRST)
        row = replace(row, adjusted=float(adjusted.get(id(row), row.pvalue)))
        if row.pvalue < gate:
            row = replace(row, status="fail")
        elif row.kind != "exact" and row.pvalue < SUSPICIOUS:
            row = replace(row, status="suspicious")
        judged.append(row)
    if not any(row.status == "fail" for row in judged) and again is not None:
        for place, row in enumerate(judged):
            if row.status == "suspicious":
                key = (row.test, row.p)
                if key not in cache:
                    cache[key] = again(row)
                judged[place] = _settle(row, cache[key])
    failures = list(dict.fromkeys(row.name for row in judged if row.status == "fail"))
    verdict = "fail" if failures else "suspicious" if any(row.status == "suspicious" for row in judged) else "pass"
    rank = {"fail": 0, "suspicious": 1, "pass": 2}
    judged.sort(key=lambda row: (rank[row.status], row.pvalue))
    return Verdicts(verdict, failures, judged, bound, cauchy)


def _settle(row: Row, fresh: list[Row]) -> Row:
    kinds = {row.kind, "worst"} if row.kind == "one" else {row.kind}
    found = [new.pvalue for new in fresh if new.name == row.name and new.p == row.p and new.kind in kinds]
    if row.kind == "one":  # four draws pool where one could not
        found += [new.pvalue for new in fresh if (new.name, new.p, new.kind) == (row.name, row.p, "pooled")]
    if not found:
        return row
    value = min(1.0, min(found) * len(found))
    status = "fail" if value < STAYS else "pass" if value > CLEARED else "suspicious"
    return replace(row, again=value, status=status)


def budget(first: int, second: int, structure: int) -> float:
    """Upper bound of the chance that a perfect generator fails, by the union bound under any dependence.

    Raises:
        ValueError: above 1e-6.
    """
    bound = first * (FIRST + SUSPICIOUS * STAYS) + second * (SECOND + SUSPICIOUS * STAYS) + structure * STRUCTURE
    if first > FIRST_MOST or second > SECOND_MOST or bound >= 1e-6:
        raise ValueError(f"{first} first-level and {second} second-level p-values exceed the error budget of 1e-6")
    return float(bound)


def smallest_rate_error(p: float, n: int) -> float:
    """Error of the rate seen with power 0.99 among n draws."""
    return float(normal_effect() * np.sqrt(p * (1 - p) / n))
