"""fit(): from a model, data and a method to a Fit; and what a Fit can do."""

from __future__ import annotations

import dataclasses
import datetime
import os
import platform
import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from aleator import _tree, diagnostics, loop, store
from aleator._cache import cached
from aleator._errors import AleatorError, DataError, HealthWarning, MethodError, NonFiniteError, message
from aleator._quick import quick
from aleator._random import as_key, seeds_of, split
from aleator._typing import Key, KeyLike, Tree
from aleator._version import __version__
from aleator.data import Batch, Data, Stream, as_data, check_arrays, sketch
from aleator.methods import Method
from aleator.model import signature
from aleator.posterior import Draws, Posterior, Score
from aleator.predictive import Predictive
from aleator.target import DensityTarget, Target

NUM_SAMPLES = 1000  # posterior draws used at a prediction where the posterior is not a fixed set of them


@dataclasses.dataclass(frozen=True, eq=False)
class Fit:
    """A finished inference; nothing on it ever changes.

    model, method, posterior; info: traces by name; status: a sentence on health, with advice; manifest: seed, versions, configuration,
    timings, N and shapes; preprocessor: how a table became arrays, when it did.
    """

    model: Any
    method: Method
    posterior: Posterior
    info: dict[str, np.ndarray]
    status: str
    manifest: dict[str, Any]
    preprocessor: Any = None

    @property
    def log_evidence(self) -> Score | None:
        """log p(D), in nats, with its kind; None where the method does not give one."""
        return self.posterior.log_evidence

    def predict(self, key: KeyLike, x: Any, num_samples: int = NUM_SAMPLES) -> Predictive:
        """The predictive distribution of y at the rows of x (a table, when the fit was made from one)."""
        key, x = as_key(key), self._inputs(x)
        return self._predictive(self.posterior.outputs(key, self.model, x, num_samples))

    def functions(self, key: KeyLike, x: Any, num_samples: int = 20) -> np.ndarray:
        """Function draws: E[y | x, θ] over the rows of x for posterior draws θ, one θ per curve, in y's units; (num_samples, rows, …).

        `predict` knows each row's distribution; a curve needs all rows under the same θ.
        """
        key, x = as_key(key), self._inputs(x)
        return self._predictive(self.posterior.functions(key, self.model, x, num_samples)).draws

    def joint(self, key: KeyLike, x: Any, num_samples: int = NUM_SAMPLES) -> tuple[np.ndarray, np.ndarray]:
        """Mean (rows, k) and covariance (rows, k, rows, k) of the outputs f at all rows of x together, where `predict` knows each row by itself.

        Closed form for exact posteriors and linearised Laplace, else of num_samples draws. Outputs are as the likelihood takes them: the mean of
        y (standardised, for a fit made from a table) in a regression, logits in a classification.
        """
        return self.posterior.joint(as_key(key), self.model, self._inputs(x), num_samples)

    def sample(self, key: KeyLike, num_samples: int) -> Tree:
        """Draws from the posterior over parameters, leaves (num_samples, …)."""
        return self.posterior.sample(as_key(key), num_samples)

    def update(self, data: Any) -> Fit:
        """A new Fit with more data, without the rows of before: for methods whose posterior keeps what it needs of them.

        Equal to fitting all rows at once for exact posteriors and processes, and for `al.Laplace("full")` of a linear model. Other Laplace fits
        keep the second-order Taylor term of the old rows at their mode. Sparse processes keep their hyper-parameters and inducing inputs: given these exact for
        Gaussian noise; for other likelihoods their Gaussian so far is the prior of the new rows. A fit made from a table takes more rows of it (a DataFrame with
        the target), or (x, y) as its model does; what was learned about columns and units stays as it was.
        """
        record = {"table": self.manifest["table"]} if "table" in self.manifest else {}
        found = self._updated(self._labelled(data))
        return dataclasses.replace(found, preprocessor=self.preprocessor, manifest=found.manifest | record)

    def _updated(self, data: Any) -> Fit:
        joined = getattr(self.posterior, "joined", None)
        if joined is not None:  # a posterior that keeps its rows: fitted again to all of them, from where it is
            return _fit(as_key(0), self.model, joined(as_data(data)), self.method, init=self, temperature=self.manifest["temperature"])
        absorbed = getattr(self.posterior, "absorbed", None)
        if absorbed is not None:  # a posterior that is the prior of rows to come
            more = _encode(as_data(data), self.model, fitting=False)
            self._inputs(more.x)
            posterior, status, healthy = absorbed(self.model, more)
            if not healthy:
                warnings.warn(status, HealthWarning, stacklevel=2)
            known = self.manifest["data"] | {"num_data": self.manifest["data"]["num_data"] + more.num_data}
            return dataclasses.replace(self, posterior=posterior, status=status, manifest=self.manifest | {"data": known})
        stats = getattr(self.posterior, "stats", None)
        if stats is None:
            raise MethodError(
                message(
                    f"{type(self.method).__name__} cannot be updated.",
                    "no sufficient statistics",
                    "a fit by al.Exact, of a process, or by al.Laplace with Gauss–Newton curvature",
                    "fit all the data again, with init=fit",
                )
            )
        before = self.manifest["data"]["num_data"]
        return _fit(
            _again(self.manifest, before),
            self.model,
            data,
            self.method,
            temperature=self.manifest["temperature"],
            stats=stats,
            before=before,
        )

    def save(self, path: str | os.PathLike) -> None:
        """Write one directory with JSON and safetensors; `al.load(path)` reads it back, bit for bit."""
        store.save(self, path)

    def sites(self) -> str:
        """How each parameter was treated, as a short table: path, shape, treatment."""
        rows = [(r["path"], "×".join(map(str, r["shape"])), r["treatment"]) for r in self.manifest.get("sites", [])]
        widths = [max(len(row[i]) for row in rows) for i in range(3)] if rows else []
        return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows)

    def prune(self, threshold: float = 3.0) -> Fit:
        """The network without the weights whose log α exceeds `threshold`: smaller and faster, checked against this one.

        Needs a fit with Gaussian dropout noise (al.SparseDropout). manifest["pruning"] has bytes and times before and after, and the
        largest difference in outputs. Fine-tune it with `al.fit(key, pruned.model, data, al.MAP(…))`, which starts where it is; or fit it by
        al.SparseDropout once more and prune again: weights that go take their noise with them, and others can follow.
        """
        from aleator.pruning import prune

        return prune(self, threshold)

    def to_arviz(self, key: KeyLike, num_samples: int = NUM_SAMPLES) -> Any:
        """The posterior draws as an ArviZ object, one variable per parameter leaf."""
        return diagnostics.to_arviz(self.posterior, as_key(key), num_samples)

    def __repr__(self) -> str:
        evidence = "" if self.log_evidence is None else f", log evidence {self.log_evidence.value:.4f} nats ({self.log_evidence.kind})"
        return f"<Fit of {type(self.model).__name__} by {type(self.method).__name__}{evidence}: {self.status}>"

    def _inputs(self, x: Any) -> Tree:
        """x as the model takes it: preprocessed when the fit was made from a table, checked against the data of the fit."""
        if self.model is None:
            raise MethodError(
                message(
                    "A bare log density predicts nothing.",
                    "a fit without a model",
                    "al.BNN, al.LinearModel, …",
                    "use fit.posterior.sample(key, n)",
                )
            )
        if self.preprocessor is not None and hasattr(x, "columns"):
            x, notes = self.preprocessor.transform(x)
            for note in notes:
                warnings.warn(note, HealthWarning, stacklevel=3)
        x = check_arrays(x, "x")
        expected = self.manifest["data"]["x_shape"]
        got = [list(leaf.shape[1:]) for leaf in jax.tree.leaves(x)]
        if expected is not None and got != expected:
            show = lambda shapes: " and ".join("(n" + "".join(f", {d}" for d in s) + ")" for s in shapes) or "nothing"
            raise DataError(
                message("x does not look like the data of the fit.", show(got), show(expected), "pass the same features in the same order")
            )
        return x

    def _labelled(self, data: Any) -> Any:
        """Rows with targets as the model takes them, of a table where the fit was made from one."""
        if self.preprocessor is None or not hasattr(data, "columns"):
            return data
        x, notes = self.preprocessor.transform(data)
        for note in notes:
            warnings.warn(note, HealthWarning, stacklevel=4)
        return x, self.preprocessor.encode_target(data)

    def _predictive(self, outputs: Any) -> Predictive:
        """Outputs in the units and labels of the table, when there was one."""
        scaler = self.preprocessor
        regression, classification = (scaler is not None and scaler.task == task for task in ("regression", "classification"))
        return Predictive(
            outputs=outputs,
            likelihood=self.model.likelihood,
            y_loc=np.atleast_1d(scaler.y_loc) if regression else None,
            y_scale=np.atleast_1d(scaler.y_scale) if regression else None,
            squeeze=self.manifest["data"]["squeeze"],
            labels=tuple(scaler.labels) if classification else None,
        )


def fit(
    key: KeyLike,
    model: Any,
    data: Any,
    method: Method,
    *,
    init: Fit | Posterior | Tree | None = None,
    validation: Any = None,
    temperature: float | None = None,
    progress: bool | None = None,
    checkpoint: str | os.PathLike | None = None,
    checkpoint_every: float = 30.0,
    resume: bool = False,
    driver: str = "auto",
    parallel: str = "auto",
) -> Fit:
    """Infer the posterior of `model` given `data` by `method`.

    key: an int or a JAX key. data: (x, y), (x, y, weight), al.Data or al.Stream; None when `model` is a target. init: an earlier Fit or
    Posterior, or a parameter tree, to start from. validation: held-out (x, y) for early stopping. temperature ≠ 1 is a departure from Bayes, recorded as
    such; None: that of the target, 1 for a model. The rest says how to run: see `al.Options`.

    >>> import aleator as al
    >>> x = np.linspace(-1, 1, 20)
    >>> model = al.LinearModel(al.features.Polynomial(1), al.Gaussian(0.5), al.Normal(1.0))
    >>> result = al.fit(0, model, (x, 2 * x), al.Exact())
    >>> float(result.predict(1, np.array([0.5])).mean[0].round(3))
    0.967
    """
    options = loop.Options(progress, checkpoint, checkpoint_every, resume, driver, parallel)
    return _fit(as_key(key), model, data, method, init=init, validation=validation, temperature=temperature, options=options)


def _fit(
    key: Key,
    model: Any,
    data: Any,
    method: Method,
    init: Any = None,
    validation: Any = None,
    temperature: float | None = None,
    options: loop.Options | None = None,
    stats: Any = None,
    before: int = 0,
    look: bool = True,
) -> Fit:
    options = loop.Options() if options is None else options
    if not isinstance(method, Method):
        hint = "call it: al.MAP() and not al.MAP" if isinstance(method, type) else "pass e.g. al.MAP()"
        raise MethodError(message("This is not a method.", repr(method), "an object such as al.MAP()", hint))
    began = datetime.datetime.now(datetime.UTC)
    if temperature is None:
        temperature = model.temperature if isinstance(model, (Target, DensityTarget)) else 1.0
    key_start, key_rows, key_run, key_finish = split(key, 4)
    model, data, convert, shapes, inputs = _bind(model, data, fitting=stats is None)
    held = None if validation is None else _encode(as_data(validation), model)
    rows, weights, held = _rows(key_rows, method, data, held)
    num_data = 0 if data is None else (data.num_data if rows is None else rows.shape[-1])
    _check_batch_size(method, data, num_data)
    target = (
        dataclasses.replace(model, temperature=temperature)
        if isinstance(model, DensityTarget)
        else Target(model, num_data, temperature, inputs)
    )
    algorithm = _build(method, target) if init is None else _started(method, target)
    if validation is not None and algorithm.check is None:
        raise MethodError(
            message(
                f"{type(method).__name__} would not look at the validation data.",
                "validation=…",
                "holdout > 0",
                "set e.g. MAP(holdout=0.1); the data given replaces the split",
            )
        )
    starts = stats if stats is not None else _starts(key_start, target, algorithm, init)
    identity = store.identity(key, model, method, data, temperature) if options.checkpoint is not None else ""

    def finish(result: loop.Result) -> Posterior:
        if algorithm.choose is None or held is None:
            return _conditioned(model, algorithm.finish(key_finish, result.state, result.kept), data)
        chosen, notes = algorithm.choose(result.state, held)
        manifest.update(notes)
        return _conditioned(model, chosen, data)

    shapes |= {"sketch": sketch(data)} if isinstance(data, Data) else {}
    manifest = _manifest(key, method, model, shapes, num_data + before, temperature, began) | algorithm.notes
    try:
        result = loop.run(key_run, algorithm, data, starts, options, identity, rows, held, convert, weights)
    except NonFiniteError as error:
        partial = error.result
        if error.at_start and stats is None:
            first = starts if algorithm.members is None and algorithm.starts is None else _tree.take(starts, 0)
            with _precision(algorithm):
                why = diagnostics.explain_start(target, first, data)
            raise NonFiniteError(why) from error
        error.fit = Fit(_public(model), method, finish(partial), partial.traces, f"Stopped: {error}", manifest | {"steps": partial.steps})
        raise
    posterior = finish(result)
    with _precision(algorithm):
        status, healthy, health = diagnostics.verdict(method, algorithm, result, num_data + before)
    manifest |= {"health": health} if health else {}
    manifest |= {"steps": result.steps, "stopped_early": result.stopped_early, "plan": result.plan}
    done = Fit(_public(model), method, posterior, result.traces, status, manifest)
    second_look = getattr(posterior, "second_look", None) if look else None
    if second_look is not None:
        doubt, trusted = second_look(_again(manifest, 0), done)
        status, healthy = status if doubt is None else f"{status} {doubt}", healthy and trusted
    if not healthy:
        warnings.warn(status, HealthWarning, stacklevel=3)
    seconds = (datetime.datetime.now(datetime.UTC) - began).total_seconds()
    return dataclasses.replace(done, status=status, manifest=manifest | {"seconds": seconds})


def _again(manifest: dict[str, Any], number: int) -> Key:
    """A new key from that of a fit."""
    key = jax.random.wrap_key_data(np.asarray(manifest["key"], np.uint32), impl=manifest["key_impl"])
    return jax.random.fold_in(key, number)


def _conditioned(model: Any, posterior: Posterior, data: Any) -> Posterior:
    """A process predicts from its data: its posterior over hyper-parameters is given them."""
    condition = getattr(model, "condition", None)
    return posterior if condition is None else condition(posterior, data)


def _public(model: Any) -> Any:
    return None if isinstance(model, DensityTarget) else model


def _bind(model: Any, data: Any, fitting: bool = True) -> tuple[Any, Data | Stream | None, Any, dict[str, Any], Any]:
    """Check the data, encode y, fit the model to their shapes: (model, data, converter for stream batches, shapes, signature of x). fitting:
    there are no other rows, so that they must show more than one class."""
    shapes: dict[str, Any] = {"x_shape": None, "y_shape": None, "squeeze": False}
    if isinstance(model, DensityTarget):
        if data is not None:
            raise DataError(message("A bare log density takes no data.", "data", "None", "put the data into the density, or use a model"))
        return model, None, tuple, shapes, None
    if isinstance(model, Target):
        model = model.model
    if not hasattr(model, "bind"):
        raise AleatorError(
            message(
                "This is not a model.",
                type(model).__name__,
                "al.BNN, al.LinearModel, al.from_numpyro(…) or a target",
                "wrap your network: al.BNN(network)",
            )
        )
    generative = getattr(model, "generative", False)
    if generative and not isinstance(data, (tuple, Data, Stream)):
        data = (None, data)  # a model of y alone takes it as it is
    data = as_data(data, missing=generative)
    if isinstance(data, Data):
        encoded = _encode(data, model, fitting)
        first, y_given = encoded, data.y
        convert = tuple
    else:
        item = next(iter(data.make(0, 0)), None)
        if item is None:
            raise DataError(
                message("The stream is empty.", "no batch", "at least one batch per epoch", "let make(epoch, start) yield (x, y)")
            )
        first, y_given = _encode(as_data(item, generative), model, fitting=False), as_data(item, generative).y
        encoded = data

        def convert(item: tuple) -> tuple:
            checked = _encode(as_data(item, generative), model, fitting=False)
            return (checked.x, checked.y) if checked.weight is None else (checked.x, checked.y, checked.weight)

    shapes["x_shape"] = None if first.x is None else [list(leaf.shape[1:]) for leaf in jax.tree.leaves(first.x)]
    shapes["x_dtype"] = None if first.x is None else [str(leaf.dtype) for leaf in jax.tree.leaves(first.x)]
    shapes["y_shape"] = list(np.shape(y_given)[1:]) if y_given is not None and hasattr(y_given, "shape") else None
    shapes["squeeze"] = y_given is not None and np.ndim(y_given) == 1
    return model.bind(first.x, first.y), encoded, convert, shapes, None if first.x is None else signature(first.x)


def _encode(data: Data, model: Any, fitting: bool = True) -> Data:
    if data.y is None or getattr(model, "likelihood", None) is None or getattr(model, "generative", False):
        return data
    return Data(data.x, model.likelihood.encode(data.y, fitting=fitting), data.weight)


def _rows(key: Key, method: Method, data: Any, held: Data | None) -> tuple[np.ndarray | None, np.ndarray | None, Batch | None]:
    """Which rows each member trains on, its weights for all N of them, and the Batch it is checked on: (members, n), (members, N) and
    stacked, when there are members."""
    members = getattr(method, "num_members", None)
    bootstrap, holdout = getattr(method, "bootstrap", False), method.holdout
    bayesian = bootstrap == "bayesian"
    spread = lambda batch: batch if members is None else jax.tree.map(lambda leaf: jnp.broadcast_to(leaf, (members, *leaf.shape)), batch)
    if data is None:
        return None, None, None
    if not bootstrap and (not holdout or held is not None):
        return None, None, None if held is None else spread(held.batch())
    if not isinstance(data, Data):
        raise MethodError(
            message(
                "The rows cannot be split.",
                type(data).__name__,
                "data in memory",
                "pass validation=(x, y) instead of a split, and bootstrap=False",
            )
        )
    num_data = data.num_data
    num_held = 0 if held is not None or not holdout else max(1, round(holdout * num_data))
    if num_held >= num_data:
        raise DataError(
            message(
                "There is nothing left to train on.",
                f"{num_data} rows, {num_held} held out",
                "at least one row on each side",
                "use more rows or holdout=0",
            )
        )
    train, weights, test = [], [], []
    # Members that are chosen among by the held-out rows must all have been kept from the same ones.
    seeds = seeds_of(key, 1) * (members or 1) if getattr(method, "chooses", False) else seeds_of(key, members or 1)
    for seed in seeds:
        generator = np.random.Generator(np.random.Philox(seed))
        order = generator.permutation(num_data)
        test.append(np.sort(order[:num_held]))
        rest = np.sort(order[num_held:])
        train.append(generator.choice(rest, len(rest)) if bootstrap and not bayesian else rest)
        if bayesian:
            weights.append(np.zeros(num_data))
            weights[-1][rest] = _dirichlet(generator, len(rest))
    if held is not None:
        batch = spread(held.batch())
    elif num_held:
        parts = [data.take(index).batch() for index in test]
        batch = parts[0] if members is None else _tree.stack(parts)
    else:
        batch = None
    join = lambda arrays: arrays[0] if members is None else np.stack(arrays)
    return (None if bayesian and not num_held else join(train)), (join(weights) if bayesian else None), batch


def _dirichlet(generator: np.random.Generator, size: int) -> np.ndarray:
    """size · Dirichlet(1, …, 1): weights of mean one that sum to the number of rows."""
    drawn = generator.standard_exponential(size)
    return drawn * (size / drawn.sum())


def _check_batch_size(method: Any, data: Any, num_data: int) -> None:
    size = getattr(getattr(method, "base", method), "batch_size", None)
    if isinstance(data, Data) and size is not None and size > num_data and not method.card.name == "Exact":
        raise MethodError(
            message(
                "The batches are larger than the data.",
                f"batch_size={size}",
                f"at most {num_data} rows",
                f"use batch_size=None for all rows, or at most {num_data}",
            )
        )


@cached
def _build(method: Method, target: Any) -> loop.Algorithm:
    """Equal methods on equal targets share one Algorithm, hence its compiled steps: a second fit does not trace again."""
    algorithm = method.build(target)
    # Covariance matrices cannot be factorised in single precision, whatever the method.
    return dataclasses.replace(algorithm, x64=True) if getattr(target.model, "always_double", False) else algorithm


@cached
def _started(method: Method, target: Any) -> loop.Algorithm:
    """The algorithm without the phases that only look for a start."""
    algorithm = _build(method, target)
    return dataclasses.replace(algorithm, phases=algorithm.phases[algorithm.preliminary :]) if algorithm.preliminary else algorithm


def _starts(key: Key, target: Any, algorithm: loop.Algorithm, init: Any) -> Tree:
    """Where each member (or chain) begins, as seen in the algorithm's precision: one tree, or stacked."""
    stacked = algorithm.members if algorithm.members is not None else algorithm.starts
    with _precision(algorithm):
        if isinstance(init, (Fit, Posterior)):
            source = init.posterior if isinstance(init, Fit) else init
            # As many draws as members: one each. Other numbers are drawn from.
            one_each = isinstance(source, Draws) and source.weights is None and _tree.rows(source.params) == (stacked or 1)
            draws = source.params if one_each else source.sample(key, stacked or 1)  # type: ignore[attr-defined]
            return jax.tree.map(jnp.asarray, draws if stacked is not None else _tree.take(draws, 0))
        if init is not None:
            params = jax.tree.map(jnp.asarray, init)
            return params if stacked is None else jax.tree.map(lambda leaf: jnp.broadcast_to(leaf, (stacked, *leaf.shape)), params)
        if algorithm.blank:
            shapes = jax.eval_shape(target.start, jax.random.key(0))
            return jax.tree.map(lambda leaf: jnp.zeros(leaf.shape if stacked is None else (stacked, *leaf.shape), leaf.dtype), shapes)
        return _compiled_starts(target, stacked)(key)


def _precision(algorithm: loop.Algorithm) -> Any:
    return jax.enable_x64(algorithm.x64 or jax.config.read("jax_enable_x64"))


@cached
def _compiled_starts(target: Any, members: int | None) -> Any:
    """All starting values in one compiled call; eager initialisation compiles a little function per layer."""
    if members is None:
        return quick(target.start)
    return quick(lambda key: jax.vmap(target.init)(jax.random.split(key, members)))


def _manifest(
    key: Key, method: Method, model: Any, shapes: dict, num_data: int, temperature: float, began: datetime.datetime
) -> dict[str, Any]:
    return {
        "key": np.asarray(jax.random.key_data(key)).tolist(),
        "key_impl": str(jax.random.key_impl(key)),
        "versions": {"aleator": __version__, "jax": jax.__version__, "numpy": np.__version__, "python": platform.python_version()},
        "created": began.isoformat(timespec="seconds"),
        "method": type(method).__name__,
        "temperature": temperature,
        "data": {"num_data": num_data, **shapes},
    }
