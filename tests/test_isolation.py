"""Data that say nothing of one another: a word, and none where they do."""

import warnings

import pytest
import torch

import torchgpmc as tg
from tests.problems import fixed_kernel, kernel
from torchgpmc.calls.isolation import warn_of_isolated_data
from torchgpmc.storage.draws import Draws


def model_of(kind, scale):
    x = scale * torch.linspace(0, 1, 12, dtype=torch.float64)
    y = torch.arange(12) % 2
    return kind(x, y, kernel(1), tg.likelihoods.Bernoulli(), **({"inducing_points": x[::4]} if kind is tg.SparseGP else {}))


def posterior_of(model, weights=None):
    theta = torch.zeros(1, 9, model.layout.size, dtype=torch.float64)
    v = torch.zeros(1, 9, model.latent_size, dtype=torch.float64)
    return tg.Posterior(model, Draws(theta, v, weights), {"lp": torch.zeros(1, 9)}, {})


@pytest.mark.parametrize("kind", [tg.GP, tg.SparseGP])
def test_data_too_far_apart_for_every_draw_are_named(kind):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn_of_isolated_data(posterior_of(model_of(kind, 10.0)))
    model = model_of(kind, 1e6)
    if kind is tg.SparseGP:  # a point at a datum knows that
        model.inducing_points.add_(1e4)
    with pytest.warns(UserWarning, match="no datum says anything of .* standardise the columns"):
        warn_of_isolated_data(posterior_of(model))


def test_one_draw_that_counts_in_which_they_do_is_enough():
    posterior = posterior_of(model_of(tg.GP, 1e3), torch.zeros(1, 9))
    posterior.theta[0, 4, -1] = 8.0  # the log of the lengthscale
    posterior.log_weights[0, 4] = 3.0
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn_of_isolated_data(posterior)
    posterior.log_weights[0, 4] = -30.0
    with pytest.warns(UserWarning, match="no datum"):
        warn_of_isolated_data(posterior)


def test_draws_that_weigh_much_because_few_are_like_them_do_not_speak_for_the_others():
    """Five of the heaviest lie in a corner of short lengthscales, which proposals hardly reach; the rest weigh more together."""
    posterior = posterior_of(model_of(tg.GP, 1e3), torch.zeros(1, 9))
    posterior.theta[0, :4, -1] = 8.0  # the log of the lengthscale
    posterior.log_weights[0, 4:] = 0.1
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        warn_of_isolated_data(posterior)
    assert not heard


@pytest.mark.filterwarnings("ignore::torchgpmc.checks.SamplingWarning")
def test_sampling_says_so_whatever_the_method():
    x = 1e6 * torch.linspace(0, 1, 6, dtype=torch.float64)
    made = kernel(1)
    options = {"seed": 0, "progress": False}
    model = tg.GP(x, torch.arange(6) % 2, made, tg.likelihoods.Bernoulli())
    with pytest.warns(UserWarning, match="no datum says anything of another"):
        tg.sample(model, tg.AMIS(), num_samples=40, **options)
    fixed = tg.GP(x, torch.arange(6) % 2, fixed_kernel(), tg.likelihoods.Bernoulli())
    with pytest.warns(UserWarning, match="no datum says anything of another"):
        tg.sample(fixed, tg.EllipticalSlice(), num_samples=5, warmup_steps=2, num_chains=2, **options)
