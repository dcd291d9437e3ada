"""One step of a transformer's MLP, x (M, N), hidden 4 N: forward, backward, all gradients, over its bare products."""

import dataclasses
from collections.abc import Callable, Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import xfused

from ..eager import activation
from ..registry import Case, Function, Op


def inputs(case: Case, device: torch.device) -> tuple[Tensor, ...]:
    """x (M, N), fc1.weight (4 N, N), fc1.bias (4 N,), fc2.weight (N, 4 N), fc2.bias (N,)."""
    M, N, H = case.M, case.N, 4 * case.N

    def randn(*shape: int, scale: float = 1.0) -> Tensor:
        return (torch.randn(shape, device=device) * scale).to(case.torch_dtype)

    x = randn(M, N).requires_grad_()
    weights = randn(H, N, scale=N**-0.5), randn(H), randn(N, H, scale=H**-0.5), randn(N)
    return x, *(nn.Parameter(weight) for weight in weights)


def probes(case: Case, device: torch.device) -> Iterator[tuple[Case, tuple[Tensor, ...]]]:
    """With fc2 the identity the mask shows in the output; the whole of it in the case's dtype has no mask to know."""
    shown = dataclasses.replace(case, M=256, N=32, dtype="float32")
    x, w1, b1, _, _ = inputs(shown, device)
    eye, zeros = torch.eye(4 * shown.N, device=device), torch.zeros(4 * shown.N, device=device)
    yield shown, (x, w1, b1, nn.Parameter(eye), nn.Parameter(zeros))
    whole = dataclasses.replace(case, M=64, N=64, p=0.0)
    yield whole, inputs(whole, device)


def oracle(case: Case, inputs: Sequence[Tensor], keep: Tensor | None) -> Tensor:
    x, w1, b1, w2, b2 = inputs
    h = activation(case.activation)(F.linear(x, w1, b1)) / (1 - case.p)
    return F.linear(h if keep is None else h * keep, w2, b2)


def moved(case: Case) -> dict[str, int]:
    """Operands and results of the six products."""
    size = case.torch_dtype.itemsize
    x, h, w = case.M * case.N * size, case.M * 4 * case.N * size, 4 * case.N * case.N * size
    return {"fwd": 2 * (x + h + w), "bwd": 4 * (x + h + w), "fwd+bwd": 6 * (x + h + w)}


def products(case: Case, inputs: Sequence[Tensor], dy: Tensor, mode: str) -> Callable[[], object]:
    """The six matrix products alone: two forward, four backward."""
    x, w1, _, w2, _ = (t.detach() for t in inputs)
    h = torch.randn(case.M, 4 * case.N, device=x.device, dtype=x.dtype)
    forward, backward = "fwd" in mode, "bwd" in mode

    def run() -> object:
        results = [x @ w1.T, h @ w2.T] if forward else []
        if backward:
            results += [dy @ w2, dy.T @ h, h @ w1, h.T @ x]
        return results

    return run


def fused(case: Case, inputs: Sequence[Tensor]) -> Function:
    _, w1, b1, w2, b2 = inputs
    with torch.device("meta"):
        mlp = xfused.FusedMLP(w1.shape[1], w1.shape[0], w2.shape[0], activation=case.activation, dropout=case.p)
    mlp.fc1.weight, mlp.fc1.bias, mlp.fc2.weight, mlp.fc2.bias = w1, b1, w2, b2  # type: ignore[assignment]
    return lambda x, *_: mlp(x)


def eager(case: Case, inputs: Sequence[Tensor]) -> Function:
    function, p = activation(case.activation), case.p
    return lambda x, w1, b1, w2, b2: F.linear(F.dropout(function(F.linear(x, w1, b1)), p), w2, b2)


OP = Op(
    "fused_mlp",
    "fc2(dropout(activation(fc1(x)))), hidden 4 N, with all gradients",
    inputs,
    oracle,
    probes,
    moved,
    {"xfused": fused, "eager": eager},
    shapes=((8192, 4096), (8192, 1024)),
    small=((128, 512), (512, 1024)),
    bare={"products": products},
    unit="products",
    slack=4.0,
    modes=("fwd+bwd",),
    activations=("gelu",),
)
