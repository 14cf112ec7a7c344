"""Who may import what: a folder is a floor, arrows point downward, and the core is jax alone."""

import ast
import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parent.parent
PACKAGE = ROOT / "jetspec_jax"

# From the ground up. A file beside the rooms stands on the floor of the line that names it.
FLOORS = [
    {"fields", "options", "config"},
    {"layers"},
    {"loop"},
    {"backends"},
    {"models"},
    {"drafts"},
    {"files"},
    {"engine"},
    {"speculate", "baseline", "outcome", "command", "hosts"},
    {"evals", "serve", "audit", "doctor", "methods", "decode", "talk"},
    {"training", "train"},
]
FLOOR = {name: i for i, names in enumerate(FLOORS) for name in names}
# config.py is below the layers that it describes, but for the one that is a description itself.
BELOW_CONFIG = {"jetspec_jax.layers.rope_scaling"}
TRAINING_ALONE = {"optax", "grain", "orbax", "ml_collections", "pyarrow", "tensorboardX"}


def files() -> list[pathlib.Path]:
    return sorted(path for path in PACKAGE.rglob("*.py") if path != PACKAGE / "__init__.py")


def imported(path: pathlib.Path) -> set[str]:
    """Dotted names of modules that a file imports, anywhere in it."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            found |= {module(f"{node.module}.{alias.name}") for alias in node.names}
    return found


def module(name: str) -> str:
    """A dotted name without what is inside a module of the package."""
    parts = name.split(".")
    while parts[0] == "jetspec_jax" and len(parts) > 1:
        place = ROOT.joinpath(*parts)
        if place.is_dir() or place.with_suffix(".py").is_file():
            break
        parts.pop()
    return ".".join(parts)


def own(path: pathlib.Path) -> set[str]:
    """Modules of the package that a file imports, `BELOW_CONFIG` aside."""
    return {name for name in imported(path) if name.startswith("jetspec_jax.")} - BELOW_CONFIG


def outside(path: pathlib.Path) -> set[str]:
    """Top-level names of other packages that a file imports."""
    return {name.split(".")[0] for name in imported(path)} - set(sys.stdlib_module_names) - {"jetspec_jax"}


def room(path: pathlib.Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def test_a_folder_is_a_floor_and_arrows_point_downward():
    assert {room(path) for path in files()} <= set(FLOOR), "write the new room into FLOORS"
    up = {
        (str(path.relative_to(PACKAGE)), name)
        for path in files()
        for name in own(path)
        if FLOOR[name.split(".")[1]] > FLOOR[room(path)]
    }
    assert not up


def test_no_circles():
    graph: dict[str, set[str]] = {}
    for path in files():
        name = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        graph[name] = own(path) - {name}
    while graph:
        leaves = {name for name, needs in graph.items() if not needs & set(graph)}
        assert leaves, f"circle among {sorted(graph)}"
        graph = {name: needs for name, needs in graph.items() if name not in leaves}


def test_layers_and_loop_import_jax_alone():
    core = {path: outside(path) for path in files() if room(path) in ("layers", "loop")}
    assert len(core) > 10
    assert not {path for path, names in core.items() if not names <= {"jax", "jaxtyping"}}
    without = {path: outside(path) for path in files() if room(path) in ("fields", "options", "config")}
    assert not {path for path, names in without.items() if names}, "options and configurations need no jax"


def test_flax_stays_with_the_models_and_what_only_training_needs_with_training():
    flax = {room(path) for path in files() if "flax" in outside(path)}
    assert flax <= {"models", "drafts", "files", "training"}
    assert {room(path) for path in files() if outside(path) & TRAINING_ALONE} == {"training"}


def test_no_function_is_longer_than_80_lines():
    defined = (ast.FunctionDef, ast.AsyncFunctionDef)
    sources = [*files(), *ROOT.glob("*.py"), *ROOT.glob("bench/*.py"), *ROOT.glob("examples/*.py")]
    nodes = [(path, node) for path in sources for node in ast.walk(ast.parse(path.read_text()))]
    assert not [(path, n.name) for path, n in nodes if isinstance(n, defined) and n.end_lineno - n.lineno >= 80]


@pytest.mark.parametrize("statement", ["import jetspec_jax", "from jetspec_jax import SamplingConfig, TreeConfig"])
def test_the_package_alone_imports_no_jax(statement):
    code = f"import sys; {statement}; assert not {{'jax', 'flax', 'numpy'}} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)
