"""Kill a checkpointed fit with SIGKILL at random moments, resume it, and demand the bits of the uninterrupted run.

    python tests/statistical/kills.py --kills 1000 --dir DIR

Each child runs one short fit with a checkpoint after every chunk, so that a large share of the kills lands inside a write. After every
kill the checkpoint, if there is one, must be readable. The script counts in DIR/progress.json and continues when it is run again.
"""

from __future__ import annotations

import argparse
import json
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def fit(directory: Path | None) -> str:
    """The fit under test: an ensemble with early stopping, mini-batches and bootstrap; a digest of everything it returns."""
    sys.path.insert(0, str(ROOT))
    import numpy as np

    import aleator as al
    from aleator import _files, loop

    loop.MAX_CHUNK = 40  # many chunks, hence many checkpoints
    rng = np.random.default_rng(0)
    x = rng.normal(size=(64, 3)).astype(np.float32)
    y = np.sin(x.sum(1)) + 0.1 * rng.normal(size=64)
    model = al.BNN(al.networks.MLP(3, (16,), 2), al.HeteroscedasticGaussian())
    base = al.MAP(num_steps=2000, batch_size=16, holdout=0.2, check_every=50, patience=1000)
    print("started", flush=True)
    options = {} if directory is None else {"checkpoint": directory, "checkpoint_every": 0.0, "resume": True}
    result = al.fit(0, model, (x, y), al.Ensemble(base, 2, bootstrap=True), progress=False, **options)
    arrays = _files.flatten(result.posterior.params) | {f"trace/{name}": trace for name, trace in result.info.items()}
    return _files.checksum(arrays, str(result.manifest["steps"]))


def child(directory: str | None) -> subprocess.Popen:
    command = [sys.executable, str(Path(__file__)), "--child", directory or ""]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT)


def finish(process: subprocess.Popen) -> str:
    out, error = process.communicate()
    if process.returncode:
        raise SystemExit(f"A resume failed:\n{error}")
    return out.split()[-1]


def readable(directory: Path) -> None:
    sys.path.insert(0, str(ROOT))
    from aleator import _files, loop

    path = directory / loop.CHECKPOINT
    if path.exists():
        _files.unpack(path.read_bytes(), str(path))


def main(kills: int, directory: Path, seed: int = 0) -> dict:
    """Run until `kills` kills have landed; returns the counts."""
    directory.mkdir(parents=True, exist_ok=True)
    state = directory / "progress.json"
    done = json.loads(state.read_text()) if state.exists() else {"kills": 0, "runs": 0, "seconds": None, "truth": None}
    if done["truth"] is None:
        finish(child(None))  # fills the compilation cache
        begun = child(None)
        begun.stdout.readline()
        clock = time.monotonic()
        done["truth"], done["seconds"] = finish(begun), time.monotonic() - clock
    moments = random.Random(seed + done["kills"])
    while done["kills"] < kills:
        run = directory / f"run{done['runs']}"
        while True:
            process = child(str(run))
            process.stdout.readline()
            clock = time.monotonic()
            try:
                process.wait(moments.uniform(0.0, done["seconds"]))
            except subprocess.TimeoutExpired:
                process.send_signal(signal.SIGKILL)
                process.communicate()
                done["kills"] += 1
                readable(run)
                continue
            answer = finish(process)
            # The window for kills follows the machine: half as much again as runs take to end by themselves, on average.
            done["seconds"] = 0.7 * done["seconds"] + 0.3 * 1.5 * (time.monotonic() - clock)
            break
        if answer != done["truth"]:
            raise SystemExit(
                f"Run {done['runs']} resumed to other bits after {done['kills']} kills in all: {answer} is not {done['truth']}"
            )
        done["runs"] += 1
        state.write_text(json.dumps(done))
        print(f"{done['kills']} kills, {done['runs']} runs, all identical", flush=True)
    return done


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=1000)
    parser.add_argument("--dir", type=Path, default=Path("kills_output"))
    parser.add_argument("--child")
    args = parser.parse_args()
    if args.child is not None:
        print(fit(Path(args.child) if args.child else None))
    else:
        main(args.kills, args.dir)
