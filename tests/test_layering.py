"""Imports flow downwards only, the import is light, and no public name hides a private framework."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import aleator

PACKAGE = Path(aleator.__file__).parent

# A module may import (at its top) from its own floor or a lower one.
FLOORS = [
    {"_typing", "_errors", "_version", "_cache", "_quick"},
    {"_tree", "_random"},
    {"_files", "_progress", "hyperpriors", "data", "_equations"},
    {"linalg", "sites", "_feed", "_kept", "_marginal"},
    {"_chunks", "noise", "families"},
    {"likelihoods", "priors", "networks", "features", "divergences", "gradients"},
    {"model", "shallow", "selection", "programs", "_columns", "_outputs"},
    {"_quadrature", "curvature"},
    {"predictive"},
    {"target", "loop", "posterior", "latent", "criteria", "diagnostics", "convergence"},
    {"methods", "tables", "datasets", "_functions"},
    {"store", "pruning", "gp", "_settings"},
    {"fit"},
    {"compare", "evidence", "_oracle", "series", "explain", "elicit", "decide", "stein"},
    {"_stacked", "auto", "defaults"},
    {"plots"},
    {"cli", "estimators", "report"},
]
FLOOR = {name: number for number, names in enumerate(FLOORS) for name in names}


def modules() -> list[Path]:
    return [path for path in sorted(PACKAGE.rglob("*.py")) if path.name != "__init__.py" or path.parent != PACKAGE]


@pytest.mark.parametrize("path", modules(), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_flow_downwards(path: Path) -> None:
    own = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
    assert own in FLOOR, f"{own} has no floor: add it to FLOORS and say why in docs/decisions"
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "aleator":
            parts = (node.module or "").split(".")
            found = [parts[1]] if len(parts) > 1 else [alias.name for alias in node.names]
            for name in found:
                assert FLOOR[name] <= FLOOR[own], f"{own} imports {name}, which is above it"


def test_importing_aleator_is_light() -> None:
    code = "import sys, aleator; print([m for m in ('pandas', 'sklearn', 'arviz', 'matplotlib', 'numpyro', 'blackjax', 'equinox', 'flax', 'typer') if m in sys.modules])"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert out.strip() == "[]"


def test_importing_sets_no_jax_configuration() -> None:
    code = "import jax; before = dict(jax.config.values); import aleator; print(before == dict(jax.config.values))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == "True"


def test_public_names_exist() -> None:
    assert all(hasattr(aleator, name) for name in aleator.__all__)
