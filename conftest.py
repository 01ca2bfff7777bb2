"""What tests and doctests share.

Runs without ``seed=`` do the same every time, so none fails by chance on one day in twenty. Examples of methods sample until they
need no warning, which takes a second or more each: they count as slow.
"""

import importlib.util
import itertools

import pytest

from torchgpmc.calls import settings

OF_RUNS = ("methods/", "integrations/", "evidence/", "plots/", "prediction/", "calls/density_sampling.py", "variational/start.py")

# An extra, which has no examples to run where it is not installed.
collect_ignore_glob = [] if importlib.util.find_spec("botorch") else ["torchgpmc/integrations/botorch/*"]


@pytest.fixture(autouse=True)
def runs_repeat(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every test has the same random seeds, in order, where it gives none."""
    seeds = itertools.count(20260)
    monkeypatch.setattr(settings.secrets, "randbits", lambda bits: next(seeds))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Examples that sample count as slow."""
    for item in items:
        if item.nodeid.startswith(tuple(f"torchgpmc/{room}" for room in OF_RUNS)):
            item.add_marker("slow")
