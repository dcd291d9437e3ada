"""benchmarks/equivalence.py: the wrong dropouts are as wrong as said, the verdict follows from the figures, it runs."""

import csv
import dataclasses

import numpy as np
import pytest
import torch

from benchmarks import equivalence
from benchmarks.equivalence import (
    ARMS,
    BOUNDS,
    FUSED,
    PLAIN,
    RATE,
    REPEATING,
    RateDropout,
    RepeatingDropout,
    Result,
    judge,
    main,
    mask_noise,
    mlp,
)
from xfused.train import Settings, Trainee, Transformer

CPU = torch.device("cpu")
TINY = ["--device", "cpu", "--width", "16", "--layers", "1", "--batch", "4", "--jobs", "1", "--dtype", "float32"]


def test_the_repeating_mask_repeats_every_32_rows_at_the_right_rate():
    y = RepeatingDropout(0.3)(torch.ones(4, 64, 100))
    rows = y.flatten(0, 1)
    assert torch.equal(rows[:-32], rows[32:]) and len(torch.unique(rows, dim=0)) == 32
    assert abs((y == 0).double().mean() - 0.3) < 5 * (0.21 / 3200) ** 0.5
    torch.testing.assert_close(y[y != 0], torch.tensor(1 / 0.7).expand(int((y != 0).sum())))
    assert RepeatingDropout(0.3)(torch.ones(2, 5, 3)).shape == (2, 5, 3)


def test_the_wrong_rate_drops_what_it_says_and_scales_for_what_was_asked():
    y = RateDropout(0.1)(torch.ones(100, 1000))
    assert abs((y == 0).double().mean() - 0.3) < 5 * (0.21 / 100_000) ** 0.5
    torch.testing.assert_close(y[y != 0], torch.tensor(1 / 0.9).expand(int((y != 0).sum())))


@pytest.mark.parametrize("kind", [RepeatingDropout, RateDropout])
def test_wrong_dropouts_do_nothing_in_eval(kind):
    x = torch.randn(40, 6)
    assert torch.equal(kind(0.3).eval()(x), x)


def test_mask_noise_tells_shared_masks(monkeypatch):
    """At the same weights: sixteen equal sequences with one mask between them vary four times as much in their mean."""
    monkeypatch.setattr(equivalence, "NOISE_SEQUENCES", 3)
    monkeypatch.setattr(equivalence, "NOISE_MASKS", 16)
    settings = Settings(device=CPU, width=16, layers=1, batch=16, context=32, p=0.3)
    noise = {}
    for arm in (FUSED, PLAIN, REPEATING):
        torch.manual_seed(0)
        model = Transformer(20, settings, lambda arm=arm: mlp(arm, settings))
        for parameter in model.parameters():
            parameter.data.mul_(2)
        pairs = torch.randint(20, (2, 16, 32))
        noise[arm] = mask_noise(Trainee(model, settings), *pairs)
    assert abs(noise[FUSED] - noise[PLAIN]) < 0.45
    assert abs(noise[REPEATING] - noise[PLAIN] - np.log(4)) < 0.45


# ------------------------------------------------------------------------------------------------------- the verdict


def made_up(seeds=10, **shifts):
    """Results whose paired differences are 0 on average for every arm, but for what `shifts` says of one of them."""
    generator = np.random.default_rng(5)
    results = []
    for seed in range(seeds):
        common = generator.normal(2.0, 0.1)
        for arm in ARMS:
            noise = generator.normal(0, 0.001, 3)
            result = Result(arm, 0.1, seed, *(common + noise), (common,) * 5)
            wrong = {REPEATING: {"mask_noise": 1.4}, RATE: {"training": 0.03}}.get(arm, {})
            for name, shift in {**wrong, **shifts.get(arm.split()[0].split(".")[0], {})}.items():
                result = dataclasses.replace(result, **{name: getattr(result, name) + shift})
            results.append(result)
    return results


def test_equal_training_passes():
    comparisons, failures = judge(made_up())
    assert failures == [] and len(comparisons) == 9
    assert all(c.equivalent and c.low < c.mean < c.high for c in comparisons if c.arm == FUSED)
    assert {(c.arm, c.figure) for c in comparisons if c.different} == {(REPEATING, "mask noise"), (RATE, "training")}


@pytest.mark.parametrize("name, bound", BOUNDS.items())
def test_a_difference_at_the_bound_is_not_equivalence(name, bound):
    attribute = name.replace(" ", "_")
    for sign in (-1, 1):
        assert judge(made_up(xfused={attribute: 0.9 * sign * bound}))[1] == []
        (failure,) = judge(made_up(xfused={attribute: sign * bound}))[1]
        assert "not shown to be equivalent" in failure and name in failure


@pytest.mark.parametrize("arm, shift", [("repeats", {"mask_noise": 0.0}), ("drops", {"training": 0.0})])
def test_a_wrong_mask_that_goes_unnoticed_is_a_failure(arm, shift):
    (failure,) = judge(made_up(**{arm: shift}))[1]
    assert arm in failure and "was not told from" in failure


def test_too_few_noisy_runs_show_nothing():
    """Equivalence has to be shown: a lack of significance is not enough."""
    results = [
        dataclasses.replace(r, training=r.training + (0.05 * (-1) ** r.seed if r.arm == FUSED else 0))
        for r in made_up(seeds=4)
    ]
    assert any("in training" in failure for failure in judge(results)[1])


# ------------------------------------------------------------------------------------------------------- the command


def test_the_command_writes_its_tables_and_picture(tmp_path, capsys):
    table, png = tmp_path / "runs.csv", tmp_path / "curves.png"
    files = ["--csv", str(table), "--png", str(png)]
    code = main([*TINY, "--seeds", "2", "--steps", "3", "--context", "32", "--p", "0.1", *files])
    printed = capsys.readouterr().out
    assert code == (1 if "FAILED" in printed else 0)
    with table.open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 2 * len(ARMS) and {row["arm"] for row in rows} == set(ARMS)
    for row in rows:
        assert 3 < float(row["training"]) < 6 and 3 < float(row["validation"]) < 6
    with (tmp_path / "runs_curves.csv").open() as file:
        assert len(list(csv.DictReader(file))) == 3 * len(ARMS)
    assert png.read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    assert all(arm in printed for arm in ARMS) and str(png) in printed


@pytest.mark.parametrize("option", ["--seeds 1", "--p 0", "--p 0.8", "--width 30", "--steps 0", "--jobs x"])
def test_options_that_make_no_sense_are_refused(option, capsys):
    with pytest.raises(SystemExit) as caught:
        main(option.split())
    assert caught.value.code == 2 and f"{option.split()[0]}: got" in capsys.readouterr().err
