"""The shape of the repository: which module may import which, the top level, the length of files."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent

TOP_LEVEL = {
    ".ci", ".gitignore", "LICENSE", "README.md", "benchmarks", "pyproject.toml", "stats", "tests", "xfused",
}  # fmt: skip

# what a module of xfused may import from xfused; a package's name stands for every module in it
LEAVES = {"_triton", "philox", "activations"}
MAY_IMPORT = {
    "_triton": set(),
    "philox": {"_triton"},
    "activations": {"_triton"},
    "kernels": LEAVES | {"kernels"},
    "reference": LEAVES,
    "sharding": LEAVES,  # which is handed the operation that it applies
    "ops": LEAVES | {"kernels", "reference", "sharding", "ops"},
    "modules": LEAVES | {"ops", "sharding"},
    "patch": LEAVES | {"ops", "modules", "patch"},
    "__init__": LEAVES | {"ops", "modules", "patch"},
    # the commands stand above the library, and use its public names beside the table and the path taken
    "selfcheck": {"__init__", "_triton", "activations"},
    "train": {"activations", "modules"},
    "__main__": {"selfcheck", "train"},
}
OUTSIDE = {"torch", "triton"}
OUTSIDE_OF = {"train": {"matplotlib", "pydoc_data", "tqdm"}, "kernels": {"triton"}, "selfcheck": {"torch"}}
# for stats, benchmarks and tests/stats, which judge from outside; who calls philox's Triton half needs its jit too
PUBLIC_MODULES = {"__init__", "philox", "sharding", "_triton"}
ALSO = {"equivalence.py": {"train"}}  # it repeats that command's training

MAX_LINES = 500
LONGER = {"xfused/activations.py": "one table of all activations, a dozen lines each"}


def sources(folder):
    return sorted(path for path in (ROOT / folder).rglob("*.py") if "__pycache__" not in path.parts)


def tree_of(path):
    return ast.parse(path.read_text(encoding="utf-8"), str(path))


def imports(path):
    """(package, module, name) of each import: ("xfused", "ops.mask", "f") for xfused's `from .ops.mask import f`."""
    here = path.relative_to(ROOT).parent.parts
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Import):
            for alias in node.names:
                package, _, module = alias.name.partition(".")
                yield package, module, None
        elif isinstance(node, ast.ImportFrom):
            base = list(here[: len(here) + 1 - node.level]) if node.level else []
            dotted = base + (node.module.split(".") if node.module else [])
            for alias in node.names:
                yield dotted[0], ".".join(dotted[1:]), alias.name


def xfused_module(module, name):
    """The first part of the xfused module that an import reaches: `from xfused import philox` reaches philox."""
    if module:
        return module.split(".")[0]
    submodules = {path.stem for path in (ROOT / "xfused").iterdir() if not path.name.startswith("__")}
    return name if name in submodules and not is_public_name(name) else "__init__"


def is_public_name(name):
    """Whether `from xfused import name` means a re-exported object, not the module of that name."""
    return any(module and found == name for _, module, found in imports(ROOT / "xfused/__init__.py"))


def unit(path):
    return path.relative_to(ROOT / "xfused").parts[0].removesuffix(".py")


@pytest.mark.parametrize("path", sources("xfused"), ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_point_one_way(path):
    name = unit(path)
    assert name in MAY_IMPORT, f"{name} is new: say in MAY_IMPORT what it may import"
    for package, module, imported in imports(path):
        if package == "xfused":
            target = xfused_module(module, imported)
            inner = target == "__init__" and path.parent != ROOT / "xfused"
            assert target in MAY_IMPORT[name] and not inner, f"{name} imports {target}"
        elif package not in sys.stdlib_module_names:
            assert package in OUTSIDE | OUTSIDE_OF.get(name, set()), f"{name} imports {package}"
        assert package not in ("tests", "stats", "benchmarks")


def test_init_only_re_exports():
    for node in tree_of(ROOT / "xfused/__init__.py").body:
        is_docstring = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        is_dunder = isinstance(node, ast.Assign) and all(target.id.startswith("__") for target in node.targets)
        assert isinstance(node, ast.ImportFrom) or is_docstring or is_dunder, ast.unparse(node)


def test_kernels_hold_jit_functions_only():
    for path in sources("xfused/kernels"):
        for node in tree_of(path).body:
            assert not isinstance(node, ast.ClassDef), f"{path.name}: class {node.name}"
            if isinstance(node, ast.FunctionDef):
                decorators = [ast.unparse(decorator).split("(")[0] for decorator in node.decorator_list]
                assert decorators == ["jit"], f"{path.name}: {node.name} is decorated {decorators}"


@pytest.mark.parametrize("path", sources("stats") + sources("benchmarks") + sources("tests/stats"), ids=str)
def test_judges_use_public_names(path):
    """stats, benchmarks and their tests; the tests of the library itself may look inside it."""
    for package, module, name in imports(path):
        if package == "xfused":
            allowed = PUBLIC_MODULES | ALSO.get(path.name, set())
            assert xfused_module(module, name) in allowed, f"{path.name} imports xfused.{module or name}"


def tracked():
    git = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True)
    if git.returncode:
        pytest.skip("not a git checkout")
    return [name for name in git.stdout.split("\0") if name]


def test_top_level_is_fixed():
    assert {name.split("/")[0] for name in tracked()} <= TOP_LEVEL


def test_files_are_short():
    lines = {}
    for folder in ("xfused", "tests", "stats", "benchmarks"):
        for path in sources(folder):
            lines[str(path.relative_to(ROOT))] = len(path.read_text(encoding="utf-8").splitlines())
    assert {name: count for name, count in lines.items() if count > MAX_LINES and name not in LONGER} == {}
    assert {name for name in LONGER if lines.get(name, 0) <= MAX_LINES} == set(), "no longer long: take it off the list"


def test_every_module_of_the_package_is_installed():
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    for path in sources("xfused"):
        package = ".".join(path.relative_to(ROOT).parent.parts)
        assert f'"{package}"' in text, f"{package} is missing from pyproject.toml's packages"


def test_import_makes_no_cuda_call():
    modules = [".".join(path.relative_to(ROOT).with_suffix("").parts) for path in sources("xfused")]
    modules = [module.removesuffix(".__init__") for module in modules if not module.endswith("__main__")]
    script = f"""
import importlib, torch
def called(*args, **kwargs):
    raise AssertionError("a CUDA call at import")
for name in ("_lazy_init", "init", "is_available", "device_count", "current_device", "get_device_capability"):
    setattr(torch.cuda, name, called)
for module in {modules!r}:
    importlib.import_module(module)
assert not torch.cuda._initialized
"""
    subprocess.run([sys.executable, "-c", script], cwd=ROOT, check=True)
