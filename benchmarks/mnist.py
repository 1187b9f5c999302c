"""MNIST, two hidden layers of 1,200 ReLU units: test log-likelihood (sum over 10,000 images, nats) and error of several posteriors.

    python benchmarks/mnist.py --data DIR [--rows dropout mean_field] [--out benchmarks/results/mnist.json]

DIR (or ALEATOR_DATA) holds mnist.npz. One fixed recipe a row, 100 posterior draws at test time, as in the published rows. Standard errors:
of the error rate √(e(1−e)/n), of the log-likelihood from the spread over test images. Finished rows are kept in the JSON file; a run that
is stopped goes on from its checkpoint (--work DIR).
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import numpy as np

import aleator as al
from aleator import datasets

# JavierAntoran/Bayesian-Neural-Networks: total test log-likelihood, error %.
PUBLISHED = [
    ("MAP", -573, 1.58),
    ("ensemble", -497, 1.53),
    ("Bayes by backprop", -1100, 2.60),
    ("Bayes by backprop, local reparameterisation", -1086, 2.61),
    ("MC dropout", -435, 1.37),
    ("SGLD", -828, 1.76),
]
BATCH = 256
# The curvature follows in about 100,000 steps, so that it stays near its start for the weights that the data say nothing about.
IVON = {"learning_rate": 0.1, "beta2": 0.99999, "hess_init": 0.1}
PER_EPOCH = -(-60_000 // BATCH)
TITLES = {
    "dropout": "MC dropout, rate ½ on hidden units",
    "mean_field": "mean-field VI, local reparameterisation",
    "ivon": "mean-field VI by natural gradients (IVON)",
}


def method(row: str, epochs: int) -> tuple[al.BNN, al.Method]:
    net = al.networks.MLP(784, (1200, 1200), 10)
    steps = epochs * PER_EPOCH
    if row == "dropout":
        return al.BNN(net, al.Categorical(10), al.Normal(1.0)), al.Dropout(
            0.5, placement="hidden", num_steps=steps, batch_size=BATCH, learning_rate=1e-3, num_evidence=0
        )
    if row == "ivon":
        return al.BNN(net, al.Categorical(10), al.Normal(1.0)), al.IVON(num_steps=steps, batch_size=BATCH, **IVON)
    # A prior of the size weights need, 1/√fan-in: under N(0, 1) the KL of 2.4 million idle weights drowns 60,000 labels.
    prior = al.Normal(1.0, scaling="fan_in")
    return al.BNN(net, al.Categorical(10), prior), al.Variational(
        num_steps=steps, batch_size=BATCH, learning_rate=1e-3, initial_scale=0.01, num_evidence=8, kl_warmup=steps // 2
    )


def run(row: str, data: dict, args: argparse.Namespace) -> dict:
    scale = lambda pixels: (pixels.reshape(-1, 784) / 255.0).astype(np.float32)
    train, test = ((scale(data[f"x_{part}"]), data[f"y_{part}"].astype(int)) for part in ("train", "test"))
    model, chosen = method(row, args.epochs)
    work = Path(args.work) / row
    resume = (work / "checkpoint.safetensors").exists()
    fit = al.fit(0, model, train, chosen, checkpoint=work, checkpoint_every=120.0, resume=resume)
    predictive = fit.predict(1, test[0], num_samples=100)
    scores = np.asarray(predictive.log_prob(test[1]))
    wrong = np.asarray(predictive.probs.argmax(-1) != test[1])
    evidence = None if fit.log_evidence is None else list(fit.log_evidence)
    return {
        "log_likelihood": float(scores.sum()),
        "log_likelihood_stderr": float(scores.std(ddof=1) * np.sqrt(len(scores))),
        "error": 100.0 * float(wrong.mean()),
        "error_stderr": 100.0 * float(np.sqrt(wrong.mean() * (1 - wrong.mean()) / len(wrong))),
        "minutes": fit.manifest["seconds"] / 60,
        "epochs": args.epochs,
        "log_evidence": evidence,
        "settings": repr(chosen),
    }


def table(results: dict) -> str:
    lines = ["| method | test log-likelihood, nats ↑ | error % ↓ | minutes |", "|---|---|---|---|"]
    lines += [f"| {name}, published | {value} | {error:.2f} | |" for name, value, error in PUBLISHED]
    for row, result in results.items():
        value = f"{result['log_likelihood']:.0f} ± {result['log_likelihood_stderr']:.0f}"
        lines.append(
            f"| Aleator: {TITLES[row]} | {value} | {result['error']:.2f} ± {result['error_stderr']:.2f} | {result['minutes']:.0f} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data")
    parser.add_argument("--rows", nargs="+", default=list(TITLES), choices=list(TITLES))
    parser.add_argument("--epochs", type=int, default=32)
    parser.add_argument("--work", default="mnist_work", help="checkpoints")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/mnist.json"))
    args = parser.parse_args()
    data = datasets.load("mnist", args.data)
    results = json.loads(args.out.read_text()) if args.out.exists() else {}
    for row in args.rows:
        if row not in results:
            results[row] = run(row, data, args)
            args.out.parent.mkdir(parents=True, exist_ok=True)
            args.out.write_text(json.dumps(results, indent=1))
            print(json.dumps({row: results[row]}), flush=True)
    text = table({row: results[row] for row in TITLES if row in results})
    args.out.with_suffix(".md").write_text(text + "\n")
    print(text)


if __name__ == "__main__":
    main()
