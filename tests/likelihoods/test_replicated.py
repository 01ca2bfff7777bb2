"""Several observations of a function value, beside the sum over all data written out."""

import copy
import io

import pytest
import torch
from gpytorch.likelihoods import Likelihood
from gpytorch.priors import GammaPrior
from torch.distributions import Exponential

import torchgpmc as tg
from torchgpmc.adapter.functional import PureModule
from torchgpmc.likelihoods.replicated import replicated

PLACE = torch.tensor([2, 0, 2, 1, 2, 0, 2])  # of seven data among three inputs
LABELS = torch.tensor([1, 0, 1, 1, 0, 1, 1]).double()
COUNTS = torch.tensor([3, 0, 3, 1, 4, 2, 3]).double()


class Waiting(tg.likelihoods.Factorised, Likelihood):
    """A user's own, of which nothing is known but ``forward``."""

    is_log_concave = True

    def forward(self, f):
        return Exponential(f.exp())


def dispersed():
    return tg.likelihoods.NegativeBinomial(dispersion_prior=GammaPrior(2.0, 4.0)).double()


CASES = {
    "probit": (tg.likelihoods.Bernoulli, LABELS),
    "logit": (lambda: tg.likelihoods.Bernoulli("logit"), LABELS),
    "poisson": (lambda: tg.likelihoods.Poisson(exposure=0.5), COUNTS),
    "exposures": (lambda: tg.likelihoods.Poisson(exposure=torch.linspace(0.5, 2.0, 7).double()), COUNTS),
    "negative binomial": (dispersed, COUNTS),
    "student t": (lambda: tg.likelihoods.StudentT().double(), COUNTS - 2.5),
    "beta": (lambda: tg.likelihoods.Beta().double(), torch.sigmoid(0.4 * COUNTS - 0.5)),
    "own": (Waiting, COUNTS + 0.5),
}


def both(name):
    """The likelihood of one datum, with targets; and that of three values, whose equal observations are counted."""
    make, y = CASES[name]
    likelihood = make()
    order = torch.argsort(PLACE, stable=True)
    if likelihood.for_data(order) is not likelihood:
        return likelihood, y, replicated(likelihood.for_data(order), y[order], torch.ones(7).double(), PLACE[order], 3)
    pairs, times = torch.unique(torch.stack([PLACE.double(), y], 1), dim=0, return_counts=True)
    return likelihood, y, replicated(likelihood, pairs[:, 1], times.double(), pairs[:, 0].long(), 3)


def functions(seed=0):
    return torch.randn(4, 3, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def summed(of_data):
    return torch.stack([of_data[..., u == PLACE].sum(-1) for u in range(3)], -1)


@pytest.mark.parametrize("name", CASES)
def test_densities_and_slopes_are_sums_over_what_was_observed(name):
    likelihood, y, other = both(name)
    f = functions()
    torch.testing.assert_close(other.pointwise_log_prob(f, y[:3]), summed(likelihood.pointwise_log_prob(f[:, PLACE], y)))
    torch.testing.assert_close(other.log_prob(f, y[:3]), likelihood.log_prob(f[:, PLACE], y))
    for found, expected in zip(other.derivatives(f, y[:3]), likelihood.derivatives(f[:, PLACE], y), strict=True):
        torch.testing.assert_close(found, summed(expected))
    leaf = f.clone().requires_grad_(True)
    (slope,) = torch.autograd.grad(other.log_prob(leaf, y[:3]).sum(), leaf)
    torch.testing.assert_close(other.log_prob_and_slope(f, y[:3])[1], slope)


@pytest.mark.parametrize("name", CASES)
def test_expectations_are_sums_too(name):
    likelihood, y, other = both(name)
    mean, variance = functions(), functions(1).square() + 0.1
    expected = likelihood.expected_log_likelihood(mean[:, PLACE], variance[:, PLACE], y)
    torch.testing.assert_close(other.expected_log_likelihood(mean, variance, y[:3]), summed(expected), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", CASES)
def test_moments_are_those_of_a_sum_over_a_grid(name):
    likelihood, y, other = both(name)
    mean, variance = functions(), functions(1).square() + 0.1
    step = torch.linspace(-9, 9, 4001, dtype=torch.float64)
    f = mean + variance.sqrt() * step.view(-1, 1, 1)
    at_data = torch.stack([likelihood.pointwise_log_prob(some[:, PLACE], y) for some in f])
    log_density = summed(at_data) + torch.distributions.Normal(mean, variance.sqrt()).log_prob(f)
    width = (step[1] - step[0]) * variance.sqrt()
    weight = torch.softmax(log_density, 0)
    found = other.tilted_moments(mean, variance, y[:3])
    torch.testing.assert_close(found.log_normaliser, torch.logsumexp(log_density, 0) + width.log(), rtol=1e-5, atol=1e-6)
    centre = (weight * f).sum(0)
    torch.testing.assert_close(found.mean, centre, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(found.variance, (weight * (f - centre).square()).sum(0), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("rows", [torch.tensor([2, 0, 2]), torch.tensor([1]), slice(1, 3)], ids=str)
def test_some_values_have_what_was_observed_of_them(name, rows):
    _, y, other = both(name)
    f = functions()
    expected = other.pointwise_log_prob(f, y[:3])[:, rows]
    torch.testing.assert_close(other.for_data(rows).pointwise_log_prob(f[:, rows], y[:3]), expected)
    torch.testing.assert_close(other.for_data(rows).for_data(slice(0, 1)).log_prob(f[:, rows][:, :1], y), expected[:, 0])


def test_parameters_are_those_of_one_datum_under_their_names_at_several_settings():
    likelihood, y, other = both("negative binomial")
    assert [name for name, _ in other.named_parameters()] == [name for name, _ in likelihood.named_parameters()]
    assert torch.equal(other.dispersion, likelihood.dispersion)
    values, f = {"raw_dispersion": torch.linspace(0.2, 2.0, 4).double().unsqueeze(-1)}, functions()
    found = PureModule(other)(values, lambda part: part.log_prob(f, y[:3]))
    expected = PureModule(likelihood)(values, lambda part: part.log_prob(f[:, PLACE], y))
    torch.testing.assert_close(found, expected)
    assert found.unique().numel() == 4


def test_copies_and_files_keep_what_was_observed():
    _, y, other = both("negative binomial")
    file = io.BytesIO()
    torch.save(other, file)
    file.seek(0)
    for again in (copy.deepcopy(other), torch.load(file, weights_only=False)):
        torch.testing.assert_close(again.log_prob(functions(), y[:3]), other.log_prob(functions(), y[:3]))
    with pytest.raises(AttributeError):
        _ = other.nothing_of_the_kind


@pytest.mark.parametrize("name", CASES)
def test_what_engines_ask_is_answered_by_the_likelihood_of_one(name):
    likelihood, _, other = both(name)
    for trait in ("is_log_concave", "levels_off", "is_smooth", "is_analytic"):
        assert getattr(other, trait) == getattr(likelihood, trait)
    assert other.levels() == likelihood.levels() and other.ridges() == likelihood.ridges()
