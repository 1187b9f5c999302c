"""What a first call compiles: few programs, and those that run once quickly."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import aleator as al
from aleator import _chunks, _quick, _random, loop
from tests.conformance import cases

X, Y = cases.regression()


@pytest.mark.parametrize(
    ("method", "most"),
    [(al.MAP(num_steps=23), 14), (al.HMC(num_samples=7, num_warmup=5, num_chains=2, step_size=0.01, num_leapfrog=2), 20)],
    ids=["map", "hmc"],
)
@pytest.mark.filterwarnings("ignore::aleator.HealthWarning")
def test_a_first_fit_compiles_few_programs(method: al.Method, most: int) -> None:
    """16 and 118 before programs were counted. Eager operations on arrays of new shapes compile one each and are easily let in again."""
    compiled: list[str] = []
    listening = True  # a listener cannot be taken away again by public means

    def listen(event: str, seconds: float, **about: str) -> None:
        if listening and event == "/jax/core/compile/backend_compile_duration":
            compiled.append(about.get("fun_name", "?"))

    jax.monitoring.register_event_duration_secs_listener(listen)
    al.fit(0, cases.network_model(), (X, Y), method, progress=False)
    listening = False
    assert 0 < len(compiled) <= most, compiled


def test_quick_programs_are_the_function_inside_others() -> None:
    double = _quick.quick(lambda x, times: x * times, static_argnums=1)
    assert float(double(3.0, 2)) == 6.0
    assert float(jax.jit(lambda x: double(x, 2))(3.0)) == 6.0
    assert all(_quick.options(kind) in (*kind, None) for kind in (_quick.ONCE, _quick.LONG))
    assert _quick.options(({"xla_no_such_option": 1},)) is None


@pytest.mark.parametrize("impl", ["threefry2x32", "philox2x32"])
def test_fold_is_fold_in(impl: str) -> None:
    key, numbers = jax.random.key(3, impl=impl), np.arange(5, dtype=np.int32)
    ours = jax.lax.map(lambda i: jax.random.bits(_random.fold(key, i)), numbers)
    theirs = jax.lax.map(lambda i: jax.random.bits(jax.random.fold_in(key, i)), numbers)
    np.testing.assert_array_equal(ours, theirs)


class Mixed(NamedTuple):
    real: jax.Array
    flag: jax.Array
    table: jax.Array
    other: jax.Array
    number: jax.Array


def test_scalars_travel_together_and_come_back() -> None:
    def make(i: jax.Array) -> Mixed:
        return Mixed(i / 2.0, i > 1, i * jnp.ones((2, 3)), -i / 4.0, i.astype(jnp.int32))

    numbers = jnp.arange(4.0)
    packed = jax.jit(jax.vmap(lambda i: _chunks.pack((make(i), None))))(numbers)
    assert len(packed.scalars) == 3
    found, nothing = _chunks.unpack(packed)
    assert nothing is None
    for a, b in zip(jax.vmap(make)(numbers), found, strict=True):
        np.testing.assert_array_equal(a, b)
        assert a.dtype == b.dtype


@pytest.mark.filterwarnings("ignore::aleator.HealthWarning")
def test_chains_are_not_timed_outside_their_loop(monkeypatch) -> None:
    """However heavy a transition, it is a loop itself; a busy machine must not decide how it runs, nor compile it twice."""
    monkeypatch.setattr(loop, "HEAVY_SECONDS", -1.0)
    monkeypatch.setattr(loop._Job, "_choose_driver", lambda *args: pytest.fail("timed"))
    target = al.target_from_log_density(lambda q: -0.5 * jnp.sum(q**2), jnp.zeros(2))
    fit = al.fit(0, target, None, al.HMC(num_samples=5, num_warmup=0, num_chains=1, step_size=0.5, num_leapfrog=3), progress=False)
    assert fit.manifest["plan"]["driver"] == "loop"


def test_a_quick_program_may_be_called_while_another_is_traced() -> None:
    """It is part of the other program then, on what is known as on what is traced."""
    double = _quick.quick(lambda x: 2 * x)
    known = jnp.arange(3.0)
    np.testing.assert_array_equal(jax.jit(lambda x: x + double(known) + double(x))(known), 5 * np.arange(3.0))
