"""Subclasses whose methods have chains of calls replaced by fused ones."""

import __future__

import ast
import copyreg
import functools
import inspect
import types
from collections.abc import Callable
from typing import Any

from torch import nn

from .judge import arguments
from .source import Chain, Kinds, Method, UnreadableError, chains, function_of, operands, read
from .table import PARTS

ORIGINAL = "_xfused_original"  # of a patched class: the class it was made from
SITES = "_xfused_sites"  # of a patched module: a Site for each fused place

# what a patched class is made from, beside the original: (method, kinds of its calls, chains that are fused)
Recipe = tuple[tuple[str, Kinds, tuple[int, ...]], ...]


def original_class(module: nn.Module) -> type:
    """The module's class before it was patched, or its class."""
    return vars(type(module)).get(ORIGINAL, type(module))


def patched_class(cls: type, keys: tuple[str, ...], recipe: Recipe) -> type:
    """The subclass of cls in which the recipe's chains are fused; site i is the i-th of them.

    Raises:
        UnreadableError: a method cannot be compiled again, or is not what its source says.
    """
    return _patched_class(cls, tuple(function_of(cls, name) for name, *_ in recipe), keys, recipe)


@functools.cache
def _patched_class(
    cls: type, functions: tuple[types.FunctionType | None, ...], keys: tuple[str, ...], recipe: Recipe
) -> type:
    namespace: dict[str, Any] = {ORIGINAL: cls, "__reduce_ex__": _reduce_ex, "__doc__": cls.__doc__}
    index = 0
    for function, (name, kinds, fused) in zip(functions, recipe, strict=True):
        method = read(cls, name, keys)
        found = chains(method, kinds)
        kind_of = {id(node): kind for node, kind in zip(method.nodes, kinds, strict=True)}
        new: dict[int, ast.expr] = {}
        gone: set[int] = set()
        for i in fused:
            new[id(found[i].nodes[0])] = _call(found[i], index, method, kind_of)
            gone |= {id(statement) for statement in found[i].absorbed}
            index += 1
        _Rewrite(new, gone).visit(method.tree)
        assert function is not None
        runs = {chain.pattern.run.__name__: chain.pattern.run for chain in found if chain.pattern.run}
        namespace[name] = _compile(function, method.tree, method.filename, runs)
    if keys:
        namespace["forward"] = _for_these(keys, namespace["forward"])
    namespace["_xfused_recipe"] = keys, recipe
    # FSDP's wrapping policies, architectures in a config and the like go by the name
    namespace |= {"__module__": cls.__module__, "__qualname__": cls.__qualname__}
    patched = type(cls)(cls.__name__, (cls,), namespace)  # where cls wraps its subclasses' methods, it does so here
    for name, *_ in recipe:
        if not keys and _wrappers(vars(patched)[name]) != _wrappers(function_of(cls, name)):
            raise UnreadableError(f"{name} was wrapped after its class was defined")
    return patched


def _call(chain: Chain, index: int, method: Method, kind_of: dict[int, str | None]) -> ast.Call:
    """run(self, index, x, linear=self.fc1, act=self.act, p=self.p, training=self.training)"""
    run = chain.pattern.run
    assert run is not None
    keywords = []
    inner: ast.expr | None = None
    for node, step in zip(reversed(chain.nodes), chain.pattern.steps, strict=True):
        _, *others = sorted(operands(node), key=lambda operand: method.origin(operand)[0] is not inner)
        inner = node
        if not isinstance(node, ast.Call):
            keywords.append(ast.keyword("other", others[0]))
            continue
        given = arguments(node) or {}
        if kind_of[id(node)] == "dropout()":
            keywords.append(ast.keyword("p", given.get("p", ast.Constant(0.5))))
            keywords.append(ast.keyword("training", given.get("training", ast.Constant(True))))
            continue
        keywords.append(ast.keyword(PARTS[step.split("|")[0]], node.func))
        if step == "activation" and given:
            names: list[ast.expr | None] = [ast.Constant(name) for name in given]
            keywords.append(ast.keyword("options", ast.Dict(names, list(given.values()))))
    this = method.tree.args.args[0].arg
    call = ast.Call(_name(run.__name__), [_name(this), ast.Constant(index), operands(chain.nodes[-1])[0]], keywords)
    return ast.copy_location(call, chain.nodes[0])


def _name(name: str) -> ast.Name:
    return ast.Name(name, ast.Load())


class _Rewrite(ast.NodeTransformer):
    def __init__(self, new: dict[int, ast.expr], gone: set[int]) -> None:
        self.new = new
        self.gone = gone

    def visit(self, node: ast.AST) -> Any:
        if id(node) in self.gone:
            # its value lives on, as the argument of a fused call in the statement behind it
            return None
        return self.generic_visit(self.new.get(id(node), node))


def _compile(function: types.FunctionType, tree: ast.FunctionDef, filename: str, runs: dict[str, Any]) -> Any:
    """The function with another body: the same globals, closure, defaults and decorators.

    Raises:
        UnreadableError: it cannot be made.
    """
    inner = inspect.unwrap(function)
    assert isinstance(inner, types.FunctionType)
    code = inner.__code__
    owner = inner.__qualname__.split(".")[-2:-1]
    if any(name.startswith(f"_{cls.lstrip('_')}__") for name in code.co_names for cls in owner):
        raise UnreadableError(f"{tree.name} uses names that are private to its class")
    decorators, tree.decorator_list = tree.decorator_list, []
    for argument in ast.walk(tree.args):  # defaults and annotations are taken over, not evaluated again
        if isinstance(argument, ast.arg):
            argument.annotation = None
    tree.args.defaults = [ast.Constant(None) for _ in tree.args.defaults]
    tree.args.kw_defaults = [None if default is None else ast.Constant(None) for default in tree.args.kw_defaults]
    tree.returns = None
    wraps = ", ".join((*code.co_freevars, *runs))
    maker = ast.parse(f"def _make({wraps}):\n    pass\n    return {tree.name}")
    assert isinstance(maker.body[0], ast.FunctionDef)
    maker.body[0].body[0] = tree
    ast.fix_missing_locations(maker)
    flags = code.co_flags & sum(getattr(__future__, name).compiler_flag for name in __future__.all_feature_names)
    made: dict[str, Any] = {}
    try:
        cells = [cell.cell_contents for cell in inner.__closure__ or ()]
        exec(compile(maker, filename, "exec", flags=flags, dont_inherit=True), inner.__globals__, made)
        new = made["_make"](*cells, *runs.values())
        new.__defaults__, new.__kwdefaults__ = inner.__defaults__, inner.__kwdefaults__
        functools.update_wrapper(new, inner)
        del new.__wrapped__
        for decorator in reversed(decorators):
            expression = ast.fix_missing_locations(ast.Expression(decorator))
            new = eval(compile(expression, filename, "eval", flags=flags, dont_inherit=True), inner.__globals__)(new)
    except Exception as error:  # a decorator may raise anything
        raise UnreadableError(f"{tree.name} cannot be compiled again: {type(error).__name__}: {error}") from error
    return new


def _wrappers(function: Any) -> list[Any]:
    """The code around the innermost function; a subclass's wrapper around its base's, both the same, counts once."""
    codes: list[Any] = []
    while hasattr(function, "__wrapped__"):
        code = getattr(function, "__code__", type(function))
        codes += [code] if codes[-1:] != [code] else []
        function = function.__wrapped__
    return codes


def _for_these(keys: tuple[str, ...], forward: Callable[..., Any]) -> Callable[..., Any]:
    def forward_of_children(self: nn.Module, input: Any) -> Any:
        if tuple(self._modules) != keys:  # a child was added or removed since
            return nn.Sequential.forward(self, input)  # type: ignore[arg-type]
        return forward(self, input)

    return forward_of_children


def _reduce_ex(self: nn.Module, protocol: Any) -> Any:
    """As the original class's, but for how the object is made: the patched class has no name to be found under."""
    patched: Any = next(cls for cls in type(self).__mro__ if ORIGINAL in vars(cls))
    make, args, *rest = super(patched, self).__reduce_ex__(max(protocol, 2))
    if make is copyreg.__newobj__ and args[0] is patched:  # type: ignore[attr-defined]
        make, args = _restore, (vars(patched)[ORIGINAL], *vars(patched)["_xfused_recipe"], *args[1:])
    return make, args, *rest


def _restore(cls: type, keys: tuple[str, ...], recipe: Recipe, *args: Any) -> Any:
    patched = patched_class(cls, keys, recipe)
    return patched.__new__(patched, *args)
