"""The full product of the conformance table: every method that takes a network × every likelihood, network and prior."""

from __future__ import annotations

import numpy as np
import pytest

import aleator as al
from tests.conformance import cases
from tests.conformance.test_parts import check

METHODS = [name for name, (_, models) in cases.METHODS.items() if "network" in models]


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("prior", cases.PRIORS)
@pytest.mark.parametrize("likelihood", cases.LIKELIHOODS)
def test_likelihoods_and_priors(method: str, prior: str, likelihood: str, tmp_path) -> None:
    case = cases.LIKELIHOODS[likelihood]
    x, _ = cases.regression()
    model = al.BNN(al.networks.MLP(cases.D, (8,), case.out_size), case.likelihood, cases.PRIORS[prior])
    check(al.fit(0, model, (x, case.y), cases.METHODS[method][0]), x, case.y, tmp_path)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("likelihood", [name for name, case in cases.LIKELIHOODS.items() if case.out_size == 1])
@pytest.mark.parametrize("network", [name for name, case in cases.NETWORKS.items() if case.classes is None])
def test_networks_and_likelihoods(method: str, network: str, likelihood: str, tmp_path) -> None:
    case, part = cases.NETWORKS[network], cases.LIKELIHOODS[likelihood]
    made = case.make()
    loading = {"network": made} if network in ("equinox", "nnx", "function") else {}
    check(
        al.fit(0, al.BNN(made, part.likelihood), (case.x, np.asarray(part.y)), cases.METHODS[method][0]),
        case.x,
        part.y,
        tmp_path,
        **loading,
    )
