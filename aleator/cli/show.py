"""`aleator show`: what a saved fit is, read from its JSON without running anything."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from aleator.cli._common import console, guarded, print_json
from aleator.cli._scores import as_text


@guarded
def command(
    directory: Annotated[Path, typer.Argument(help="A directory written by `aleator fit` or fit.save.")],
    to_json: Annotated[bool, typer.Option("--json", help="Machine-readable output.")] = False,
) -> None:
    """What is in a saved fit: model, method, data, status, evidence, timings, versions."""
    from aleator import store

    if (directory / store.AUTO_NAME).exists():
        stack(directory, to_json)
        return
    facts = summary(directory)
    if to_json:
        print_json(facts)
        return
    from rich.markup import escape
    from rich.table import Table

    table = Table(show_header=False, box=None, pad_edge=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for name, text in lines(facts):
        table.add_row(name, escape(text))
    out = console(False)
    out.print(f"[bold]{escape(str(directory))}[/bold]")
    out.print(table)


def stack(directory: Path, to_json: bool) -> None:
    """Several fits with weights: what was tried, how it did and what counts."""
    from aleator._auto import Auto

    document = Auto.read(directory)
    if to_json:
        print_json(document)
        return
    out = console(False)
    out.print(str(directory), markup=False, style="bold")
    out.print(str(Auto.told(document)), markup=False, soft_wrap=True)
    out.print(
        f"One fit each: {', '.join(f'{name} in fit-{place}' for place, name in enumerate(document['names']))}", markup=False, soft_wrap=True
    )


def summary(directory: Path) -> dict[str, Any]:
    """The facts of a saved fit; also of one whose network was the user's own code and cannot be loaded without it."""
    from aleator import store

    document = store._read_json(directory / store.JSON_NAME)
    manifest, evidence = document["manifest"], document["posterior"]["log_evidence"]
    return {
        "model": describe(document["model"]),
        "method": describe(document["method"]),
        "posterior": document["posterior"]["kind"],
        "table": manifest.get("table"),
        "held_out_scores": manifest.get("held_out_scores", {}),
        "data": {name: value for name, value in manifest["data"].items() if name != "sketch"},
        "status": document["status"],
        "log_evidence": None if evidence is None else dict(zip(("value", "stderr", "kind"), evidence, strict=True)),
        "steps": manifest.get("steps"),
        "seconds": manifest.get("seconds"),
        "created": manifest["created"],
        "key": manifest["key"],
        "temperature": manifest["temperature"],
        "versions": manifest["versions"],
    }


def lines(facts: dict[str, Any]) -> list[tuple[str, str]]:
    """The facts as (name, sentence)."""
    data, evidence = facts["data"], facts["log_evidence"]
    shapes = " and ".join(f"({', '.join(['n', *map(str, shape)])})" for shape in data["x_shape"] or [])
    rows = [
        ("model", facts["model"]),
        ("method", facts["method"]),
        ("posterior", facts["posterior"]),
        ("data", f"{data['num_data']} rows" + (f", x of shape {shapes}" if shapes else "")),
        ("status", facts["status"]),
        ("log evidence", "not given by this method" if evidence is None else _evidence(evidence)),
        ("time", f"{facts['seconds']:.1f} s, {facts['steps']} steps" if facts["seconds"] is not None else "not recorded"),
        ("made", f"{facts['created']} with " + ", ".join(f"{name} {version}" for name, version in facts["versions"].items())),
        ("key", str(facts["key"])),
    ]
    if facts["table"]:
        made_from = facts["table"]
        columns = "; ".join(f"{kind}: {', '.join(names)}" for kind, names in made_from["columns"].items())
        rows.insert(0, ("table", f"{made_from['file']}: {made_from['task']} of {made_from['target']!r} from {columns}"))
    for name, score in facts["held_out_scores"].items():
        rows.append(
            (name, f"{as_text(score['value'], score['stderr'] if score['stderr'] is not None else float('nan'))} {score['unit']}, held out")
        )
    if facts["temperature"] != 1.0:
        rows.append(("temperature", f"{facts['temperature']}: not the Bayesian posterior"))
    return rows


def _evidence(evidence: dict[str, Any]) -> str:
    error = f" ± {evidence['stderr']:.3f}" if evidence["stderr"] else ""
    return f"{evidence['value']:.3f}{error} nats ({evidence['kind']}; higher is better)"


def describe(spec: Any) -> str:
    """A stored description as the expression that would make it.

    >>> describe({"object": "priors.Normal", "fields": {"scale": 1.0, "loc": 0.0}})
    'Normal(scale=1.0, loc=0.0)'
    """
    if not isinstance(spec, dict):
        return repr(spec)
    if "object" in spec:
        return f"{spec['object'].split('.')[-1]}({', '.join(f'{name}={describe(value)}' for name, value in spec['fields'].items())})"
    if "tuple" in spec:
        inner = [describe(item) for item in spec["tuple"]]
        return f"({', '.join(inner)}{',' if len(inner) == 1 else ''})"
    if "dict" in spec:
        return "{" + ", ".join(f"{name!r}: {describe(value)}" for name, value in spec["dict"].items()) + "}"
    if "array" in spec:
        return f"<array {spec['array']}>"
    return f"<your own {spec.get('user', 'code')}>"
