"""HMM forward–backward against hmmlearn and dynamax, T = 10,000 and S = 50: seconds, measured in one run.

    python benchmarks/sequences.py [--peers PYTHON] [--length 10000] [--states 50] [--repeats 9] [--json FILE]

PYTHON is an interpreter that has hmmlearn and dynamax. All arms see the same log emissions and transitions, are interleaved, and give log p(y)
and p(z_t | y); "counts" adds the expected transitions, which is the whole E step but the emissions' own. The best of the repeats is reported
beside the median, because the machines are noisy; lower is better.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

PEER = """
import sys, time, json
import numpy as np
name, path = sys.argv[1:3]
table = np.load(path)
initial, transition, terms = table["initial"], table["transition"], table["terms"]
if name == "dynamax":
    import jax
    jax.config.update("jax_enable_x64", len(sys.argv) > 3)
    import jax.numpy as jnp
    from dynamax.hidden_markov_model import hmm_two_filter_smoother
    inputs = tuple(map(jnp.asarray, (initial, transition, terms)))
    def run():
        value, shares = jax.block_until_ready(compiled(*inputs))
        return float(value), np.asarray(shares)
    # Only these two are returned, so that the compiler drops the transition probabilities it would else compute.
    compiled = jax.jit(lambda *given: (lambda found: (found.marginal_loglik, found.smoothed_probs))(hmm_two_filter_smoother(*given)))
else:
    from hmmlearn import _hmmc
    def run():
        if name == "hmmlearn scaling":
            value, forward, scaling = _hmmc.forward_scaling(initial, transition, np.exp(terms))
            backward = _hmmc.backward_scaling(initial, transition, np.exp(terms), scaling)
            shares = forward * backward
        else:
            value, forward = _hmmc.forward_log(initial, transition, terms)
            backward = _hmmc.backward_log(initial, transition, terms)
            shares = forward + backward
            shares = np.exp(shares - shares.max(axis=1, keepdims=True))
        return value, shares / shares.sum(axis=1, keepdims=True)
value, shares = run()
print(json.dumps([float(value), np.asarray(shares)[::1000, 0].tolist()]), flush=True)
for line in sys.stdin:
    begin = time.perf_counter(); run(); print(time.perf_counter() - begin, flush=True)
"""


def problem(length: int, states: int) -> dict:
    import numpy as np

    rng = np.random.default_rng(0)
    transition = rng.dirichlet(np.ones(states), states)
    return {"initial": np.full(states, 1.0 / states), "transition": transition, "terms": rng.normal(size=(length, states))}


def ours(table: dict, counts: bool, parallel: bool = False):
    """A function of nothing that runs our passes and returns (log p(y), p(z_t | y))."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    from aleator.latent import hmm

    jax.config.update("jax_enable_x64", True)
    there, back = (hmm.forward_parallel, hmm.backward_parallel) if parallel else (hmm.forward, hmm.backward)

    @jax.jit
    def run(initial, transition, terms, begins):
        passed = there(initial, transition, terms, begins)
        smoothed = back(passed, transition, begins)
        pairs = jnp.exp(transition) * (passed.filtered[:-1].T @ (smoothed[1:] / passed.predicted[1:])) if counts else None
        return jnp.sum(passed.log_terms), smoothed, pairs

    begins = jnp.arange(len(table["terms"])) == 0
    inputs = jnp.log(table["initial"]), jnp.log(table["transition"]), jnp.asarray(table["terms"]), begins

    def call():
        value, smoothed, _ = jax.block_until_ready(run(*inputs))
        return float(value), np.asarray(smoothed)

    return call


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers", default=sys.executable)
    parser.add_argument("--length", type=int, default=10_000)
    parser.add_argument("--states", type=int, default=50)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--json")
    given = parser.parse_args()
    import numpy as np

    table = problem(given.length, given.states)
    arms = {"aleator": ours(table, False), "aleator, counts": ours(table, True)}
    answers = {name: (lambda found: (found[0], found[1][::1000, 0].tolist()))(call()) for name, call in arms.items()}
    times: dict[str, list[float]] = {name: [] for name in arms}
    peers: dict[str, subprocess.Popen] = {}
    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder) / "problem.npz")
        np.savez(path, **table)
        for name, extra in (("hmmlearn scaling", []), ("hmmlearn log", []), ("dynamax", ["x64"]), ("dynamax, float32", [])):
            command = [given.peers, "-c", PEER, name.split(",")[0], path, *extra]
            peer = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
            line = peer.stdout.readline()  # type: ignore[union-attr]
            if not line:
                print(f"{name}: not available with --peers {given.peers}")
                continue
            answers[name], peers[name], times[name] = tuple(json.loads(line)), peer, []
        for _ in range(given.repeats):
            for name, call in arms.items():
                begin = time.perf_counter()
                call()
                times[name].append(time.perf_counter() - begin)
            for name, peer in peers.items():
                peer.stdin.write("go\n")  # type: ignore[union-attr]
                peer.stdin.flush()  # type: ignore[union-attr]
                times[name].append(float(peer.stdout.readline()))  # type: ignore[union-attr]
        for peer in peers.values():
            peer.stdin.close()  # type: ignore[union-attr]
            peer.wait()
    value, shares = answers["aleator"]
    print(
        f"T = {given.length}, S = {given.states}, {given.repeats} repeats\n{'arm':<20} {'best s':>9} {'median s':>9} {'ours is':>9}  log p(y)"
    )
    rows = {}
    for name, seconds in times.items():
        ratio = min(seconds) / min(times["aleator"])
        apart = max(abs(answers[name][0] - value), float(np.max(np.abs(np.subtract(answers[name][1], shares)))))
        rows[name] = {"best": min(seconds), "median": statistics.median(seconds), "ratio": ratio, "apart": apart}
        print(
            f"{name:<20} {min(seconds):>9.4f} {statistics.median(seconds):>9.4f} {ratio:>8.2f}×  {answers[name][0]:.6f} (apart {apart:.1e})"
        )
    if given.json:
        Path(given.json).write_text(json.dumps({"length": given.length, "states": given.states, "arms": rows}, indent=1))


if __name__ == "__main__":
    main()
