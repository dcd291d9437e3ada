"""`python -m xfused train`: a small transformer on real text, its MLPs fused, beside its twin with torch.nn's MLPs."""

import argparse
import dataclasses
import importlib.util
import math
import os
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .activations import TABLE, Activation, activation
from .modules import FusedMLP

SUMMARY = "Train a small character-level transformer with FusedMLP, beside the same model with torch.nn modules."
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
FUSED, PLAIN = "xfused.FusedMLP", "torch.nn"
WARMUP_STEPS = 3  # not timed: kernels are compiled, memory is first touched
MEASURE_EVERY = 10  # steps between those whose dropped elements are counted, which are not timed either


# --------------------------------------------------------------------------------------------------------- options


@dataclasses.dataclass(frozen=True)
class Settings:
    """The options of one run, checked."""

    device: torch.device
    steps: int = 500
    width: int = 128
    layers: int = 2
    heads: int = 4
    batch: int = 8
    context: int = 64
    p: float = 0.1
    activation: str = "gelu"
    lr: float = 3e-3
    dtype: str = "float32"
    seed: int = 0
    png: str = "xfused-train.png"

    @classmethod
    def of(cls, args: argparse.Namespace, error: Callable[[str], NoReturn]) -> "Settings":
        """The parsed options; calls `error` with one line if one makes no sense or a package is missing."""
        settings = cls(**{field.name: getattr(args, field.name) for field in dataclasses.fields(cls)})
        if missing := [name for name in ("matplotlib", "tqdm") if importlib.util.find_spec(name) is None]:
            error(f"needs {' and '.join(missing)}, the extra train of xfused: pip install 'xfused[train]'")
        if settings.width % settings.heads:
            error(f"--width: got {settings.width}, takes a multiple of --heads = {settings.heads}")
        folder = os.path.dirname(os.path.abspath(settings.png))
        if os.path.isdir(settings.png) or not os.access(folder, os.W_OK):
            error(f"--png: got {settings.png!r}, takes a file name in a folder that can be written to")
        shortest = min(len(text) for text in texts())
        if settings.context >= shortest:
            error(
                f"--context: got {settings.context}, takes less than the {shortest} characters of the validation text"
            )
        return settings


def _number(kind: type, takes: str, holds: Callable[[Any], bool]) -> Callable[[str], Any]:
    def parse(text: str) -> Any:
        try:
            value = kind(text)
        except ValueError:
            value = None
        if value is None or not holds(value):
            raise argparse.ArgumentTypeError(f"got {text!r}, takes {takes}")
        return value

    return parse


def _activation(text: str) -> str:
    try:
        return activation(text).name
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds every option of the command but --device."""
    count = _number(int, "a whole number of at least 1", lambda value: value >= 1)
    probability = _number(float, "a number from 0 to 1", lambda value: 0 <= value <= 1)
    rate = _number(float, "a number above 0", lambda value: 0 < value < math.inf)
    seed = _number(int, "a whole number from 0 to 2**63 - 1", lambda value: 0 <= value < 2**63)
    options: dict[str, tuple[Callable[[str], Any], str]] = {
        "steps": (count, "optimiser steps"),
        "width": (count, "of the residual stream; the MLPs are four times as wide"),
        "layers": (count, "transformer blocks"),
        "heads": (count, "attention heads a block"),
        "batch": (count, "sequences a step"),
        "context": (count, "characters a sequence"),
        "p": (probability, "dropout probability in the MLPs"),
        "activation": (_activation, "of the MLPs: one of " + ", ".join(TABLE)),
        "lr": (rate, "AdamW's highest learning rate"),
        "seed": (seed, "of weights, batches and masks"),
        "png": (str, "file for the loss curves"),
    }
    for name, (kind, text) in options.items():
        default = getattr(Settings, name)
        parser.add_argument(f"--{name}", type=kind, default=default, help=f"{text} (default: {default})")
    text = "of the matrix products and MLPs, by autocast; the weights stay float32 (default: float32)"
    parser.add_argument("--dtype", choices=DTYPES, default="float32", help=text)


# ------------------------------------------------------------------------------------------------------------ data


def texts() -> tuple[str, str]:
    """(training, validation) text: the standard library's help topics, every tenth of them for validation."""
    from pydoc_data.topics import topics

    names = sorted(topics)
    held_out = names[5::10]
    return "\n".join(topics[n] for n in names if n not in held_out), "\n".join(topics[n] for n in held_out)


def batches(text: Tensor, settings: Settings, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Endless (input, target) pairs, each int64 (batch, context), of random windows of `text` (characters,)."""
    generator = torch.Generator().manual_seed(seed)
    offsets = torch.arange(settings.context + 1)
    while True:
        start = torch.randint(len(text) - settings.context, (settings.batch, 1), generator=generator)
        window = text[start + offsets].to(settings.device)
        yield window[:, :-1], window[:, 1:]


# ----------------------------------------------------------------------------------------------------------- model


class PlainMLP(nn.Module):
    """What FusedMLP computes, out of torch.nn; its state_dict has the same names and shapes."""

    def __init__(self, width: int, act: Activation, p: float) -> None:
        super().__init__()
        self.fc1 = nn.Linear(width, 4 * width)
        self.act = act
        self.dropout = nn.Dropout(p)
        self.fc2 = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(self.dropout(TABLE[self.act.name].forward(self.fc1(x), *self.act.parameters)))


class Block(nn.Module):
    """Pre-norm transformer block: x (batch, context, width) -> the same shape."""

    def __init__(self, width: int, heads: int, mlp: nn.Module) -> None:
        super().__init__()
        self.heads = heads
        self.norm1 = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)
        self.norm2 = nn.LayerNorm(width)
        self.mlp = mlp

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)  # (B, H, T, D) each
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(attended.transpose(1, 2).flatten(2))
        return x + self.mlp(self.norm2(x))


class Transformer(nn.Module):
    """Characters (batch, context) int64 -> logits (batch, context, vocabulary)."""

    def __init__(self, vocabulary: int, settings: Settings, mlp: Callable[[], nn.Module]) -> None:
        super().__init__()
        width = settings.width
        self.token = nn.Embedding(vocabulary, width)
        self.position = nn.Embedding(settings.context, width)
        self.blocks = nn.Sequential(*(Block(width, settings.heads, mlp()) for _ in range(settings.layers)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary)

    def forward(self, characters: Tensor) -> Tensor:
        x = self.token(characters) + self.position.weight[: characters.shape[1]]
        return self.head(self.norm(self.blocks(x)))


def models(vocabulary: int, settings: Settings) -> dict[str, Transformer]:
    """The fused model and its torch.nn twin with the same weights."""
    act = activation(settings.activation)
    fused = Transformer(vocabulary, settings, lambda: FusedMLP(settings.width, activation=act, dropout=settings.p))
    plain = Transformer(vocabulary, settings, lambda: PlainMLP(settings.width, act, settings.p))
    plain.load_state_dict(fused.state_dict())
    return {FUSED: fused.to(settings.device), PLAIN: plain.to(settings.device)}


class DropCounter:
    """Counts what the fused layers drop: zeros behind the activation where the activation itself is not zero."""

    def __init__(self, model: nn.Module) -> None:
        self.counting = False
        self.dropped = self.total = 0
        self._fc1: dict[nn.Module, Tensor] = {}
        for mlp in model.modules():
            if isinstance(mlp, FusedMLP):
                mlp.fc1.register_forward_hook(self._keep_fc1)
                mlp.fc2.register_forward_pre_hook(lambda _, inputs, mlp=mlp: self._count(mlp, inputs[0]))

    def _keep_fc1(self, module: nn.Module, inputs: Any, output: Tensor) -> None:
        if self.counting and module.training:
            self._fc1[module] = output.detach()  # FusedMLP adds the bias later

    @torch.no_grad()
    def _count(self, mlp: FusedMLP, hidden: Tensor) -> None:
        if mlp.fc1 not in self._fc1:
            return
        u = self._fc1.pop(mlp.fc1).float() + mlp.fc1.bias.float()
        undropped = TABLE[mlp.activation.name].forward(u, *mlp.activation.parameters).to(hidden.dtype)
        nonzero = undropped != 0
        self.total += int(nonzero.sum())
        self.dropped += int((nonzero & (hidden == 0)).sum())


# -------------------------------------------------------------------------------------------------------- training


class Trainee:
    """One model with its optimiser and what was recorded of it."""

    def __init__(self, model: Transformer, settings: Settings) -> None:
        self.model, self.settings = model, settings
        self.optimiser = torch.optim.AdamW(model.parameters(), lr=settings.lr, betas=(0.9, 0.95), weight_decay=0.1)
        self.scaler = torch.amp.GradScaler(settings.device.type, enabled=settings.dtype == "float16")
        self.losses: list[float] = []
        self.seconds: list[float] = []
        self.validation: dict[int, float] = {}  # step -> loss

    def loss(self, inputs: Tensor, targets: Tensor) -> Tensor:
        dtype = DTYPES[self.settings.dtype]
        with torch.autocast(self.settings.device.type, dtype=dtype, enabled=dtype != torch.float32):
            logits = self.model(inputs)
        return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())

    def step(self, inputs: Tensor, targets: Tensor, lr: float, timed: bool) -> None:
        start = time.perf_counter()
        for group in self.optimiser.param_groups:
            group["lr"] = lr
        self.optimiser.zero_grad()
        loss = self.loss(inputs, targets)
        self.scaler.scale(loss).backward()
        self.scaler.unscale_(self.optimiser)
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.scaler.step(self.optimiser)
        self.scaler.update()
        self.losses.append(loss.item())
        if self.settings.device.type == "cuda":
            torch.cuda.synchronize(self.settings.device)
        if timed:
            self.seconds.append(time.perf_counter() - start)

    @torch.no_grad()
    def validate(self, held_out: list[tuple[Tensor, Tensor]]) -> None:
        self.model.eval()
        self.validation[len(self.losses)] = sum(self.loss(*pair).item() for pair in held_out) / len(held_out)
        self.model.train()


def learning_rate(step: int, settings: Settings) -> float:
    """Linear warm-up over the first twentieth, at most 100 steps, then a cosine down to a tenth."""
    warm_up = min(100, max(1, settings.steps // 20))
    if step < warm_up:
        return settings.lr * (step + 1) / warm_up
    progress = (step - warm_up) / max(1, settings.steps - warm_up)
    return settings.lr * (0.1 + 0.45 * (1 + math.cos(math.pi * progress)))


@dataclasses.dataclass
class Outcome:
    """What a run, or what was done of it, gave."""

    trainees: dict[str, Trainee]
    drops: DropCounter
    interrupted: bool


def train(settings: Settings) -> Outcome:
    """Trains both models in turn, step by step, on the same batches; an interrupt ends it early."""
    from tqdm import tqdm

    training, validation = texts()
    characters = sorted(set(training + validation))
    index = {character: i for i, character in enumerate(characters)}
    training_ids, validation_ids = (torch.tensor([index[c] for c in text]) for text in (training, validation))
    torch.manual_seed(settings.seed)
    trainees = {name: Trainee(model, settings) for name, model in models(len(characters), settings).items()}
    drops = DropCounter(trainees[FUSED].model)
    draws = batches(validation_ids, settings, seed=settings.seed + 1)
    held_out = [next(draws) for _ in range(max(1, 64 // settings.batch))]
    size = sum(parameter.numel() for parameter in trainees[FUSED].model.parameters())
    print(
        f"{len(training):,} characters to train on, {len(validation):,} to validate; {len(characters)} different ones\n"
        f"{size:,} parameters, {settings.layers} blocks of width {settings.width}, {settings.activation}, "
        f"p = {settings.p:g}, {settings.dtype}, on {settings.device}",
        flush=True,
    )
    interrupted = False
    pairs = batches(training_ids, settings, seed=settings.seed)
    every = 0.2 if sys.stderr.isatty() else 10.0  # seconds: a log file wants few lines
    bar = tqdm(range(settings.steps), unit="step", dynamic_ncols=True, mininterval=every)
    try:
        for trainee in trainees.values():
            trainee.validate(held_out)
        for step in bar:
            inputs, targets = next(pairs)
            lr = learning_rate(step, settings)
            drops.counting = step % MEASURE_EVERY == 0
            timed = not drops.counting and step >= WARMUP_STEPS
            # in turn first and second: what runs second finds warmer caches
            for trainee in list(trainees.values())[:: 1 if step % 2 else -1]:
                trainee.step(inputs, targets, lr, timed)
            last = {name: f"{trainee.losses[-1]:.3f}" for name, trainee in trainees.items()}
            bar.set_postfix(last, refresh=False)
            if (step + 1) % max(1, settings.steps // 10) == 0:
                for trainee in trainees.values():
                    trainee.validate(held_out)
    except KeyboardInterrupt:
        interrupted = True
    finally:
        bar.close()
    for trainee in trainees.values():
        if trainee.losses and len(trainee.losses) not in trainee.validation:
            trainee.validate(held_out)
    return Outcome(trainees, drops, interrupted)


# ---------------------------------------------------------------------------------------------------------- report


def smoothed(losses: list[float], window: int) -> list[float]:
    """Means of the last `window` values, fewer at the start."""
    sums = [0.0]
    for loss in losses:
        sums.append(sums[-1] + loss)
    return [(sums[i + 1] - sums[max(0, i + 1 - window)]) / min(i + 1, window) for i in range(len(losses))]


def window_of(outcome: Outcome) -> int:
    """Steps in a smoothed loss: a twentieth of those done."""
    return max(1, len(outcome.trainees[FUSED].losses) // 20)


def report(outcome: Outcome, settings: Settings) -> str:
    """The losses, the drop rate and the time a step takes, as text."""
    window = window_of(outcome)
    lines = [
        f"{'loss':<16} {'training':>17} {'validation':>19} {'a step':>14}",
        f"{'':<16} {'first':>8} {'last':>8} {'first':>10} {'last':>8} {'median':>14}",
    ]
    for name, trainee in outcome.trainees.items():
        values = list(trainee.validation.values())
        seconds = sorted(trainee.seconds)
        median = f"{1000 * seconds[len(seconds) // 2]:.2f} ms" if seconds else "not timed"
        lines.append(
            f"{name:<16} {trainee.losses[0]:>8.3f} {smoothed(trainee.losses, window)[-1]:>8.3f} "
            f"{values[0]:>10.3f} {values[-1]:>8.3f} {median:>14}"
        )
    lines.append(f"(last training loss: mean of {window} steps; validation at step {max(trainee.validation)})")
    dropped, total = outcome.drops.dropped, outcome.drops.total
    if total:
        rate, deviation = dropped / total, math.sqrt(settings.p * (1 - settings.p) / total)
        off = f", {abs(rate - settings.p) / deviation:.1f} standard errors off" if deviation else ""
        lines.append(f"drop rate of the fused layers: {rate:.5f} of {total:,} elements (p = {settings.p:g}{off})")
    else:
        lines.append("drop rate of the fused layers: nothing to count, every activation was 0")
    return "\n".join(lines)


def draw(outcome: Outcome, settings: Settings) -> None:
    """Writes the loss curves as a PNG."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.add_subplot()
    window = window_of(outcome)
    styles = {FUSED: ("tab:blue", "-", 4), PLAIN: ("tab:orange", "--", 9)}  # both are seen where they coincide
    for name, trainee in outcome.trainees.items():
        color, line, size = styles[name]
        steps = range(1, len(trainee.losses) + 1)
        axes.plot(steps, trainee.losses, color=color, alpha=0.2, linewidth=0.8)
        axes.plot(steps, smoothed(trainee.losses, window), color=color, linestyle=line, label=f"{name}, training")
        where = trainee.validation
        values = list(where.values())
        axes.plot(list(where), values, "o", color=color, fillstyle="none", markersize=size, label=f"{name}, validation")
    axes.set(xlabel="step", ylabel="cross-entropy a character, nats")
    axes.set_title(f"{settings.activation}, p = {settings.p:g}, width {settings.width}, {settings.dtype}")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(settings.png, format="png", dpi=120)


def run(settings: Settings) -> int:
    """Trains, prints and draws; 0, or 130 after an interrupt."""
    outcome = train(settings)
    done = min(len(trainee.losses) for trainee in outcome.trainees.values())
    if outcome.interrupted:
        print(f"interrupted after {done} of {settings.steps} steps", file=sys.stderr)
    if done > 0:
        print(report(outcome, settings))
        draw(outcome, settings)
        print(f"loss curves: {settings.png}")
    return 130 if outcome.interrupted else 0
