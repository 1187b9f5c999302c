"""Names of a package that are imported when they are first asked for (PEP 562): `aleator --help` and `aleator predict` import what they use."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any


def names(package: str, homes: Mapping[str, str], public: Sequence[str], rest: str = "") -> tuple[Callable, Callable]:
    """(`__getattr__`, `__dir__`) of `package`. homes: {module of it: "the names that come from there"}; public: its `__all__`, what is neither in
    homes nor a module of the package comes from the module `rest`. No name may also be a module's: importing that would put it in the name's place.
    """
    home = {name: module for module, text in homes.items() for name in text.split()}

    def get(name: str) -> Any:
        if name not in home:
            if not name.startswith("__") and importlib.util.find_spec(f"{package}.{name}") is not None:
                return importlib.import_module(f"{package}.{name}")
            if name not in public or not rest:
                raise AttributeError(f"module {package!r} has no attribute {name!r}", name=name, obj=sys.modules[package])
        value = getattr(importlib.import_module(f"{package}.{home.get(name, rest)}"), name)
        return vars(sys.modules[package]).setdefault(name, value)

    def known() -> list[str]:
        here = (name for name in vars(sys.modules[package]) if name.startswith("__") or f"{package}.{name}" in sys.modules)
        return sorted({*public, *here})

    return get, known
