"""bias_act_dropout on what a linear layer put out, under tensor parallelism this rank's part of it."""

from typing import Any

from torch import Tensor

from ._check import PLAIN, is_dtensor
from .bias_act_dropout import bias_act_dropout


def bias_act_dropout_after(
    parameter: Any,
    x: Tensor,
    bias: Tensor | None,
    fed: Tensor,
    activation: Any = "identity",
    p: float = 0.0,
    training: bool = True,
) -> Tensor:
    """bias_act_dropout(x, bias), with one mask over all ranks where the layer that put out x is sharded.

    Args:
        parameter: of that layer, with the columns of x as its first dimension: its weight (N, K), mostly. Where it is
            a DTensor, it tells how a plain x is sharded.
        x: (..., N), the layer's output: a DTensor, or a plain tensor that is this rank's shard or the whole.
        bias: (N,), or None where the layer has none or has added it itself.
        fed: (..., K), what the layer was called with.
        activation, p, training: as `bias_act_dropout` takes them.
    """
    if type(parameter) not in PLAIN and is_dtensor(parameter):  # mostly it is plain: one Python call less
        from ..sharding import on_shards

        return on_shards(
            bias_act_dropout, x, bias, p=p, training=training, seed=None, parameter=parameter, fed=fed,
            activation=activation,
        )  # fmt: skip
    return bias_act_dropout(x, bias, activation=activation, p=p, training=training)
