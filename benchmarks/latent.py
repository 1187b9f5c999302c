"""Latent-variable models beside scikit-learn: time per pass or step, and whether the answers are as good.

    python benchmarks/latent.py [--rows lda,gmm] [--topics 50] [--passes 10] [--repeats 5] [--data DIR] [--json FILE]

lda: online variational Bayes on the Associated Press corpus (2,246 documents, 10,473 words; every tenth is held out), batches of 256, both
libraries with α = c = 1/K, the same step sizes (t + 10)^−0.7 and as many passes. Time: of one pass, compilation apart, ours and theirs in
turn. Perplexity: document completion (`al.latent.perplexity`) with each library's mean topics, the same words held out.
gmm: EM for 20 full covariances on 100,000 × 10 synthetic rows, the time of one step: of a longer run less that of a shorter one.
DIR (or the environment variable ALEATOR_DATA) holds text/ap.npz. A line says whether a bar is met: lda ≥ 2 × as fast with no higher perplexity, gmm ≥ 1 ×.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

import aleator as al
from aleator import datasets
from aleator.latent import LDA, documents, perplexity

BATCH, DELAY = 256, 10.0
ROWS, COLUMNS, COMPONENTS = 100_000, 10, 20


def timed(call: Callable[[], Any]) -> tuple[float, Any]:
    begin = time.perf_counter()
    value = call()
    return time.perf_counter() - begin, value


def lda(options: argparse.Namespace) -> dict[str, float]:
    from scipy import sparse
    from sklearn.decomposition import LatentDirichletAllocation

    held = datasets.load("text/ap", options.data)
    shape = int(held["n_docs"]), len(held["vocab"])
    counts = sparse.csr_matrix((held["count"].astype(float), (held["doc"].astype(int), held["word"].astype(int))), shape=shape)
    test = np.arange(shape[0]) % 10 == 0
    train, test = counts[~test], counts[test]
    topics, words, rows = options.topics, shape[1], train.shape[0]
    y = documents(train, num_words=words)
    per_pass = -(-rows // BATCH)

    def ours(passes: int) -> al.Fit:
        method = al.CAVI(num_steps=passes * per_pass, num_restarts=1, batch_size=BATCH, delay=DELAY)
        return al.fit(0, LDA(topics, num_words=words), y, method)

    for passes in (1, 1 + options.passes):
        ours(passes)  # compilation
    peer = LatentDirichletAllocation(
        topics, learning_method="online", batch_size=BATCH, total_samples=rows, learning_offset=DELAY, random_state=0
    )
    peer.partial_fit(train)
    mine, theirs, fit = [], [], None
    for _ in range(options.repeats):
        short, _ = timed(lambda: ours(1))
        long, fit = timed(lambda: ours(1 + options.passes))
        mine.append((long - short) / options.passes)
        theirs.append(
            timed(lambda: [peer.partial_fit(train) for _ in range(max(options.passes // options.repeats, 1))])[0]
            / max(options.passes // options.repeats, 1)
        )
    share = peer.components_ / peer.components_.sum(axis=1, keepdims=True)
    return {
        "ours_seconds": statistics.median(mine),
        "peer_seconds": statistics.median(theirs),
        "ours_perplexity": perplexity(1, fit, test),
        "peer_perplexity": perplexity(1, (share, 1.0 / topics), test),
    }


def gmm(options: argparse.Namespace) -> dict[str, float]:
    from sklearn.mixture import GaussianMixture

    rng = np.random.default_rng(0)
    centres = rng.normal(size=(COMPONENTS, COLUMNS))  # they overlap: neither library converges within these steps
    y = centres[rng.integers(COMPONENTS, size=ROWS)] + rng.normal(size=(ROWS, COLUMNS))
    few, many = 2, 2 + options.passes

    def ours(steps: int) -> al.Fit:
        fit = al.fit(0, al.latent.Mixture(COMPONENTS), y, al.EM(num_steps=steps, num_restarts=1, tolerance=1e-300))
        assert fit.manifest["steps"] == steps + 1, fit.status  # one that looks for a start
        return fit

    def peer(steps: int) -> Any:
        found = GaussianMixture(COMPONENTS, max_iter=steps, tol=0.0, init_params="random_from_data", random_state=0).fit(y)
        assert found.n_iter_ == steps
        return found

    for steps in (few, many):
        ours(steps)  # compilation
    mine, theirs = [], []
    for _ in range(options.repeats):
        mine.append((timed(lambda: ours(many))[0] - timed(lambda: ours(few))[0]) / (many - few))
        theirs.append((timed(lambda: peer(many))[0] - timed(lambda: peer(few))[0]) / (many - few))
    return {"ours_seconds": statistics.median(mine), "peer_seconds": statistics.median(theirs)}


SECTIONS: dict[str, tuple[Callable[[argparse.Namespace], dict[str, float]], float]] = {"lda": (lda, 2.0), "gmm": (gmm, 1.0)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", default="lda,gmm")
    parser.add_argument("--topics", type=int, default=50)
    parser.add_argument("--passes", type=int, default=10)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--data", help="directory with text/ap.npz; default: ALEATOR_DATA")
    parser.add_argument("--json")
    options = parser.parse_args()
    warnings.simplefilter("ignore", al.HealthWarning)
    from sklearn.exceptions import ConvergenceWarning

    warnings.simplefilter("ignore", ConvergenceWarning)  # a number of steps is what is compared
    results = {}
    for name in options.rows.split(","):
        section, bar = SECTIONS[name]
        found = results[name] = section(options)
        ratio = found["peer_seconds"] / found["ours_seconds"]
        good = ratio >= bar and found.get("ours_perplexity", 0.0) <= found.get("peer_perplexity", 0.0)
        numbers = ", ".join(f"{key} {value:.4g}" for key, value in found.items())
        print(f"{name}: {ratio:.2f} × as fast; {numbers}; bar {'met' if good else 'MISSED'}", flush=True)
    if options.json:
        Path(options.json).write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
