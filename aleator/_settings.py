"""From `--method NAME --set key=value …` to a Method: values are read by the type of the field they are for."""

from __future__ import annotations

import dataclasses
import json
import types
import typing
from collections.abc import Mapping, Sequence
from typing import Any

from aleator._errors import MethodError, message, nearest
from aleator.methods import METHODS, Method

NOTHING = ("none", "null", "")
YES, NO = ("true", "yes", "on", "1"), ("false", "no", "off", "0")


def build(name: str, settings: Sequence[str], defaults: Mapping[type, Mapping[str, Any]] | None = None) -> Method:
    """The method called `name` with `key=value` settings over `defaults` (per class).

    "base.num_steps=500" reaches into a method inside a method; a plain "num_steps=500" does too, when only the inner one has that name.

    >>> build("ensemble", ["num_members=3", "num_steps=500"])
    Ensemble(base=MAP(num_steps=500, ...), num_members=3, bootstrap=False)
    """
    known = find(name)
    pairs: dict[str, str] = {}
    for setting in settings:
        key, equals, value = setting.partition("=")
        if not equals or not key.strip():
            raise MethodError(message("A setting has a wrong form.", repr(setting), "key=value", "write e.g. --set num_steps=500"))
        pairs[key.strip()] = value.strip()
    return _make(known, pairs, defaults or {})


def find(name: str, more: Sequence[str] = ()) -> type[Method]:
    """The method class of a command-line name, whatever its case; more: other names that would have been right, for the message."""
    known = METHODS.get(name.lower())
    if known is None:
        every = [*more, *METHODS]
        got, do = repr(name) + nearest(name.lower(), every), "run `aleator methods`"
        raise MethodError(message("There is no method of this name.", got, f"one of {every}", do))
    return known


def _make(cls: type[Method], pairs: Mapping[str, str], defaults: Mapping[type, Mapping[str, Any]]) -> Method:
    hints = typing.get_type_hints(cls)
    fields = [field.name for field in dataclasses.fields(cls) if field.init]  # type: ignore[arg-type]
    values: dict[str, Any] = dict(defaults.get(cls, {}))
    inner: dict[str, dict[str, str]] = {name: {} for name in fields if hints.get(name) is Method}
    chosen = {name: pairs[name] for name in inner if name in pairs}
    bases = {name: find(chosen[name]) if name in chosen else type(_default(cls, name)) for name in inner}
    for key, text in pairs.items():
        head, _, rest = key.partition(".")
        if head in inner:
            if rest:
                inner[head][rest] = text
        elif key in fields:
            values[key] = parse(f"{cls.__name__}.{key}", text, hints[key])
        else:
            owner = next((name for name, base in bases.items() if key in _names(base)), None)
            if owner is None:
                everything = fields + [f"{name}.{field}" for name, base in bases.items() for field in _names(base)]
                close = nearest(key, [entry.split(".")[-1] for entry in everything]) or nearest(key, everything)
                raise MethodError(
                    message(
                        f"{cls.__name__} has no hyper-parameter of this name.",
                        repr(key) + close,
                        f"one of {everything}",
                        "check the spelling",
                    )
                )
            inner[owner].setdefault(key, text)
    for name, base in bases.items():
        values[name] = _make(base, inner[name], defaults)
    return cls(**values)


def that_fit(cls: type, settings: Sequence[str]) -> list[str]:
    """Those of an ensemble's settings that its base has too, for running the base by itself.

    >>> from aleator.methods import MAP
    >>> that_fit(MAP, ["num_members=3", "base.num_steps=5", "clip=1"])
    ['num_steps=5', 'clip=1']
    """
    return [plain for plain in (setting.removeprefix("base.") for setting in settings) if plain.partition("=")[0] in _names(cls)]


def _names(cls: type) -> list[str]:
    return [field.name for field in dataclasses.fields(cls) if field.init]


def _default(cls: type, name: str) -> Any:
    field = next(field for field in dataclasses.fields(cls) if field.name == name)
    return field.default if field.default_factory is dataclasses.MISSING else field.default_factory()


def parse(name: str, text: str, hint: Any) -> Any:
    """A value of type `hint` from its text.

    >>> parse("MAP.batch_size", "32", int | None), parse("MAP.clip", "none", float | None), parse("Ensemble.bootstrap", "yes", bool)
    (32, None, True)
    """
    options = typing.get_args(hint) if typing.get_origin(hint) in (typing.Union, types.UnionType) else (hint,)
    if type(None) in options and text.lower() in NOTHING:
        return None
    for option in options:
        try:
            return _parse_one(text, option)
        except (ValueError, OverflowError):  # int(inf) overflows
            continue
    wanted = " or ".join(_WORDS.get(option, getattr(option, "__name__", str(option))) for option in options)
    raise MethodError(message(f"{name} cannot be read.", repr(text), wanted, "check the value after the ="))


_WORDS = {int: "a whole number", float: "a number", bool: "true or false", str: "a word", type(None): "none"}


def _parse_one(text: str, hint: Any) -> Any:
    if hint is bool:
        if text.lower() in YES + NO:
            return text.lower() in YES
        raise ValueError(text)
    if hint is int:
        number = float(text)  # 1e4 is a whole number too
        if number != int(number):
            raise ValueError(text)
        return int(text) if text.lstrip("+-").isdigit() else int(number)
    if hint is float:
        return float(text)
    if hint in (str, Any):
        return text
    if typing.get_origin(hint) is tuple:
        kind = typing.get_args(hint)[0]
        return tuple(_parse_one(part.strip(), kind) for part in text.split(",") if part.strip())
    if hint is type(None):
        raise ValueError(text)
    return json.loads(text)
