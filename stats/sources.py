"""What can be put under test: one small interface, and the ways to it from functions, modules and the package."""

from __future__ import annotations

import contextlib
import importlib
import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, cast

import numpy as np

from stats import contract
from stats.outcome import Array

Masker = Callable[[int, int, int, int, float], Any]
"""(seed, offset, rows, columns, p) -> bool array (rows, columns), numpy or torch, True = kept."""


class SourceError(ValueError):
    """A source that cannot be tested: it raises, or its masks are not what they must be."""


@dataclass(frozen=True)
class Source:
    """A generator of masks.

    Attributes:
        name: for reports.
        masker: draws a mask.
        bits: optional (seed, offset, rows, columns) -> uint32 (rows, columns), the numbers compared with T: tests of
            words (T17, T18) run.
        block: optional (seed, offset, group, column) -> uint32 (..., 4) of integer arrays that broadcast, the words of
            the 8-row group at that column: T19 and jumps to far seeds and offsets run.
        backward: optional, as `masker`, the mask read off the gradient.
        shard: optional (seed, offset, rows, columns, p, origin) -> mask, for slices at an origin.
        contract: True if the masks follow the mask contract, which L0 and T20 then hold them to.
        p: the one p that it can draw at, if it has but one.
        columns: the one width of its masks, if it has but one.
    """

    name: str
    masker: Masker
    bits: Callable[[int, int, int, int], Any] | None = None
    block: contract.Block | None = None
    backward: Masker | None = None
    shard: Callable[[int, int, int, int, float, tuple[int, int]], Any] | None = None
    contract: bool = False
    p: float | None = None
    columns: int | None = None

    def draw(self, kind: str, *arguments: Any) -> Array:
        """A checked mask: `kind` is the attribute to call, "masker", "backward" or "shard".

        Raises:
            SourceError: if the source raises, or returns anything but a bool array of the right shape.
        """
        rows, columns = arguments[2:4]
        mask = as_numpy(self._call(kind, arguments))
        if not isinstance(mask, np.ndarray) or mask.dtype != np.bool_:
            seen = f"dtype {mask.dtype}" if isinstance(mask, np.ndarray) else f"a {type(mask).__name__}"
            raise SourceError(f"{self.name} must return a bool array, got {seen}")
        if mask.shape != (rows, columns):
            raise SourceError(f"{self.name} must return shape {(rows, columns)}, got {mask.shape}")
        return mask

    def words(self, kind: str, *arguments: Any) -> Array:
        """Checked raw words: `kind` is "bits" or "block"."""
        found = as_numpy(self._call(kind, arguments))
        if kind == "bits":
            shape: tuple[int, ...] = (arguments[2], arguments[3])
        else:
            shape = (*np.broadcast_shapes(*(np.shape(argument) for argument in arguments)), 4)
        if not isinstance(found, np.ndarray) or found.dtype != np.uint32 or found.shape != shape:
            seen = f"{found.dtype} {found.shape}" if isinstance(found, np.ndarray) else f"a {type(found).__name__}"
            raise SourceError(f"{kind} of {self.name} must return a uint32 array of shape {shape}, got {seen}")
        return found

    def _call(self, kind: str, arguments: tuple[Any, ...]) -> Any:
        try:
            return getattr(self, kind)(*arguments)
        except SourceError:
            raise
        except Exception as error:
            where = f"({', '.join(str(a) if np.ndim(a) == 0 else 'array' for a in arguments)})"
            reason = str(error).strip().splitlines()
            message = reason[0] if reason else "no message"
            raise SourceError(f"{self.name} raised {type(error).__name__} at {where}: {message}") from error


def as_numpy(value: Any) -> Any:
    """numpy arrays as they are, torch tensors copied to the host, anything else untouched."""
    if hasattr(value, "detach") and hasattr(value, "cpu"):
        return value.detach().cpu().numpy()
    return value


def as_source(source: Any, device: str = "cpu") -> Source:
    """Anything that `assess` takes, as a Source.

    Args:
        source: a Source; a function (seed, offset, rows, columns, p) -> mask with the optional attributes of a Source;
            a torch.nn.Module or a function of one tensor, whose mask is read off ones.
        device: where a module's or tensor function's ones lie.

    Raises:
        TypeError: for anything else.
    """
    if isinstance(source, Source):
        return source
    if not callable(source):
        raise TypeError(f"source must be a function or a torch.nn.Module, got {type(source).__name__}")
    name = getattr(source, "__name__", type(source).__name__)
    if not hasattr(source, "parameters"):
        try:
            inspect.signature(source).bind(0, 0, 1, 1, 0.5)
        except (TypeError, ValueError):
            pass
        else:
            names = ("bits", "block", "backward", "shard", "contract", "p", "columns")
            return Source(name, source, **{key: getattr(source, key) for key in names if hasattr(source, key)})
        try:
            inspect.signature(source).bind(0)
        except TypeError:
            raise TypeError(
                f"source {name}{inspect.signature(source)} must take (seed, offset, rows, columns, p) or one tensor"
            ) from None
        except ValueError:  # a builtin without a signature
            pass
    return from_function(source, name, device)


@contextlib.contextmanager
def seeded(seed: int, device: str) -> Iterator[None]:
    """torch.manual_seed(seed) inside, the generators as they were after."""
    import torch

    devices = [torch.device(device)] if torch.device(device).type == "cuda" else []
    with torch.random.fork_rng(devices=devices):
        torch.manual_seed(seed)
        yield


def from_function(function: Any, name: str, device: str = "cpu") -> Source:
    """A module or function of a tensor: its mask is where ones do not become zero; call k comes after k others."""
    import torch

    def run(seed: int, offset: int, rows: int, columns: int, gradient: bool) -> Any:
        x = torch.ones(rows, columns, device=device, requires_grad=gradient)
        with seeded(seed, device):
            with torch.no_grad():
                for _ in range(offset):
                    function(x)
            y = function(x)
        if not isinstance(y, torch.Tensor):
            raise SourceError(f"{name} must return a tensor, got a {type(y).__name__}")
        if not gradient:
            return y != 0
        y.sum().backward()
        return x.grad != 0

    def masker(seed: int, offset: int, rows: int, columns: int, p: float) -> Any:
        return run(seed, offset, rows, columns, False)

    def backward(seed: int, offset: int, rows: int, columns: int, p: float) -> Any:
        return run(seed, offset, rows, columns, True)

    own, features = getattr(function, "p", None), getattr(function, "features", None)
    return Source(
        name,
        masker,
        backward=backward,
        p=float(own) if isinstance(own, int | float) else None,
        columns=features if isinstance(features, int) else None,
    )


def from_block(name: str, block: contract.Block, *, bits: bool = True, exact: bool = False) -> Source:
    """The contract's masks from another generator of words; `exact` if it claims to be the contract's own."""

    def shard(seed: int, offset: int, rows: int, columns: int, p: float, origin: tuple[int, int]) -> Array:
        return contract.mask(seed, offset, rows, columns, p, origin, block)

    def masker(seed: int, offset: int, rows: int, columns: int, p: float) -> Array:
        return contract.mask(seed, offset, rows, columns, p, block=block)

    def words(seed: int, offset: int, rows: int, columns: int) -> Array:
        return contract.draws(seed, offset, np.arange(rows), np.arange(columns), block)

    return Source(
        name, masker, words if bits else None, block if bits else None, shard=shard if exact else None, contract=exact
    )


def reference() -> Source:
    """The contract in numpy, written independently of the package."""
    return from_block("reference", contract.block, exact=True)


def pcg64() -> Source:
    """numpy's PCG64, seeded by (seed, offset): a good generator that knows nothing of the contract."""

    def bits(seed: int, offset: int, rows: int, columns: int) -> Array:
        rng = np.random.Generator(np.random.PCG64([seed, offset]))
        return rng.integers(2**32, size=(rows, columns), dtype=np.uint32)

    def masker(seed: int, offset: int, rows: int, columns: int, p: float) -> Array:
        return bits(seed, offset, rows, columns) >= contract.threshold(p)

    return Source("PCG64", masker, bits)


def philox_rounds(rounds: int) -> Source:
    """The contract's layout with another number of rounds."""

    def block(seed: Any, offset: Any, group: Any, column: Any) -> Array:
        return contract.block(seed, offset, group, column, rounds)

    return from_block(f"Philox-{rounds}", block)


def package(device: str = "cpu") -> Source:
    """xfused's own op: masks off its output, its gradient and its shards, words from its Philox in torch."""
    import torch

    import xfused
    from xfused.philox import philox_torch

    def seed_words(seed: int, offset: int) -> Any:
        return torch.tensor([signed(seed), signed(offset)], dtype=torch.int64)

    def op(
        seed: int, offset: int, rows: int, columns: int, p: float, origin: tuple[int, int], gradient: bool = False
    ) -> Any:
        x = torch.ones(rows, columns, device=device, requires_grad=gradient)
        y = xfused.bias_act_dropout(x, None, p=p, seed=seed_words(seed, offset), origin=origin)
        if not gradient:
            return y != 0
        y.backward(torch.ones_like(y))
        return x.grad != 0

    def masker(seed: int, offset: int, rows: int, columns: int, p: float) -> Any:
        return op(seed, offset, rows, columns, p, (0, 0))

    def backward(seed: int, offset: int, rows: int, columns: int, p: float) -> Any:
        return op(seed, offset, rows, columns, p, (0, 0), True)

    def block(seed: Any, offset: Any, group: Any, column: Any) -> Array:
        words = np.broadcast_arrays(*(contract.as_words(word) for word in (seed, offset, group, column)))
        key, position, row, col = (torch.from_numpy(word.astype(np.int64)).to(device) for word in words)
        low = 2**32 - 1
        split = [part & low for word in (key, position) for part in (word, word >> 32)]
        found = philox_torch(row & low, split[2], col & low, split[3], split[0], split[1])
        return torch.stack(found, -1).cpu().numpy().astype(np.uint32)

    def bits(seed: int, offset: int, rows: int, columns: int) -> Array:
        return contract.draws(seed, offset, np.arange(rows), np.arange(columns), block)

    return Source("xfused", masker, bits, block, backward, op, True)


def signed(word: int) -> int:
    """The two's complement reading of a 64-bit word."""
    return (word + 2**63) % 2**64 - 2**63


def torch_dropout(p: float, device: str = "cpu", compiled: bool = False) -> Source:
    """torch.nn.Dropout(p), eager or under torch.compile."""
    import torch

    module = torch.nn.Dropout(p)
    if compiled:
        torch.compiler.reset()  # the limit on recompilations counts all modules of a class together
        source = from_function(torch.compile(module, dynamic=True, fullgraph=True), "torch.nn.Dropout compiled", device)
        return Source(source.name, source.masker, backward=source.backward, p=p)
    return from_function(module, "torch.nn.Dropout", device)


NAMED: dict[str, Callable[[float, str], Source]] = {
    "xfused": lambda p, device: package(device),
    "reference": lambda p, device: reference(),
    "torch": lambda p, device: torch_dropout(p, device),
    "torch-compiled": lambda p, device: torch_dropout(p, device, True),
    "pcg64": lambda p, device: pcg64(),
    "philox7": lambda p, device: philox_rounds(7),
}
"""Sources of the command line: name -> (p, device) -> Source."""


def named(name: str, p: float, device: str) -> Source:
    """A source by its name in NAMED, or "package.module:attribute", a source, module, or function making one for p.

    Raises:
        ValueError: if there is no such source.
    """
    if name in NAMED:
        return NAMED[name](p, device)
    module, colon, attribute = name.partition(":")
    if not colon:
        raise ValueError(f"source must be one of {', '.join(NAMED)} or package.module:attribute, got {name!r}")
    try:
        found: Any = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"source {name!r} cannot be imported: {error}") from None
    return as_source(cast(Any, found)(p) if inspect.isclass(found) else found, device)
