"""`python -m xfused`, `python -m xfused train`, the README's example and commands."""

import dataclasses
import importlib.util
import os
import re
import resource
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import xfused
from xfused import philox, reference, selfcheck, train
from xfused.__main__ import main
from xfused.activations import TABLE

ROOT = Path(__file__).parent.parent
CPU = torch.device("cpu")
SMALL = ["--device=cpu", "--width=32", "--layers=1", "--heads=2", "--batch=4", "--context=32"]


def python(*args, **variables):
    """Runs Python as a user would: without this test run's switch for Triton, on one core."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"OMP_NUM_THREADS": "1", "COLUMNS": "120", **variables}
    return subprocess.run([sys.executable, *args], cwd=ROOT, env=environment, capture_output=True, text=True)


# ------------------------------------------------------------------------------------------------------ self-check


def test_self_check_passes_within_ten_seconds():
    before = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime
    done = python("-m", "xfused", "--device", "cpu")
    seconds = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime - before
    assert done.returncode == 0, done.stdout + done.stderr
    assert "all 94 checks held" in done.stdout and done.stderr == ""
    assert seconds < 10
    for version in (xfused.__version__, torch.__version__, "device cpu"):
        assert version in done.stdout


def test_self_check_passes_without_triton_and_scientific_packages():
    """As where there is no Triton: every tensor takes the torch path."""
    absent = "triton", "numpy", "scipy", "matplotlib", "tqdm"
    hide = f"import sys, runpy; sys.modules.update(dict.fromkeys({absent!r})); "
    done = python("-c", hide + "runpy.run_module('xfused', {}, '__main__')")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "triton none" in done.stdout and "torch for every dtype" in done.stdout


@pytest.mark.gpu
def test_self_check_passes_on_the_gpu(capsys):
    assert main(["--device", "cuda"]) == 0
    assert "Triton kernels" in capsys.readouterr().out


right_mask, right_backward = philox.keep_mask_torch, reference.bias_act_dropout_backward


def swapped_halves(rows, cols, p, seed, origin, device):
    skip = origin[0] % 2
    mask = right_mask(rows + skip + 1, cols, p, seed, (origin[0] - skip, origin[1]), device)
    return mask[(torch.arange(rows) + skip) ^ 1]


def row_group_not_counted(rows, cols, p, seed, origin, device):
    return right_mask(8, cols, p, seed, (0, origin[1]), device)[(torch.arange(rows) + origin[0]) % 8]


def column_as_16_bits(rows, cols, p, seed, origin, device):
    return right_mask(rows, cols, p, seed, (origin[0], origin[1] % 65536), device)


def offset_not_used(rows, cols, p, seed, origin, device):
    return right_mask(rows, cols, p, seed * torch.tensor([1, 0]), origin, device)


def five_rounds(*args, rounds=10, right=philox.philox_torch):
    return right(*args, rounds=5)


def one_row_lost(*args):
    dx, dbias = right_backward(*args)
    return dx, None if dbias is None else dbias - dx[0].to(dbias.dtype)


def wrong_derivative(g, u):
    return torch.ops.aten.gelu_backward(g, u, approximate="tanh")


def breaks(where, name, value, *caught_by):
    return pytest.param(
        where, name, value, caught_by, id=getattr(value, "__name__", str(value)).strip("<>") + f"-{name}"
    )


@pytest.mark.parametrize(
    "where, name, value, caught_by",
    [
        breaks(philox, "keep_mask_torch", swapped_halves, "known answers", "mask = contract", "mask in the layer"),
        breaks(philox, "keep_mask_torch", row_group_not_counted, "known answers", "mask = contract"),
        breaks(philox, "keep_mask_torch", column_as_16_bits, "known answers", "mask = contract"),
        breaks(philox, "keep_mask_torch", offset_not_used, "mask = contract"),
        breaks(philox, "philox_torch", five_rounds, "known answers", "mask = contract"),
        breaks(philox, "threshold", lambda p: int(p * 2**32) & 0xFFFF0000, "threshold"),
        breaks(philox, "threshold", lambda p: int(p * 2**32) + 1, "threshold", "known answers"),
        breaks(philox, "threshold", lambda p: round(p * 256) << 24, "drop rate"),
        breaks(philox, "keep_scale", lambda p: 1.0, "mask in the layer", "gelu in torch.float32"),
        breaks(philox, "draw_seed", lambda device, generator=None: torch.tensor((1, 2)), "seeds"),
        breaks(reference, "bias_act_dropout_backward", one_row_lost, "gelu in torch.float32", "gelu in torch.bfloat16"),
    ],
)
def test_self_check_fails_when_something_is_broken(monkeypatch, capsys, where, name, value, caught_by):
    monkeypatch.setattr(xfused, "activations", lambda: ["gelu"])
    monkeypatch.setattr(where, name, value)
    assert main(["--device", "cpu"]) == 1
    verdict = capsys.readouterr().out.splitlines()[-1]
    assert verdict.startswith("FAILED")
    for check in caught_by:
        assert check in verdict


def test_self_check_fails_on_a_wrong_derivative(monkeypatch, capsys):
    broken = dataclasses.replace(TABLE["gelu"], backward=wrong_derivative)
    monkeypatch.setitem(TABLE, "gelu", broken)
    assert main(["--device", "cpu"]) == 1
    assert "gelu in torch.float32" in capsys.readouterr().out.splitlines()[-1]


def test_self_check_reports_an_exception_as_a_failure(monkeypatch, capsys):
    def broken(*args, **kwargs):
        raise RuntimeError("no launch")

    monkeypatch.setattr(xfused, "bias_act_dropout", broken)
    assert main(["--device", "cpu"]) == 1
    assert "RuntimeError: no launch" in capsys.readouterr().out


def test_self_check_leaves_the_random_state_alone(monkeypatch):
    monkeypatch.setattr(xfused, "activations", lambda: ["gelu"])
    state = torch.get_rng_state()
    main(["--device", "cpu"])
    assert torch.equal(torch.get_rng_state(), state)


# -------------------------------------------------------------------------------------------------------- training


def losses(report, name):
    """(first, last) training loss and (first, last) validation loss of a model in the printed report."""
    first, last, validation_first, validation_last = re.search(
        rf"^{re.escape(name)} +([\d.]+) +([\d.]+) +([\d.]+) +([\d.]+) +[\d.]+ ms$", report, re.MULTILINE
    ).groups()
    return (float(first), float(last)), (float(validation_first), float(validation_last))


def drop_rate(report):
    return float(re.search(r"drop rate of the fused layers: ([\d.]+) of", report).group(1))


@pytest.mark.parametrize("device", [pytest.param("cpu"), pytest.param("cuda", marks=pytest.mark.gpu)])
def test_training_falls_and_draws(tmp_path, capsys, device):
    png = tmp_path / "curves.png"
    assert main(["train", *SMALL, "--device", device, "--steps", "60", "--p", "0.2", "--png", str(png)]) == 0
    report = capsys.readouterr().out
    for name in (train.FUSED, train.PLAIN):
        for first, last in losses(report, name):
            assert first > 4 and last < first - 1
    assert abs(losses(report, train.FUSED)[1][1] - losses(report, train.PLAIN)[1][1]) < 0.1
    assert abs(drop_rate(report) - 0.2) < 0.005
    assert png.read_bytes().startswith(b"\x89PNG\r\n\x1a\n") and str(png) in report


@pytest.mark.parametrize(
    "options, rate",
    [
        ("--dtype bfloat16", 0.1),
        ("--dtype float16", 0.1),
        ("--activation relu --p 0.4", 0.4),  # half of its values are zeros of its own
        ("--activation leaky_relu --p 1", 1.0),
        ("--p 0", 0.0),
        ("--seed 9223372036854775807 --batch 128 --layers 2", 0.1),
    ],
)
def test_training_options(tmp_path, capsys, options, rate):
    assert main(["train", *SMALL, "--steps", "5", "--png", str(tmp_path / "curves.png"), *options.split()]) == 0
    assert abs(drop_rate(capsys.readouterr().out) - rate) < 0.01


def test_both_models_are_the_same_without_dropout():
    settings = train.Settings(device=CPU, width=32, layers=2, heads=2, context=16, p=0.0, activation="leaky_relu")
    models = train.models(50, settings)
    fused, plain = models[train.FUSED], models[train.PLAIN]
    characters = torch.randint(50, (3, 16))
    torch.testing.assert_close(fused(characters), plain(characters))
    fused.load_state_dict(plain.state_dict())  # and back
    assert all(torch.equal(a, b) for a, b in zip(fused.parameters(), plain.parameters(), strict=True))


def test_training_keeps_what_was_done_when_interrupted(tmp_path, capsys, monkeypatch):
    step = train.Trainee.step

    def interrupted(self, *args):
        if len(self.losses) == 7:
            raise KeyboardInterrupt
        step(self, *args)

    monkeypatch.setattr(train.Trainee, "step", interrupted)
    png = tmp_path / "curves.png"
    assert main(["train", *SMALL, "--steps", "50", "--png", str(png)]) == 130
    printed = capsys.readouterr()
    assert "interrupted after 7 of 50 steps" in printed.err
    assert losses(printed.out, train.FUSED)[0][0] > 4 and png.stat().st_size > 0


@pytest.mark.parametrize(
    "options",
    [
        "train --steps 0",
        "train --steps many",
        "train --p 1.5",
        "train --p nan",
        "train --p -0.1",
        "train --lr 0",
        "train --lr inf",
        "train --width 100 --heads 3",
        "train --heads 0",
        "train --activation nonsense",
        "train --dtype float8",
        "train --device nowhere",
        "train --device cuda:99",
        "train --seed -1",
        "train --context 10000000",
        "train --png no/such/folder/curves.png",
        "train --png .",
        "train --unknown 1",
        "nonsense",
        "--device nowhere",
        "--unknown",
    ],
)
def test_bad_options_exit_with_one_line(options, capsys):
    with pytest.raises(SystemExit) as exit:
        main(options.split())
    printed = capsys.readouterr()
    assert exit.value.code == 2
    assert printed.out == "" and printed.err.count("\n") == 1 and ": error: " in printed.err


def test_training_names_the_missing_extra(monkeypatch, capsys):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(SystemExit) as exit:
        main(["train", *SMALL])
    printed = capsys.readouterr()
    assert exit.value.code == 2
    assert printed.err.count("\n") == 1 and "pip install 'xfused[train]'" in printed.err


def test_texts_are_split():
    training, validation = train.texts()
    assert len(training) > 5 * len(validation) > 50_000
    assert validation[:1000] not in training


# ---------------------------------------------------------------------------------------------------------- README


README = (ROOT / "README.md").read_text(encoding="utf-8")


def blocks(language):
    return re.findall(rf"^```{language}\n(.*?)^```", README, re.MULTILINE | re.DOTALL)


def test_readme_example_runs():
    examples = blocks("python")
    assert examples
    for example in examples:
        exec(compile(example, "README.md", "exec"), {})


def test_readme_commands():
    commands = blocks("sh")
    assert len(commands) == 2
    assert commands[1].strip() in (ROOT / ".ci/run").read_text(encoding="utf-8").splitlines()
    extras = {
        name for command in commands for names in re.findall(r"\[([\w,]+)\]", command) for name in names.split(",")
    }
    declared = re.findall(r"^(\w+) = \[", (ROOT / "pyproject.toml").read_text(encoding="utf-8"), re.MULTILINE)
    assert extras <= set(declared)


def test_readme_names_exist():
    names = set(re.findall(r"`(?:xfused\.)?(\w+)\(", README)) - {"eval", "dropout", "act"}
    assert names and names <= set(xfused.__all__)


def test_self_check_evaluates_the_contract_by_itself():
    """Nothing of xfused.philox is used in the oracle: the known answers hold without it."""
    for counter, key, words in selfcheck.KNOWN_ANSWERS:
        assert selfcheck.philox4x32_10(counter, key) == words
