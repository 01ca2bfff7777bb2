"""What tests and doctests share.

Runs without ``seed=`` do the same every time, so none fails by chance on one day in twenty. Examples of methods sample until they
need no warning, which takes seconds each: they count as slow.
"""

import itertools

import pytest

from torchgpmc import loop


@pytest.fixture(autouse=True)
def runs_repeat(monkeypatch):
    seeds = itertools.count(20260)
    monkeypatch.setattr(loop.secrets, "randbits", lambda bits: next(seeds))


def pytest_collection_modifyitems(items):
    for item in items:
        if item.nodeid.startswith("torchgpmc/methods/"):
            item.add_marker("slow")
