"""patch and unpatch: fused operations inside a model that was written without them.

A module's methods are read as source. Where calls form a chain of the table `PATTERNS`, the module's class is replaced
by a subclass whose methods have that chain as one fused call. Nothing else changes: submodules, parameters and hooks
stay what they are, and a chain whose parts have changed since runs as it was written.
"""

from dataclasses import replace

import torch
from torch import nn

from ..modules import BiasActDropout, FusedMLP
from .judge import describe, judge, place, site_of, why_left
from .report import PatchEntry, PatchReport
from .source import UnreadableError, chains, function_of, inner_function_of, keys_of, methods
from .swap import ORIGINAL, SITES, original_class, patched_class
from .table import Site

__all__ = ["PatchEntry", "PatchReport", "patch", "unpatch"]


def patch(model: nn.Module) -> PatchReport:
    """Takes fused operations into a model, in place: bias + activation + dropout wherever it computes that in training.

    Parameters, submodules, state_dict keys and hooks stay what they are. In eval mode the model runs as it was written.
    The places are found in the source of the modules' methods. Patching again brings them and the report up to date.

    Args:
        model: any module; its submodules are patched too, also inside wrappers such as DistributedDataParallel.
    Returns:
        PatchReport: a list with an entry for each place that was fused or that nearly fits, which prints as a table.
    Raises:
        TypeError: model is not a module.
        RuntimeError: a patched module's class was changed by something else since; nothing is patched then.
    """
    report = PatchReport()
    plans = []
    for path, module in _modules(model):
        entries, cls, sites = _plan(path, module)
        report += entries
        plans.append((module, cls, sites))
    for module, cls, sites in plans:
        if type(module) is not cls:
            module.__class__ = cls
        vars(module).pop(SITES, None)
        if sites:
            vars(module)[SITES] = sites
    return report


def unpatch(model: nn.Module) -> None:
    """Undoes `patch`, in place: every module has its own class again.

    Args:
        model: the patched module, or any part of it. One that is not patched is left alone.
    Raises:
        TypeError: model is not a module.
        RuntimeError: a patched module's class was changed by something else since; nothing is undone then.
    """
    for _, module in _modules(model):
        if (cls := original_class(module)) is not type(module):
            module.__class__ = cls
            vars(module).pop(SITES, None)


def _modules(model: nn.Module) -> list[tuple[str, nn.Module]]:
    if not isinstance(model, nn.Module):
        raise TypeError(f"model: got {type(model).__name__}, takes a torch.nn.Module")
    modules = list(model.named_modules())
    for path, module in modules:
        if hasattr(type(module), ORIGINAL) and ORIGINAL not in vars(type(module)):
            raise RuntimeError(
                f"{path or 'the model'}: its class became {type(module).__name__} after it was patched; undo that first"
            )
    return modules


def _plan(path: str, module: nn.Module) -> tuple[list[PatchEntry], type, tuple[Site, ...]]:
    """The entries for one module, the class that it gets, and its sites."""
    cls = original_class(module)
    name = cls.__name__
    if isinstance(module, (FusedMLP, BiasActDropout)):
        return [PatchEntry(path, name, "", reason="is fused already")], cls, ()
    if function_of(cls, "forward") is None or isinstance(module, torch.jit.ScriptModule):
        return [], cls, ()
    keys = keys_of(module, cls)
    try:
        read = list(methods(cls, keys))
    except UnreadableError as error:
        children = {type(child) for child in module.children()}
        near = nn.Linear in children and nn.Dropout in children
        return [PatchEntry(path, name, "", reason=str(error))] if near else [], cls, ()
    entries: list[PatchEntry] = []
    sites: list[Site] = []
    recipe = []
    for method in read:
        function = inner_function_of(cls, method.name)
        kinds = judge(method, module, function)
        fused = []
        of_method = []
        for i, chain in enumerate(chains(method, kinds)):
            reason = why_left(chain, module, function)
            became = None
            if not reason:
                fused.append(i)
                sites.append(site_of(chain, module, function))
                became = describe(chain, sites[-1])
            of_method.append(PatchEntry(path, name, place(chain), became, reason or None))
        entries += reversed(of_method)  # as they are called
        if fused:
            recipe.append((method.name, kinds, tuple(fused)))
    if not sites:
        return entries, cls, ()
    try:
        if "forward" in vars(module):
            raise UnreadableError("forward is replaced on the module itself")
        return entries, patched_class(cls, keys, tuple(recipe)), tuple(sites)
    except UnreadableError as error:
        return [replace(entry, became=None, reason=entry.reason or str(error)) for entry in entries], cls, ()
