"""The ways to compute the operation, behind one interface, so that one test body holds for each.

reference: the public op on the CPU, in plain torch. interpreter: the launchers on CPU tensors, the kernels in Triton's
interpreter (slow: keep shapes tiny). cuda: the public op on a GPU, the compiled kernels.
"""

import pytest
import torch

import xfused
from xfused._triton import INTERPRET
from xfused.ops import bias_act_dropout as op
from xfused.ops.mask import launch_mask

CUDA = torch.cuda.is_available()


def as_tensor(seed):
    """(key, offset), unsigned or signed 64-bit, as the int64 tensor."""
    return torch.tensor([(word + 2**63) % 2**64 - 2**63 for word in seed], dtype=torch.int64)


class Public:
    """The public functions on a device."""

    def __init__(self, name, device):
        self.name, self.device = name, torch.device(device)

    def __repr__(self):
        return self.name

    def mask(self, seed, rows, cols, p, origin=(0, 0)):
        return xfused.dropout_mask((rows, cols), p, as_tensor(seed), origin=origin, device=self.device)

    def forward(self, x, bias=None, activation="identity", p=0.0, seed=(0, 0), origin=(0, 0)):
        return xfused.bias_act_dropout(
            x, bias, activation=activation, p=p, seed=as_tensor(seed) if p else None, origin=origin
        )

    def forward_backward(self, x, bias, dy, activation="identity", p=0.0, seed=(0, 0), origin=(0, 0)):
        """y, dx, dbias (None without bias)."""
        x = x.detach().requires_grad_()
        bias = None if bias is None else bias.detach().requires_grad_()
        y = self.forward(x, bias, activation, p, seed, origin)
        grads = torch.autograd.grad(y, [x] if bias is None else [x, bias], dy)
        return y.detach(), grads[0], None if bias is None else grads[1]


class Interpreter(Public):
    """The launchers, which run the kernels on CPU tensors."""

    def mask(self, seed, rows, cols, p, origin=(0, 0)):
        return launch_mask(as_tensor(seed), rows, cols, p, *origin, self.device)

    def forward(self, x, bias=None, activation="identity", p=0.0, seed=(0, 0), origin=(0, 0)):
        act = xfused.activation(activation)
        return op.launch_forward(x, bias, as_tensor(seed), act.name, act.parameters, p, *origin)

    def forward_backward(self, x, bias, dy, activation="identity", p=0.0, seed=(0, 0), origin=(0, 0)):
        act = xfused.activation(activation)
        y = self.forward(x, bias, act, p, seed, origin)
        saved = None if act.name == "identity" else x
        dx, dbias = op.launch_backward(dy, saved, bias, as_tensor(seed), act.name, act.parameters, p, *origin)
        return y, dx, None if bias is None else dbias


REFERENCE = Public("reference", "cpu")
INTERPRETER = Interpreter("interpreter", "cpu")
GPU = Public("cuda", "cuda:0" if CUDA else "cpu")

_needs_interpreter = pytest.mark.skipif(not INTERPRET, reason="kernels run on the GPU here")
MARKS = {REFERENCE: (), INTERPRETER: _needs_interpreter, GPU: pytest.mark.gpu}

every_path = pytest.mark.parametrize(
    "path", [pytest.param(path, marks=marks) for path, marks in MARKS.items()], ids=repr
)
kernel_path = pytest.mark.parametrize(
    "path", [pytest.param(path, marks=MARKS[path]) for path in (INTERPRETER, GPU)], ids=repr
)


def sized(names, interpreter, gpu, reference=None):
    """Parametrises `path` together with `names`, with other cases on each path; none on the reference by default."""
    lists = {REFERENCE: reference or [], INTERPRETER: interpreter, GPU: gpu}
    params = [
        pytest.param(path, *(case if isinstance(case, tuple) else (case,)), marks=MARKS[path], id=f"{path}-{i}")
        for path, cases in lists.items()
        for i, case in enumerate(cases)
    ]
    return pytest.mark.parametrize("path, " + names, params)
