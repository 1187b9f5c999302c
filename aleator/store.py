"""Saving and loading fits: one directory with `fit.json` and one safetensors file. No pickle, no code run on loading.

Objects are written as their registered name and their fields, so only classes of this library are ever built. What is the user's own
code (a network, a basis, a program) is written as its shapes and must be handed back to `load`, which checks them. `fit.json` names its
array file by content and is replaced atomically: a save that is cut short leaves the fit that was there before.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import json
import os
from pathlib import Path
from typing import Any

import jax
import numpy as np

from aleator import _files, _tree
from aleator._errors import StoreError, message
from aleator._typing import Key, Tree
from aleator._version import __version__
from aleator.data import Data
from aleator.linalg import DensePrecision
from aleator.posterior import Draws, LinearGaussian, Mixture, Point, Posterior, Sampled, Score

SCHEMA = 1
JSON_NAME = "fit.json"
AUTO_NAME = "auto.json"  # of several fits with weights
WITH_NAME = "with.json"  # of a fit and what was learnt beside it: a recalibration, a detector
PARAMETER_TREES = ("params", "mean")  # fields of sampled posteriors shaped like the model's parameters


def save(fit: Any, path: str | os.PathLike) -> None:
    """Write `fit` to the directory `path`; an earlier fit there is replaced, anything else is left alone and refused."""
    directory = Path(path)
    if directory.exists() and not directory.is_dir():
        raise StoreError(
            message("A fit is saved to a directory.", f"{directory} is a file", "a new or empty directory", "choose another path")
        )
    if directory.is_dir() and any(directory.iterdir()) and not (directory / JSON_NAME).exists():
        raise StoreError(
            message(
                "The directory holds something else.", str(directory), "a new or empty directory, or an earlier fit", "choose another path"
            )
        )
    arrays: dict[str, np.ndarray] = {}
    document = {
        "schema": SCHEMA,
        "aleator": __version__,
        "model": to_spec(fit.model, arrays, "model"),
        "method": to_spec(fit.method, arrays, "method"),
        "posterior": _posterior_to_spec(fit.posterior, arrays, "posterior"),
        "status": fit.status,
        "manifest": fit.manifest,
        "info": sorted(fit.info),
        "preprocessor": None if fit.preprocessor is None else fit.preprocessor.to_json(),
    }
    arrays |= {f"info/{name}": np.asarray(trace) for name, trace in fit.info.items()}
    _write(directory, JSON_NAME, document, arrays)


def save_with(whole: Any, path: str | os.PathLike) -> None:
    """Write an object that has a `fit` and fields of this library's own: the fit to a directory within, the rest beside it."""
    directory = Path(path)
    if directory.exists() and (not directory.is_dir() or (any(directory.iterdir()) and not (directory / WITH_NAME).exists())):
        raise StoreError(message("The directory holds something else.", str(directory), "a new or empty directory", "choose another path"))
    whole.fit.save(directory / "fit")
    arrays: dict[str, np.ndarray] = {}
    fields = {f.name: to_spec(getattr(whole, f.name), arrays, f.name) for f in dataclasses.fields(whole) if f.name != "fit"}
    document = {"schema": SCHEMA, "aleator": __version__, "object": _name(type(whole)), "fields": fields}
    _write(directory, WITH_NAME, document, arrays)


def _write(directory: Path, name: str, document: dict[str, Any], arrays: dict[str, np.ndarray]) -> None:
    """The arrays in a file named by content, then the document that names it, in place of the one before."""
    content = _files.pack(arrays, {"aleator": __version__})
    document["arrays"] = {"file": f"arrays-{_files.digest(content)[:16]}.safetensors", "sha256": _files.digest(content)}
    text = json.dumps(document, indent=1)
    _files.write_atomic(directory / document["arrays"]["file"], content)
    _files.write_atomic(directory / name, json.dumps({"sha256": _files.digest(text.encode()), "fit": document}, indent=1).encode())
    for stale in directory.glob("arrays-*.safetensors"):
        if stale.name != document["arrays"]["file"]:
            stale.unlink()


def load(path: str | os.PathLike, network: Any = None, model: Any = None, template: Tree = None) -> Any:
    """Read a Fit back, an Auto, or what has a fit within (a recalibrated one, a detector).

    network: the network, when it was your own (Equinox, NNX, function). model: the whole model, when more of it was your own code (a
    NumPyro program, your own basis). template: a parameter tree, for fits of a bare log density.
    """
    from aleator._fit import Fit

    directory = Path(path)
    if (directory / AUTO_NAME).exists():
        from aleator._auto import Auto

        return Auto.load(directory)
    if (directory / WITH_NAME).exists():
        document, arrays = _read(directory, WITH_NAME)
        spec = {"object": document["object"], "fields": document["fields"]}
        return from_spec(spec, arrays, fit=load(directory / "fit", network, model, template))
    document, arrays = _read(directory, JSON_NAME)
    try:
        model = _model(document["model"], arrays, network, model, document["manifest"]["data"])
        if template is None:
            template = None if model is None else jax.eval_shape(model.init, jax.random.key(0))
        return Fit(
            model=model,
            method=from_spec(document["method"], arrays),
            posterior=_posterior_from_spec(document["posterior"], arrays, template, "posterior"),
            info={name: arrays[f"info/{name}"] for name in document["info"]},
            status=document["status"],
            manifest=document["manifest"],
            preprocessor=_preprocessor(document["preprocessor"]),
        )
    except (KeyError, TypeError, AttributeError) as error:
        raise StoreError(
            message(f"{directory} cannot be understood.", f"{type(error).__name__}: {error}", "a fit saved by aleator", "fit again")
        ) from error


def _read(directory: Path, json_name: str) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """A document and its arrays, whole and unaltered."""
    document = _read_json(directory / json_name)
    name = str(document["arrays"]["file"])
    if Path(name).name != name or not (directory / name).is_file():
        raise StoreError(message("The saved fit is incomplete.", f"no {name}", "the directory as saved", "copy the whole directory"))
    content = (directory / name).read_bytes()
    if _files.digest(content) != document["arrays"]["sha256"]:
        raise StoreError(
            message(
                f"{directory / name} was altered or cut short.",
                "another checksum",
                "the bytes as written",
                "restore it from a copy, or fit again",
            )
        )
    return document, _files.unpack(content, str(directory / name))[0]


def _preprocessor(stored: Any) -> Any:
    if stored is None:
        return None
    from aleator.tables import Preprocessor  # needs pandas, which a fit on arrays does not

    return Preprocessor.from_json(stored)


def identity(key: Key, model: Any, method: Any, data: Any, temperature: float) -> str:
    """A digest of everything that defines a run, the same in every process."""
    arrays: dict[str, np.ndarray] = {}
    spec = {
        "key": np.asarray(jax.random.key_data(key)).tolist(),
        "model": to_spec(model, arrays, "model"),
        "method": to_spec(method, arrays, "method"),
        "temperature": temperature,
        "num_data": getattr(data, "num_data", 0),
    }
    if isinstance(data, Data):
        arrays |= _files.flatten((data.x, data.y, data.weight), "data/")
    return _files.checksum(arrays, json.dumps(spec, sort_keys=True))


# ---- objects ----------------------------------------------------------------------------------------------------------------------


# Modules whose dataclasses may be written and built again, by their names there. The last two import classes that are no part of a saved fit.
MODULES = (
    *("networks", "features", "hyperpriors", "likelihoods", "priors", "model", "shallow", "methods", "linalg", "families", "posterior"),
    *("latent", "latent.parts", "latent.posteriors", "gp", "gp.wide", "decide.ood", "decide.recalibration"),
)


@functools.cache
def _class(name: str) -> type | None:
    """The class that a saved fit calls `name`, None where it may not be built; only its own module is imported."""
    home, _, own = name.rpartition(".")
    if home not in MODULES or not own.isidentifier() or own.startswith("_"):
        return None
    value = getattr(importlib.import_module(f"aleator.{home}"), own, None)
    owner = f"aleator.{home}" if home.startswith("decide.") else "aleator."
    known = isinstance(value, type) and dataclasses.is_dataclass(value) and value.__name__ == own and value.__module__.startswith(owner)
    return value if known else None


def _known(name: str) -> type:
    """The class called `name`, or a refusal."""
    cls = _class(name)
    if cls is None:
        got, do = repr(name), "update aleator, or check where the file came from"
        raise StoreError(message("The saved fit names an unknown class.", got, "a class of this version of aleator", do))
    return cls


@functools.cache
def _name(cls: type) -> str | None:
    owned = cls.__module__.startswith("aleator.")
    return next((name for home in MODULES if _class(name := f"{home}.{cls.__name__}") is cls), None) if owned else None


def to_spec(value: Any, arrays: dict[str, np.ndarray], path: str) -> Any:
    """A JSON-able description; arrays inside go to `arrays` under their path. User code becomes {"user": …} with its shapes."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, (np.integer, np.floating)):
        return value.item()
    if isinstance(value, (tuple, list)) and not hasattr(value, "_fields"):
        return {"tuple": [to_spec(item, arrays, f"{path}.{i}") for i, item in enumerate(value)]}
    if isinstance(value, dict):
        return {"dict": {str(k): to_spec(item, arrays, f"{path}.{k}") for k, item in value.items()}}
    if isinstance(value, (np.ndarray, jax.Array)):
        arrays[path] = np.asarray(value)
        return {"array": path}
    name = _name(type(value)) if dataclasses.is_dataclass(value) else None
    if name == "networks.UserNetwork":
        paths, leaves = _tree.paths(value.params), jax.tree.leaves(value.params)
        arrays |= {f"{path}.{p}": np.asarray(leaf) for p, leaf in zip(paths, leaves, strict=True)}
        return {"user": value.framework, "paths": paths, "shapes": [list(leaf.shape) for leaf in leaves]}
    if name is None:
        # Somebody's own class: its fields still count for the identity of a run, though it cannot be built again from them.
        own = {f.name: getattr(value, f.name) for f in dataclasses.fields(value)} if dataclasses.is_dataclass(value) else {}
        return {"user": type(value).__qualname__, "fields": {n: to_spec(item, arrays, f"{path}.{n}") for n, item in own.items()}}
    fields = {f.name: to_spec(getattr(value, f.name), arrays, f"{path}.{f.name}") for f in dataclasses.fields(value) if f.init}
    return {"object": name, "fields": fields}


def from_spec(spec: Any, arrays: dict[str, np.ndarray], **more: Any) -> Any:
    """The inverse of `to_spec`, for all but user code. more: fields that are not in the spec."""
    if not isinstance(spec, dict):
        return spec
    if "tuple" in spec:
        return tuple(from_spec(item, arrays) for item in spec["tuple"])
    if "dict" in spec:
        return {k: from_spec(item, arrays) for k, item in spec["dict"].items()}
    if "array" in spec:
        return arrays[spec["array"]]
    if "user" in spec:
        return UserPart(spec["user"])
    return _known(spec["object"])(**more, **{name: from_spec(item, arrays) for name, item in spec["fields"].items()})


@dataclasses.dataclass(frozen=True)
class UserPart:
    """Stands for a piece of user code that was not stored, such as a custom optimiser of a finished fit."""

    what: str

    def __call__(self, *args: Any) -> Any:
        raise StoreError(message("This part was your own code and was not stored.", self.what, "the original object", "pass it again"))


def _model(spec: Any, arrays: dict[str, np.ndarray], network: Any, model: Any, shapes: dict[str, Any]) -> Any:
    """Build the model, with the user's own parts put back and their shapes checked."""
    if spec is None:
        return model
    if model is not None:
        return _rebound(model, shapes)
    if "user" in spec:
        raise StoreError(message("The saved model was your own code.", spec["user"], "the model", "pass al.load(path, model=…)"))
    fields = spec["fields"]
    stored = fields.get("network")
    if isinstance(stored, dict) and "user" in stored:
        if network is None:
            raise StoreError(
                message(
                    "The saved network was your own code.", f"a {stored['user']} network", "the network", "pass al.load(path, network=…)"
                )
            )
        from aleator.networks import as_network

        given = as_network(network)
        paths, shapes = _tree.paths(given.params), [list(leaf.shape) for leaf in jax.tree.leaves(given.params)]
        if paths != stored["paths"] or shapes != stored["shapes"]:
            differs = next(
                (
                    f"{p} {s}"
                    for p, s in zip(paths, shapes, strict=True)
                    if (p, s) not in list(zip(stored["paths"], stored["shapes"], strict=True))
                ),
                f"{len(paths)} arrays",
            )
            raise StoreError(
                message(
                    "The network differs from the saved one.",
                    differs,
                    dict(zip(stored["paths"], stored["shapes"], strict=True)),
                    "pass the same architecture",
                )
            )
        built = {name: given if name == "network" else from_spec(item, arrays) for name, item in fields.items()}
        return _known(spec["object"])(**built)
    if network is not None:
        raise StoreError(message("The saved network reloads by itself.", "network=…", "nothing", "call al.load(path)"))
    if any(isinstance(item, dict) and "user" in item for item in fields.values()):
        raise StoreError(
            message(
                "Part of the saved model was your own code.",
                str([n for n, i in fields.items() if isinstance(i, dict) and "user" in i]),
                "the model",
                "pass al.load(path, model=…)",
            )
        )
    return from_spec(spec, arrays)


def _rebound(model: Any, shapes: dict[str, Any]) -> Any:
    """A model handed back as it was before it met data is shown two rows of the stored shapes."""
    if shapes["x_shape"] is None or len(shapes["x_shape"]) != 1 or not hasattr(model, "bind"):
        return model
    y_shape = [1] if shapes["y_shape"] == [] else shapes["y_shape"]
    dtype = shapes.get("x_dtype", ["float32"])[0]  # look-ups take whole numbers only
    return model.bind(np.zeros((2, *shapes["x_shape"][0]), dtype), np.zeros((2, *(y_shape or [1])), np.float32))


# ---- posteriors -------------------------------------------------------------------------------------------------------------------


def _posterior_to_spec(posterior: Posterior, arrays: dict[str, np.ndarray], path: str) -> dict[str, Any]:
    evidence = None if posterior.log_evidence is None else list(posterior.log_evidence)
    spec: dict[str, Any] = {"kind": type(posterior).__name__, "log_evidence": evidence}
    if isinstance(posterior, (Point, Draws)):
        arrays |= _files.flatten(posterior.params, f"{path}/params/")
    if isinstance(posterior, Draws):
        spec["num_chains"] = posterior.num_chains
    if isinstance(posterior, Mixture):
        spec["components"] = [_posterior_to_spec(part, arrays, f"{path}/{i}") for i, part in enumerate(posterior.components)]
    if isinstance(posterior, (Draws, Mixture)) and posterior.weights is not None:
        arrays[f"{path}/weights"] = np.asarray(posterior.weights)
    if isinstance(posterior, Sampled):
        for field in dataclasses.fields(posterior):  # type: ignore[arg-type]
            value = getattr(posterior, field.name)
            if field.name in PARAMETER_TREES:
                arrays |= _files.flatten(value, f"{path}/{field.name}/")
            elif field.name != "log_evidence":
                spec[field.name] = to_spec(value, arrays, f"{path}/{field.name}")
    if hasattr(posterior, "base"):  # a process: hyper-parameters, and what they are conditioned on
        spec["base"] = _posterior_to_spec(posterior.base, arrays, f"{path}/base")
        rest = [field.name for field in dataclasses.fields(posterior) if field.name not in ("base", "log_evidence")]
        spec |= {name: to_spec(getattr(posterior, name), arrays, f"{path}/{name}") for name in rest}
    if isinstance(posterior, LinearGaussian):
        named = {name: getattr(posterior, name) for name in ("mean", "scale", "concentration", "rate")}
        named |= {"factor": posterior.operator.factor} | {f"stats.{name}": value for name, value in posterior.stats._asdict().items()}
        arrays |= {f"{path}/{name}": np.asarray(value) for name, value in named.items() if value is not None}
    return spec


def _posterior_from_spec(spec: dict[str, Any], arrays: dict[str, np.ndarray], template: Tree, path: str) -> Posterior:
    kind, evidence = spec["kind"], None if spec["log_evidence"] is None else Score(*spec["log_evidence"])
    # Most kinds are in `posterior`; asking for another imports `latent`.
    sampled = _class(f"posterior.{kind}") or (None if "base" in spec else _class(f"latent.{kind}"))
    sampled = sampled if sampled is not None and issubclass(sampled, Sampled) else None
    if kind in ("Point", "Draws") or sampled is not None:
        if template is None:
            raise StoreError(
                message(
                    "The fit was of a bare log density.",
                    "no template",
                    "a parameter tree of the same structure",
                    "pass al.load(path, template=params0)",
                )
            )
        if sampled is not None:
            values: dict[str, Any] = {"log_evidence": evidence}
            for field in dataclasses.fields(sampled):
                if field.name in PARAMETER_TREES:
                    prefix = f"{path}/{field.name}/"
                    values[field.name] = _files.unflatten(template, {n: a for n, a in arrays.items() if n.startswith(prefix)}, prefix)
                elif field.name in spec and field.name != "log_evidence":  # a field added since keeps its default
                    values[field.name] = from_spec(spec[field.name], arrays)
            return sampled(**values)
        prefix = f"{path}/params/"
        named = {name: array for name, array in arrays.items() if name.startswith(prefix)}
        params = _files.unflatten(template, named, prefix, leading=0 if kind == "Point" else 1)
        if kind == "Point":
            return Point(params, evidence)
        return Draws(params, arrays.get(f"{path}/weights"), evidence, spec.get("num_chains", 1))
    if "base" in spec:
        base = _posterior_from_spec(spec["base"], arrays, template, f"{path}/base")
        rest = {name: from_spec(item, arrays) for name, item in spec.items() if name not in ("kind", "log_evidence", "base")}
        return _known(f"gp.{kind}")(base=base, log_evidence=evidence, **rest)
    if kind == "Mixture":
        parts = tuple(_posterior_from_spec(part, arrays, template, f"{path}/{i}") for i, part in enumerate(spec["components"]))
        return Mixture(parts, arrays.get(f"{path}/weights"), evidence)
    if kind == "LinearGaussian":
        get = lambda name: arrays.get(f"{path}/{name}")
        from aleator.methods.exact import State as ExactState

        stats = ExactState(*(get(f"stats.{name}") for name in ExactState._fields))
        return LinearGaussian(get("mean"), DensePrecision(get("factor")), get("scale"), get("concentration"), get("rate"), stats, evidence)
    raise StoreError(message("The saved fit has an unknown posterior.", repr(kind), "a kind of this version", "update aleator"))


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise StoreError(message("There is no saved fit.", str(path.parent), f"a directory with {JSON_NAME}", "check the path"))
    try:
        outer = json.loads(path.read_text())
        document, checksum = outer["fit"], outer["sha256"]
        schema = document["schema"]
    except (ValueError, KeyError, TypeError, UnicodeDecodeError, RecursionError) as error:
        raise StoreError(
            message(
                f"{path} cannot be read.",
                f"{type(error).__name__}: {error}",
                "a file written by aleator",
                "restore it from a copy, or fit again",
            )
        ) from error
    if schema != SCHEMA:
        raise StoreError(
            message(
                f"{path} has another format.",
                f"schema {schema}, written by aleator {document.get('aleator')}",
                f"schema {SCHEMA}",
                "update aleator",
            )
        )
    if _files.digest(json.dumps(document, indent=1).encode()) != checksum:
        raise StoreError(
            message(
                f"{path} was altered.",
                "contents that do not match their checksum",
                "the text as written",
                "restore it from a copy, or fit again",
            )
        )
    return document
