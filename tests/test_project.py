"""The project's own promises: bounds that are tested, a contributing page that works, a strict climate, numbered change notes."""

from __future__ import annotations

import importlib.util
import re
import tomllib
import warnings
from pathlib import Path

import jax
import pytest

import aleator._version

ROOT = Path(__file__).resolve().parent.parent


def _contributing():
    spec = importlib.util.spec_from_file_location("ci_contributing", ROOT / ".ci" / "contributing.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_lower_bounds_are_the_versions_that_test_oldest_installs():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    bounds = dict(line.split(">=") for line in [*project["dependencies"], *project["optional-dependencies"]["flax"]])
    ours = (ROOT / "requirements" / "oldest.txt").read_text(encoding="utf-8").split("# Not ours")[0]
    assert dict(re.findall(r"^(\S+)==(\S+)$", ours, flags=re.M)) == bounds


def test_the_contributing_page_names_only_targets_that_exist():
    module = _contributing()
    listed = module.commands((ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8"))
    targets = module.targets((ROOT / "Makefile").read_text(encoding="utf-8"))
    made = {command.split()[1] for _, command in listed if command.startswith("make ")}
    assert made <= targets
    assert {"make lint", "make test"} <= {command for run, command in listed if run}


def test_shell_lines_are_read_with_and_without_the_mark():
    text = "```sh ci\nmake a   # why\n\n# remark\nb c\n```\ntext\n```sh\nmake d\n```\n```python\nmake e\n```\n"
    assert _contributing().commands(text) == [(True, "make a"), (True, "b c"), (False, "make d")]


def test_change_notes_are_numbered_files_with_a_heading():
    notes = sorted(p for p in (ROOT / "changes").glob("*.md") if p.name != "README.md")
    assert notes
    numbers = [re.fullmatch(r"(\d{4})-[a-z0-9-]+\.md", note.name)[1] for note in notes]
    assert len(set(numbers)) == len(numbers)
    assert all(note.read_text(encoding="utf-8").startswith("# ") for note in notes)


def test_version_has_three_numbers():
    assert re.fullmatch(r"\d+\.\d+\.\d+", aleator._version.__version__)


def test_warnings_are_errors_here():
    with pytest.raises(UserWarning, match="careful"):
        warnings.warn("careful", stacklevel=1)


def test_a_key_used_twice_is_an_error_here():
    key = jax.random.key(0)
    jax.random.normal(key)
    with pytest.raises(jax.errors.KeyReuseError):
        jax.random.normal(key)


@pytest.mark.reuses_keys
def test_a_marked_test_may_use_a_key_twice():
    key = jax.random.key(0)
    assert jax.random.normal(key) == jax.random.normal(key)
