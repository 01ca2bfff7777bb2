"""A word on targets that are in another unit than the priors."""

import warnings

import pytest
import torch
from gpytorch.kernels import RBFKernel, ScaleKernel
from gpytorch.means import ConstantMean
from gpytorch.priors import GammaPrior, HalfCauchyPrior, NormalPrior

import torchgpmc as tg
from torchgpmc.calls import units
from torchgpmc.calls.units import warn_of_unit


def river(scale=1.0, likelihood=None, outputscale_prior=None, mean=None, kind=tg.GPRegression):
    """Yearly discharges: some 900, give or take 170, times ``scale``."""
    generator = torch.Generator().manual_seed(0)
    x = torch.arange(30.0)
    y = scale * (900 + 170 * torch.randn(30, generator=generator))
    outputscale_prior = outputscale_prior or GammaPrior(2.0, 1.0)
    kernel = ScaleKernel(RBFKernel(lengthscale_prior=GammaPrior(2.0, 1.0)), outputscale_prior=outputscale_prior)
    return kind(x, y, kernel, likelihood or tg.likelihoods.Gaussian(noise_prior=GammaPrior(1.5, 5.0)), mean=mean)


def said(model):
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        warn_of_unit(model)
    return [str(message.message) for message in heard]


def test_targets_far_above_and_below_what_priors_reach_are_named():
    (above,), (below,) = said(river()), said(river(1e-7))
    assert "root mean square is 896" in above and "of 64 draws from the priors at most" in above and "ConstantMean" in above
    assert "at least" in below


@pytest.mark.parametrize(
    "model",
    [
        river(1 / 900),
        river(1 / 50),  # ten times too large, which data tell
        river(outputscale_prior=HalfCauchyPrior(100.0)),
        river(mean=ConstantMean(constant_prior=NormalPrior(0.0, 1000.0))),
        river(likelihood=tg.likelihoods.Poisson(), scale=0.01, kind=lambda x, y, *rest, **more: tg.GP(x, y.round(), *rest, **more)),
    ],
)
def test_other_targets_are_not(model):
    assert not said(model)


def test_whatever_noise_is_added_to_f():
    student = tg.likelihoods.StudentT(deg_free_prior=GammaPrior(2.0, 0.1), noise_prior=GammaPrior(1.5, 5.0))
    laplace = tg.likelihoods.LaplaceNoise(noise_prior=GammaPrior(1.5, 5.0))
    for likelihood in (student, laplace):
        assert len(said(river(likelihood=likelihood, kind=tg.GP))) == 1


def test_many_data_are_drawn_a_part_at_a_time(monkeypatch):
    shapes, draws = [], units._drawn
    monkeypatch.setattr(units, "_CHUNK_ELEMENTS", 100)  # three thetas of thirty data
    monkeypatch.setattr(
        units, "_drawn", lambda model, theta, generator: shapes.append(len(theta)) or draws(model, theta, generator)
    )
    assert len(said(river())) == 1 and not said(river(1 / 900))
    assert shapes == 2 * (21 * [3] + [1])


def test_a_prior_that_cannot_draw_says_nothing():
    class Flat(GammaPrior):
        def rsample(self, *args, **options):
            raise NotImplementedError

    assert not said(river(outputscale_prior=Flat(2.0, 1.0)))


def test_it_is_said_before_anything_is_sampled_or_foretold():
    model = river(1.0)
    with pytest.warns(tg.SamplingWarning, match="in another unit"):
        tg.explain(model)
    with pytest.warns(tg.SamplingWarning, match="in another unit"):
        tg.sample(model, tg.AdaptiveMH(), num_samples=2, warmup_steps=2, num_chains=2, seed=0, progress=False)
