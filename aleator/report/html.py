"""A document as one HTML file that needs nothing else: light and dark, paper and telephone, pictures inline in the page's own colours."""

from __future__ import annotations

import re
from html import escape

from aleator.plots._road import ALEATORIC, ALEATORIC_FILL, DATA, EPISTEMIC, EPISTEMIC_FILL, MEAN
from aleator.report.document import Document, Part, Picture, Points, Section, Table, Text

# Colours of the pictures follow the page: blue stays epistemic and orange aleatoric, in shades that stand out from light and from dark paper.
COLOURS = {
    MEAN: "ink",
    DATA: "soft",
    "#FFFFFF": "paper",
    EPISTEMIC: "epistemic",
    EPISTEMIC_FILL: "epistemic-fill",
    ALEATORIC: "aleatoric",
    ALEATORIC_FILL: "aleatoric-fill",
}
LIGHT = {
    "ink": MEAN,
    "soft": DATA,
    "paper": "#ffffff",
    "quiet": "#f3f4f2",
    "line": "#cfd2cd",
    "link": "#0b57a4",
    "epistemic": EPISTEMIC,
    "epistemic-fill": EPISTEMIC_FILL,
    "aleatoric": ALEATORIC,
    "aleatoric-fill": ALEATORIC_FILL,
}
DARK = {
    "ink": "#e6e6e2",
    "soft": "#a9aca8",
    "paper": "#16181b",
    "quiet": "#212429",
    "line": "#3d4148",
    "link": "#8ab8f0",
    "epistemic": "#56b4e9",
    "epistemic-fill": "#1f5878",
    "aleatoric": "#e69f00",
    "aleatoric-fill": "#5f4712",
}
SHEET = """
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 1rem; max-width: 66rem; color: var(--ink); background: var(--paper); font: 16px/1.5 system-ui, "Segoe UI", Roboto, sans-serif; overflow-wrap: anywhere; }
h1 { font-size: 1.7rem; line-height: 1.2; margin: 0.4rem 0 0.8rem; }
h2 { font-size: 1.25rem; margin: 2.2rem 0 0.6rem; padding-top: 0.6rem; border-top: 1px solid var(--line); }
p, li { max-width: 46rem; }
.summary { padding: 0.8rem 1rem; border-left: 4px solid var(--epistemic); background: var(--quiet); max-width: none; }
.note { padding: 0.5rem 0.8rem; border-left: 4px solid var(--aleatoric); background: var(--quiet); }
.made { color: var(--soft); font-size: 0.85rem; max-width: none; }
nav ul { display: flex; flex-wrap: wrap; gap: 0.2rem 1.1rem; list-style: none; padding: 0; font-size: 0.92rem; }
nav li { max-width: none; }
a { color: var(--link); }
.table { overflow-x: auto; margin: 0.3rem 0 1rem; border: 1px solid var(--line); border-radius: 6px; }
.table:focus-visible { outline: 2px solid var(--link); }
table { border-collapse: collapse; width: 100%; font-size: 0.9rem; overflow-wrap: normal; }
.caption { color: var(--soft); font-size: 0.88rem; margin: 1rem 0 0.3rem; }
th, td { padding: 0.35rem 0.7rem; text-align: left; vertical-align: top; border-top: 1px solid var(--line); max-width: 40rem; white-space: nowrap; }
thead tr:first-child th { border-top: 0; }
thead th { background: var(--quiet); font-weight: 600; }
tbody th { font-weight: 500; }
td.long, tbody th.long { overflow-wrap: anywhere; min-width: 14rem; white-space: normal; }
.number { text-align: right; font-variant-numeric: tabular-nums; }
.pictures { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 22rem), 1fr)); gap: 1.2rem; }
figure { margin: 0.8rem 0; max-width: 30rem; }
figure svg { display: block; width: 100%; height: auto; }
figure svg text { font-family: inherit !important; }
figcaption { color: var(--soft); font-size: 0.88rem; margin-top: 0.3rem; }
@media print {
  body { max-width: none; padding: 0; font-size: 10.5pt; }
  nav { display: none; }
  .table { overflow: visible; border: 0; }
  th, td, td.long { overflow-wrap: anywhere; min-width: 0; white-space: normal; }
  figure, tr { break-inside: avoid; }
  h2 { break-after: avoid; }
}
"""
LONG = 28  # letters from which on a cell may be broken


def html(document: Document) -> str:
    """The whole file."""
    colours = lambda chosen: "".join(f"--{name}: {value}; " for name, value in chosen.items())
    style = f":root {{ color-scheme: light dark; {colours(LIGHT)}}}\n@media screen and (prefers-color-scheme: dark) {{ :root {{ {colours(DARK)}}} }}{SHEET}"
    menu = "".join(f'<li><a href="#{anchor(part.title)}">{escape(part.title)}</a></li>' for part in document.sections)
    body = "\n".join(map(_section, document.sections))
    title = escape(document.title)
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<meta name="generator" content="Aleator">
<link rel="icon" href="data:,">
<title>{title}</title>
<style>{style}</style>
</head>
<body>
<header>
<h1>{title}</h1>
<p class="summary">{escape(document.summary)}</p>
</header>
<nav aria-label="Sections"><ul>{menu}</ul></nav>
<main>
{body}
</main>
<footer><p class="made">{escape(document.made)}</p></footer>
</body>
</html>
"""


def anchor(title: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", title.lower()).strip("-")


def _section(section: Section) -> str:
    out: list[str] = []
    row: list[str] = []

    def place() -> None:
        if row:
            out.append(f'<div class="pictures">{"".join(row)}</div>' if len(row) > 1 else row[0])
            row.clear()

    for part in section.parts:
        if isinstance(part, Picture):
            row.append(_part(part))
        else:
            place()
            out.append(_part(part))
    place()
    return f'<section id="{anchor(section.title)}">\n<h2>{escape(section.title)}</h2>\n' + "\n".join(out) + "\n</section>"


def _part(part: Part) -> str:
    if isinstance(part, Text):
        return f"<p{' class=note' if part.kind == 'note' else ''}>{escape(part.text)}</p>"
    if isinstance(part, Points):
        return "<ul>" + "".join(f"<li>{escape(item)}</li>" for item in part.items) + "</ul>"
    if isinstance(part, Table):
        return _table(part)
    return f"<figure>{inline(part)}<figcaption>{escape(part.caption)}</figcaption></figure>"


def _table(table: Table) -> str:
    kind = lambda j, text: " class=number" if j in table.numeric else " class=long" if len(text) > LONG else ""
    head = "".join(
        f'<th scope="col"{" class=number" if j in table.numeric else ""}>{escape(text)}</th>' for j, text in enumerate(table.head)
    )
    tag = lambda j, text: f'<th scope="row"{kind(j, text)}>{escape(text)}</th>' if j == 0 else f"<td{kind(j, text)}>{escape(text)}</td>"
    rows = "".join("<tr>" + "".join(tag(j, text) for j, text in enumerate(row)) + "</tr>" for row in table.rows)
    caption = escape(table.caption)
    # Focusable, so that it can be scrolled with the keyboard.
    return (
        f'<p class="caption">{caption}</p><div class="table" role="region" tabindex="0" aria-label="{caption}"><table>'
        f"<thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table></div>"
    )


def inline(picture: Picture) -> str:
    """The SVG inside the page: names made its own, colours those of the page, described in words."""
    text = picture.svg.decode()
    text = text[text.index("<svg") :]
    text = re.sub(r"<!--.*?-->|<metadata>.*?</metadata>|<title>.*?</title>", "", text, flags=re.S)
    text = re.sub(r'\bid="', f'id="{picture.name}-', text)
    text = re.sub(r'(xlink:href="#|url\(#)', rf"\g<1>{picture.name}-", text)
    for colour, name in COLOURS.items():
        text = re.sub(rf"{colour}\b", f"var(--{name})", text, flags=re.I)
    text = re.sub(r'(<svg[^>]*?) width="[^"]*"', r"\1", re.sub(r'(<svg[^>]*?) height="[^"]*"', r"\1", text, count=1), count=1)
    return text.replace("<svg", f'<svg role="img" aria-label="{escape(picture.alt)}"', 1)
