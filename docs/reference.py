"""The API reference: every public name with its signature and docstring, as Markdown. Called by the page api.md when it is built."""

from __future__ import annotations

import importlib
import inspect
import re
from types import ModuleType
from typing import Any

import aleator as al

# Modules with names of their own, in reading order; the top level comes first.
MODULES = (
    "aleator",
    "aleator.networks",
    "aleator.features",
    "aleator.priors",
    "aleator.hyperpriors",
    "aleator.posterior",
    "aleator.criteria",
    "aleator.convergence",
    "aleator.decide",
    "aleator.decide.active",
    "aleator.decide.calibration",
    "aleator.decide.conformal",
    "aleator.decide.ood",
    "aleator.evidence",
    "aleator.explain",
    "aleator.elicit",
    "aleator.gp",
    "aleator.latent",
    "aleator.datasets",
    "aleator.estimators",
    "aleator.plots",
    "aleator.report",
)
SPECIAL = re.compile(r"([\\`*_{}\[\]<>#|])")


def text() -> str:
    """The whole reference."""
    return "\n\n".join(section(importlib.import_module(name)) for name in MODULES)


def names(module: ModuleType) -> list[str]:
    """Public names that are defined in the library and are no modules."""
    own = getattr(module, "__all__", None) or [n for n, v in vars(module).items() if getattr(v, "__module__", "") == module.__name__]
    return sorted({n for n in own if not n.startswith("_") and not isinstance(getattr(module, n), ModuleType)}, key=str.lower)


def section(module: ModuleType) -> str:
    short = module.__name__.replace("aleator", "al", 1)
    out = [f"## {short}", *document(inspect.getdoc(module) or "")]
    constants = []
    for name in names(module):
        value = getattr(module, name)
        if callable(value):
            out += entry(f"{short}.{name}", value)
        else:
            constants.append(f"`{short}.{name}`")
    return "\n\n".join([*out, *([f"Constants: {', '.join(constants)}."] if constants else [])])


def entry(name: str, value: Any) -> list[str]:
    """Heading, signature, docstring; for classes also their public methods in a line each."""
    out = [f"### {escape(name)}", f"```\n{name}{signature(value)}\n```", *document(inspect.getdoc(value) or "")]
    if inspect.isclass(value):
        members = [f"- `{n}`: {escape(first(v))}" for n, v in sorted(vars(value).items()) if shown(n, v)]
        out += ["\n".join(members)] if members else []
    return out


def shown(name: str, value: Any) -> bool:
    method = inspect.isfunction(value) or isinstance(value, (property, classmethod, staticmethod))
    return method and not name.startswith("_") and bool(first(value))


def first(value: Any) -> str:
    """The first sentence of a docstring."""
    doc = " ".join((inspect.getdoc(getattr(value, "__func__", value)) or "").split())
    return re.split(r"(?<=[.:;])\s", doc, maxsplit=1)[0].rstrip(":;")


def signature(value: Any) -> str:
    """As in the source; addresses of default objects would change from run to run, and are left out."""
    try:
        told = str(inspect.signature(value))
    except (TypeError, ValueError):
        return ""
    return re.sub(r"<([\w.]+)( object)? at 0x[0-9a-f]+>", r"<\1>", told).replace("'", "")


def document(doc: str) -> list[str]:
    """Paragraphs of a docstring; examples as code."""
    out = []
    for part in re.split(r"\n\s*\n", doc):
        if part.lstrip().startswith(">>>"):
            out.append(f"```pycon\n{part}\n```")
        elif part.strip():
            out.append(escape(" ".join(part.split())))
    return out


def escape(words: str) -> str:
    return SPECIAL.sub(r"\\\1", words)


def undocumented() -> list[str]:
    """Public names without a word about them."""
    return [
        f"{module}.{name}"
        for module in MODULES
        for name in names(importlib.import_module(module))
        if callable(value := getattr(importlib.import_module(module), name)) and not (inspect.getdoc(value) or "").strip()
    ]


assert all(hasattr(al, name) for name in al.__all__)
