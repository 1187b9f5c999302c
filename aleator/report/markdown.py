"""A document as Markdown, with its pictures as files beside it."""

from __future__ import annotations

import re

from aleator.report.document import Document, Part, Points, Table, Text

# Everything that Markdown, or the HTML inside it, would take for more than a letter.
SPECIAL = re.compile(r"([\\`*_{}\[\]#|])")
ENTITIES = str.maketrans({letter: f"&#{ord(letter)};" for letter in "&<>$~"})  # no backslash takes their meaning everywhere


def markdown(document: Document, folder: str) -> str:
    """The text; pictures are referred to as files of `folder`."""
    out = [f"# {plain(document.title)}", plain(document.summary)]
    for section in document.sections:
        out.append(f"## {plain(section.title)}")
        out += [_part(part, folder) for part in section.parts]
    return "\n\n".join([*out, "---", plain(document.made)]) + "\n"


def plain(text: str) -> str:
    """Text that shows as it is, on one line.

    >>> print(plain("a_b | [x] & y"))
    a\\_b \\| \\[x\\] &#38; y
    """
    return SPECIAL.sub(r"\\\1", " ".join(text.split())).translate(ENTITIES)


def _part(part: Part, folder: str) -> str:
    if isinstance(part, Text):
        return f"> {plain(part.text)}" if part.kind == "note" else plain(part.text)
    if isinstance(part, Points):
        return "\n".join(f"- {plain(item)}" for item in part.items)
    if isinstance(part, Table):
        line = lambda cells: "| " + " | ".join(plain(text) or " " for text in cells) + " |"
        rule = "|" + "|".join("---:" if j in part.numeric else "---" for j in range(len(part.head))) + "|"
        return "\n".join([plain(part.caption), "", line(part.head), rule, *map(line, part.rows)])
    return f"![{plain(part.alt)}]({folder}/{part.name}.svg)\n\n{plain(part.caption)}"
