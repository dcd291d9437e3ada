"""What the modules add on the host to a call of the bare operation; `python tests/test_overhead.py` prints it.

The operation is a stub that returns its input, so nothing but the Python around it is timed. Loops of all calls take
turns; a loop's least time tells them apart where the machine is busy.
"""

import gc
import statistics
import sys
import time

import torch
from torch import nn

from xfused import BiasActDropout, FusedMLP, modules
from xfused.ops import after_linear


def stub(x, bias=None, *, activation="identity", p=0.0, training=True, seed=None, origin=(0, 0)):
    return x


class Bare(nn.Module):
    """What any module costs whose forward calls the operation."""

    def __init__(self, module):
        super().__init__()
        self.bias, self.activation, self.p = module.bias, module.activation, module.p

    def forward(self, x):
        return stub(x, self.bias, activation=self.activation, p=self.p, training=self.training)


def overheads(loops, inner=200):
    """{what: (median, least)} in microseconds a call, less the stub's own."""
    x, layer, mlp = torch.ones(1, 8), BiasActDropout(8), FusedMLP(8, 8)
    bias, activation, p, bare = layer.bias, layer.activation, layer.p, Bare(layer)
    # the linear layers of the MLP return their input: what is left is the module, two calls of them and the fused call
    mlp.fc1.forward = mlp.fc2.forward = lambda x: x

    class Plain(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc1, self.fc2 = mlp.fc1, mlp.fc2

        def forward(self, x):
            fc1, fc2 = self.fc1, self.fc2
            return fc2(stub(fc1(x), fc1.bias, activation=activation, p=p, training=True))

    plain = Plain()
    calls = {
        "stub": lambda: stub(x, bias, activation=activation, p=p, training=True),
        "bare nn.Module": lambda: bare(x),
        "BiasActDropout": lambda: layer(x),
        "BiasActDropout.forward": lambda: layer.forward(x),
        "plain MLP": lambda: plain(x),
        "FusedMLP": lambda: mlp(x),
    }
    times = {name: [] for name in calls}
    gc.collect()
    gc.disable()
    try:
        for _ in range(loops):
            for name, call in calls.items():
                start = time.perf_counter()
                for _ in range(inner):
                    call()
                times[name].append((time.perf_counter() - start) / inner * 1e6)
    finally:
        gc.enable()
    found = {name: (statistics.median(t), min(t)) for name, t in times.items()}
    return {name: tuple(a - b for a, b in zip(t, found["stub"], strict=True)) for name, t in found.items()}


def test_modules_add_less_than_a_bare_module_costs(monkeypatch):
    """nn.Module.__call__ takes about 2 us, so this is the bound of 2 us on a machine of any speed."""
    monkeypatch.setattr(modules, "bias_act_dropout", stub)
    monkeypatch.setattr(after_linear, "bias_act_dropout", stub)
    for _ in range(10):  # a busy machine may disturb one measurement, not ten
        least = {name: pair[1] for name, pair in overheads(60).items()}
        unit = least["bare nn.Module"]
        found = {
            "BiasActDropout.forward": least["BiasActDropout.forward"] / unit,
            "BiasActDropout": least["BiasActDropout"] / unit - 1,
            "FusedMLP": (least["FusedMLP"] - least["plain MLP"]) / unit,
        }
        if unit > 0.1 and max(found.values()) < 1:
            return
    raise AssertionError(f"more than a bare module costs, {unit:.2f} us: {found}")


if __name__ == "__main__":
    modules.bias_act_dropout = after_linear.bias_act_dropout = stub
    torch.set_num_threads(1)
    print(
        f"torch {torch.__version__}, Python {sys.version.split()[0]}: median and least, microseconds more than the stub"
    )
    for what, (median, least_time) in overheads(1000).items():
        print(f"{what:24}{median:6.2f}{least_time:6.2f}")
