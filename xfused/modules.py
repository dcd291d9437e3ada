"""torch.nn modules of the fused operations."""

from typing import Any

import torch
from torch import Tensor, nn

from .activations import activation as resolve
from .ops._check import check_p
from .ops.after_linear import bias_act_dropout_after
from .ops.bias_act_dropout import bias_act_dropout


class BiasActDropout(nn.Module):
    """dropout(activation(x + bias)): the tail of a linear layer that has no bias of its own.

    Args:
        features: N, the size of the last dimension.
        activation: what `xfused.activation` takes.
        p: dropout probability, in training mode only.
        bias: False for none.
        device, dtype: of the bias.
    Shapes:
        x (..., N) -> y (..., N), in x's dtype.
    Attributes:
        bias: Parameter (N,), zeros at first, or None.
    """

    bias: nn.Parameter | None

    def __init__(
        self,
        features: int,
        activation: Any = "gelu",
        p: float = 0.1,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        check_p(p)
        self.features = features
        self.activation = resolve(activation)
        self.p = p
        self.register_parameter(
            "bias", nn.Parameter(torch.empty(features, device=device, dtype=dtype)) if bias else None
        )
        self.reset_parameters()

    def reset_parameters(self) -> None:
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def forward(self, x: Tensor) -> Tensor:
        return bias_act_dropout(x, self.bias, activation=self.activation, p=self.p, training=self.training)

    def extra_repr(self) -> str:
        return f"{self.features}, activation={self.activation}, p={self.p}, bias={self.bias is not None}"


class _LinearSkipsBias(nn.Linear):
    """x @ weight.T: a torch.nn.Linear whose bias is added by the fused operation behind it."""

    def forward(self, input: Tensor) -> Tensor:
        return nn.functional.linear(input, self.weight)


class FusedMLP(nn.Module):
    """output_dropout(fc2(dropout(activation(fc1(x))))), the transformer's MLP.

    Args:
        in_features: K.
        hidden_features: H; default 4 * K.
        out_features: O; default K.
        activation: what `xfused.activation` takes.
        dropout: probability after the activation, in training mode only.
        output_dropout: probability after fc2, in training mode only.
        bias: False for none in either layer.
        device, dtype: of the parameters.
    Shapes:
        x (..., K) -> y (..., O), in the dtype that torch.nn.Linear gives.
    Attributes:
        fc1.weight (H, K), fc1.bias (H,), fc2.weight (O, H), fc2.bias (O,): initialised as torch.nn.Linear does. `fc1`
        (and `fc2`, where output_dropout > 0) leaves its bias to the fused operation, so what replaces or wraps it must
        not add the bias either.
    """

    def __init__(
        self,
        in_features: int,
        hidden_features: int | None = None,
        out_features: int | None = None,
        *,
        activation: Any = "gelu",
        dropout: float = 0.1,
        output_dropout: float = 0.0,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        check_p(dropout, "dropout")
        check_p(output_dropout, "output_dropout")
        hidden_features = 4 * in_features if hidden_features is None else hidden_features
        out_features = in_features if out_features is None else out_features
        self.activation = resolve(activation)
        self.dropout = dropout
        self.output_dropout = output_dropout
        last = _LinearSkipsBias if output_dropout > 0 else nn.Linear
        self.fc1 = _LinearSkipsBias(in_features, hidden_features, bias=bias, device=device, dtype=dtype)
        self.fc2 = last(hidden_features, out_features, bias=bias, device=device, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        fc1, fc2 = self.fc1, self.fc2
        h = fc1(x)
        weight = getattr(fc1, "weight", None)  # what replaces a layer may have none
        h = bias_act_dropout_after(weight, h, fc1.bias, x, self.activation, self.dropout, self.training)
        y = fc2(h)
        if self.output_dropout > 0:
            weight = getattr(fc2, "weight", None)
            y = bias_act_dropout_after(weight, y, fc2.bias, h, "identity", self.output_dropout, self.training)
        return y

    def extra_repr(self) -> str:
        return f"activation={self.activation}, dropout={self.dropout}, output_dropout={self.output_dropout}"
