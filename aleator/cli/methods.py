"""`aleator methods`: what can be fitted with, and by which hyper-parameters."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from aleator.cli._common import console, guarded, print_json

ROWS = (("model_class", "model class"), ("criterion", "criterion"), ("search", "search"), ("cost", "cost"), ("needs", "needs"))


@guarded
def command(
    name: Annotated[str | None, typer.Argument(help="One method, to see its whole card and its hyper-parameters.")] = None,
    to_json: Annotated[bool, typer.Option("--json", help="Machine-readable output.")] = False,
) -> None:
    """The methods, as cards: model class, criterion, search, cost."""
    from aleator._settings import find
    from aleator.methods import METHODS

    chosen = METHODS if name is None else {name.lower(): find(name)}
    if to_json:
        print_json({key: {**cls.card._asdict(), "hyper_parameters": parameters(cls)} for key, cls in chosen.items()})
    elif name is None:
        _print_all(chosen)
    else:
        _print_one(name.lower(), chosen[name.lower()])


def parameters(cls: type) -> dict[str, dict[str, Any]]:
    """Type and default of each hyper-parameter, as text."""
    import dataclasses

    rows = {}
    for field in dataclasses.fields(cls):
        if field.init:
            default = field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
            kind = field.type if isinstance(field.type, str) else getattr(field.type, "__name__", str(field.type))
            rows[field.name] = {
                "type": kind,
                "default": default if isinstance(default, (int, float, str, bool, type(None))) else repr(default),
            }
    return rows


def _print_all(chosen: dict[str, Any]) -> None:
    from rich.table import Table

    table = Table(title="Methods", title_justify="left", show_lines=True)
    for heading in ("--method", "what it gives", "model class", "cost"):
        table.add_column(heading, overflow="fold")
    for key, cls in chosen.items():
        table.add_row(key, cls.card.summary, cls.card.model_class, cls.card.cost)
    out = console(False)
    out.print(table)
    out.print("One card in full, with its hyper-parameters: aleator methods NAME")


def _print_one(key: str, cls: Any) -> None:
    from rich.table import Table

    out = console(False)
    out.print(f"[bold]{cls.card.name}[/bold] (--method {key}): {cls.card.summary}")
    card = Table(show_header=False, box=None, pad_edge=False)
    for name, words in ROWS:
        card.add_row(f"[bold]{words}[/bold]", getattr(cls.card, name))
    card.add_row("[bold]references[/bold]", "\n".join(cls.card.references))
    out.print(card)
    table = Table(title="Hyper-parameters", title_justify="left")
    for heading in ("--set", "type", "default"):
        table.add_column(heading, overflow="fold")
    for name, row in parameters(cls).items():
        table.add_row(
            name,
            row["type"],
            repr(row["default"]) if isinstance(row["default"], str) and "(" not in row["default"] else str(row["default"]),
        )
    out.print(table)
    if "base" in parameters(cls):
        out.print("Those of the base are set as base.NAME=VALUE, or by NAME alone where only the base has it.")
