"""Several latent vectors of one estimate: each is the posterior's, by its weight, and predictions are averages over all."""

import copy

import pytest
import torch

import torchgpmc as tg
from tests.calibration import worst_excess
from tests.evidence.test_orthants import generator, moments, quadrature
from tests.problems import gp, inputs, kernel, sparse_gp
from torchgpmc.evidence import LATENTS_KEPT
from torchgpmc.evidence import importance_sampling as sampling
from torchgpmc.runs.chain_targets import estimator_for

REPEATS = 20_000

pytestmark = pytest.mark.filterwarnings("ignore::torchgpmc.checks.SamplingWarning")


def rough_points():
    """Two data whose latents hardly know of one another, so that white noise is taken out, beside a label that is unlikely."""
    likelihood = tg.likelihoods.Bernoulli()
    base = kernel(1).requires_grad_(False)
    base.outputscale, base.base_kernel.lengthscale = 3.0, 0.3
    return tg.GP(inputs(2, 1), torch.tensor([1.0, 0.0]), base, likelihood)


ESTIMATORS = {
    "laplace": lambda model: tg.evidence.importance(model, tg.Laplace(), num_importance=4),
    "ep, no pairs": lambda model: tg.evidence.importance(model, tg.EP(), num_importance=3),
    "white noise out": lambda model: tg.evidence.SmoothProbit(num_importance=2).estimator(model),
    "data in turn": lambda model: tg.evidence.SequentialImportance(num_points=2).estimator(model),
    "orthants": lambda model: tg.evidence.Orthant(num_points=2).estimator(model),
}


def excess(name):
    """E[estimate g(v_j)] for each of the further latent vectors, against the integral of p(y | v) p(v) g(v)."""
    model = rough_points()
    evidence, expected = quadrature(model, moments)
    theta = torch.zeros(REPEATS, 0, dtype=torch.float64)
    found = ESTIMATORS[name](model).draw(theta, generator(), num_latents=LATENTS_KEPT)
    assert found.further_whitened.shape == (REPEATS, LATENTS_KEPT - 1, 2)
    values = torch.cat([moments(other) for other in found.further_whitened.unbind(1)], -1) * found.value.exp().unsqueeze(-1)
    return worst_excess(values / evidence, (expected / evidence).repeat(LATENTS_KEPT - 1))


@pytest.mark.statistical
@pytest.mark.parametrize("name", ESTIMATORS)
def test_each_is_drawn_from_the_posterior_by_its_weight(name):
    assert excess(name) < 1


def test_levels_that_do_not_wrap_are_caught(monkeypatch):
    def levels(uniform, count):
        return (uniform.unsqueeze(-1) + torch.arange(count) / count).clamp_max(1.0)

    monkeypatch.setattr(sampling, "spread_levels", levels)
    assert excess("laplace") > 1


@pytest.mark.statistical
def test_of_a_collapsed_model_they_are_draws_of_its_normal_posterior():
    model = sparse_gp("gaussian", num_inducing=2)
    theta = torch.zeros(1, model.layout.size, dtype=torch.float64).expand(REPEATS, -1)
    found = estimator_for(model, tg.Laplace(), 1, None, None).draw(theta, generator(), num_latents=3)
    fresh = estimator_for(model, tg.Laplace(), 1, None, None).draw(theta, generator(1))
    for other in found.further_whitened.unbind(1):
        assert worst_excess(moments(other) - moments(fresh.whitened)) < 1
    assert float((found.further_whitened[:, 0] - found.whitened).abs().min()) > 0


@pytest.mark.parametrize("model", [gp("probit"), sparse_gp("probit"), gp("softmax", 6)], ids=["full", "inducing", "several"])
def test_predictions_are_averages_over_all(model, monkeypatch):
    monkeypatch.setattr(type(model.likelihood), "predicts_quickly", True)
    posterior = tg.sample(model, tg.AMIS(num_importance=4), num_samples=60, seed=0, progress=False)
    x = inputs(3, 2, seed=5)
    whole, several = posterior.predict(x), posterior._functions(torch.arange(60)).latents
    assert several.shape[1] == LATENTS_KEPT
    parts = []
    for v in several.unbind(1):
        one = copy.copy(posterior)
        one.whitened, one._further = v[None], None
        parts.append(one.predict(x))
    torch.testing.assert_close(whole.mean, torch.stack([part.mean for part in parts]).mean(0))
    torch.testing.assert_close(whole.latent_mean, torch.stack([part.latent_mean for part in parts]).mean(0))
    chunked = posterior.predict(x, test_chunk=2)
    torch.testing.assert_close(chunked.mean, whole.mean)
    assert posterior.predict(x, num_draws=7).sample(5, joint=True).shape == (5, 3)


def test_means_of_counts_are_averages_over_all_and_their_densities_over_the_first_alone():
    posterior = tg.sample(gp("poisson"), tg.AMIS(num_importance=4), num_samples=60, seed=0, progress=False)
    x, y = inputs(3, 2, seed=5), torch.tensor([0, 2, 1])
    mean, variance = posterior._functions(torch.arange(60)).marginals(x)(slice(0, 240))(slice(None))
    weights = torch.softmax(posterior.log_weights[0], 0)
    rates = (mean + 0.5 * variance).exp().view(60, LATENTS_KEPT, 3).mean(1)
    torch.testing.assert_close(posterior.predict(x).mean, weights @ rates)
    of_first = copy.copy(posterior)
    of_first._further = None
    torch.testing.assert_close(posterior.predict(x).log_prob(y), of_first.predict(x).log_prob(y))
    torch.testing.assert_close(posterior.predict(x, test_chunk=2).log_prob(y), of_first.predict(x).log_prob(y))


def test_they_halve_the_variance_of_probabilities():
    posterior = tg.sample(gp("probit", 30), tg.AMIS(), num_samples=200, seed=0, progress=False)
    mean, variance = posterior.predict(inputs(4, 2, seed=5))._given(slice(None))(slice(None))
    probabilities = torch.special.ndtr(mean / (1 + variance).sqrt()).view(200, LATENTS_KEPT, 4)
    weights = torch.softmax(posterior.log_weights[0], 0)

    def spread(values):
        return (weights @ (values - weights @ values).square()).mean()

    assert float(spread(probabilities.mean(1))) < 0.5 * float(spread(probabilities[:, 0]))


def test_they_are_saved_and_resampled(tmp_path):
    model = gp("probit")
    posterior = tg.sample(
        model, tg.AMIS(), num_samples=60, seed=0, progress=False, checkpoint=tg.Checkpoint(tmp_path / "run", every=1)
    )
    again = tg.sample(model, tg.AMIS(), num_samples=60, seed=0, progress=False, checkpoint=tg.Checkpoint(tmp_path / "run", every=1))
    posterior.save(tmp_path / "file")
    x, rows = inputs(3, 2), posterior.resampled(5)
    for other in (again, tg.Posterior.load(tmp_path / "file", model)):
        torch.testing.assert_close(other.predict(x).probs, posterior.predict(x).probs, rtol=0, atol=0)
    place = (posterior.theta[0] == rows.theta[0, 0]).all(-1).nonzero()[0, 0]
    torch.testing.assert_close(rows._further[0, 0], posterior._further[0, place], rtol=0, atol=0)
