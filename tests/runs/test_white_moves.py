"""Latents moved in coordinates that are white under Gaussian sites."""

import warnings

import pytest
import torch
from torch.distributions import MultivariateNormal

import torchgpmc as tg
from tests.problems import fixed_kernel, inputs, targets
from tests.statistical.test_closed_form import data, noisy_likelihood
from torchgpmc.models.whitening import GaussianSites
from torchgpmc.runs.white_moves import _DensityOfWhite, white_map

SITES = GaussianSites(torch.tensor([0.5, 2.0, 30.0]).double(), torch.tensor([1.0, -1.0, 4.0]).double())


@pytest.fixture
def prior():
    generator = torch.Generator().manual_seed(4)
    projection = torch.randn(2, 3, 3, generator=generator, dtype=torch.float64)
    return projection, torch.randn(2, 3, generator=generator, dtype=torch.float64)


def test_white_under_the_posterior_that_the_sites_give(prior):
    """w is standard normal where v has the posterior's mean and covariance, by plain inverses."""
    projection, mean = prior
    coordinates = white_map(projection, mean, SITES)
    covariance = torch.linalg.inv(torch.eye(3) + projection.mT @ (SITES.precision[:, None] * projection))
    expected = (covariance @ projection.mT @ (SITES.shift - SITES.precision * mean)[..., None]).squeeze(-1)
    torch.testing.assert_close(coordinates.latents(torch.zeros(2, 3).double()), expected)
    unit = torch.eye(3, dtype=torch.float64)
    slopes = torch.stack([coordinates.latents(unit[i].expand(2, 3)) - expected for i in range(3)], -1)
    torch.testing.assert_close(slopes @ slopes.mT, covariance)
    v = torch.randn(2, 3, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    torch.testing.assert_close(coordinates.latents(coordinates.white(v)), v)


def test_density_is_the_posterior_over_the_standard_normal(prior, generator):
    projection, mean = prior
    coordinates = white_map(projection, mean, SITES)
    w = torch.randn(2, 3, generator=generator, dtype=torch.float64)
    value, (v, log_likelihood) = _DensityOfWhite(lambda v: -v.exp().sum(-1), coordinates).draw(w, generator)
    unit = MultivariateNormal(torch.zeros(3).double(), torch.eye(3).double())
    torch.testing.assert_close(value, -v.exp().sum(-1) + unit.log_prob(v) - unit.log_prob(w))
    torch.testing.assert_close(log_likelihood, -v.exp().sum(-1))


def test_where_the_sites_fail_latents_stay_as_they_are(prior):
    projection, mean = prior
    broken = SITES._replace(shift=torch.stack([SITES.shift, torch.full((3,), torch.nan).double()]))
    v = torch.randn(2, 3, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    white = white_map(projection, mean, broken).white(v)
    assert torch.equal(white[1], v[1])
    assert not torch.equal(white[0], v[0])


@pytest.mark.parametrize("method", [tg.PCN, tg.EllipticalSlice])
def test_every_proposal_is_taken_where_sites_are_the_likelihood(method):
    x, y = data(5)
    model = tg.GP(x, y, fixed_kernel(), noisy_likelihood())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # draws so few
        posterior = tg.sample(model, method(whitening=tg.Laplace()), num_samples=5, warmup_steps=5, num_chains=4, progress=False)
    torch.testing.assert_close(posterior.stats["acceptance_rate"], torch.ones(4, 5).double())


def test_what_cannot_be_approximated_is_refused():
    model = tg.GP(inputs(6), targets("softmax", 6), fixed_kernel(), tg.likelihoods.Softmax(num_classes=3))
    with pytest.raises(ValueError, match="EP"):
        tg.sample(model, tg.PCN(whitening=tg.EP()), num_samples=5, progress=False)
    with pytest.raises(TypeError, match="whitening"):
        tg.sample(model, tg.EllipticalSlice(whitening="laplace"), num_samples=5, progress=False)
