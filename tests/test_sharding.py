"""Sharded runs equal the run on one device: four processes (gloo) go through the checks."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import sharding_checks_compile  # noqa: F401  adds its checks, and those of the two modules that it imports
import torch
from sharding_checks import CHECKS

ROOT = Path(__file__).parent.parent
WORLD = 4


def environment():
    """The kernels' interpreter off: the torch path has the same masks."""
    inherited = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    return {**inherited, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}


@pytest.mark.skipif(not torch.distributed.is_gloo_available(), reason="PyTorch without gloo")
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_on_four_processes(compiled, tmp_path):
    """Two tests, since starting the processes takes longer than most checks."""
    checks = [name for name in CHECKS if name.startswith("compiled") == compiled]
    worker = Path(__file__).with_name("sharding_worker.py")
    reports = [tmp_path / str(rank) for rank in range(WORLD)]
    processes = [
        subprocess.Popen(
            [sys.executable, worker, str(rank), str(WORLD), tmp_path / "store", reports[rank], *checks],
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=ROOT, env=environment(),
        )
        for rank in range(WORLD)
    ]  # fmt: skip
    try:
        outputs = [process.communicate(timeout=280)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert all(report.exists() for report in reports), "\n".join(outputs)
    results = [json.loads(report.read_text(encoding="utf-8")) for report in reports]
    failures = [
        f"{name}, rank {rank}:\n{text}" for rank, result in enumerate(results) for name, text in result.items() if text
    ]
    assert not failures, "\n".join(failures)
    assert all(list(result) == checks for result in results)


def test_xfused_alone_does_not_import_dtensor():
    script = """
import sys, torch, xfused
mlp = xfused.FusedMLP(8, dropout=0.1, output_dropout=0.1)
mlp(torch.randn(4, 8)).sum().backward()
assert "torch.distributed.tensor" not in sys.modules and "xfused.sharding" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", script], cwd=ROOT, check=True, env=environment())
