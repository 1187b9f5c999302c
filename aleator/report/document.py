"""What a report is made of, whatever it is written as: sections of sentences, lists, tables and pictures. Text is plain; writers escape it."""

from __future__ import annotations

import math
from typing import Any, NamedTuple, TypeAlias


class Text(NamedTuple):
    """One paragraph. kind: "plain", or "note" for what asks for more data or cannot be told."""

    text: str
    kind: str = "plain"


class Points(NamedTuple):
    """A list of sentences, one thing each."""

    items: tuple[str, ...]


class Table(NamedTuple):
    """Cells as text; the first column names the row. caption: what it shows. numeric: columns set to the right."""

    head: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    caption: str
    numeric: tuple[int, ...] = ()


class Picture(NamedTuple):
    """An SVG file; alt: what it shows, in words that stand for it; caption: how to read it."""

    name: str
    svg: bytes
    alt: str
    caption: str


Part: TypeAlias = Text | Points | Table | Picture


class Section(NamedTuple):
    """A heading and what is under it."""

    title: str
    parts: tuple[Part, ...]


class Document(NamedTuple):
    """The whole. made: a line on when, from what and with what."""

    title: str
    summary: str
    made: str
    sections: tuple[Section, ...]


def number(value: Any, digits: int = 3) -> str:
    """A number in `digits` significant digits, without an exponent where it can be read without.

    >>> number(1234.567), number(0.000123), number(float("nan")), number(0.5)
    ('1235', '0.000123', '–', '0.5')
    """
    value = float(value)
    if not math.isfinite(value):
        return "–" if math.isnan(value) else ("∞" if value > 0 else "−∞")
    if value != 0 and not 1e-4 <= abs(value) < 1e7:
        return f"{value:.{digits - 1}e}"
    places = digits if value == 0 else max(0, digits - 1 - math.floor(math.log10(abs(value))))
    text = f"{value:.{places}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def cell(value: Any, longest: int = 40) -> str:
    """A value of a table, short enough for one: numbers in four digits, text cut, missing ones as a dash."""
    if value is None or (isinstance(value, float) and math.isnan(value)) or str(value) in ("NaT", "<NA>"):
        return "–"
    plain = value.item() if hasattr(value, "item") else value
    if isinstance(plain, float):
        return number(plain, 4)
    text = " ".join(str(plain).split())
    return text if len(text) <= longest else text[: longest - 1] + "…"


def percent(share: float) -> str:
    """A share as a percentage, whole where that is enough.

    >>> percent(0.123), percent(0.004), percent(1.0)
    ('12 %', '0.4 %', '100 %')
    """
    return f"{100 * share:.0f} %" if share == 0 or share >= 0.095 else f"{100 * share:.1f} %"


def p_text(p: float) -> str:
    """A p-value, never smaller than can be told apart from zero.

    >>> p_text(0.0321), p_text(0.0002)
    ('p = 0.032', 'p < 0.001')
    """
    return "p < 0.001" if p < 0.001 else f"p = {p:.2g}"


def some(names: Any, most: int = 6) -> str:
    """The first few of a list, and how many more."""
    names = [str(name) for name in names]
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")
