"""The tables of numbers in the README and in docs/choose_a_method.md, from the JSON files of benchmarks/results and the methods' cards: the last step of `make bench`.

    python benchmarks/_summary.py [--check]

A section without its file is named on the screen and left out. Published numbers are those that the scripts themselves carry. --check changes nothing, and ends with
status 1 where a page says something else.
"""

from __future__ import annotations

import argparse
import ast
import json
import math
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
BEGIN, END = "<!-- numbers: made by benchmarks/_summary.py -->", "<!-- end of numbers -->"


class Row(NamedTuple):
    """One line of the table, cells as text."""

    what: str
    ours: str
    beside: str


def published(script: str) -> Any:
    """PUBLISHED of a script, read without running it."""
    for node in ast.parse((ROOT / "benchmarks" / script).read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "PUBLISHED":
            return ast.literal_eval(node.value)
    raise LookupError(f"{script} has no PUBLISHED")


def mean(values: list[float]) -> tuple[float, float]:
    """Mean and its standard error."""
    return statistics.fmean(values), statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else math.nan


def uci(results: dict[str, Any]) -> list[Row]:
    known, rows = published("uci.py"), []
    for name in sorted(set(results) & set(known)):
        splits = results[name].get("ensemble", {})
        if splits:
            value, error = mean([one["log_likelihood"] for one in splits.values()])
            theirs, spread = known[name]
            beside = f"{theirs:.2f} ± {spread / math.sqrt(len(splits)):.3f}"
            rows.append(Row(f"{name}, ensemble of 5, {len(splits)} splits", f"{value:.3f} ± {error:.3f}", beside))
    return rows


def mnist(results: dict[str, Any]) -> list[Row]:
    beside = {"dropout": "MC dropout", "mean_field": "Bayes by backprop", "map": "MAP", "ensemble": "ensemble", "sgld": "SGLD"}
    theirs = {name: f"{value}; {error:.2f} % ({name})" for name, value, error in published("mnist.py")}
    told = lambda r: f"{r['log_likelihood']:.0f} ± {r['log_likelihood_stderr']:.0f}; {r['error']:.2f} ± {r['error_stderr']:.2f} %"
    return [Row(name.replace("_", " "), told(r), theirs.get(beside.get(name, ""), "–")) for name, r in results.items()]


def sparse(results: dict[str, Any]) -> list[Row]:
    known, rows = published("sparse.py"), []
    for name, result in results.items():
        best = max(result["rows"], key=lambda row: row["compression"])
        error = math.sqrt(best["error"] * (100 - best["error"]) / 10_000)
        theirs = next((f"{c} ×, {e} %" for m, e, _, c in known.get(name, []) if m == "Sparse VD"), "–")
        rows.append(Row(name, f"{best['compression']:.0f} ×, {best['error']:.2f} ± {error:.2f} %", theirs))
    return rows


def active(results: dict[str, Any]) -> list[Row]:
    known = published("active.py")
    groups: dict[str, list[dict[str, Any]]] = {}
    for tag, run in results.items():
        if "-repeated" not in tag:
            groups.setdefault(f"{run['name']}, {tag.split('-')[0]}", []).append(run)
    rows = []
    for name, runs in groups.items():
        labels = [[run[level] for run in runs if run[level] is not None] for level in ("to_90", "to_95")]
        if not all(len(found) == len(runs) for found in labels):
            continue  # a run that did not get there has no number of labels
        told = [f"{value:.0f}" + ("" if math.isnan(error) else f" ± {error:.0f}") for value, error in map(mean, labels)]
        theirs = known.get(runs[0]["name"])
        rows.append(Row(f"{name}, {len(runs)} seeds", f"{told[0]}; {told[1]}", f"{theirs[0]}; {theirs[1]}" if theirs else "–"))
    return rows


def fidelity(results: dict[str, Any]) -> list[Row]:
    worst = {key: max(one[key] for one in results.values()) for key in ("mean", "sd", "mcse")}
    value = f"{worst['mean']:.1f} (means), {worst['sd']:.1f} (sds)"
    return [Row(f"NUTS, worst of {len(results)} posteriors", value, "0; bar 5")]


def samplers(results: dict[str, Any]) -> list[Row]:
    peer, rows = results["NumPyro NUTS"], []
    for name, row in results.items():
        if name != "NumPyro NUTS":
            told = [ratio(row[key], peer[key]) for key in ("rate", "ess")]
            rows.append(Row(name, "; ".join(told), "1"))
    return rows


def ratio(ours: list[float], theirs: list[float]) -> str:
    """Ratio of medians, and its range over repeats that ran beside each other."""
    each = [a / b for a, b in zip(ours, theirs, strict=True)]
    return f"{statistics.median(ours) / statistics.median(theirs):.2f} ({min(each):.2f} … {max(each):.2f})"


def speed(results: dict[str, Any]) -> list[Row]:
    split = {name: name.partition(" (") for name in results["results"]}
    return [Row(split[name][0], f"{value:.3g}", split[name][2].rstrip(")")) for name, value in results["results"].items()]


class Part(NamedTuple):
    """A section: its file, its heading, what its two numbers are, and how its rows are made."""

    file: str
    title: str
    ours: str
    beside: str
    rows: Callable[[dict[str, Any]], list[Row]]


PARTS = (
    Part("uci.json", "UCI regression", "log-likelihood, nats per row ↑", "deep ensembles, published", uci),
    Part("mnist.json", "MNIST, 1200-1200", "log-likelihood, nats ↑; error ↓", "published", mnist),
    Part("sparse.json", "Sparse networks, MNIST", "weights / weights kept ↑; error ↓", "sparse variational dropout, published", sparse),
    Part("active.json", "Active learning, MNIST", "labels to 90 %; to 95 % ↓", "published", active),
    Part("posteriordb.json", "Fidelity to reference posteriors", "largest error, joint standard errors ↓", "exact", fidelity),
    Part(
        "samplers.json",
        "Samplers, 501 weights, CPU",
        "gradients per second; effective draws per second, ÷ the peer (range over repeats) ↑",
        "NumPyro NUTS",
        samplers,
    ),
    Part("speed.json", "Training steps", "measured", "direction or bar", speed),
)


def table(results: Path = RESULTS) -> tuple[str, list[str]]:
    """The table as Markdown, and the sections that have no file."""
    lines, missing = ["| | ours | beside it |", "|---|---|---|"], []
    for part in PARTS:
        path = results / part.file
        rows = part.rows(json.loads(path.read_text(encoding="utf-8"))) if path.exists() else []
        if not rows:
            missing.append(f"{part.title}: no {path.name}")
            continue
        lines.append(f"| **{part.title}** | {part.ours} | {part.beside} |")
        lines += [f"| {row.what} | {row.ours} | {row.beside} |" for row in rows]
    return "\n".join(lines), missing


def methods(results: Path = RESULTS) -> str:
    """The table to choose a method by: what its card says, and what benchmarks/choice.py measured of it."""
    from aleator.methods import METHODS

    path = results / "choice.json"
    found = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    lines = [
        "| `--method` | what it gives | cost | processor s ↓ | memory, MB ↓ | distance to the posterior ↓ | 90 % covers, % | log score, nats per row ↑ |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name, cls in METHODS.items():
        row = found.get(name, {})
        lines.append(f"| `{name}` | {cls.card.summary} | {cls.card.cost} | {' | '.join(measured(row))} |")
    if "oracle" in found:
        lines += ["", f"Two halves of the chains are {found['oracle']['total_variation']:.3f} apart: what a perfect method would show."]
    return "\n".join(lines)


def measured(row: dict[str, Any]) -> list[str]:
    """Five cells; a dash where there is no number."""
    if "seconds" not in row:
        return ["–"] * 5
    error = 100 * math.sqrt(row["coverage"] * (1 - row["coverage"]) / row["rows"])
    value, stderr = row["log_score"]
    told = [f"{row['seconds']:.1f}", "–" if row["megabytes"] is None else f"{row['megabytes']:.0f}", f"{row['total_variation']:.3f}"]
    return [*told, f"{100 * row['coverage']:.0f} ± {error:.0f}", f"{value:.2f} ± {stderr:.2f}"]


def with_table(text: str, made: str) -> str:
    """A page with the table between its marks."""
    if text.count(BEGIN) != 1 or text.count(END) != 1 or text.index(BEGIN) > text.index(END):
        raise ValueError(f"The page needs the lines {BEGIN} and {END}, once and in this order")
    before, _, rest = text.partition(BEGIN)
    return f"{before}{BEGIN}\n{made}\n{END}{rest.partition(END)[2]}"


def main(readme: Path = ROOT / "README.md", choice: Path = ROOT / "docs" / "choose_a_method.md") -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="only say whether the pages are up to date")
    args = parser.parse_args()
    made, missing = table()
    for words in missing:
        print(f"left out: {words}")
    stale = 0
    for page, own in ((readme, made), (choice, methods())):
        text = page.read_text(encoding="utf-8")
        new = with_table(text, own)
        if args.check:
            print(f"{page.name} is " + ("up to date" if new == text else "out of date: run python benchmarks/_summary.py"))
            stale |= int(new != text)
        else:
            page.write_text(new, encoding="utf-8")
            print(own)
    return stale


if __name__ == "__main__":
    raise SystemExit(main())
