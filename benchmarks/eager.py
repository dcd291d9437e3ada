"""The activations as a user of PyTorch writes them: what eager mode and torch.compile run, and the check's oracle."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

# those that PyTorch has under another name, or not at all
SPECIAL: dict[str, Callable[[Tensor], Tensor]] = {
    "identity": lambda u: u,
    "relu_squared": lambda u: F.relu(u).square(),
    "gelu_tanh": lambda u: F.gelu(u, approximate="tanh"),
    "quick_gelu": lambda u: u * torch.sigmoid(1.702 * u),
    "smelu": lambda u: torch.where(u >= 2, u, (u + 2).clamp_min(0).square() / 8),
    "star_relu": lambda u: 0.8944 * F.relu(u).square() - 0.4472,
}


def activation(name: str) -> Callable[[Tensor], Tensor]:
    """The function that `name` means in xfused, with its default parameters."""
    return SPECIAL[name] if name in SPECIAL else getattr(F, name)
