"""Without a GPU, kernels run in Triton's interpreter: the switch must be set before triton is imported."""

import os
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import settings

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

sys.path.insert(0, str(Path(__file__).parent))  # oracle.py and paths.py, which the tests share

settings.register_profile("xfused", deadline=None, derandomize=True, max_examples=40)
settings.load_profile("xfused")


def pytest_configure(config):
    if hasattr(config, "workerinput"):
        torch.set_num_threads(1)  # one core a worker


def pytest_collection_modifyitems(items):
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="no CUDA device"))


@pytest.fixture(autouse=True)
def fixed_seed():
    """Every test starts from the same random state, and leaves the global switches as they were."""
    torch.manual_seed(20240607)
    yield
    if torch.are_deterministic_algorithms_enabled():  # the call itself imports torch._inductor, for many seconds
        torch.use_deterministic_algorithms(False)
    torch.set_grad_enabled(True)


@pytest.fixture
def used(monkeypatch):
    """The keyword arguments of every call that a patched module makes of the fused operation."""
    from xfused.patch import table

    calls = []
    real = table.bias_act_dropout_after
    monkeypatch.setattr(
        table, "bias_act_dropout_after", lambda *args, **kwargs: calls.append(kwargs) or real(*args, **kwargs)
    )
    return calls
