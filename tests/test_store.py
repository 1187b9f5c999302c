"""Saving and loading: round trips, refusals, and nothing run on loading."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import aleator as al
from aleator import _files, store
from tests.conformance import cases

X, Y = cases.regression()


@pytest.fixture(scope="module")
def fit() -> al.Fit:
    return al.fit(0, cases.network_model(), (X, Y), al.Ensemble(al.MAP(num_steps=5), 2))


@pytest.fixture
def saved(fit: al.Fit, tmp_path):
    fit.save(tmp_path / "fit")
    return tmp_path / "fit"


def test_two_files_and_no_pickle(saved) -> None:
    names = sorted(path.name for path in saved.iterdir())
    assert len(names) == 2 and names[0].startswith("arrays-") and names[1] == "fit.json"
    assert b"pickle" not in b"".join(path.read_bytes() for path in saved.iterdir())


def test_saving_again_replaces(fit: al.Fit, saved) -> None:
    other = al.fit(1, cases.network_model(), (X, Y), al.MAP(num_steps=5))
    other.save(saved)
    assert len(list(saved.iterdir())) == 2
    np.testing.assert_array_equal(al.load(saved).predict(0, X).mean, other.predict(0, X).mean)


def test_foreign_directories_and_files_are_left_alone(fit: al.Fit, tmp_path) -> None:
    (tmp_path / "precious.txt").write_text("mine")
    with pytest.raises(al.StoreError, match="something else"):
        fit.save(tmp_path)
    with pytest.raises(al.StoreError, match="is a file"):
        fit.save(tmp_path / "precious.txt")
    assert (tmp_path / "precious.txt").read_text() == "mine"


def test_missing_directories_and_parts(saved, tmp_path) -> None:
    with pytest.raises(al.StoreError, match="no saved fit"):
        al.load(tmp_path / "nowhere")
    next(saved.glob("arrays-*")).unlink()
    with pytest.raises(al.StoreError, match="incomplete"):
        al.load(saved)


@pytest.mark.parametrize("name", ["fit.json", "arrays"])
@pytest.mark.parametrize("damage", ["cut", "flip", "empty"])
def test_damaged_files_are_refused(saved, name: str, damage: str) -> None:
    path = next(saved.glob(f"{name}*"))
    content = bytearray(path.read_bytes())
    middle = len(content) // 2
    flipped = bytes(content[:middle]) + bytes([content[middle] ^ 1]) + bytes(content[middle + 1 :])
    path.write_bytes({"cut": bytes(content[:middle]), "flip": flipped, "empty": b""}[damage])
    with pytest.raises(al.StoreError):
        al.load(saved)


def rewrite(saved, change) -> None:
    """Alter the JSON and its checksum together, as an attacker would."""
    outer = json.loads((saved / "fit.json").read_text())
    change(outer["fit"])
    text = json.dumps(outer["fit"], indent=1)
    (saved / "fit.json").write_text(json.dumps({"sha256": _files.digest(text.encode()), "fit": outer["fit"]}))


def test_future_versions_are_refused(saved) -> None:
    rewrite(saved, lambda document: document.update(schema=99, aleator="9.0"))
    with pytest.raises(al.StoreError, match=r"schema 99, written by aleator 9\.0"):
        al.load(saved)


@pytest.mark.parametrize("name", ["os.system", "builtins.eval", "networks._network", "store.save", "methods.Nope"])
def test_only_known_classes_are_built(saved, name: str) -> None:
    rewrite(saved, lambda document: document["method"].update(object=name, fields={"command": "touch hacked"}))
    with pytest.raises(al.StoreError, match="unknown class"):
        al.load(saved)


def test_array_files_outside_the_directory_are_refused(saved) -> None:
    rewrite(saved, lambda document: document["arrays"].update(file="../../etc/passwd"))
    with pytest.raises(al.StoreError, match="incomplete"):
        al.load(saved)


def test_wrong_fields_are_refused(saved) -> None:
    rewrite(saved, lambda document: document["model"]["fields"].update(surprise=1))
    with pytest.raises(al.StoreError, match="cannot be understood"):
        al.load(saved)


def function_network(width: int = 4):
    return (lambda p, x: jnp.tanh(x @ p["w"]) @ p["v"], {"w": jnp.ones((cases.D, width)), "v": jnp.ones((width, 1))})


def test_user_networks_must_be_handed_back(tmp_path) -> None:
    fit = al.fit(0, al.BNN(function_network()), (X, Y), al.MAP(num_steps=5))
    fit.save(tmp_path / "fit")
    with pytest.raises(al.StoreError, match=r"pass al\.load"):
        al.load(tmp_path / "fit")
    with pytest.raises(al.StoreError, match="differs"):
        al.load(tmp_path / "fit", network=function_network(5))
    again = al.load(tmp_path / "fit", network=function_network())
    np.testing.assert_array_equal(again.predict(0, X).mean, fit.predict(0, X).mean)


def test_built_in_networks_need_nothing(saved) -> None:
    with pytest.raises(al.StoreError, match="reloads by itself"):
        al.load(saved, network=function_network())


def test_models_with_own_code(tmp_path) -> None:
    model = al.LinearModel(lambda x: jnp.concatenate([x, x**2], 1), al.Gaussian(0.3), al.Normal(1.0))
    fit = al.fit(0, model, (X, Y), al.Exact())
    fit.save(tmp_path / "fit")
    with pytest.raises(al.StoreError, match="model="):
        al.load(tmp_path / "fit")
    again = al.load(tmp_path / "fit", model=model.bind(X, Y[:, None]))
    np.testing.assert_array_equal(again.predict(0, X).mean, fit.predict(0, X).mean)


def test_an_optimiser_of_ones_own_does_not_keep_a_fit_from_loading(tmp_path) -> None:
    """What was fitted is read back; only running the method again needs the function that was not stored."""
    import optax

    x, y = cases.regression()
    fit = al.fit(0, cases.network_model(), (x, y), al.MAP(num_steps=20, optimizer=lambda rate: optax.sgd(rate)), progress=False)
    fit.save(tmp_path / "fit")
    again = al.load(tmp_path / "fit")
    np.testing.assert_array_equal(again.predict(1, x).mean, fit.predict(1, x).mean)
    with pytest.raises(al.StoreError, match="not stored"):
        al.fit(0, again.model, (x, y), again.method, progress=False)


def test_last_hidden_layers_reload_with_their_weights(tmp_path) -> None:
    body = al.fit(0, cases.network_model(), (X, Y), al.MAP(num_steps=20))
    basis = al.features.LastHidden(body.model.network, body.posterior.params["network"])
    fit = al.fit(0, al.LinearModel(basis, al.Gaussian(0.3), al.Normal(1.0)), (X, Y), al.Exact())
    fit.save(tmp_path / "fit")
    np.testing.assert_array_equal(al.load(tmp_path / "fit").predict(0, X).variance, fit.predict(0, X).variance)


def test_bare_densities_need_a_template(tmp_path) -> None:
    target = al.target_from_log_density(lambda p: -0.5 * jnp.sum((p["a"] - 3) ** 2), {"a": jnp.zeros(2)})
    fit = al.fit(0, target, None, al.MAP(num_steps=500, learning_rate=0.1))
    np.testing.assert_allclose(fit.posterior.params["a"], 3.0, atol=1e-2)
    fit.save(tmp_path / "fit")
    with pytest.raises(al.StoreError, match="template="):
        al.load(tmp_path / "fit")
    again = al.load(tmp_path / "fit", template={"a": jnp.zeros(2)})
    np.testing.assert_array_equal(again.posterior.params["a"], fit.posterior.params["a"])
    with pytest.raises(al.MethodError, match="predicts nothing"):
        fit.predict(0, X)


def test_mixtures_and_weights_round_trip(fit: al.Fit) -> None:
    point = al.posterior.Point({"a": np.arange(3.0)})
    mixed = al.posterior.Mixture((point, al.posterior.Draws({"a": np.ones((2, 3))}, np.array([0.3, 0.7]))), np.array([0.2, 0.8]))
    arrays: dict = {}
    spec = json.loads(json.dumps(store._posterior_to_spec(mixed, arrays, "p")))
    again = store._posterior_from_spec(spec, arrays, {"a": jax.ShapeDtypeStruct((3,), float)}, "p")
    np.testing.assert_array_equal(again.weights, mixed.weights)
    np.testing.assert_array_equal(again.components[1].weights, [0.3, 0.7])
    np.testing.assert_array_equal(again.components[0].params["a"], np.arange(3.0))


def test_names_in_saved_files_stay() -> None:
    """saved_names.txt: every class that a fit.json may name. Files move, these do not: lines may be added, never taken away."""
    names = (Path(__file__).parent / "saved_names.txt").read_text().split()
    assert names and [name for name in names if store._name(store._known(name)) != name] == []


def test_scalars_keep_their_shape() -> None:
    arrays, meta = _files.unpack(_files.pack({"a": np.float64(1.5), "b": np.zeros((0, 2))}, {"x": 1}), "test")
    assert arrays["a"].shape == () and arrays["b"].shape == (0, 2) and meta == {"x": 1}


def test_identity_does_not_depend_on_the_process(tmp_path) -> None:
    """Functions have no stable name; shapes and values have."""
    data = al.Data(X, Y)
    one = store.identity(jax.random.key(0), al.BNN(function_network()), al.MAP(), data, 1.0)
    two = store.identity(jax.random.key(0), al.BNN(function_network()), al.MAP(), data, 1.0)
    other = store.identity(jax.random.key(0), al.BNN(function_network(5)), al.MAP(), data, 1.0)
    assert one == two != other


def test_identity_sees_the_fields_of_a_users_method() -> None:
    @dataclasses.dataclass(frozen=True)
    class Own(al.Method):
        num_draws: int = 10
        card = al.MAP.card

        def build(self, target):
            raise AssertionError

    ids = {store.identity(jax.random.key(0), cases.linear_model(), Own(n), al.Data(X, Y), 1.0) for n in (10, 20)}
    assert len(ids) == 2


def test_arviz_gets_one_variable_per_leaf(fit: al.Fit) -> None:
    exported = fit.to_arviz(0, 50)
    posterior = exported["posterior"] if hasattr(exported, "__getitem__") else exported.posterior
    assert dict(posterior.sizes)["draw"] == 50
    assert "network.layer0.weight" in posterior


def test_networks_that_look_rows_up_reload(tmp_path) -> None:
    """A model handed back meets whole numbers where it was fitted to them."""
    from flax import nnx

    class Net(nnx.Module):
        def __init__(self) -> None:
            self.table, self.last = nnx.Embed(7, 4, rngs=nnx.Rngs(0)), nnx.Linear(4, 1, rngs=nnx.Rngs(1))

        def __call__(self, x: jax.Array) -> jax.Array:
            return self.last(self.table(x).mean(axis=1))

    x = np.arange(24).reshape(12, 2) % 7
    fit = al.fit(0, al.BNN(Net(), al.Gaussian(0.5)), (x, np.linspace(-1, 1, 12)), al.MAP(num_steps=2), progress=False)
    fit.save(tmp_path / "fit")
    again = al.load(tmp_path / "fit", model=al.BNN(Net(), al.Gaussian(0.5)))
    np.testing.assert_array_equal(again.predict(0, x).mean, fit.predict(0, x).mean)
