"""Probit evidence after white noise in f has been integrated out."""

import pytest
import torch

import torchgpmc as tg
from tests.problems import gp
from torchgpmc.evidence.smooth_probit import Smoothed, _latents_given, smoothed
from torchgpmc.models.latents import LatentPrior

# Lengthscales from far below the distances between inputs to far above them.
THETA = torch.tensor([[1.0, -5.0, -5.0], [2.0, -2.5, 0.0], [0.5, -2.0, -2.0], [0.0, 1.0, 1.0]], dtype=torch.float64)


def test_what_is_taken_out_and_what_is_left_are_the_whole():
    model = gp("probit", 12)
    prior = model.prior(THETA)
    found = smoothed(prior)
    least = torch.linalg.eigvalsh(prior.covariance)[:, 0]
    assert bool((found.noise[:3].amax(-1) > 0.8 * least[:3]).all()) and float(found.noise[3].amax()) == 0
    root = (1 + found.noise).sqrt()
    whole = root.unsqueeze(-1) * found.prior.covariance * root.unsqueeze(-2) + torch.diag_embed(found.noise)
    torch.testing.assert_close(whole, prior.covariance)
    torch.testing.assert_close(found.prior.factor @ found.prior.factor.mT, found.prior.covariance)


def test_a_theta_does_not_see_its_neighbours():
    estimator = tg.evidence.SmoothProbit(num_importance=4).estimator(gp("probit", 12))
    auxiliary = torch.randn(4, estimator.auxiliary_size, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    together = estimator.evaluate(THETA, auxiliary)
    for row in range(4):
        alone = estimator.evaluate(THETA[row : row + 1], auxiliary[row : row + 1])
        torch.testing.assert_close(alone.value[0], together.value[row], rtol=1e-9, atol=1e-9)
        torch.testing.assert_close(alone.whitened[0], together.whitened[row], rtol=1e-6, atol=1e-8)


def test_what_was_taken_out_is_drawn_given_the_label_as_quadrature_has_it():
    """e given h has the density N(e | 0, d) Phi(s (m + g + e)): its mean, variance and skewness over a lattice of both normals."""
    noise = torch.tensor([[1.0, 0.4, 2.5]], dtype=torch.float64)
    mean = torch.tensor([[0.3, -0.8, 0.1]], dtype=torch.float64)
    root = torch.tensor([[0.9, 0.0, 0.0], [0.3, 0.7, 0.0], [-0.2, 0.4, 1.1]], dtype=torch.float64)  # of h's covariance
    scale = (1 + noise[0]).sqrt()
    covariance = scale[:, None] * (root @ root.mT) * scale + torch.diag(noise[0])
    factor, ok = torch.linalg.cholesky(covariance)[None], torch.ones(1, dtype=torch.bool)
    prior = LatentPrior({}, mean, covariance[None], factor, ok)
    of_h = Smoothed(LatentPrior({}, mean / scale, (root @ root.mT)[None], root[None], ok), noise)
    sign, h = torch.tensor([1.0, -1.0, -1.0], dtype=torch.float64), torch.tensor([0.5, 1.2, -0.7], dtype=torch.float64)
    levels = torch.special.ndtri((torch.arange(400, dtype=torch.float64) + 0.5) / 400)
    first, second = (part.reshape(1, -1, 1).expand(1, -1, 3) for part in torch.meshgrid(levels, levels, indexing="ij"))
    v = _latents_given(prior, of_h, h.expand(1, 160_000, 3), sign, first, second)
    g = scale * (root @ h)
    e = (v @ factor.mT)[0] - g
    nodes = torch.linspace(-12, 12, 20_001, dtype=torch.float64)[:, None]
    density = torch.exp(-0.5 * nodes.square() / noise) * torch.special.ndtr(sign * (mean + g + nodes))
    density = density / density.sum(0)
    centre = (density * nodes).sum(0)
    torch.testing.assert_close(e.mean(0), centre, rtol=0, atol=1e-3)
    for power, tolerance in ((2, 0.01), (3, 0.05)):  # a lattice of 400 levels cuts the tails
        expected = (density * (nodes - centre) ** power).sum(0)
        torch.testing.assert_close((e - centre).pow(power).mean(0), expected, rtol=0, atol=tolerance)


@pytest.mark.slow
def test_precise_where_importance_samples_of_f_are_not():
    model = gp("probit", 60)
    theta = torch.tensor([[2.0, -5.5, -1.0]], dtype=torch.float64).expand(64, -1)
    truth = tg.evidence.classify(model, theta[:1], num_points=20_000).log_evidence

    def error(estimator):
        return float((estimator.draw(theta, torch.Generator().manual_seed(0)).value - truth).square().mean().sqrt())

    for approximation in (tg.Laplace(), tg.EP()):
        smooth = tg.evidence.SmoothProbit(approximation).estimator(model)
        assert error(smooth) < 0.2 * error(tg.evidence.importance(model, approximation))


def test_without_white_noise_it_is_ordinary_importance_sampling():
    model = gp("probit", 12)
    smooth = tg.evidence.SmoothProbit().estimator(model)
    plain = tg.evidence.importance(model)
    auxiliary = torch.randn(1, smooth.auxiliary_size, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    found, expected = smooth.evaluate(THETA[3:], auxiliary), plain.evaluate(THETA[3:], auxiliary[:, :-24])
    for name in found._fields:
        torch.testing.assert_close(getattr(found, name), getattr(expected, name))


def test_a_warm_start_saves_work():
    model = gp("probit", 12)
    estimator = tg.evidence.SmoothProbit(num_importance=64).estimator(model)
    cold = estimator.draw(THETA, torch.Generator().manual_seed(0))
    warm = estimator.draw(THETA, torch.Generator().manual_seed(0), estimator.start_at(THETA * 1.01))
    assert float(warm.num_factorizations.sum()) < float(cold.num_factorizations.sum())
    torch.testing.assert_close(warm.value, cold.value, atol=0.05, rtol=0)


def test_mistakes_are_named():
    options = {"num_samples": 2, "warmup_steps": 2, "num_chains": 2, "progress": False}
    with pytest.raises(ValueError, match="probit"):
        tg.sample(gp("poisson"), tg.PseudoMarginal(evidence=tg.evidence.SmoothProbit()), **options)
    with pytest.raises(ValueError, match="latent_steps"):
        tg.sample(gp("probit"), tg.PseudoMarginal(evidence=tg.evidence.SmoothProbit(), latent_steps=1), **options)
    with pytest.raises(ValueError, match="num_importance"):
        tg.evidence.SmoothProbit(num_importance=0).estimator(gp("probit"))
