"""Evidence of models whose inducing values one normal density may not hold."""

import math

import pytest
import torch

import torchgpmc as tg
from tests.problems import generator, gp, kernel, projected_process, sparse_gp
from torchgpmc.approximations.nearest_normal import nearest_normal
from torchgpmc.calls.engines import candidates
from torchgpmc.evidence import defended

THETA = {
    "student_t": torch.tensor([[0.7, -0.5, -1.5, 1.0, -1.0]], dtype=torch.float64),
    "robust_max": torch.tensor([[0.9, -0.5, -1.5]], dtype=torch.float64),
}
PROJECTED = torch.tensor([[0.7, -0.5, -1.5]], dtype=torch.float64)


def two_classes():
    """Two functions at one inducing point."""
    x = torch.tensor([[0.1, 0.2], [0.4, 0.9], [0.3, 0.3]], dtype=torch.float64)
    likelihood = tg.likelihoods.RobustMax(num_classes=2, epsilon=0.01)
    return tg.SparseGP(x, torch.tensor([0.0, 1.0, 0.0]), kernel(), likelihood, inducing_points=x[:1])


def two_classes_of_softmax():
    """The same, searches for whose normal density take expectations over a few points."""
    x = torch.tensor([[0.1, 0.2], [0.4, 0.9], [0.3, 0.3], [0.35, 0.3]], dtype=torch.float64)
    likelihood = tg.likelihoods.Softmax(num_classes=2)
    return tg.SparseGP(x, torch.tensor([0.0, 1.0, 0.0, 0.0]), kernel(), likelihood, inducing_points=x[:1])


MODELS = {
    "expectations by points, two functions": lambda: (two_classes_of_softmax(), THETA["robust_max"]),
    "expectations, one function": lambda: (sparse_gp("student_t", num_inducing=2), THETA["student_t"]),
    "expectations, two functions": lambda: (two_classes(), THETA["robust_max"]),
    "a function of inducing values": lambda: (projected_process("probit", num_inducing=2), PROJECTED),
}


def by_grid(model, theta):
    """log of the integral over two numbers in v."""
    axis = torch.linspace(-9, 9, 121, dtype=torch.float64)
    v = torch.cartesian_prod(axis, axis)
    logs = torch.cat([model.log_likelihood(model.at(model.prior(theta.expand(len(part), -1))), part) for part in v.split(2000)])
    return torch.logsumexp(logs + torch.log_softmax(-0.5 * v.square().sum(-1), 0), 0).detach()


@pytest.mark.parametrize("name", MODELS)
def test_the_mean_of_many_estimates_is_the_integral(name):
    model, theta = MODELS[name]()
    found = tg.evidence.InducingMixture(1000).estimator(model).draw(theta.expand(20, -1), generator(1))
    assert bool(found.converged.all())
    error = float(found.value.exp().std() / found.value.exp().mean() / 20**0.5)
    assert error < 0.01
    assert abs(float(torch.logsumexp(found.value, 0)) - math.log(20) - float(by_grid(model, theta))) < 5 * error


def test_draws_have_the_density_that_they_are_weighed_by():
    # The integral of exp(-|w - 1|^2) over the mixture's own draws; a part without its share or determinant is off by a tenth.
    centre, precision = torch.tensor([[1.0, 0.5]]).double(), torch.tensor([[[9.0, 2.0], [2.0, 4.0]]]).double()
    white, log_ratio = defended.defended_draws(centre, precision, torch.randn(1, 40_000, 2, generator=generator()).double())
    prior = -0.5 * white.square().sum(-1) - math.log(2 * math.pi)
    value, variance = defended.mean_weight(-(white - 1).square().sum(-1) - prior - log_ratio)
    assert abs(float(value) - math.log(math.pi)) < 5 * float(variance.sqrt()) < 0.05


def test_the_prior_stands_in_for_what_cannot_be_drawn_from():
    noise = torch.randn(2, 20, 2, generator=generator()).double()
    precision = torch.stack([torch.full((2, 2), math.nan), -torch.eye(2)]).double()
    white, log_ratio = defended.defended_draws(torch.ones(2, 2).double(), precision, noise)
    torch.testing.assert_close(white, noise)
    torch.testing.assert_close(log_ratio, torch.zeros_like(log_ratio))


def test_a_theta_does_not_see_its_neighbours_and_a_start_saves_work():
    model, theta = sparse_gp("robust_max"), torch.tensor([[0.9, -0.5, -1.5], [2.0, -2.0, 0.0]], dtype=torch.float64)
    estimator = tg.evidence.InducingMixture(16).estimator(model)
    auxiliary = torch.randn(2, estimator.auxiliary_size, generator=generator(), dtype=torch.float64)
    together = estimator.evaluate(theta, auxiliary, num_latents=2)
    assert together.further_whitened.shape == (2, 1, model.latent_size)
    alone = estimator.evaluate(theta[1:], auxiliary[1:])
    torch.testing.assert_close(alone.value[0], together.value[1], rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(alone.whitened[0], together.whitened[1], rtol=1e-6, atol=1e-8)
    begun = estimator.evaluate(theta, auxiliary, estimator.start_at(theta))
    assert float(begun.num_factorizations.sum()) < float(together.num_factorizations.sum())


def test_expectations_over_few_points_find_nearly_the_nearest_normal():
    model = sparse_gp("softmax")
    at = model.at(model.prior(torch.tensor([[2.0, -0.5, -1.0]], dtype=torch.float64)))
    exact = nearest_normal(model, at, model.targets)
    rough = nearest_normal(model, at, model.targets, tolerance=0.1, roughly=True)
    assert bool(rough.converged.all())
    for found, expected in ((rough, exact), (exact, exact)):
        gap = (found.latents.mean - expected.latents.mean).unsqueeze(-1)
        assert float(torch.linalg.solve_triangular(expected.latents.scale, gap, upper=False).norm()) < 0.5
        widths = torch.linalg.svdvals(torch.linalg.solve_triangular(expected.latents.scale, found.latents.scale, upper=False))
        assert 0.8 < float(widths.min()) <= float(widths.max()) < 1.25


def test_integrals_of_many_classes_count_among_operations():
    x = torch.rand(20, 2, generator=generator())
    likelihood = tg.likelihoods.Softmax(num_classes=5)
    model = tg.SparseGP(x, torch.arange(20) % 5, kernel(), likelihood, inducing_points=x[:3])
    labels = tg.SparseGP(x, torch.arange(20) % 2, kernel(), tg.likelihoods.Bernoulli(), inducing_points=x[:3])
    assert model.operations == labels.operations + 20 * model.likelihood.expectation_operations > 2 * labels.operations


@pytest.mark.filterwarnings("ignore::torchgpmc.SamplingWarning")  # of so few draws
@pytest.mark.parametrize("name", ["robust_max", "student_t", "projected"])
def test_the_default_call_begins_with_it(name):
    # A projected process of 20 labels took 20 CPU seconds by chains around a fit, and takes half a second.
    model = projected_process() if name == "projected" else sparse_gp(name)
    first = candidates(model)[0]
    assert isinstance(first.method.evidence, tg.evidence.InducingMixture)
    posterior = tg.sample(model, first.method, num_samples=40, seed=0, progress=False)
    assert bool(torch.isfinite(posterior.log_weights).any())


def test_mistakes_are_named():
    with pytest.raises(ValueError, match="SparseGP or a ProjectedProcess"):
        tg.evidence.InducingMixture().estimator(gp("student_t"))
    with pytest.raises(ValueError, match="num_importance"):
        tg.evidence.InducingMixture(9).estimator(sparse_gp("student_t"))
    with pytest.raises(ValueError, match="one normal density"):  # a search for modes still needs one
        tg.sample(sparse_gp("robust_max"), tg.AMIS(evidence=tg.evidence.InducingMixture()), num_samples=10, progress=False)
