"""benchmarks/tensor_parallel.py on CPU processes."""

import csv
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks.tensor_parallel import Row, arrangements

ROOT = Path(__file__).parent.parent

GOOD = Row(
    "tensor and sequence parallel", 1, 2, "float32", 2, 4, 8, 32, 0.1, True, True, 1e-7, 1e-7, 1.0, 2.0, 0.5, 2,
    "gloo", "cpu", "2",
)  # fmt: skip


@pytest.mark.skipif(not torch.distributed.is_gloo_available(), reason="PyTorch without gloo")
def test_two_processes(tmp_path):
    result = tmp_path / "rows.csv"
    command = [sys.executable, "-m", "benchmarks.tensor_parallel", "--device", "cpu", "--processes", "2"]
    sizes = ["--batch", "2", "--sequence", "8", "--width", "16", "--p", "0.3", "--repeats", "2", "--csv", str(result)]
    unset = ("TRITON_INTERPRET", "RANK", "WORLD_SIZE")
    environment = {name: value for name, value in os.environ.items() if name not in unset}
    run = subprocess.run(
        command + sizes, cwd=ROOT, env={**environment, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True
    )
    assert run.returncode == 0, run.stdout + run.stderr
    with open(result, newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert [(row["dp"], row["tp"]) for row in rows] == [("1", "2"), ("2", "1"), ("1", "2")]
    for row in rows:
        assert row["mask_is_equal"] == row["replicas_differ"] == "True"
        assert float(row["loss_error"]) < 1e-5 and float(row["gradient_error"]) < 1e-5
        assert float(row["ratio"]) == float(row["milliseconds_xfused"]) / float(row["milliseconds_torch_nn"])
        assert row["arrangement"] in run.stdout


@pytest.mark.parametrize("world", range(1, 9))
def test_arrangements_use_every_rank(world):
    assert all(dp * tp == world for dp, tp, _ in arrangements(world))
    assert {fsdp for *_, fsdp in arrangements(world)} == {False, True}


def test_each_check_can_fail():
    assert GOOD.failures() == []
    for name, change in {
        "mask": {"mask_is_equal": False},
        "replicas": {"replicas_differ": False},
        "loss": {"loss_error": float("nan")},
        "gradients": {"gradient_error": 1e-4},
    }.items():
        assert Row(**{**vars(GOOD), **change}).failures() == [name]
