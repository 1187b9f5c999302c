"""A short version of kills.py; the full count is run by hand: python tests/statistical/kills.py --kills 1000."""

from __future__ import annotations

from tests.statistical import kills


def test_forty_kills_change_nothing(tmp_path) -> None:
    counts = kills.main(40, tmp_path)
    assert counts["kills"] >= 40 and counts["runs"] >= 1
