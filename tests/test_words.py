"""What README, docs and benchmarks say is there: links lead somewhere, commands and names exist, numbers come from the results."""

from __future__ import annotations

import importlib
import importlib.util
import json
import re
import shlex
from pathlib import Path

import pytest
import typer.main

import aleator as al
from aleator import cli

ROOT = Path(__file__).resolve().parent.parent
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "benchmarks" / "README.md",
    *sorted((ROOT / "docs").rglob("*.md")),
]
PAGES = [page for page in PAGES if "_build" not in page.parts]


def _load(path):
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def spans(text):
    """Inline code, blocks left out."""
    return re.findall(r"(?<!`)`([^`\n]+)`(?!`)", re.sub(r"^(`{3,}).*?^\1", "", text, flags=re.S | re.M))


def shell(text):
    return [line for block in re.findall(r"^```sh[^\n]*\n(.*?)^```", text, flags=re.S | re.M) for line in block.splitlines()]


@pytest.mark.parametrize("page", PAGES[:3], ids=lambda page: page.relative_to(ROOT).as_posix())
def test_links_lead_somewhere(page):
    for address in re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8")):
        if not re.match(r"[a-z]+:", address):
            assert (page.parent / address.partition("#")[0]).exists(), address


def broken_command(line):
    """Why a line that begins with `aleator` cannot be typed; "" where it can."""
    words = shlex.split(line.split(" #")[0].split("|")[0].replace("…", ""))
    if len(words) < 2 or words[1].startswith("-") or words[1].isupper():
        return ""
    verbs = typer.main.get_command(cli.app).commands
    if words[1] not in verbs:
        return f"no verb {words[1]}"
    known = {option for parameter in verbs[words[1]].params for option in (*parameter.opts, *parameter.secondary_opts)} | {"--help"}
    return next((f"no option {word} of {words[1]}" for word in words if word.startswith("--") and word.split("=")[0] not in known), "")


def missing_name(span):
    """The first al.something of a span that does not exist; "" where all do."""
    for name in re.findall(r"(?<![\w.])(?:al|aleator)(?:\.[A-Za-z_]\w*)+", span):
        at = al
        for part in name.split(".")[1:]:
            if not hasattr(at, part):
                try:
                    importlib.import_module(f"{at.__name__}.{part}")
                except (ImportError, AttributeError):
                    return name
            at = getattr(at, part)
            if isinstance(at, type) or not hasattr(at, "__dict__"):
                break
    return ""


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_commands_and_names_exist(page):
    text = page.read_text(encoding="utf-8")
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), flags=re.M))
    for span in [*spans(text), *shell(text)]:
        if span.startswith("aleator "):
            assert broken_command(span) == "", span
        if match := re.match(r"make ([a-z-]+)", span):
            assert match[1] in targets, span
    if "decisions" not in page.parts:  # those tell of their time
        for span in spans(text):
            assert missing_name(span) == "", span


def test_the_checks_notice_what_is_wrong():
    assert broken_command("aleator fit data.csv --target y --out d") == ""
    assert "no verb" in broken_command("aleator fly data.csv")
    assert "no option" in broken_command("aleator fit data.csv --colour red")
    assert missing_name("al.fit(key, al.gp.GP())") == ""
    assert missing_name("al.nothing") == "al.nothing"
    assert missing_name("al.decide.nothing(1)") == "al.decide.nothing"


# ---- numbers ---------------------------------------------------------------------------------------------------------------------

summary = _load(ROOT / "benchmarks" / "_summary.py")


def test_the_table_of_the_readme_is_what_the_results_make():
    made, missing = summary.table()
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert summary.with_table(text, made) == text
    assert all((summary.RESULTS / part.file).exists() or any(part.title in words for words in missing) for part in summary.PARTS)
    assert "| boston, ensemble of 5, 20 splits |" in made


def test_the_table_to_choose_by_is_what_cards_and_results_make(tmp_path):
    text = (ROOT / "docs" / "choose_a_method.md").read_text(encoding="utf-8")
    assert summary.with_table(text, summary.methods()) == text, "run python benchmarks/_summary.py"
    row = {"rows": 100, "seconds": 2.25, "megabytes": None, "total_variation": 0.0828, "coverage": 0.95, "log_score": [-1.088, 0.046]}
    (tmp_path / "choice.json").write_text(json.dumps({"map": row, "exact": {"refused": "Another model."}}))
    made = summary.methods(tmp_path).splitlines()
    assert len(made) == 2 + len(al.METHODS)
    assert next(line for line in made if line.startswith("| `map`")).endswith("| 2.2 | – | 0.083 | 95 ± 2 | -1.09 ± 0.05 |")
    assert next(line for line in made if line.startswith("| `exact`")).endswith("| – | – | – | – | – |")
    assert {line.count(" | ") for line in made if "---" not in line} == {7}


def test_every_section_is_made_when_its_results_are_there(tmp_path):
    (tmp_path / "mnist.json").write_text(
        json.dumps({"dropout": {"log_likelihood": -450.2, "log_likelihood_stderr": 20.1, "error": 1.4, "error_stderr": 0.12}})
    )
    (tmp_path / "sparse.json").write_text(
        json.dumps({"lenet300": {"rows": [{"compression": 50, "error": 1.8}, {"compression": 70, "error": 2.0}]}})
    )
    run = lambda name, a, b: {"name": name, "to_90": a, "to_95": b}
    (tmp_path / "active.json").write_text(
        json.dumps(
            {
                "dropout-bald-0-1-2": run("bald", 100, 200),
                "dropout-bald-1-1-2": run("bald", 120, 220),
                "dropout-random-0-1-2": run("random", 300, None),
                "dropout-repeated-bald-0-1-2": run("bald", 1, 1),
            }
        )
    )
    (tmp_path / "posteriordb.json").write_text(
        json.dumps({"a": {"mean": 1.0, "sd": 2.5, "mcse": 0.01}, "b": {"mean": 3.0, "sd": 0.5, "mcse": 0.02}})
    )
    (tmp_path / "speed.json").write_text(json.dumps({"results": {"ours / hand-written (bar: at least 0.8)": 0.954}}))
    made, missing = summary.table(tmp_path)
    assert {words.split(":")[0] for words in missing} == {"UCI regression", "Samplers, 501 weights, CPU"}
    assert "| dropout | -450 ± 20; 1.40 ± 0.12 % | -435; 1.37 % (MC dropout) |" in made
    assert "| lenet300 | 70 ×, 2.00 ± 0.14 % | 68 ×, 1.92 % |" in made
    assert "| bald, dropout, 2 seeds | 110 ± 10; 210 ± 10 | 120; 250 |" in made
    assert "random" not in made  # it never got to 95 %
    assert "| NUTS, worst of 2 posteriors | 3.0 (means), 2.5 (sds) | 0; bar 5 |" in made
    assert "| ours / hand-written | 0.954 | bar: at least 0.8 |" in made


def test_a_readme_without_marks_is_refused():
    with pytest.raises(ValueError, match="once and in this order"):
        summary.with_table("# Nothing", "| |")
