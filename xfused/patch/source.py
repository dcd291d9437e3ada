"""Methods as source: their calls, which call works on whose result, and the chains among them."""

import ast
import functools
import inspect
import textwrap
import types
from collections.abc import Iterator
from typing import NamedTuple

from torch import nn

from .table import PATTERNS, Pattern

_SCOPES = (ast.Lambda, ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
_DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
_LATER = (*_SCOPES, ast.IfExp, ast.BoolOp, ast.NamedExpr)  # may evaluate a part later, or not at all


class UnreadableError(Exception):
    """A method that cannot be read or compiled again; the message says why."""


class Method:
    """One method as a syntax tree.

    Attributes:
        name: of the method.
        filename: that its line numbers refer to.
        tree: its definition.
        nodes: the calls, sums and products in it; later statements first, and outer expressions before inner ones.
    """

    def __init__(self, name: str, source: str, filename: str, first_line: int) -> None:
        self.name = name
        self.filename = filename
        tree = ast.parse(textwrap.dedent(source)).body[0]
        if not isinstance(tree, ast.FunctionDef):
            raise UnreadableError(f"{name} is not a plain function")
        ast.increment_lineno(tree, first_line - 1)
        self.tree = tree
        self.nodes: list[ast.expr] = []
        self._before: dict[int, tuple[ast.stmt, ast.expr]] = {}  # by the id of a Name: where its value comes from
        self._uses: dict[str, int] = {}
        for node in ast.walk(tree):
            if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Store):
                self._count(node)
            elif isinstance(node, ast.AugAssign) and isinstance(node.target, ast.Name):
                self._count(node.target)
        self._shared = set(_shared_names(tree))
        self._read_block(tree.body)

    def _count(self, name: ast.Name) -> None:
        self._uses[name.id] = self._uses.get(name.id, 0) + 1

    def _read_block(self, block: list[ast.stmt]) -> None:
        for i in reversed(range(len(block))):
            statement = block[i]
            if isinstance(statement, _DEFINITIONS):
                continue
            for field in ("body", "orelse", "finalbody"):
                self._read_block(getattr(statement, field, []))
            for inner in [*getattr(statement, "handlers", []), *getattr(statement, "cases", [])]:
                self._read_block(inner.body)
            value = getattr(statement, "value", None)
            if isinstance(value, ast.expr):
                self.nodes += [n for n in _walk(value) if isinstance(n, ast.Call) or operator(n)]
                if i > 0:
                    self._link(block[i - 1], statement, value)

    def _link(self, before: ast.stmt, statement: ast.stmt, value: ast.expr) -> None:
        """Notes where `before` assigns a variable whose value serves `statement`, once, and nothing else."""
        name, assigned = _target(before), getattr(before, "value", None)
        inner = list(ast.walk(value))
        uses = [n for n in inner if isinstance(n, ast.Name) and n.id == name]
        if name is None or assigned is None or len(uses) != 1 or name in self._shared:
            return
        for node in inner:
            # nothing else in the statement may run before what is moved into it
            if isinstance(node, _LATER) or (isinstance(node, ast.Call) and uses[0] not in ast.walk(node)):
                return
        if isinstance(statement, ast.Return) or _target(statement) == name or self._uses[name] == 1:
            self._before[id(uses[0])] = before, assigned

    def origin(self, operand: ast.expr) -> tuple[ast.expr, ast.stmt | None]:
        """The expression that an operand stands for, and the statement it comes from where that is an earlier one."""
        statement, value = self._before.get(id(operand), (None, operand))
        return value, statement


def operator(node: ast.AST) -> str | None:
    names: dict[type, str] = {ast.Add: "add", ast.Mult: "mul"}
    return names.get(type(node.op)) if isinstance(node, ast.BinOp) else None


def operands(node: ast.expr) -> list[ast.expr]:
    """What a chain's call works on: its first argument, or either side of a sum or product."""
    if isinstance(node, ast.BinOp):
        return [node.left, node.right]
    return node.args[:1] if isinstance(node, ast.Call) else []


def _target(statement: ast.stmt) -> str | None:
    """The variable that a statement assigns, if that is all it does."""
    if isinstance(statement, ast.Assign) and len(statement.targets) == 1:
        target = statement.targets[0]
    elif isinstance(statement, ast.AnnAssign):
        target = statement.target
    else:
        return None
    return target.id if isinstance(target, ast.Name) else None


def _walk(value: ast.expr) -> Iterator[ast.expr]:
    """Outer before inner; no scopes of their own, whose names mean something else."""
    queue: list[ast.AST] = [value]
    for node in queue:
        if not isinstance(node, _SCOPES):
            if isinstance(node, ast.expr):
                yield node
            queue += ast.iter_child_nodes(node)


def _shared_names(tree: ast.FunctionDef) -> Iterator[str]:
    """Names that an inner scope sees too, or that are not local."""
    for scope in ast.walk(tree):
        if isinstance(scope, (ast.Global, ast.Nonlocal)):
            yield from scope.names
        elif isinstance(scope, (*_SCOPES, *_DEFINITIONS)) and scope is not tree:
            yield from (node.id for node in ast.walk(scope) if isinstance(node, ast.Name))


# ------------------------------------------------------------------------------------------------ of a class


def function_of(cls: type, name: str) -> types.FunctionType | None:
    function = inspect.getattr_static(cls, name, None)
    return function if isinstance(function, types.FunctionType) else None


def inner_function_of(cls: type, name: str) -> types.FunctionType:
    """A method without its decorators, which its source belongs to."""
    return _inner(getattr(cls, name))


def _inner(function: types.FunctionType) -> types.FunctionType:
    inner = inspect.unwrap(function)
    if not isinstance(inner, types.FunctionType):
        raise UnreadableError(f"{function.__name__} is not a plain function")
    return inner


def read(cls: type, name: str, keys: tuple[str, ...]) -> Method:
    """A class's method, fresh. `keys` are the children of a Sequential, whose calls are written out."""
    return _read(function_of(cls, name), name, keys)


def _read(function: types.FunctionType | None, name: str, keys: tuple[str, ...]) -> Method:
    if function is None:
        raise UnreadableError(f"{name} is not a plain function")
    if function is nn.Sequential.forward:
        calls = "".join(f"    input = self._modules[{key!r}](input)\n" for key in keys)
        return Method(name, f"def forward(self, input):\n{calls}    return input\n", "<xfused.patch>", 1)
    inner = _inner(function)
    try:
        lines, first_line = inspect.getsourcelines(inner)
        return Method(name, "".join(lines), inner.__code__.co_filename, first_line)
    except (OSError, TypeError, SyntaxError, AttributeError) as error:
        raise UnreadableError(f"the source of {name} is not available") from error


_read_once = functools.lru_cache(maxsize=4096)(_read)  # for who does not change the tree


def keys_of(module: nn.Module, cls: type) -> tuple[str, ...]:
    return tuple(module._modules) if function_of(cls, "forward") is nn.Sequential.forward else ()


def methods(cls: type, keys: tuple[str, ...]) -> Iterator[Method]:
    """forward, and the methods of its class that it calls.

    Raises:
        UnreadableError: forward cannot be read.
    """
    names, seen = ["forward"], {"forward"}
    while names:
        name = names.pop()
        try:
            method = _read_once(function_of(cls, name), name, keys)
        except UnreadableError:
            if name == "forward":
                raise
            continue
        yield method
        this = method.tree.args.args[0].arg if method.tree.args.args else None
        for node in ast.walk(method.tree):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == this:
                function = function_of(cls, node.attr)
                if node.attr not in seen and function not in (None, function_of(nn.Module, node.attr)):
                    seen.add(node.attr)
                    names.append(node.attr)


# ---------------------------------------------------------------------------------------------------- chains


class Chain(NamedTuple):
    """One match: its pattern, its calls from the last to the first, and the statements they come from but the last."""

    pattern: Pattern
    nodes: list[ast.expr]
    absorbed: list[ast.stmt]


Kinds = tuple[str | None, ...]  # of a method's calls, in the order of its nodes; "dropout()" is the function


def chains(method: Method, kinds: Kinds) -> list[Chain]:
    """The chains of PATTERNS in a method, whose calls are of the given kinds; the last call comes first.

    Raises:
        UnreadableError: the kinds are those of another source.
    """
    if len(kinds) != len(method.nodes):
        raise UnreadableError(f"{method.name} has another source than when it was patched")
    kind_of = {id(node): (kind or "").removesuffix("()") for node, kind in zip(method.nodes, kinds, strict=True)}
    taken: set[int] = set()

    def follow(node: ast.expr, steps: tuple[str, ...]) -> tuple[list[ast.expr], list[ast.stmt]] | None:
        if id(node) in taken or kind_of.get(id(node)) not in steps[-1].split("|"):
            return None
        if len(steps) == 1:
            return [node], []
        for operand in operands(node):
            value, statement = method.origin(operand)
            if (rest := follow(value, steps[:-1])) is not None:
                return [node, *rest[0]], [*([] if statement is None else [statement]), *rest[1]]
        return None

    found = []
    for node in method.nodes:
        for pattern in PATTERNS:
            if (match := follow(node, pattern.steps)) is not None:
                found.append(Chain(pattern, *match))
                taken |= {id(n) for n in match[0]}
                break
    return found
