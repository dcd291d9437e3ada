"""One module's calls: of which kind they are, and what a chain of them becomes."""

import ast
import re
import types
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from .source import Chain, Kinds, Method, operator
from .table import PARTS, PRODUCTS, Site, activation_of, full_name, kind_of, settings_of

_PURE = (
    *(ast.Name, ast.Attribute, ast.Subscript, ast.Constant, ast.IfExp, ast.Compare, ast.BoolOp, ast.UnaryOp, ast.BinOp),
    *(ast.operator, ast.unaryop, ast.boolop, ast.cmpop, ast.expr_context),
)


def _evaluate(node: ast.expr, module: nn.Module, function: types.FunctionType) -> Any:
    """What `self.a.b`, `self.a["b"]` or a global name stands for; None where that is not known before the call."""
    code = function.__code__
    if isinstance(node, ast.Name):
        if node.id == code.co_varnames[0]:
            return module
        if node.id in code.co_freevars:
            return (function.__closure__ or ())[code.co_freevars.index(node.id)].cell_contents
        return None if node.id in code.co_varnames + code.co_cellvars else function.__globals__.get(node.id)
    if isinstance(node, ast.Attribute):
        return getattr(_evaluate(node.value, module, function), node.attr, None)
    if isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant):
        try:
            return _evaluate(node.value, module, function)[node.slice.value]
        except (KeyError, IndexError, TypeError):
            return None
    return None


def _is_pure(value: ast.expr) -> bool:
    """Whether evaluating it earlier or later makes no difference."""
    return all(isinstance(node, _PURE) for node in ast.walk(value))


def is_dropout_function(thing: Any) -> bool:
    return thing is F.dropout or thing is torch.dropout


def arguments(call: ast.Call) -> dict[str, ast.expr] | None:
    """A call's arguments by name, less the first, positional ones as dropout names them; None if one is computed."""
    values = [*call.args, *(k.value for k in call.keywords)]
    named = all(k.arg is not None for k in call.keywords)
    if not call.args or not named or not all(_is_pure(value) for value in values[1:]):
        return None
    if isinstance(call.args[0], ast.Starred) or len(call.args) > 4:
        return None
    given = dict(zip(("p", "training", "inplace"), call.args[1:], strict=False))
    return given | {{"train": "training"}.get(str(k.arg), str(k.arg)): k.value for k in call.keywords}


def _literals(call: ast.Call) -> dict[str, Any] | None:
    """The keywords of a call with one positional argument, if they are constants."""
    given = arguments(call)
    if given is None or len(call.args) > 1 or not all(isinstance(v, ast.Constant) for v in given.values()):
        return None
    return {name: value.value for name, value in given.items() if isinstance(value, ast.Constant)}


def _classify(node: ast.expr, module: nn.Module, function: types.FunctionType) -> str | None:
    if not isinstance(node, ast.Call):
        return operator(node)
    thing = _evaluate(node.func, module, function)
    if is_dropout_function(thing):
        return None if arguments(node) is None else "dropout()"
    options = _literals(node)
    return None if thing is None or options is None else kind_of(thing, options)


def judge(method: Method, module: nn.Module, function: types.FunctionType) -> Kinds:
    """The kinds of a method's calls, as this module would make them."""
    return tuple(_classify(node, module, function) for node in method.nodes)


def parts(chain: Chain, module: nn.Module, function: types.FunctionType) -> dict[str, tuple[Any, ast.Call]]:
    """The callees of a chain and their calls, first to last, by the names that `Pattern.run` takes them under."""
    pairs = zip(reversed(chain.nodes), chain.pattern.steps, strict=True)
    calls = [(PARTS.get(step.split("|")[0], step), node) for node, step in pairs if isinstance(node, ast.Call)]
    return {name: (_evaluate(node.func, module, function), node) for name, node in calls}


def site_of(chain: Chain, module: nn.Module, function: types.FunctionType) -> Site:
    found = parts(chain, module, function)
    linear, act = (found[name][0] if name in found else None for name in ("linear", "act"))
    options = (_literals(found["act"][1]) or {}) if "act" in found else {}
    takes_bias = chain.pattern.steps[0] == "linear"
    return Site(
        linear=type(linear) if takes_bias else None,
        product=PRODUCTS[full_name(type(linear))] if takes_bias else None,
        act=type(act) if isinstance(act, nn.Module) else act,
        settings=settings_of(act),
        activation=activation_of("identity" if act is None else act, options),
    )


def why_left(chain: Chain, module: nn.Module, function: types.FunctionType) -> str:
    """Why a chain is not fused; empty where it is."""
    if chain.pattern.run is None:
        return chain.pattern.left
    for node in chain.nodes:
        if isinstance(node, ast.BinOp) and not any(_is_pure(side) for side in (node.left, node.right)):
            return "both sides of a sum or product are computed in place"
    act = parts(chain, module, function).get("act")
    if chain.pattern.steps[0] != "linear" and act is not None and getattr(act[0], "inplace", False):
        return "the activation changes its input in place"
    return ""


def place(chain: Chain) -> str:
    """A chain as a reader would name it: "fc1 > activation_fn > dropout"."""
    signs = {"add": "+", "mul": "*"}
    names = [
        ast.unparse(node.func).removeprefix("self.") if isinstance(node, ast.Call) else signs[step]
        for node, step in zip(reversed(chain.nodes), chain.pattern.steps, strict=True)
    ]
    names = [re.sub(r"_modules\['(\w+)'\]", r"\1", name.split("functional.")[-1]) for name in names]
    return " > ".join(names)


def describe(chain: Chain, site: Site) -> str:
    """What a chain has become: "bias + gelu + dropout"."""
    names = {"linear": "bias", "activation": str(site.activation)}
    return " + ".join(names.get(step, step) for step in chain.pattern.steps if step != "opaque")
