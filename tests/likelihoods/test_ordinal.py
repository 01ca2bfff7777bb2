"""Ordered levels: against a plain formula differentiated by autograd, and against dense quadrature."""

import pytest
import torch
from gpytorch.priors import GammaPrior, NormalPrior

import torchgpmc as tg
from tests.likelihoods.test_derivatives import F, dense_tilted
from tests.likelihoods.test_likelihoods import MEAN, VARIANCE, dense_expectation
from tests.problems import gp, inputs, kernel, targets
from tests.speed import quick
from torchgpmc.likelihoods import Factorised

Y = targets("ordinal", 5)
NEAR = F.clamp(-3.0, 3.0)  # where the plain formula has its digits


def ordinal(first=-0.7, gaps=(0.9, 0.4), num_levels=4):
    likelihood = tg.likelihoods.Ordinal(num_levels=num_levels).double()
    likelihood.initialize(first_cut=first)
    likelihood.gaps = torch.tensor(gaps, dtype=torch.float64)
    return likelihood


class Plain(Factorised):
    """The formula, as one would write it down: no digits in the tails."""

    def __init__(self, cuts):
        self.ends = torch.cat([torch.tensor([-30.0]), cuts, torch.tensor([30.0])]).double()

    def pointwise_log_prob(self, f, targets):
        above, below = (torch.special.ndtr(self.ends[targets.long() + side] - f) for side in (1, 0))
        return (above - below).log()


def test_it_is_the_plain_formula_with_its_derivatives():
    likelihood = ordinal().requires_grad_(False)
    torch.testing.assert_close(likelihood.cut_points, torch.tensor([-0.7, 0.2, 0.6]).double())
    found, plain = likelihood.derivatives(NEAR, Y), Plain(likelihood.cut_points).derivatives(NEAR, Y)
    for part, expected in zip(found, plain, strict=True):
        torch.testing.assert_close(part, expected, rtol=1e-6, atol=1e-9)
    torch.testing.assert_close(likelihood.pointwise_log_prob(NEAR, Y), plain.value, rtol=1e-9, atol=1e-12)


def test_derivatives_are_differentiable_in_the_cut_points():
    """What the gradient of Laplace's evidence asks for."""
    likelihood, step = ordinal(), 1e-6
    for order in range(3):
        part = likelihood.derivatives(F, Y)[order].sum()
        slopes = torch.autograd.grad(part, [likelihood.first_cut, likelihood.raw_gaps])
        for leaf, slope in zip((likelihood.first_cut, likelihood.raw_gaps), slopes, strict=True):
            for j in range(len(leaf)):
                ends = []
                for sign in (1, -1):
                    leaf.data[j] += sign * step
                    ends.append(float(likelihood.derivatives(F, Y)[order].sum().detach()))
                    leaf.data[j] -= sign * step
                assert float(slope[j]) == pytest.approx((ends[0] - ends[1]) / (2 * step), rel=1e-5, abs=1e-6)


@pytest.mark.parametrize("f", [-300.0, -30.0, 30.0, 300.0])
def test_far_tails_keep_their_digits(f):
    likelihood = ordinal().requires_grad_(False)
    at = torch.full((1, 4), f, dtype=torch.float64)
    found = likelihood.derivatives(at, torch.arange(4.0).double())
    lower = torch.cat([torch.tensor([-1e6]), likelihood.cut_points]) - f
    upper = torch.cat([likelihood.cut_points, torch.tensor([1e6])]) - f
    # Beyond both ends of the interval log p falls as the normal density does at the nearer one.
    near = torch.where(torch.as_tensor(f) > 0, upper, lower)
    flat = near.abs() > 1e5
    torch.testing.assert_close(found.first[0], torch.where(flat, 0.0, near), rtol=2e-2, atol=1e-9)
    assert bool((found.second <= 0).all()) and bool((found.second >= -1.001).all())


@pytest.mark.parametrize("far", [2e6, -3e8])
def test_nothing_stands_for_infinity(far):
    """1e6 did: of f or cuts beyond it the last level had no probability, the first all of it."""
    zero, levels = torch.zeros(1, 4).double(), torch.arange(4.0).double()
    here, there = ordinal().requires_grad_(False), ordinal(first=far - 0.7).requires_grad_(False)
    f = zero + 0.3
    rounding = 4 * abs(far) * torch.finfo(torch.float64).eps
    torch.testing.assert_close(there.log_prob(f + far, levels), here.log_prob(f, levels), rtol=0, atol=8 * rounding)
    for name in ("derivatives", "tilted_moments"):
        arguments = (levels,) if name == "derivatives" else (zero + 1.5, levels)
        found, expected = (getattr(made, name)(f + at, *arguments) for made, at in ((there, far), (here, 0.0)))
        expected = expected._replace(mean=expected.mean + far) if name == "tilted_moments" else expected
        torch.testing.assert_close(tuple(found), tuple(expected), rtol=rounding, atol=8 * rounding)
    top = torch.tensor([3.0 if far > 0 else 0.0]).double()
    assert float(here.log_prob(zero[:, :1] + far, top)) == 0.0
    assert float(here.predictive_log_prob(zero[:, :1] + far, zero[:, :1] + 1, top)) == 0.0
    torch.testing.assert_close(here.response_moments(zero[0, :1] + far, zero[0, :1] + 1).mean.squeeze(), (levels == top).double())


def test_slopes_have_values_at_levels_without_an_end():
    likelihood, size = ordinal(), (2, 4)
    mean = torch.linspace(-40, 40, 8).double().view(size).requires_grad_(True)
    variance = torch.full(size, 1.5).double().requires_grad_(True)
    y = torch.tensor([0.0, 3.0, 0.0, 3.0]).double()
    leaves = [mean, variance, likelihood.first_cut, likelihood.raw_gaps]
    for value in (
        likelihood.predictive_log_prob(mean, variance, y),
        likelihood.expected_log_likelihood(mean, variance, y),
        *likelihood.tilted_moments(mean, variance, y),
        likelihood.response_moments(mean, variance).mean,
    ):
        slopes = torch.autograd.grad(value.sum(), leaves, retain_graph=True)
        assert all(bool(torch.isfinite(slope).all()) for slope in slopes)


@pytest.mark.parametrize("level", quick([1], range(4)))
def test_expectations_and_predictions(level):
    likelihood, y = ordinal().requires_grad_(False), torch.full((5,), float(level), dtype=torch.float64)
    dense = dense_expectation(lambda f: likelihood.pointwise_log_prob(f, y), MEAN, VARIANCE)
    torch.testing.assert_close(likelihood.expected_log_likelihood(MEAN, VARIANCE, y), dense, rtol=0, atol=1e-7)
    dense = dense_expectation(lambda f: likelihood.pointwise_log_prob(f, y).exp(), MEAN, VARIANCE).log()
    torch.testing.assert_close(likelihood.predictive_log_prob(MEAN, VARIANCE, y), dense, rtol=0, atol=1e-7)
    probabilities = likelihood.response_moments(MEAN, VARIANCE).mean
    torch.testing.assert_close(probabilities[..., level].log(), dense, rtol=0, atol=1e-7)
    torch.testing.assert_close(probabilities.sum(-1), torch.ones_like(MEAN))
    for part, expected in zip(
        likelihood.tilted_moments(MEAN, VARIANCE, y), dense_tilted(likelihood, MEAN, VARIANCE, y), strict=True
    ):
        torch.testing.assert_close(part, expected, rtol=1e-7, atol=1e-7)


def test_gradients_of_expectations():
    likelihood = ordinal()
    mean, variance = MEAN.clone().requires_grad_(True), VARIANCE.clone().requires_grad_(True)
    assert torch.autograd.gradcheck(lambda m, v: likelihood.expected_log_likelihood(m, v, Y), (mean, variance))
    assert torch.autograd.gradcheck(lambda m, v: likelihood.predictive_log_prob(m, v, Y), (mean, variance))


def test_priors_by_default_and_by_request():
    model = gp("ordinal")
    assert model.layout.names[-2:] == ["likelihood.first_cut", "likelihood.gaps"]
    asked = tg.likelihoods.Ordinal(num_levels=3, first_cut_prior=NormalPrior(0.0, 3.0), gaps_prior=GammaPrior(3.0, 1.0))
    assert float(asked.first_cut_prior.scale) == 3.0 and float(asked.gaps_prior.concentration) == 3.0
    # Equal shares where f has variance one.
    zero = torch.zeros(1).double()
    even = tg.likelihoods.Ordinal(num_levels=3).double().response_moments(zero, zero + 1).mean
    torch.testing.assert_close(even, torch.full((1, 3), 1 / 3).double(), rtol=1e-6, atol=0)


@pytest.mark.parametrize("y", [torch.tensor([0.0, 1.0, 3.0]), torch.tensor([0.0, 0.5, 1.0]), torch.tensor([-1.0, 0.0, 1.0])])
def test_mistakes_are_named(y):
    with pytest.raises(ValueError, match=r"Expected levels 0 to 2. Encode the levels from 0, or set num_levels"):
        tg.GP(inputs(3), y, kernel(), tg.likelihoods.Ordinal(num_levels=3))
    with pytest.raises(ValueError, match=r"num_levels is 2. .*for two levels use Bernoulli"):
        tg.likelihoods.Ordinal(num_levels=2)
