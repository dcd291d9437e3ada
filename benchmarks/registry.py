"""What is measured: an op is one `Op`, in a file of its own in benchmarks/ops, which is found by being there."""

import dataclasses
import functools
import importlib
import importlib.util
import pkgutil
from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
from torch import Tensor

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
MODES = ("fwd", "bwd", "fwd+bwd")
# other people's kernels: the module that must be there; an op says which of them compute it
PEERS = {
    "liger": "liger_kernel",
    "flash_attn": "flash_attn.ops.triton.layer_norm",
    "attorch": "attorch",
    "xformers": "xformers.triton.dropout",
}


@dataclasses.dataclass(frozen=True)
class Case:
    """One measurement: the op, x's shape (M, N), and how it is called."""

    op: str
    M: int
    N: int
    dtype: str
    activation: str
    p: float

    @property
    def torch_dtype(self) -> torch.dtype:
        return DTYPES[self.dtype]

    def __str__(self) -> str:
        return f"{self.op} {self.M}x{self.N} {self.dtype} {self.activation} p={self.p:g}"


class NotOfferedError(ValueError):
    """A provider does not compute this case."""


Function = Callable[..., Tensor]  # of the op's inputs
Builder = Callable[[Case, Sequence[Tensor]], Function]  # the inputs are for a module to take its parameters from
Bare = Callable[[Case, Sequence[Tensor], Tensor, str], Callable[[], object]]  # (case, inputs, dy, mode)


@dataclasses.dataclass(frozen=True)
class Op:
    """An entry of the registry.

    Attributes:
        inputs: leaf tensors that require a gradient. The first `rotating` depend on M and exist several times.
        oracle: the result of float64 inputs, given what dropout keeps (True; None: everything), scaled by 1 / (1 - p).
        probes: (case, inputs) on which every provider is checked; the first is the only one for torch.compile.
        moved: bytes that a perfect implementation reads and writes, by mode.
        providers: by name. What torch.compile compiles is `eager`.
        bare: what is timed beside the providers and computes something else, such as matrix products alone.
        unit: whose time a table divides by: "copy", of x, or a name in `bare`.
        slack: factor on the check's tolerance.
        shapes, small, tiny: default (M, N) for device time, for wall time and CUDA graphs, and on a CPU.
    """

    name: str
    summary: str
    inputs: Callable[[Case, torch.device], tuple[Tensor, ...]]
    oracle: Callable[[Case, Sequence[Tensor], Tensor | None], Tensor]
    probes: Callable[[Case, torch.device], Iterable[tuple[Case, tuple[Tensor, ...]]]]
    moved: Callable[[Case], Mapping[str, int]]
    providers: Mapping[str, Builder]
    shapes: Sequence[tuple[int, int]]
    small: Sequence[tuple[int, int]] = ((1, 512), (128, 512), (512, 1024), (2048, 4096))
    tiny: Sequence[tuple[int, int]] = ((32, 64), (64, 128))
    bare: Mapping[str, Bare] = dataclasses.field(default_factory=dict)
    rotating: int = 1
    unit: str = "copy"
    slack: float = 1.0
    modes: tuple[str, ...] = MODES
    dtypes: tuple[str, ...] = ("bfloat16",)
    activations: tuple[str, ...] = ("identity",)
    p: float = 0.1

    def builder(self, provider: str) -> Builder | None:
        """None where the op has no such provider."""
        if provider == "compile" and (eager := self.providers.get("eager")):
            return lambda case, inputs: torch.compile(eager(case, inputs), dynamic=False)
        return self.providers.get(provider)


@functools.cache
def ops() -> dict[str, Op]:
    """Every op by name."""
    from . import ops as package

    modules = [importlib.import_module(f"{package.__name__}.{m.name}") for m in pkgutil.iter_modules(package.__path__)]
    return {op.name: op for module in modules for op in vars(module).values() if isinstance(op, Op)}


def provider_names() -> list[str]:
    """xfused, eager and compile first, then the rest."""
    known = {name: None for name in ("xfused", "eager", "compile", *PEERS)}
    return list(known | {name: None for op in ops().values() for name in op.providers})


def installed(provider: str) -> bool:
    try:
        return provider not in PEERS or importlib.util.find_spec(PEERS[provider]) is not None
    except ImportError:  # of a parent package
        return False
