"""Is training with FusedMLP the same as training with torch.nn? Two one-sided tests on paired runs, and controls.

    python -m benchmarks.equivalence --jobs 12 --csv equivalence.csv --png equivalence.png

The transformer of `python -m xfused train` is trained on the same text with each kind of MLP, many times over. Runs
with the same seed start from the same weights and see the same batches, so that they differ by their masks alone. Of
each run three figures are taken, and the paired differences to torch.nn are tested (BOUNDS says why these and how far).

Two kinds of deliberately wrong dropout are trained too: a mask that repeats every 32 rows, and one that drops 30% where
10% was asked. A test that cannot tell these from torch.nn proves nothing, so they must be told apart, or it fails.
"""

import argparse
import concurrent.futures
import csv
import dataclasses
import math
import multiprocessing
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from scipy import stats
from torch import Tensor, nn
from tqdm import tqdm

from xfused import FusedMLP, activation
from xfused.train import DTYPES, PlainMLP, Settings, Trainee, Transformer, batches, learning_rate, smoothed, texts

FUSED, PLAIN, REPEATING, RATE = "xfused.FusedMLP", "torch.nn", "repeats every 32 rows", "drops 0.2 too much"
ARMS = {FUSED: "tab:blue", PLAIN: "tab:orange", REPEATING: "tab:red", RATE: "tab:purple"}  # and their colours

# How far means may lie apart and still count as equal. Set before the runs whose figures are reported, after pilot runs
# with other settings (width 64, 300 steps, 4 seeds, CPU).
#
# training, validation (nats a character): 0.01, that is 1% of perplexity. In the pilot, 0.2 more dropped than asked
# moved both by about 0.02, chance moved a paired difference by 0.001 to 0.002, and the seed a single run by 0.015.
#
# mask noise (natural logarithm): 0.2. It is the standard deviation, over masks, of the training loss of a batch that
# holds one sequence many times over, where independent masks average out. Masks that are right one by one, but shared
# between rows, leave final losses alone, as their mean effect is the same: in the pilot, a mask that repeats every 32
# rows moved them by less than 0.001. This figure it must move: by log(k) / 2 where k copies of the sequence share their
# masks, which is 0.35 at the least.
BOUNDS = {"training": 0.01, "validation": 0.01, "mask noise": 0.2}
LEVEL = 0.05  # of each one-sided test
CONTROL_LEVEL = 1e-3  # a wrong mask must differ at this level, divided by the number of figures

HELD_OUT = 256  # sequences of the validation text
NOISE_SEQUENCES, NOISE_MASKS = 8, 32  # of the mask noise: sequences, and masks of each
POINTS = 100  # of a curve


class RepeatingDropout(nn.Dropout):
    """Wrong: rows r and r + 32 share their mask."""

    def forward(self, input: Tensor) -> Tensor:
        if not self.training:
            return input
        x = input.flatten(0, -2)
        keep = torch.rand(32, x.shape[1], device=x.device) >= self.p
        return (x * keep[torch.arange(len(x), device=x.device) % 32] / (1 - self.p)).view_as(input)


class RateDropout(nn.Dropout):
    """Wrong: drops 0.2 more than asked, and scales as if it did not."""

    def forward(self, input: Tensor) -> Tensor:
        return input * (torch.rand_like(input) >= self.p + 0.2) / (1 - self.p) if self.training else input


@dataclasses.dataclass(frozen=True)
class Result:
    """What was measured of one run; the figures in BOUNDS have the attributes of their names."""

    arm: str
    p: float
    seed: int
    training: float  # mean loss of the last tenth of the steps
    validation: float
    mask_noise: float  # logarithm
    curve: tuple[float, ...]  # smoothed training losses, at POINTS steps

    def figure(self, name: str) -> float:
        return getattr(self, name.replace(" ", "_"))


def mlp(arm: str, settings: Settings) -> nn.Module:
    act = activation(settings.activation)
    if arm == FUSED:
        return FusedMLP(settings.width, activation=act, dropout=settings.p)
    module = PlainMLP(settings.width, act, settings.p)
    wrong = {REPEATING: RepeatingDropout, RATE: RateDropout}
    if arm in wrong:
        module.dropout = wrong[arm](settings.p)
    return module


@torch.no_grad()
def mask_noise(trainee: Trainee, inputs: Tensor, targets: Tensor) -> float:
    """Logarithm of the standard deviation over masks, at the present weights, of the loss of one sequence repeated.

    Args:
        inputs, targets: (batch, context); the first NOISE_SEQUENCES are each repeated to a batch of the settings' size.
    """
    variances = []
    for pair in zip(inputs[:NOISE_SEQUENCES], targets[:NOISE_SEQUENCES], strict=True):
        x, y = (row.expand(trainee.settings.batch, -1) for row in pair)
        losses = torch.stack([trainee.loss(x, y) for _ in range(NOISE_MASKS)])
        variances.append(losses.double().var().item())
    return 0.5 * math.log(sum(variances) / len(variances))


def run(arm: str, settings: Settings) -> Result:
    """Trains one model. The weights at the start and the batches follow from the seed, the masks from seed and arm."""
    torch.set_num_threads(1)
    training, validation = texts()
    characters = sorted(set(training + validation))
    index = {character: i for i, character in enumerate(characters)}
    training_ids, validation_ids = (torch.tensor([index[c] for c in text]) for text in (training, validation))
    torch.manual_seed(settings.seed)
    model = Transformer(len(characters), settings, lambda: mlp(arm, settings)).to(settings.device)
    torch.manual_seed(1_000_003 * (settings.seed + 1) + [*ARMS].index(arm))
    trainee = Trainee(model, settings)
    pairs = batches(training_ids, settings, seed=settings.seed)
    for step in range(settings.steps):
        trainee.step(*next(pairs), learning_rate(step, settings), timed=False)
    draws = batches(validation_ids, settings, seed=settings.seed + 1)
    trainee.validate([next(draws) for _ in range(max(1, HELD_OUT // settings.batch))])
    last = trainee.losses[-max(1, settings.steps // 10) :]
    curve = smoothed(trainee.losses, max(1, settings.steps // 20))
    return Result(
        arm,
        settings.p,
        settings.seed,
        sum(last) / len(last),
        trainee.validation[settings.steps],
        mask_noise(trainee, *next(pairs)),
        tuple(curve[i] for i in curve_steps(settings.steps)),
    )


def curve_steps(steps: int) -> list[int]:
    """The steps, counted from 0, at which curves are kept."""
    return sorted({round(i) for i in np.linspace(0, steps - 1, POINTS)})


# -------------------------------------------------------------------------------------------------------- statistics


@dataclasses.dataclass(frozen=True)
class Comparison:
    """Paired differences of one figure between an arm and torch.nn."""

    arm: str
    p: float
    figure: str
    mean: float  # of the differences
    low: float  # the interval of confidence 1 - 2 * LEVEL, which lies within the bound where both tests reject
    high: float
    p_equivalence: float  # the larger of the two one-sided tests' p-values
    p_difference: float  # of the two-sided t-test

    @property
    def equivalent(self) -> bool:
        return self.p_equivalence < LEVEL

    @property
    def different(self) -> bool:
        return self.p_difference < CONTROL_LEVEL / len(BOUNDS)


def compare(results: Sequence[Result], arm: str, p: float, figure: str) -> Comparison:
    """Tests an arm against torch.nn, paired by seed."""
    of = {(r.arm, r.seed): r.figure(figure) for r in results if r.p == p}
    seeds = sorted(seed for name, seed in of if name == arm)
    differences = np.array([of[arm, seed] - of[PLAIN, seed] for seed in seeds])
    bound = BOUNDS[figure]
    above = stats.ttest_1samp(differences, -bound, alternative="greater").pvalue
    below = stats.ttest_1samp(differences, bound, alternative="less").pvalue
    two_sided = stats.ttest_1samp(differences, 0.0)
    interval = two_sided.confidence_interval(1 - 2 * LEVEL)
    return Comparison(
        arm,
        p,
        figure,
        float(differences.mean()),
        float(interval.low),
        float(interval.high),
        float(max(above, below)),
        float(two_sided.pvalue),
    )


def judge(results: Sequence[Result]) -> tuple[list[Comparison], list[str]]:
    """All comparisons, and what did not come out as it must: one line each."""
    probabilities = sorted({r.p for r in results})
    others = [arm for arm in ARMS if arm != PLAIN]
    comparisons = [compare(results, arm, p, figure) for p in probabilities for arm in others for figure in BOUNDS]
    failures = [
        f"p = {c.p:g}: {FUSED} was not shown to be equivalent to {PLAIN} in {c.figure}"
        for c in comparisons
        if c.arm == FUSED and not c.equivalent
    ]
    for p in probabilities:
        for arm in (REPEATING, RATE):
            if not any(c.different and not c.equivalent for c in comparisons if (c.arm, c.p) == (arm, p)):
                failures.append(f"p = {p:g}: the wrong mask that {arm} was not told from {PLAIN}")
    return comparisons, failures


# ------------------------------------------------------------------------------------------------------------ output


def table(results: Sequence[Result], comparisons: Sequence[Comparison]) -> str:
    """Means with their spread over the seeds, differences and verdicts, as text."""
    lines = []
    for p in sorted({r.p for r in results}):
        lines.append(f"p = {p:g}{'':<20} " + "".join(f"{name:>22}" for name in BOUNDS))
        for arm in ARMS:
            cells = []
            for name in BOUNDS:
                values = [r.figure(name) for r in results if (r.arm, r.p) == (arm, p)]
                cells.append(f"{np.mean(values):>12.4f} +- {np.std(values, ddof=1):<6.4f}")
            lines.append(f"  {arm:<24} " + "".join(cells))
    lines.append(f"differences to {PLAIN}, with intervals of confidence {1 - 2 * LEVEL:g}")
    for c in comparisons:
        verdict = "equivalent" if c.equivalent else "different" if c.different else "undecided"
        lines.append(
            f"  p = {c.p:<4g} {c.arm:<22} {c.figure:<11} {c.mean:+.4f} ({c.low:+.4f} to {c.high:+.4f}), bound "
            f"{BOUNDS[c.figure]:g}: {verdict} (equivalence {c.p_equivalence:.1e}, difference {c.p_difference:.1e})"
        )
    return "\n".join(lines)


def write_csv(path: Path, results: Sequence[Result], steps: int) -> Path:
    """The figures of every run; beside them, in the file whose path is returned, the curves' means and spread."""
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["p", "arm", "seed", *BOUNDS])
        writer.writerows([r.p, r.arm, r.seed, *(f"{r.figure(name):.6f}" for name in BOUNDS)] for r in results)
    curves = path.with_name(f"{path.stem}_curves{path.suffix}")
    with curves.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["p", "arm", "step", "mean", "standard deviation"])
        for p, arm in sorted({(r.p, r.arm) for r in results}):
            values = np.array([r.curve for r in results if (r.p, r.arm) == (p, arm)])
            for step, mean, deviation in zip(curve_steps(steps), values.mean(0), values.std(0, ddof=1), strict=True):
                writer.writerow([p, arm, step + 1, f"{mean:.6f}", f"{deviation:.6f}"])
    return curves


def draw(path: Path, results: Sequence[Result], steps: int) -> None:
    """Mean curves with their spread over the seeds; below, paired differences to torch.nn with 95% intervals."""
    from matplotlib.figure import Figure

    probabilities = sorted({r.p for r in results})
    x = np.array(curve_steps(steps)) + 1
    figure = Figure(figsize=(6.5 * len(probabilities), 8), layout="constrained")
    axes = figure.subplots(2, len(probabilities), squeeze=False, sharex=True, sharey="row")
    for column, p in enumerate(probabilities):
        top, bottom = axes[:, column]
        curves = {
            arm: np.array([r.curve for r in sorted(results, key=lambda r: r.seed) if (r.p, r.arm) == (p, arm)])
            for arm in ARMS
        }
        for arm, color in ARMS.items():
            mean, deviation = curves[arm].mean(0), curves[arm].std(0, ddof=1)
            line = "--" if arm == PLAIN else "-"
            top.plot(x, mean, line, color=color, label=arm, zorder=3 if arm == PLAIN else 2)
            top.fill_between(x, mean - deviation, mean + deviation, color=color, alpha=0.15, linewidth=0)
            if arm != PLAIN:
                differences = curves[arm] - curves[PLAIN]
                mean, count = differences.mean(0), len(differences)
                reach = stats.t.ppf(0.975, count - 1) * differences.std(0, ddof=1) / count**0.5
                bottom.plot(x, mean, color=color, label=arm)
                bottom.fill_between(x, mean - reach, mean + reach, color=color, alpha=0.2, linewidth=0)
        for sign in (-1, 1):
            bottom.axhline(sign * BOUNDS["training"], color="black", linestyle=":", linewidth=1)
        top.set_title(f"p = {p:g}, {len(curves[PLAIN])} seeds: mean and standard deviation")
        bottom.set_title(f"difference to {PLAIN}: mean and its 95% interval; dotted: the bound")
        bottom.set_xlabel("step")
        for one in (top, bottom):
            one.grid(alpha=0.3)
            one.legend()
    axes[0, 0].set_ylabel("training loss, nats a character")
    axes[1, 0].set_ylabel("nats a character")
    figure.savefig(path, format="png", dpi=110)


# ----------------------------------------------------------------------------------------------------------- command


def at_least(lowest: int) -> Any:
    def parse(text: str) -> int:
        if not text.isdecimal() or int(text) < lowest:
            raise argparse.ArgumentTypeError(f"got {text!r}, takes a whole number of at least {lowest}")
        return int(text)

    return parse


def probability(text: str) -> float:
    try:
        p = float(text)
    except ValueError:
        p = -1.0
    if not 0 < p <= 0.75:
        raise argparse.ArgumentTypeError(f"got {text!r}, takes a number above 0 and at most 0.75")
    return p


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    cuda = torch.cuda.is_available()
    parser = argparse.ArgumentParser(prog="python -m benchmarks.equivalence", description=__doc__.split("\n")[0])
    parser.add_argument("--seeds", type=at_least(2), default=16, help="runs of each kind (default: 16)")
    parser.add_argument("--p", type=probability, nargs="+", default=[0.1, 0.3], help="(default: 0.1 0.3)")
    for name, default, text in (
        ("steps", 400, "optimiser steps a run"),
        ("width", 128, "of the residual stream, a multiple of 4"),
        ("layers", 2, "transformer blocks"),
        ("batch", 32, "sequences a step"),
        ("context", 64, "characters a sequence"),
        ("jobs", 12 if cuda else 2, "processes at once; all use the one device"),
    ):
        parser.add_argument(f"--{name}", type=at_least(1), default=default, help=f"{text} (default: {default})")
    parser.add_argument("--lr", type=float, default=Settings.lr, help=f"(default: {Settings.lr})")
    parser.add_argument("--device", default="cuda" if cuda else "cpu")
    dtype = "bfloat16" if cuda else "float32"
    parser.add_argument("--dtype", choices=DTYPES, default=dtype, help=f"of autocast (default here: {dtype})")
    parser.add_argument("--csv", type=Path, help="file for the figures of all runs; curves go to *_curves beside it")
    parser.add_argument("--png", type=Path, help="file for the loss curves")
    options = parser.parse_args(arguments)
    if options.width % Settings.heads:
        parser.error(f"--width: got {options.width}, takes a multiple of {Settings.heads}")
    return options


def all_runs(options: argparse.Namespace) -> list[Result]:
    """Every arm, p and seed, spread over processes."""
    names = "steps", "width", "layers", "batch", "context", "lr", "dtype"
    common = {name: getattr(options, name) for name in names}
    tasks = [
        (arm, Settings(device=torch.device(options.device), p=p, seed=seed, **common))
        for seed in range(options.seeds)
        for p in options.p
        for arm in ARMS
    ]
    quiet = not sys.stderr.isatty()
    if options.jobs == 1:
        return [run(*task) for task in tqdm(tasks, unit="run", disable=quiet)]
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(min(options.jobs, len(tasks)), context) as pool:
        pending = [pool.submit(run, *task) for task in tasks]
        try:
            for done in tqdm(concurrent.futures.as_completed(pending), total=len(tasks), unit="run", disable=quiet):
                done.result()
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
        return [future.result() for future in pending]


def main(arguments: Sequence[str] | None = None) -> int:
    """0 where equivalence was shown and both wrong masks were told apart, else 1."""
    options = parse(arguments)
    results = all_runs(options)
    comparisons, failures = judge(results)
    print(
        f"{len(results)} runs of {options.steps} steps, {options.layers} blocks of width {options.width}, "
        f"{options.batch} x {options.context} characters, {options.dtype}, {options.device}, torch {torch.__version__}"
    )
    print(table(results, comparisons))
    if options.csv:
        print(f"figures: {options.csv}, {write_csv(options.csv, results, options.steps)}")
    if options.png:
        draw(options.png, results, options.steps)
        print(f"loss curves: {options.png}")
    print("\n".join(f"FAILED  {failure}" for failure in failures) or "equivalent; both wrong masks were told apart")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
