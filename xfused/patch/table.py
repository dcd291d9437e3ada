"""The table of patterns: which chains of calls a fused operation replaces, and what then runs."""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.module import _has_any_global_hook

from ..activations import Activation
from ..activations import activation as resolve
from ..ops.after_linear import bias_act_dropout_after

# ------------------------------------------------------------------------------------------------- what runs


def _linear_product(linear: nn.Module, x: Tensor) -> Tensor:
    return F.linear(x, linear.weight)  # type: ignore[arg-type]


def _conv1d_product(linear: nn.Module, x: Tensor) -> Tensor:
    return torch.matmul(x, linear.weight)  # type: ignore[arg-type]


# linear layers whose bias can be left to the fused operation; a class's full name, as its library is optional
CONV1D = "transformers.pytorch_utils.Conv1D"
PRODUCTS: dict[str, Callable[[nn.Module, Tensor], Tensor]] = {
    "torch.nn.modules.linear.Linear": _linear_product,
    CONV1D: _conv1d_product,
}


@dataclass(frozen=True)
class Site:
    """What a place of one module consisted of when it was patched.

    Attributes:
        linear: the class of the linear layer, or None where the place has none that can leave out its bias.
        product: multiplies by that layer's weight.
        act: the class of the activation module, or the function; None for none.
        settings: the activation module's attributes that are numbers or strings.
        activation: what `act` resolves to.
    """

    linear: type | None
    product: Callable[[nn.Module, Tensor], Tensor] | None
    act: Any
    settings: tuple[tuple[str, Any], ...]
    activation: Activation


def settings_of(act: Any) -> tuple[tuple[str, Any], ...]:
    if not isinstance(act, nn.Module):
        return ()
    skipped = ("training", "inplace")
    return tuple((k, v) for k, v in vars(act).items() if isinstance(v, (int, float, str)) and k not in skipped)


def is_bare(module: Any) -> bool:
    """Whether calling the module would run its class's forward and nothing else: no hook, no forward of its own."""
    if not isinstance(module, nn.Module):
        return True
    own = module.__dict__
    hooks = own["_forward_hooks"] or own["_forward_pre_hooks"] or own["_backward_hooks"] or own["_backward_pre_hooks"]
    return not (hooks or "forward" in own)


def run_bias_act_dropout(
    owner: nn.Module,
    index: int,
    x: Tensor,
    linear: Any = None,
    act: Any = None,
    options: dict[str, Any] | None = None,
    drop: Any = None,
    p: float | None = None,
    training: Any = None,
) -> Tensor:
    """drop(act(linear(x))), less what is None.

    In training it is fused, as far as what stands there is what stood there when the module was patched. In eval mode
    the calls run as they were written: there is nothing to regenerate, and the results are the same bits.
    """
    sites = getattr(owner, "_xfused_sites", None)  # None: unpatched, while a bound method lived on
    is_dropout = type(drop) is nn.Dropout
    rate, active = (drop.p, drop.training) if is_dropout else (p, owner.training if training is None else training)
    fits = active and (drop is None or is_dropout) and is_bare(drop) and is_bare(act)
    if sites is None or not fits or _has_any_global_hook():
        return _as_written(x, linear, act, options, drop, p, training)
    site = sites[index]
    if act is not None and not _is_same(act, site):
        return _as_written(x, linear, act, options, drop, p, training)
    bias = None
    fed = x
    if linear is not None and type(linear) is site.linear and is_bare(linear):
        x, bias = site.product(linear, x), linear.bias
    elif linear is not None:
        x = linear(x)
    if bias is None and not rate:
        return _as_written(x, None, act, options, drop, p, training)
    return bias_act_dropout_after(_columns(linear), x, bias, fed, activation=site.activation, p=rate or 0.0)


def _columns(linear: Any) -> Any:
    """A parameter of a linear layer whose first dimension is the columns of its output."""
    return linear.bias if full_name(type(linear)) == CONV1D else getattr(linear, "weight", None)  # (K, N), or (N, K)


def _as_written(
    x: Tensor, linear: Any, act: Any, options: dict[str, Any] | None, drop: Any, p: Any, training: Any
) -> Tensor:
    x = x if linear is None else linear(x)
    if act is not None:
        x = act(x, **options) if options else act(x)
    if drop is not None:
        return drop(x)
    return x if p is None else F.dropout(x, p, training)


def _is_same(act: Any, site: Site) -> bool:
    return (type(act) is site.act or act is site.act) and all(
        getattr(act, name) == value for name, value in site.settings
    )


# ----------------------------------------------------------------------------------------------- the patterns


@dataclass(frozen=True)
class Pattern:
    """A chain of calls, each on the result of the one before, and what becomes of it.

    Attributes:
        steps: their kinds (see `kind_of`), first to last; "a|b" is either.
        run: called instead as run(owner, index, x, **parts), or None to leave the chain as it is.
        left: why it is left.
    """

    steps: tuple[str, ...]
    run: Callable[..., Tensor] | None
    left: str = ""


_NO_NORM = "the fused bias + dropout + residual + norm is not there yet"
_NO_BIAS = "the linear layer has no bias, or is of a class that must add it itself"

_GATED = "gated: a product stands between the activation and the dropout"

# the names under which `run` takes the callees of the steps; the other side of a sum or product is `other`
PARTS = {"linear": "linear", "opaque": "linear", "activation": "act", "dropout": "drop", "norm": "norm"}

# a chain is matched with the first pattern that fits, and the last call of a method is matched first
PATTERNS: tuple[Pattern, ...] = (
    Pattern(("linear|opaque", "dropout", "add", "norm"), None, _NO_NORM),
    Pattern(("linear", "activation", "dropout"), run_bias_act_dropout),
    Pattern(("opaque", "activation", "dropout"), run_bias_act_dropout),  # the layer tells how its output is sharded
    Pattern(("activation", "dropout"), run_bias_act_dropout),
    Pattern(("linear", "activation"), run_bias_act_dropout),
    Pattern(("linear", "dropout"), run_bias_act_dropout),
    Pattern(("linear|opaque", "mul", "dropout"), None, _GATED),
    Pattern(("linear|opaque", "other", "dropout"), None, "no activation of xfused stands between layer and dropout"),
    Pattern(("opaque", "activation"), None, _NO_BIAS),
    Pattern(("opaque", "dropout"), None, _NO_BIAS),
)


def full_name(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"


def kind_of(thing: Any, options: dict[str, Any]) -> str | None:
    """The kind of a callee: "opaque" is a linear layer whose bias is its own affair, "other" any other callee."""
    if isinstance(thing, nn.Module):
        name = type(thing).__name__
        if isinstance(thing, (nn.LayerNorm, nn.RMSNorm)) or name.endswith(("LayerNorm", "RMSNorm")):
            return "norm"
        if type(thing) is nn.Dropout:
            return "dropout"
        if full_name(type(thing)) in PRODUCTS:
            return "opaque" if getattr(thing, "bias", None) is None else "linear"
        if isinstance(thing, nn.Linear) or hasattr(thing, "base_layer"):
            return "opaque"
    elif not callable(thing):
        return None
    try:
        return None if activation_of(thing, options).name == "identity" else "activation"
    except (TypeError, ValueError):
        return "other"


def activation_of(thing: Any, options: dict[str, Any]) -> Activation:
    return resolve(functools.partial(thing, **options) if options else thing)
