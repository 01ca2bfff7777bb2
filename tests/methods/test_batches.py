"""Sizes of importance sampling's batches, and where the estimates of the first begin."""

import pytest
import torch

import torchgpmc as tg
from tests.problems import gp
from torchgpmc.evidence.importance_sampling import ImportanceEstimator
from torchgpmc.runs.run import Settings


def schedule(method, num_samples, columns=2):
    return method.prepare(gp("poisson", num_columns=columns), Settings(num_samples, None, None, None)).schedule


@pytest.mark.parametrize(
    ("num_samples", "sizes"),
    [(4000, [200] * 20), (2000, [200] * 10), (1500, [150] * 10), (1000, [100] * 10), (500, [50] * 10), (90, [30] * 3)],
)
def test_batches_of_amis_are_all_of_a_size(num_samples, sizes):
    assert schedule(tg.AMIS(), num_samples) == sizes


def test_many_hyperparameters_take_larger_batches_and_the_last_is_what_is_left():
    assert schedule(tg.AMIS(), 900, columns=13) == [140] * 6 + [60]


def test_those_of_mamis_grow_as_it_learns_from_the_last_alone():
    assert schedule(tg.MAMIS(), 4000)[:3] == [400, 600, 900]


@pytest.mark.filterwarnings("ignore::torchgpmc.SamplingWarning")
def test_the_first_batch_begins_at_the_nearest_of_some_of_its_own_thetas(monkeypatch):
    model, begun = gp("poisson"), []
    drawn = ImportanceEstimator.draw

    def noted(self, theta, generator, start=None, num_latents=1):
        begun.append((theta, start))
        return drawn(self, theta, generator, start, num_latents)

    monkeypatch.setattr(ImportanceEstimator, "draw", noted)
    tg.sample(model, tg.AMIS(batch_size=40), num_samples=80, seed=1, progress=False)
    theta, start = begun[0]
    assert theta.shape[0] == 40 and len(torch.unique(start, dim=0)) > 5
    # An anchor's own estimate begins where its approximation ends.
    found = tg.evidence.importance(model, tg.Laplace(), num_importance=16).start_at(theta[:10])
    torch.testing.assert_close(start[:10], found)
