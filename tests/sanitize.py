"""Every kernel at odd sizes, strides, dtypes, p and origins, for NVIDIA's compute-sanitizer:

    compute-sanitizer --tool memcheck python tests/sanitize.py
    compute-sanitizer --tool racecheck python tests/sanitize.py

Prints "done". Without a CUDA device it says so and exits with 2. xfused must be installed or in PYTHONPATH. The values
are checked loosely, so that a kernel that writes nothing cannot pass; other tests hold them exactly.
"""

import os
import sys

# memory of its own for each tensor: inside the caching allocator's blocks an access out of bounds goes unseen
os.environ["PYTORCH_NO_CUDA_MEMORY_CACHING"] = "1"

import torch

import xfused

SEEDS = (7, "cpu", "cuda")
# rows, columns, x's dtype, bias's dtype, activation, p, origin, the kind of x
CASES = [
    (1, 1, torch.float32, torch.float32, "gelu", 0.5, (0, 0), "whole"),
    (9, 3, torch.bfloat16, torch.bfloat16, "silu", 0.1, (3, 5), "whole"),
    (7, 130, torch.float16, torch.float32, "relu", 1.0, (1, 0), "whole"),
    (17, 256, torch.bfloat16, None, "identity", 0.3, (2**33 + 5, 2**31), "whole"),
    (33, 1000, torch.bfloat16, torch.bfloat16, "gelu", 0.1, (0, 0), "whole"),
    (65, 257, torch.float32, torch.bfloat16, "gelu_tanh", 0.1, (7, 1), "strided"),
    (31, 129, torch.float16, torch.float16, "tanh", 0.0, (0, 0), "misaligned"),
    (70, 264, torch.bfloat16, torch.float32, "relu_squared", 0.9, (4, 8), "transposed"),
    (600, 144, torch.bfloat16, torch.bfloat16, "gelu", 0.1, (0, 0), "whole"),  # several programs add one column sum
    (519, 131, torch.float32, torch.float32, "softplus", 0.1, (6, 2), "expanded"),
]


def matrix(m, n, dtype, kind):
    """(m, n) with gaps between the rows, off the 16-byte grid, with columns apart, or with one row for all."""
    if kind == "strided":
        return torch.randn(m, n + 3, device="cuda").to(dtype)[:, :n]
    if kind == "misaligned":
        return torch.randn(m * n + 1, device="cuda").to(dtype)[1:].view(m, n)
    if kind == "transposed":
        return torch.randn(n, m, device="cuda").to(dtype).t()
    if kind == "expanded":
        return torch.randn(1, n, device="cuda").to(dtype).expand(m, n)
    return torch.randn(m, n, device="cuda").to(dtype)


def run(m, n, dtype, bias_dtype, activation, p, origin, kind, seed):
    if isinstance(seed, str):
        seed = torch.tensor([3, 4], device=seed)
    x = matrix(m, n, dtype, kind).requires_grad_()
    bias = None if bias_dtype is None else torch.randn(n, device="cuda").to(bias_dtype).requires_grad_()
    dy = matrix(m, n, dtype, kind)
    inputs = [x] if bias is None else [x, bias]
    y = xfused.bias_act_dropout(x, bias, activation=activation, p=p, seed=seed, origin=origin)
    dx, *dbias = torch.autograd.grad(y, inputs, dy)
    keep = xfused.dropout_mask((m, n), p, seed, origin=origin, device="cuda")
    assert not y[~keep].any() and not dx[~keep].any(), "what is dropped is not zero"
    scale = 0.0 if p == 1 else 1 / (1 - p)
    u = (x if bias is None else x + bias).detach().double().requires_grad_()
    reference = xfused.bias_act_dropout(u, activation=activation) * keep * scale
    torch.testing.assert_close(y.double(), reference, rtol=0.05, atol=0.05)
    (dx_reference,) = torch.autograd.grad(reference, u, dy.double())
    torch.testing.assert_close(dx.double(), dx_reference, rtol=0.1, atol=0.1)
    if dbias:
        torch.testing.assert_close(dbias[0].double(), dx_reference.sum(0), rtol=0.1, atol=0.02 * m + 0.1)


def main():
    if not torch.cuda.is_available():
        print("no CUDA device")
        return 2
    torch.manual_seed(0)
    for i, case in enumerate(CASES):
        run(*case, seed=SEEDS[i % len(SEEDS)])
    torch.cuda.synchronize()
    print("done")
    return 0


if __name__ == "__main__":
    sys.exit(main())
