"""A run that dies right after one of its checkpoints."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest

from aleator import loop


@contextlib.contextmanager
def dies_after(saves: int, surely: bool = True) -> Iterator[None]:
    """Inside, a fit is interrupted once checkpoint number `saves` is written. surely: it is an error if it was not; short runs save less often."""
    save, count = loop._Job.save, 0

    def dying(self: loop._Job) -> None:
        nonlocal count
        save(self)
        count += 1
        if count == saves:
            raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop._Job, "save", dying)
        with pytest.raises(KeyboardInterrupt) if surely else contextlib.suppress(KeyboardInterrupt):
            yield
