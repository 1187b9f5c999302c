"""Random flags and tables: always a message and an exit code, never a traceback. tests/statistical/test_fuzz_long.py runs ten thousand."""

import collections
import contextlib
import warnings

import numpy as np
import pandas as pd
import pytest
from typer.testing import CliRunner

from aleator import cli
from tests import fuzz
from tests.test_cli import run

CASES = 120


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Two good fits of small tables, of numbers."""
    place = tmp_path_factory.mktemp("saved")
    generator = np.random.default_rng(0)
    found = []
    for number in range(2):
        x = generator.normal(size=(fuzz.ROWS, 2))
        table = pd.DataFrame(x, columns=["a", "b"]).assign(y=x @ [1.0, -1.0] + 0.1 * generator.normal(size=fuzz.ROWS))
        table.to_csv(place / f"{number}.csv", index=False)
        how = ["--method", "exact"] if number == 0 else ["--budget", "0.01s"]
        run("fit", place / f"{number}.csv", "--target", "y", "--out", place / f"fit{number}", *how)
        found.append(place / f"fit{number}")
    return found


def broken(seed, place, saved):
    """What is wrong with how the command of this seed ended, or None; and its exit code."""
    place.mkdir()
    words = fuzz.case(seed, place, saved)
    with warnings.catch_warnings(), contextlib.chdir(place):  # a random word may be taken for a name of a directory
        warnings.simplefilter("ignore")
        result = CliRunner().invoke(cli.app, words)
    output = result.output
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        return f"{words}: {type(result.exception).__name__}: {result.exception}", result.exit_code
    if result.exit_code not in (0, 1, 2, 3) or "Traceback" in output:
        return f"{words}: code {result.exit_code}: {output[-600:]}", result.exit_code
    if not output.strip():
        return f"{words}: no word with code {result.exit_code}", result.exit_code
    if result.exit_code == 1 and not ("Error: " in output and "Do this: " in output):
        return f"{words}: a refusal without advice: {output[-600:]}", result.exit_code
    return None, result.exit_code


def check(first, number, place, saved):
    """Run cases and return how often each exit code came; all that is broken is told at once."""
    codes, wrong = collections.Counter(), []
    for seed in range(first, first + number):
        found, code = broken(seed, place / str(seed), saved)
        codes[code] += 1
        if found is not None:
            wrong.append(f"{seed}: {found}")
    assert not wrong, f"{len(wrong)} of {number}:\n" + "\n".join(wrong[:20])
    return codes


def test_random_commands_end_in_a_message_and_a_code(tmp_path, saved):
    codes = check(0, CASES, tmp_path, saved)
    assert codes[0] > CASES // 20  # they are not all refused
    assert codes[1] > CASES // 10
    assert codes[2] > 0
