"""What tests and doctests share: runs without ``seed=`` do the same every time, so none fails by chance on one day in twenty."""

import itertools

import pytest

from torchgpmc import loop


@pytest.fixture(autouse=True)
def runs_repeat(monkeypatch):
    seeds = itertools.count(20260)
    monkeypatch.setattr(loop.secrets, "randbits", lambda bits: next(seeds))
