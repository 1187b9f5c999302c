"""What methods for models of y alone must do: the same bits again, after a kill, after a load, without compiling twice."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import pytest

import aleator as al
from aleator import loop
from tests.interrupted import dies_after

from . import cases
from .test_methods import assert_same, leaves

pytestmark = pytest.mark.filterwarnings("ignore::aleator.HealthWarning")
METHOD = pytest.mark.parametrize("name", cases.GENERATIVE)


def fitted(name: str, key: int = 0, **options: Any) -> al.Fit:
    method, model = cases.GENERATIVE[name]
    return al.fit(key, cases.GENERATIVE_MODELS[model](), cases.regression()[0], method, progress=False, **options)


@METHOD
def test_same_key_same_posterior_and_nothing_compiled_twice(name: str) -> None:
    first = fitted(name)
    compiled: list[str] = []

    def listener(event: str, duration: float, **kwargs: object) -> None:
        if event.endswith("backend_compile_duration"):
            compiled.append(event)

    leaves(first)
    jax.monitoring.register_event_duration_secs_listener(listener)
    try:
        second = fitted(name)
    finally:
        jax.monitoring.clear_event_listeners()
    assert compiled == []
    assert_same(first, second)
    assert any((a != b).any() for a, b in zip(leaves(first), leaves(fitted(name, 1)), strict=True))


@METHOD
def test_saved_and_loaded(name: str, tmp_path: Any) -> None:
    fit = fitted(name)
    fit.save(tmp_path / "fit")
    again = al.load(tmp_path / "fit")
    assert_same(fit, again)
    assert (again.model, again.method, again.status, again.log_evidence) == (fit.model, fit.method, fit.status, fit.log_evidence)


@METHOD
def test_resume_gives_the_same_bits(name: str, tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop, "FIRST_CHUNK", 7)
    monkeypatch.setattr(loop, "MAX_CHUNK", 25)
    whole = fitted(name)
    with dies_after(2, surely=False):
        fitted(name, checkpoint=tmp_path, checkpoint_every=0.0)
    resumed = fitted(name, checkpoint=tmp_path, checkpoint_every=0.0, resume=True)
    assert_same(whole, resumed)
    for field, trace in whole.info.items():
        np.testing.assert_array_equal(trace, resumed.info[field])


@METHOD
def test_a_given_start_is_used(name: str) -> None:
    """From a start the search for one is left out, and a fit that has converged stays where it is."""
    first = fitted(name)
    start = jax.tree.map(lambda leaf: leaf[0], first.sample(3, 1))
    again = fitted(name, init=start)
    assert again.manifest["steps"] <= first.manifest["steps"]
    assert all(np.isfinite(leaf).all() for leaf in leaves(again))


def test_wrong_models_are_refused() -> None:
    x, y = cases.regression()
    for name, (method, _) in cases.GENERATIVE.items():
        with pytest.raises(al.MethodError, match=r"al\.latent|sum out|inference network"):
            al.fit(0, cases.network_model(), (x, y), method)
        assert name in al.METHODS
