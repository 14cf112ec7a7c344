"""Who may import what: the floors of the package and the thin decode core."""

import ast
import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parent.parent
PACKAGE = ROOT / "jetspec_jax"

# Arrows point downward or stay on a floor, and never in a circle. A new module gets its line here.
FLOORS = [
    {"config", "numerics", "rope", "cache", "masks", "moe", "sampling", "tree", "tokenizer", "sharding", "kernels"}
    | {"options", "processors", "stops"},
    {"attention", "ops", "verify", "checkpoint", "gguf_file"},
    {"models", "drafts", "decoder", "batch", "speculate"},
    {"load", "baseline", "trace", "demo", "programs"},
    {"training", "evals", "serve"},
]
FLOORS[0] |= {"rope_scaling", "pairing", "arguments"}
FLOORS[4] |= {"audit", "doctor"}
FLOOR = {name: i for i, names in enumerate(FLOORS) for name in names}
CORE = {"config", "numerics", "rope", "cache", "masks", "attention", "moe", "tree", "sampling", "verify"}
CORE |= {
    "kernels",
    "ops",
    "rope_scaling",
    "pairing",
    "options",
    "processors",
    "stops",
    "batch",
    "decoder",
    "speculate",
    "baseline",
}
CORE |= {"models", "drafts"}  # of these two only the protocols
FLAX = ("models/", "drafts/", "training/", "load.py", "checkpoint.py")


def files() -> list[pathlib.Path]:
    return sorted(PACKAGE.rglob("*.py"))


def imported(path: pathlib.Path) -> set[str]:
    """Dotted names that a file imports, anywhere in it."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def own(path: pathlib.Path) -> set[str]:
    """Top-level modules of the package that a file imports."""
    return {name.split(".")[1] for name in imported(path) if name.startswith("jetspec_jax.")} & existing()


def existing() -> set[str]:
    return {module(path) for path in files()} - {"__init__"}


def module(path: pathlib.Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def test_every_module_has_a_floor():
    assert existing() <= set(FLOOR), "write the new module into FLOORS"


@pytest.mark.parametrize("path", files(), ids=lambda p: str(p.relative_to(PACKAGE)))
def test_arrows_point_downward(path):
    if module(path) == "__init__":
        return
    above = {name for name in own(path) if FLOOR[name] > FLOOR[module(path)]}
    assert not above, f"{path.name} imports {above} from a floor above"


def test_no_circles():
    graph = {}
    for path in files():
        graph.setdefault(module(path), set()).update(own(path) - {module(path)})
    while graph:
        leaves = {name for name, needs in graph.items() if not needs & set(graph)}
        assert leaves, f"circle among {sorted(graph)}"
        graph = {name: needs for name, needs in graph.items() if name not in leaves}


@pytest.mark.parametrize("name", sorted(CORE))
def test_the_decode_core_imports_jax_alone(name):
    path = PACKAGE / name / "__init__.py" if (PACKAGE / name).is_dir() else PACKAGE / f"{name}.py"
    outside = {full.split(".")[0] for full in imported(path)} - set(sys.stdlib_module_names)
    assert outside <= {"jax", "jaxtyping", "jetspec_jax"}


@pytest.mark.parametrize("path", files(), ids=lambda p: str(p.relative_to(PACKAGE)))
def test_flax_stays_in_models_and_drafts(path):
    if not str(path.relative_to(PACKAGE)).startswith(FLAX):
        assert not any(name.split(".")[0] == "flax" for name in imported(path))


@pytest.mark.parametrize("path", files(), ids=lambda p: str(p.relative_to(PACKAGE)))
def test_what_only_training_needs_stays_there(path):
    if not str(path.relative_to(PACKAGE)).startswith("training/"):
        outside = {name.split(".")[0] for name in imported(path)}
        assert not outside & {"optax", "grain", "orbax", "ml_collections", "pyarrow", "tensorboardX"}


@pytest.mark.parametrize("name", ["config", "rope_scaling"])
def test_configuration_needs_no_jax(name):
    assert "jax" not in {full.split(".")[0] for full in imported(PACKAGE / f"{name}.py")}


@pytest.mark.parametrize("statement", ["import jetspec_jax", "from jetspec_jax import SamplingConfig, TreeConfig"])
def test_the_package_alone_imports_no_jax(statement):
    code = f"import sys; {statement}; assert not {{'jax', 'flax', 'numpy'}} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)
