"""xfused: fused Triton kernels for training, under PyTorch."""

from .activations import Activation, activation, activations
from .modules import BiasActDropout, FusedMLP
from .ops.bias_act_dropout import bias_act_dropout
from .ops.mask import dropout_mask
from .patch import patch, unpatch
from .philox import new_seed

__version__ = "0.1.0"

__all__ = [
    "Activation",
    "BiasActDropout",
    "FusedMLP",
    "activation",
    "activations",
    "bias_act_dropout",
    "dropout_mask",
    "new_seed",
    "patch",
    "unpatch",
]
