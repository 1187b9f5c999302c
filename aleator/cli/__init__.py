"""The command line: `aleator fit`, `predict`, `compare`, `label`, `audit`, `report`, `methods`, `show`, `demo`.

A verb is one file: its options in its signature, the work in its body, where the heavy imports are. Exit codes: `_common.EXIT_CODES`.
"""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from aleator.cli import audit, compare, demo, fit, label, methods, predict, report, show
from aleator.cli._common import EXIT_CODES, INTERRUPTED, use_compilation_cache

app = typer.Typer(
    name="aleator",
    epilog=EXIT_CODES,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
app.command("fit", help=fit.HELP)(fit.command)
app.command("predict")(predict.command)
app.command("compare", help=compare.HELP)(compare.command)
app.command("label", help=label.HELP)(label.command)
app.command("audit", help=audit.HELP)(audit.command)
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
