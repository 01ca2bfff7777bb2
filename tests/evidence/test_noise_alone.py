"""Evidence of regressions with noise of a latent size, the mean function integrated out."""

import pytest
import torch

import torchgpmc as tg
from tests.problems import generator, gp
from torchgpmc.calls.engines import candidates
from torchgpmc.evidence import noise_alone

THETA = torch.tensor([[-0.7, -0.5, 1.5], [2.0, -2.5, 0.0]], dtype=torch.float64)


def by_grid(model, theta):
    """log p(y | theta) of two data, over all of f_2, by the trapezoidal rule in white coordinates; f_1 by autograd's own normal."""
    prior = model.prior(theta[None])
    axis = torch.linspace(-9, 9, 361, dtype=torch.float64)
    white = torch.cartesian_prod(axis, axis)
    deviation = model.likelihood.scale * (prior.mean + white @ prior.factor[0].T).exp()
    covariance = prior.covariance + torch.diag_embed(deviation.square())
    logs = torch.distributions.MultivariateNormal(prior.mean, covariance).log_prob(model.train_y)
    return torch.logsumexp(logs + torch.log_softmax(-0.5 * white.square().sum(-1), 0), 0)


def test_the_mean_of_many_estimates_is_the_integral():
    # 4000 x 20 draws; a part of the mixture without its density, or its determinant, is off by tens of errors.
    model = gp("heteroskedastic", 2)
    for theta in THETA:
        found = tg.evidence.NoiseAlone(20).estimator(model).draw(theta.expand(4000, -1), generator(1))
        error = float(found.value.exp().std() / found.value.exp().mean() / 4000**0.5)
        assert error < 3e-3
        assert abs(float(torch.logsumexp(found.value, 0)) - torch.tensor(4000.0).log() - float(by_grid(model, theta))) < 5 * error


def test_a_fixed_estimate_does_not_depend_on_the_search(monkeypatch):
    # Wherever draws come from, their weights have the evidence for their mean: two searches, many draws, one answer.
    model = gp("heteroskedastic", 2)
    monkeypatch.setattr(noise_alone, "_MOST_STEPS", 1)
    found = tg.evidence.NoiseAlone(40_000).estimator(model).draw(THETA, generator(2))
    for theta, value, variance in zip(THETA, found.value, found.variance, strict=True):
        assert abs(float(value - by_grid(model, theta))) < 5 * float(variance.sqrt()) < 0.1


def test_the_mean_function_is_drawn_from_its_normal_density():
    model = gp("heteroskedastic", 5)
    prior = model.prior(THETA)
    problem = tg.evidence.NoiseAlone().estimator(model)._problem(prior)
    centred = torch.randn(2, 5, generator=generator(), dtype=torch.float64)
    noise = noise_alone._noise(problem, centred)
    deviation = noise.variance.sqrt()

    def drawn(normals):
        return torch.func.vmap(lambda pair: noise_alone._mean_given(problem, noise, pair.expand(2, 2, 5)))(normals)

    unit = torch.eye(10, dtype=torch.float64).view(10, 2, 5)
    middle = drawn(torch.zeros_like(unit))[0]
    linear = (drawn(unit) - middle).permute(1, 2, 0)
    precision = torch.eye(5) + prior.factor.mT @ (deviation**-2).diag_embed() @ prior.factor
    torch.testing.assert_close(linear @ linear.mT, torch.linalg.inv(precision))
    right = prior.factor.mT @ ((model.train_y - prior.mean) / deviation.square()).unsqueeze(-1)
    torch.testing.assert_close(middle, torch.linalg.solve(precision, right).squeeze(-1))


def test_a_theta_does_not_see_its_neighbours_and_a_start_saves_work(monkeypatch):
    monkeypatch.setattr(noise_alone, "even_slices", lambda count, *_: [slice(0, count)])  # not a theta a core: they are neighbours
    estimator = tg.evidence.NoiseAlone(16).estimator(gp("heteroskedastic", 12))
    auxiliary = torch.randn(2, estimator.auxiliary_size + 24, generator=generator(), dtype=torch.float64)
    together = estimator.evaluate(THETA, auxiliary)
    assert together.further_whitened.shape == (2, 1, 24) and bool(together.converged.all())
    for row in range(2):
        alone = estimator.evaluate(THETA[row : row + 1], auxiliary[row : row + 1])
        # Of two thetas and of one, products in single precision are rounded otherwise; a neighbour would show in the first digits.
        torch.testing.assert_close(alone.value[0], together.value[row], rtol=0, atol=1e-4)
        torch.testing.assert_close(alone.whitened[0], together.whitened[row], rtol=0, atol=1e-4)
    begun = estimator.evaluate(THETA, auxiliary, estimator.start_at(THETA))
    torch.testing.assert_close(begun.value, together.value, atol=1e-2, rtol=0)
    assert float(begun.num_factorizations.sum()) < float(together.num_factorizations.sum())


def test_modes_are_looked_for_in_single_precision_unless_rounding_shows():
    model = gp("heteroskedastic", 12)
    problem = tg.evidence.NoiseAlone().estimator(model)._problem(model.prior(THETA))
    # Deviations of a thousand beside the same noise.
    rough = problem._replace(covariance=problem.covariance.clone(), factor=problem.factor.clone())
    rough.covariance[1] *= 1e6
    rough.factor[1] *= 1e3
    start = torch.zeros_like(problem.mean)
    for begin in (None, start):
        found, exact = noise_alone._mode(rough, begin)[0], noise_alone._searched(rough, begin)[0]
        torch.testing.assert_close(found.white[0], exact.white[0], rtol=0, atol=1e-3)
        torch.testing.assert_close(found.precision[0], exact.precision[0], rtol=1e-3, atol=1e-3)
        assert not torch.equal(found.white[0], exact.white[0])
        assert all(map(torch.equal, (part[1] for part in found), (part[1] for part in exact)))
    found, converged, _ = noise_alone._mode(problem._replace(covariance=-problem.covariance), None)
    assert not bool(converged.any()) and found.white.dtype == torch.float64  # nothing factorises, in double neither


def test_the_default_call_begins_with_it():
    # NUTS on [theta, v] had no answer within 40 CPU seconds; this takes half a second of six data.
    first = candidates(gp("heteroskedastic"))[0]
    assert isinstance(first.method.evidence, tg.evidence.NoiseAlone) and first.method.begin == tg.AtPrior()


def test_mistakes_are_named():
    with pytest.raises(ValueError, match="HeteroskedasticGaussian"):
        tg.evidence.NoiseAlone().estimator(gp("student_t"))
    with pytest.raises(ValueError, match="num_importance"):
        tg.evidence.NoiseAlone(9).estimator(gp("heteroskedastic"))
    with pytest.raises(ValueError, match="latent_steps"):
        tg.evidence.NoiseAlone().estimator(gp("heteroskedastic")).move(THETA, None, 1, generator())
