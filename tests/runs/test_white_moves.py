"""Latents moved in coordinates that are white under Gaussian sites."""

import warnings

import pytest
import torch
from torch.distributions import MultivariateNormal

import torchgpmc as tg
from tests.problems import fixed_kernel, inputs, kernel, targets
from tests.statistical.test_closed_form import data, noisy_likelihood
from torchgpmc.models.whitening import GaussianSites
from torchgpmc.runs.run import Settings
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


WHITE = [tg.PCN(whitening=tg.Laplace()), tg.EllipticalSlice(whitening=tg.Laplace())]


def few_events(kernel):
    """Counts that put f about -4, where the prior's is about 0."""
    likelihood = tg.likelihoods.Poisson(exposure=torch.full((5,), 100.0).double())
    return tg.GP(inputs(5), torch.full((5,), 2.0).double(), kernel, likelihood)


@pytest.mark.parametrize("method", WHITE)
def test_chains_start_at_draws_from_the_posterior_of_the_sites(method):
    """At w ~ N(0, I): from f of the prior, where N(w | 0, I) has next to no density, they would hardly move."""
    state = method.prepare(few_events(fixed_kernel()), Settings(1, 1, 3, None)).init(torch.Generator().manual_seed(6))
    w = torch.randn(3, 5, generator=torch.Generator().manual_seed(6), dtype=torch.float64)
    torch.testing.assert_close(state.chain.inner.position, w)


@pytest.mark.parametrize("latent", WHITE)
def test_so_do_latents_beside_hyperparameters(latent):
    model = few_events(kernel())
    state = tg.Gibbs(latent=latent).prepare(model, Settings(1, 1, 3, None)).init(torch.Generator().manual_seed(6))
    f = model.latents(state.chain.payload.at.prior, state.chain.position[:, model.layout.size :])
    assert bool((f < -2).all())


def test_what_cannot_be_approximated_is_refused():
    model = tg.GP(inputs(6), targets("softmax", 6), fixed_kernel(), tg.likelihoods.Softmax(num_classes=3))
    with pytest.raises(ValueError, match="EP"):
        tg.sample(model, tg.PCN(whitening=tg.EP()), num_samples=5, progress=False)
    with pytest.raises(TypeError, match="whitening"):
        tg.sample(model, tg.EllipticalSlice(whitening="laplace"), num_samples=5, progress=False)
