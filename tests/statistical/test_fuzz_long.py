"""Ten thousand random commands, in blocks that can be run by themselves: `pytest -m long tests/statistical/test_fuzz_long.py -k "block3-"`."""

import pytest

from tests.test_fuzz import check
from tests.test_fuzz import saved as saved

BLOCK = 500


@pytest.mark.parametrize("block", range(20), ids=lambda number: f"block{number}-")
def test_ten_thousand_random_commands(block, tmp_path, saved):
    check(1000 + block * BLOCK, BLOCK, tmp_path, saved)
