"""Imports flow downwards only, names are imported when they are asked for, and help does not wait for JAX."""

from __future__ import annotations

import ast
import graphlib
import importlib
import pickle
import pkgutil
import subprocess
import sys
from pathlib import Path

import pytest

import aleator
from aleator import methods

PACKAGE = Path(aleator.__file__).parent

# A module may import (at its top) from its own floor or a lower one.
FLOORS = [
    {"_typing", "_errors", "_version", "_cache", "_quick", "_lazy"},
    {"_tree", "_random"},
    {"_files", "_progress", "hyperpriors", "data", "_equations"},
    {"linalg", "sites", "_feed", "_kept", "_marginal"},
    {"_chunks", "noise", "families"},
    {"likelihoods", "priors", "networks", "features", "divergences", "gradients"},
    {"model", "shallow", "selection", "programs", "_columns", "_outputs", "_closed"},
    {"_quadrature", "curvature"},
    {"predictive"},
    {"target", "loop", "posterior", "latent", "criteria", "diagnostics", "convergence"},
    {"methods", "tables", "datasets", "_functions"},
    {"store", "pruning", "gp", "_settings"},
    {"_fit"},
    {"_compare", "evidence", "_oracle", "series", "explain", "elicit", "decide", "stein"},
    {"_stacked", "_auto", "defaults"},
    {"plots"},
    {"cli", "estimators", "report"},
]
FLOOR = {name: number for number, names in enumerate(FLOORS) for name in names}


def files() -> list[Path]:
    return [path for path in sorted(PACKAGE.rglob("*.py")) if path.name != "__init__.py" or path.parent != PACKAGE]


@pytest.mark.parametrize("path", files(), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_flow_downwards(path: Path) -> None:
    own = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
    assert own in FLOOR, f"{own} has no floor: add it to FLOORS and say why in docs/decisions"
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "aleator":
            parts = (node.module or "").split(".")
            found = [parts[1]] if len(parts) > 1 else [alias.name for alias in node.names]
            for name in found:
                assert FLOOR[name] <= FLOOR[own], f"{own} imports {name}, which is above it"


def imported_at_the_top(path: Path) -> set[str]:
    """Modules of the package that importing `path` imports first."""
    found = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "aleator":
            parts = (node.module or "").split(".")
            for alias in node.names:
                full = [*parts, alias.name]
                inner = PACKAGE.joinpath(*full[1:])
                found.add(".".join(full if inner.is_dir() or inner.with_suffix(".py").exists() else parts))
    return found


def test_no_module_waits_for_itself() -> None:
    """Whichever module is imported first, the ones below it can be: with lazy names the order is the user's."""
    name = lambda path: ".".join(("aleator", *path.relative_to(PACKAGE).with_suffix("").parts)).removesuffix(".__init__")
    graph = {name(path): imported_at_the_top(path) for path in files()}
    graph = {one: {other for other in below if other in graph and not one.startswith(other)} for one, below in graph.items()}
    list(graphlib.TopologicalSorter(graph).static_order())  # raises CycleError, which names the modules


def told(code: str) -> str:
    """What a fresh interpreter prints."""
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip()


def test_importing_aleator_is_light() -> None:
    assert told("import sys, aleator; print([m for m in ('jax', 'numpy', 'scipy') if m in sys.modules])") == "[]"
    code = "import sys, aleator.store, aleator._fit; print([m for m in ('aleator.gp', 'aleator.latent', 'aleator.methods.nuts') if m in sys.modules])"
    assert told(code) == "[]"
    heavy = ("pandas", "sklearn", "arviz", "matplotlib", "numpyro", "blackjax", "equinox", "flax", "typer")
    code = f"import sys, aleator; [getattr(aleator, n) for n in aleator.__all__]; print([m for m in {heavy} if m in sys.modules])"
    assert told(code) == "[]"


def test_help_does_not_wait_for_jax() -> None:
    """No clock: what is not imported takes no time."""
    code = """
import sys
from typer.testing import CliRunner
from aleator import cli
verbs = [[verb.name, "--help"] for verb in cli.app.registered_commands]
for words in [["--help"], ["--version"], *verbs, ["fit", "--hidden", "x"], ["nonsense"]]:
    code = CliRunner().invoke(cli.app, words).exit_code
    assert code == (0 if words[-1] in ("--help", "--version") else 2), words
    heavy = [name for name in ("jax", "numpy", "scipy", "pandas", "sklearn", "matplotlib") if name in sys.modules]
    assert not heavy, (words, heavy)
print(len(verbs))
"""
    assert int(told(code)) >= 9


def test_importing_sets_no_jax_configuration() -> None:
    code = "import jax; before = dict(jax.config.values); from aleator import *; print(before == dict(jax.config.values))"
    assert told(code) == "True"


def lazily() -> tuple[dict[str, str], set[str]]:
    """Names and modules as the type checkers read them in `aleator/__init__.py`: {name: home}, modules."""
    names, found = {}, set()
    for node in ast.parse((PACKAGE / "__init__.py").read_text()).body:
        if isinstance(node, ast.If) and isinstance(node.test, ast.Name):
            for one in node.body:
                assert isinstance(one, ast.ImportFrom)
                if one.module == "aleator":
                    found |= {alias.name for alias in one.names}
                else:
                    names |= {alias.name: str(one.module).removeprefix("aleator.") for alias in one.names}
    return names, found


def test_what_type_checkers_read_is_what_happens() -> None:
    names, found = lazily()
    told = {name: home for home, text in aleator._HOMES.items() for name in text.split()}
    assert names == told | dict.fromkeys(set(aleator.__all__) - {*told, *found, "__version__"}, "methods")
    assert sorted([*names, *found, "__version__"]) == sorted(aleator.__all__)
    assert {name for name, home in names.items() if home == "methods"} <= set(methods.__all__)
    assert sorted(methods.__all__) == sorted(methods._table.__all__)
    assert all(getattr(methods, name) is getattr(methods._table, name) for name in methods.__all__)


def test_public_names_are_what_they_are_called() -> None:
    """Functions named as modules would be replaced by them as soon as somebody imports the module: there are none."""
    names, found = lazily()
    beside = {one.name for one in pkgutil.iter_modules(aleator.__path__)}
    for name, home in names.items():
        value = getattr(aleator, name)
        assert value is getattr(importlib.import_module(f"aleator.{home}"), name)
        assert name not in beside, f"importing aleator.{name} would put the module in the place of {value}"
        assert not isinstance(value, type) or pickle.loads(pickle.dumps(value)) is value
    for name in found:
        assert getattr(aleator, name) is importlib.import_module(f"aleator.{name}")
    assert set(aleator.__all__) <= set(dir(aleator))
    starred: dict[str, object] = {}
    exec("from aleator import *", starred)
    assert set(aleator.__all__) <= set(starred)


def test_a_name_that_does_not_exist() -> None:
    with pytest.raises(AttributeError, match="'Lapalce'"):
        _ = aleator.Lapalce
    assert not hasattr(aleator, "__wrapped__")
    assert aleator.plots.__name__ == "aleator.plots"  # modules without being imported by hand
