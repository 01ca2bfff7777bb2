"""Mistakes are named before any sampling, and estimates not to be trusted say so."""

import math

import pytest
import torch

import torchgpmc as tg
from tests.orthant.simple import gp_covariance, one_factor
from torchgpmc.orthant import (
    Count,
    KnownSplit,
    SeparationOfVariables,
    Sequential,
    log_probability,
    truncated_normal_draws,
    truncated_normal_samples,
)

EYE = torch.eye(3, dtype=torch.float64)
BATCH = EYE.expand(2, 3, 3).clone()
INDEFINITE, SKEW, MISSING = BATCH.clone(), BATCH.clone(), BATCH.clone()
INDEFINITE[1, 0, 1] = INDEFINITE[1, 1, 0] = 2.0
SKEW[1, 0, 1] = 0.5
MISSING[1, 2, 2] = math.nan
TWO_SCALES = BATCH * torch.tensor([3.0, 1.0])[:, None, None]


@pytest.mark.parametrize(
    ("covariance", "options", "message"),
    [
        (INDEFINITE, {}, "batch entry 1: covariance is not positive definite"),
        (SKEW, {}, "batch entry 1: covariance is not symmetric"),
        (MISSING, {}, "batch entry 1: covariance has NaN"),
        (EYE[:2], {}, r"shape \(2, 3\). Expected square matrices"),
        (EYE, {"lower": 1.0, "upper": 1.0}, "batch entry 0: lower is not below upper"),
        (BATCH, {"lower": torch.tensor([[0.0] * 3, [0.0, 5.0, 0.0]]), "upper": 4.0}, "batch entry 1: lower is not below upper"),
        (EYE, {"lower": math.nan}, "lower has NaN"),
        (EYE, {"mean": math.inf}, "mean is infinite"),
        (EYE, {"lower": torch.zeros(4)}, r"lower has shape \(4,\)"),
        (BATCH, {"lower": torch.zeros(3, 3)}, "Expected all to broadcast"),
        (EYE, {"lower": 0.0, "num_points": 0}, "num_points is 0. Expected a whole number"),
        (EYE, {"lower": 0.0, "method": SeparationOfVariables(num_replicates=1)}, "num_replicates is 1. Expected at least 2"),
        (EYE, {"lower": 0.0, "method": Sequential(num_groups=0)}, "num_groups is 0"),
        (EYE, {"lower": 0.0, "method": KnownSplit(-1.0)}, "noise has elements that are not positive"),
        (EYE, {"lower": 0.0, "method": KnownSplit(torch.ones(2))}, r"noise has shape \(2,\)"),
        (
            TWO_SCALES,
            {"lower": 0.0, "method": KnownSplit(2.0)},
            "batch entry 1: .*less the noise",
        ),
    ],
)
def test_mistakes_are_named(covariance, options, message):
    with pytest.raises(ValueError, match=message):
        log_probability(covariance, **options)


@pytest.mark.parametrize("method", ["separation", SeparationOfVariables, 3])
def test_only_a_method_object_is_a_method(method):
    with pytest.raises(TypeError, match=r"Expected one of torchgpmc.orthant's|missing"):
        log_probability(EYE, lower=0.0, method=method)


def test_other_types_are_named():
    with pytest.raises(TypeError, match=r"covariance is str 'eye'. Expected numbers"):
        log_probability("eye", lower=0.0)
    with pytest.raises(TypeError, match=r"Expected one of torchgpmc\.orthant\.Count"):
        log_probability(EYE, lower=0.0, method=Sequential("hard"))
    with pytest.raises(ValueError, match="num_samples is 0"):
        truncated_normal_draws(EYE, lower=0.0, num_samples=0)


def test_a_group_that_loses_all_particles_is_reported():
    with pytest.warns(tg.SamplingWarning, match="no particle of batch entry 0, group 0 was within the limits"):
        found = log_probability(EYE, lower=9.0, method=Sequential(Count.HARD), num_points=100)
    assert float(found.value) == -math.inf


def test_weights_that_collapse_are_reported():
    """Plain GHK on a strongly correlated box far from the mean; with tilting there is nothing to report."""
    covariance = gp_covariance(100, seed=1, scale=30.0, lengthscale=0.3)
    with pytest.warns(tg.SamplingWarning, match="k-hat .* too low"):
        plain = log_probability(covariance, lower=1.0, method=SeparationOfVariables(tilting=False, reordering=False))
    assert float(plain.effective_size) < 500
    tilted = log_probability(covariance, lower=1.0, num_points=20_000)
    assert float(tilted.pareto_khat) < 0.7


def test_a_guessed_split_is_refused_or_reported():
    d = torch.linspace(0.1, 0.99, 20, dtype=torch.float64)
    with pytest.raises(ValueError, match="less the noise is not positive semidefinite"):
        log_probability(one_factor(d), lower=0.0, method=KnownSplit(0.5))
    d = torch.linspace(-0.99, 0.99, 100, dtype=torch.float64)
    least = float(torch.linalg.eigvalsh(one_factor(d))[0])
    with pytest.warns(tg.SamplingWarning, match="k-hat"):
        log_probability(one_factor(d), lower=0.0, method=KnownSplit(0.999 * least))


def at_odds(num_data):
    """A GP's covariance with labels that have nothing to do with it: a corner that few draws reach."""
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(num_data, 2, generator=generator, dtype=torch.float64)
    y = torch.where(torch.rand(num_data, generator=generator) < 0.5, 1.0, -1.0).double()
    covariance = 100 * torch.exp(-0.5 * torch.cdist(x, x).square() / 0.2**2) + torch.eye(num_data, dtype=torch.float64)
    return covariance * torch.outer(y, y)


def test_draws_out_of_reach_are_weighted_and_say_so():
    covariance = at_odds(150)
    found = truncated_normal_draws(covariance, lower=0.0, num_samples=200)
    assert not bool(found.exact)
    assert float(found.acceptance_rate) < 1e-4 and float(found.log_weight.std()) > 0
    with pytest.warns(tg.SamplingWarning, match="only approximate: truncated_normal_draws returns their weights"):
        samples = truncated_normal_samples(covariance, lower=0.0, num_samples=200)
    assert samples.shape == (200, 150) and bool((samples >= 0).all())


@pytest.mark.parametrize("covariance", [EYE.long(), EYE.numpy(), EYE.tolist()])
def test_a_covariance_of_any_kind_of_numbers_is_taken(covariance):
    expected = log_probability(EYE, lower=0.0).value
    assert torch.equal(log_probability(covariance, lower=[0.0, 0.0, 0.0]).value, expected)
    expected = truncated_normal_samples(EYE, lower=0.0, num_samples=2)
    assert torch.equal(truncated_normal_samples(covariance, lower=0.0, num_samples=2), expected)
