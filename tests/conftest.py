"""Options, fixtures, and the bookkeeping behind the suite's false-alarm rate."""

import os

import pytest
import torch

from tests.calibration import MAX_STATISTICAL_TESTS


def pytest_addoption(parser):
    parser.addoption("--device", default="cpu", help="where the tests' models live: cpu, cuda, cuda:1, ...")


@pytest.fixture
def device(request):
    name = request.config.getoption("--device")
    if name.startswith("cuda") and not torch.cuda.is_available():
        pytest.fail(f"--device {name} was asked for and there is no CUDA device")
    return torch.device(name)


@pytest.fixture
def generator(device):
    return torch.Generator(device=device).manual_seed(20260)


def pytest_configure(config):
    if workers := os.environ.get("PYTEST_XDIST_WORKER_COUNT"):  # workers share the cores
        torch.set_num_threads(max(1, torch.get_num_threads() // int(workers)))
    config.addinivalue_line("markers", "statistical: may fail by chance; counted against the suite's false-alarm rate")


def pytest_collection_modifyitems(items):
    count = sum(item.get_closest_marker("statistical") is not None for item in items)
    if count > MAX_STATISTICAL_TESTS:
        raise pytest.UsageError(f"{count} statistical tests; the false-alarm rate is shared among {MAX_STATISTICAL_TESTS}")
