"""One page on a fit: what it was made from, whether it can be trusted, what it knows and does not, and what to do next.

`write(key, fit, data, "report.html")` makes a file that needs nothing else; a name that ends in .md makes Markdown with pictures beside it.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from aleator._errors import DataError, message
from aleator._files import write_atomic
from aleator._typing import KeyLike
from aleator.report.document import Document, Picture
from aleator.report.facts import Facts, collect

__all__ = ["Document", "Facts", "collect", "document", "write", "write_document"]

FORMATS = (".html", ".htm", ".md", ".markdown")


def document(key: KeyLike, fit: Any, data: Any = None, name: str = "") -> Document:
    """The report as sections of sentences, tables and pictures, before it is written as anything."""
    return describe(collect(key, fit, data, name))


def describe(facts: Facts) -> Document:
    """The same, from facts already collected."""
    from aleator.report.sections import document as arrange

    first = facts.members[0]
    versions = ", ".join(f"{name} {version}" for name, version in first.versions.items())
    return arrange(facts, f"Fitted {first.created or 'at a time not recorded'} with {versions or 'versions not recorded'}.")


def write(key: KeyLike, fit: Any, data: Any = None, path: str | os.PathLike = "report.html", name: str = "") -> Path:
    """Write the report on a Fit, or on a stack from `al.auto`, and return its path.

    data: rows with known targets, a table with the target's column (a DataFrame, for fits of a table) or (x, y); those that the fit was trained on
    are left out where they can be told and enough others remain. Without data the report has what the fit says about itself. path: .html for one
    file, .md for Markdown with the pictures in a folder of the same name. name: the heading.
    """
    check_path(path)
    return write_document(document(key, fit, data, name), path)


def check_path(path: str | os.PathLike) -> None:
    """Refuse a name that says no format."""
    if Path(path).suffix.lower() not in FORMATS:
        got = f"a file name ending in {Path(path).suffix!r}"
        raise DataError(message("The report cannot be written.", got, f"one of {', '.join(FORMATS)}", "rename the file"))


def write_document(made: Document, path: str | os.PathLike) -> Path:
    """Write a document by the ending of the path; files appear whole or not at all."""
    from aleator.report.html import html
    from aleator.report.markdown import markdown

    check_path(path)
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    if target.suffix.lower() in (".html", ".htm"):
        write_atomic(target, html(made).encode())
        return target
    folder = target.with_name(f"{target.stem}_files")
    folder.mkdir(exist_ok=True)
    for picture in (part for section in made.sections for part in section.parts if isinstance(part, Picture)):
        write_atomic(folder / f"{picture.name}.svg", picture.svg)
    write_atomic(target, markdown(made, folder.name.replace(" ", "%20")).encode())
    return target
