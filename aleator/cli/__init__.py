"""The command line: `aleator fit`, `predict`, `report`, `methods`, `show`, `demo`.

A verb is one file: its options here in its signature, the work in its body, where the heavy imports are. Exit codes: 0 done, 1 the data,
model or method was refused, 2 wrong usage, 130 interrupted.
"""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from aleator.cli import demo, fit, methods, predict, report, show
from aleator.cli._common import INTERRUPTED, use_compilation_cache

app = typer.Typer(
    name="aleator",
    help="Bayesian deep learning: fit a table, predict with the uncertainty split into noise and ignorance.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.command("fit")(fit.command)
app.command("predict")(predict.command)
app.command("report")(report.command)
app.command("methods")(methods.command)
app.command("show")(show.command)
app.command("demo")(demo.command)


def _version(wanted: bool) -> None:
    if wanted:
        from aleator._version import __version__

        typer.echo(f"aleator {__version__}")
        raise typer.Exit()


@app.callback()
def _options(
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and stop.")] = False,
) -> None:
    """Bayesian deep learning: fit a table, predict with the uncertainty split into noise and ignorance."""


def main() -> None:
    """Entry point of the `aleator` program."""
    use_compilation_cache()
    try:
        app()
    except KeyboardInterrupt:  # outside a verb: while it was still importing
        sys.exit(INTERRUPTED)
