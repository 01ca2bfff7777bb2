"""Estimates around the normal density of inducing values: slopes, and what exactness needs."""

import pytest
import torch

import torchgpmc as tg
from tests.problems import gp, sparse_gp
from tests.runs.resume import dies_and_resumes
from torchgpmc.approximations import ApproximateMarginal, Variational
from torchgpmc.approximations.gaussian_form import problem_of

THETA = torch.tensor([[0.7, -0.5, -1.5], [-0.7, 0.5, 0.5], [2.5, -2.0, -2.0]], dtype=torch.float64)


def test_slopes_reach_the_likelihood_s_parameters():
    model = sparse_gp("ordinal")
    theta = model.layout.starting_points(1, torch.Generator().manual_seed(0))
    density, step = ApproximateMarginal(model, Variational()), 1e-4 * torch.eye(theta.shape[1]).double()
    _, gradient = density.value_and_grad(theta)
    torch.testing.assert_close(gradient[0], (density(theta + step) - density(theta - step)) / 2e-4, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("num_importance", [1, 4])
def test_the_weight_of_a_kept_draw_is_that_which_it_was_drawn_with(num_importance):
    model, generator = sparse_gp("poisson"), torch.Generator().manual_seed(0)
    estimator = tg.evidence.importance(model, num_importance=num_importance)
    found = estimator.draw(THETA, generator)
    prior = model.prior(THETA)
    again = estimator._with_kept(prior, problem_of(model, prior, model.targets), found, generator)
    torch.testing.assert_close(again.value, found.value)
    given = estimator.given(THETA, found.whitened, generator)
    torch.testing.assert_close(given.log_likelihood, found.log_likelihood)
    assert bool((estimator.move(THETA, found, 3, generator).whitened != found.whitened).any(-1).all())


def test_gradients_of_estimates_are_those_of_their_logarithm():
    model = sparse_gp("probit", num_data=4, num_inducing=2)
    estimator, theta = tg.evidence.importance(model, num_importance=2000), THETA[:1].clone().requires_grad_(True)
    (gradient,) = torch.autograd.grad(estimator(theta, torch.Generator().manual_seed(0)).value.sum(), theta)
    step = 1e-4 * torch.eye(3).double()
    either = torch.cat([THETA[:1] + step, THETA[:1] - step])
    auxiliary = torch.randn(1, estimator.auxiliary_size, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    high, low = estimator.evaluate(either, auxiliary.expand(6, -1)).value.chunk(2)
    torch.testing.assert_close(gradient[0], (high - low) / 2e-4, rtol=0.02, atol=0.02)


def test_where_the_normal_density_is_unusable_the_prior_stands_in():
    model = sparse_gp("poisson")
    estimator = tg.evidence.importance(model, num_importance=16)
    start = torch.full((3, 2, 12), torch.nan, dtype=torch.float64)
    found = estimator.draw(THETA, torch.Generator().manual_seed(0), start)
    assert not bool(found.converged.any())
    assert bool(torch.isfinite(found.value).all())


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (lambda: sparse_gp("student_t"), "several modes"),
        (lambda: sparse_gp("softmax"), "several latent functions"),
        (lambda: gp("probit"), "Expected a SparseGP; use torchgpmc.Laplace"),
    ],
)
def test_what_it_cannot_serve_is_refused(model, words):
    with pytest.raises(ValueError, match=words):
        ApproximateMarginal(model(), Variational())


def test_annealing_still_wants_latents_at_the_data():
    with pytest.raises(ValueError, match="not a latent of SparseGP"):
        tg.evidence.annealed(sparse_gp("probit"))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::torchgpmc.SamplingWarning")
def test_runs_resume_with_the_same_draws(tmp_path, monkeypatch):
    options = {"num_samples": 6, "warmup_steps": 10, "num_chains": 2, "seed": 0, "progress": False}
    for advances in (4, 12):  # in warm-up, and after the anchors were set
        path = tmp_path / f"{advances}.pt"
        assert dies_and_resumes(sparse_gp, tg.PseudoMarginal(num_importance=2), options, advances, path, monkeypatch)
