"""Chunks of data side by side: the same sums in the same order, whatever the number of threads."""

import threading

import pytest
import torch

import torchgpmc as tg
from tests.problems import sparse_gp
from torchgpmc.models import sparse_gradient
from torchgpmc.numerics.threads import one_torch_thread


@pytest.fixture
def threads():
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.mark.parametrize("name", ["probit", "student_t"])
def test_results_do_not_depend_on_threads(threads, monkeypatch, name):
    """Probit has no parameters; a Student-t's are put into a module that all threads see."""
    monkeypatch.setattr(sparse_gradient, "WORTH_A_THREAD", 0.0)
    model = sparse_gp(name, num_data=40, jitter=1e-4, data_chunk=7)
    density, workers = tg.joint_log_density(model), set()
    sums = sparse_gradient.SparseDensity._sums
    monkeypatch.setattr(
        sparse_gradient.SparseDensity, "_sums", lambda *arguments: (workers.add(threading.get_ident()), sums(*arguments))[1]
    )
    size = model.layout.size + model.latent_size
    position = 0.3 * torch.randn(1, size, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    found = []
    for count in (1, 2, 3):
        threads(count)
        workers.clear()
        with one_torch_thread():  # as sample() does
            found.append((*density.value_and_grad(position), density(position)))
        assert (workers == {threading.get_ident()}) == (count == 1)
    for several in found[1:]:
        assert all(torch.equal(one, other) for one, other in zip(found[0], several, strict=True))


def test_small_chunks_stay_in_the_calling_thread(threads, monkeypatch):
    at_once = []

    def one_after_another(function, parts, device):
        at_once.append(len(parts))
        return [function(part) for part in parts]

    monkeypatch.setattr(sparse_gradient, "side_by_side", one_after_another)
    threads(2)
    model = sparse_gp(num_data=40, data_chunk=7)
    position = torch.zeros(1, model.layout.size + model.latent_size, dtype=torch.float64)
    tg.joint_log_density(model).value_and_grad(position)
    assert at_once == [1] * 6  # forty data by sevens
