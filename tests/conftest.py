"""Options, fixtures, and the bookkeeping behind the suite's false-alarm rate."""

import os

import pytest
import torch

from tests.calibration import MAX_STATISTICAL_TESTS
from tests.device import other


def pytest_addoption(parser):
    parser.addoption("--device", default="cpu", help="where the tests' models live: cpu, cuda, cuda:1, ...")
    parser.addoption("--attack-models", type=int, default=1000, help="how many random models the long attack has")
    parser.addoption("--attack-first", type=int, default=40, help="number of its first, which is its seed")
    parser.addoption("--attack-engines", type=int, default=4, help="engines a model of the long attack, drawn by chance")
    parser.addoption("--attack-record", default=None, help="folder for what the long attack finds, for tests.attack.record")


@pytest.fixture
def device(request):
    name = request.config.getoption("--device")
    if name.startswith("cuda") and not torch.cuda.is_available():
        pytest.fail(f"--device {name} was asked for and there is no CUDA device")
    return torch.device(name)


@pytest.fixture
def generator():
    return torch.Generator().manual_seed(20260)


def pytest_configure(config):
    if workers := os.environ.get("PYTEST_XDIST_WORKER_COUNT"):  # workers share the cores
        torch.set_num_threads(max(1, torch.get_num_threads() // int(workers)))
    other.use(config.getoption("--device"))
    config.addinivalue_line("markers", "statistical: may fail by chance; counted against the suite's false-alarm rate")


def pytest_collection_modifyitems(items):
    # Pieces of the long attack share one test's chance.
    marked = [item for item in items if item.get_closest_marker("statistical")]
    count = sum(item.get_closest_marker("long") is None for item in marked) + 1
    if count > MAX_STATISTICAL_TESTS:
        raise pytest.UsageError(f"{count} statistical tests; the false-alarm rate is shared among {MAX_STATISTICAL_TESTS}")
