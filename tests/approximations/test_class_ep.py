"""Sites of several classes against dense algebra, and expectation propagation for them where the answer is known."""

import math

import pytest
import torch
from gpytorch.kernels import RBFKernel, ScaleKernel
from gpytorch.priors import GammaPrior, NormalPrior

import torchgpmc as tg
from tests.approximations.reference import evidence_by_quadrature
from tests.problems import gp, inputs, kernel
from torchgpmc.approximations import class_ep
from torchgpmc.approximations.class_sites import (
    class_marginals,
    class_mean,
    class_precision,
    differences,
    under_class_sites,
    weights_of_diagonal,
)
from torchgpmc.approximations.gaussian_form import problem_of, without_graph
from torchgpmc.evidence.gaussian_draws import draws_around
from torchgpmc.runs.run import Settings


def normals(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def softmax(num_data, num_classes=3, **options):
    likelihood = tg.likelihoods.Softmax(num_classes=num_classes, mixing_weights=False)
    return tg.GP(inputs(num_data), torch.arange(num_data) % num_classes, kernel(), likelihood, jitter=1e-4, **options)


def dense(weight, covariance):
    """I kron K, and W of stacked functions, ``(V, V)``, at one theta."""
    classes, size = weight.shape
    blocks = class_precision(weight[None])[0]  # (N, K, K)
    whole = torch.zeros(classes, size, classes, size, dtype=torch.float64)
    rows = torch.arange(size)
    whole[:, rows, :, rows] = blocks
    return torch.block_diag(*[covariance] * classes), whole.view(classes * size, -1)


@pytest.mark.parametrize("classes", [2, 3, 5])
def test_the_algebra_of_sites_is_that_of_dense_matrices(classes):
    root = normals(2, 4, 4)
    covariance = root @ root.mT + 0.1 * torch.eye(4, dtype=torch.float64)
    weight = 3 * normals(2, classes, 4, seed=1).square() + 1e-3
    shift = normals(2, classes, 4, seed=2)
    shift = shift - shift.mean(1, keepdim=True)
    under = under_class_sites(covariance, weight)
    alpha, centred = class_mean(covariance, under, shift)
    basis = differences(classes, shift)
    marginals = class_marginals(under, basis)
    for row in range(2):
        prior, precision = dense(weight[row], covariance[row])
        posterior = torch.linalg.inv(torch.linalg.inv(prior) + precision)
        determinant = torch.linalg.slogdet(torch.eye(len(prior), dtype=torch.float64) + prior @ precision).logabsdet
        torch.testing.assert_close(under.log_determinant[row], determinant)
        mean = posterior @ shift[row].flatten()
        torch.testing.assert_close(centred[row].flatten(), mean)
        torch.testing.assert_close((prior @ alpha[row].flatten()), mean)
        own = posterior.view(classes, 4, classes, 4).diagonal(dim1=1, dim2=3).permute(2, 0, 1)
        torch.testing.assert_close(marginals[row], basis @ own @ basis.T)


def test_a_matrix_that_cannot_be_inverted_is_a_value():
    covariance = torch.stack([torch.eye(3), -torch.eye(3)]).double()  # I + D^1/2 K D^1/2 of the second is zero
    assert under_class_sites(covariance, torch.ones(2, 3, 3).double()).ok.tolist() == [True, False]


@pytest.mark.parametrize("classes", [2, 3, 6])
def test_weights_have_the_diagonal_they_are_made_from(classes):
    weight = normals(4, classes, 7).exp()
    diagonal = class_precision(weight).diagonal(dim1=-2, dim2=-1).mT
    again = class_precision(weights_of_diagonal(diagonal)).diagonal(dim1=-2, dim2=-1).mT
    torch.testing.assert_close(again, diagonal, rtol=0.02, atol=0)


def test_draws_have_the_covariance_of_the_sites():
    # Draws are linear in their normals, so those of all unit vectors make up the covariance.
    model = softmax(3)
    theta = 0.5 * normals(1, model.layout.size)
    prior = model.prior(theta)
    found = tg.approximations.ClassEP().importance_density(model, prior)
    size = model.latent_size
    unit = torch.eye(2 * size, dtype=torch.float64).view(1, 2 * size, 2, size).transpose(1, 2)
    delta = draws_around(prior, without_graph(problem_of(model, prior, None)), found, unit).delta[0]
    whole, precision = dense(found.weight[0], prior.covariance[0].detach())
    torch.testing.assert_close(delta.T @ delta, torch.linalg.inv(torch.linalg.inv(whole) + precision))


def test_one_datum_has_its_posterior_mean_and_nearly_its_covariance():
    model = softmax(1)
    theta = 0.6 * normals(3, model.layout.size)
    found = tg.approximations.ClassEP(tolerance=1e-6).importance_density(model, model.prior(theta))
    _, mean, covariance = evidence_by_quadrature(model, theta)
    assert bool(found.converged.all())
    basis = differences(3, mean)
    # The points are few: a mean of 1.1 comes to 1.13.
    torch.testing.assert_close(found.mean @ basis.T, mean @ basis.T, atol=0.05, rtol=0)
    ours = class_marginals(found.under, basis)[:, 0]
    torch.testing.assert_close(ours, basis @ covariance @ basis.T, atol=0.03, rtol=0.05)


def far_apart(num_data, outputscale):
    base = RBFKernel()
    base.raw_lengthscale.requires_grad_(False)
    prior = NormalPrior(0.0, 1.0)
    likelihood = tg.likelihoods.Softmax(num_classes=3, mixing_weights=False)
    x = 100 * torch.arange(num_data, dtype=torch.float64)
    model = tg.GP(x, torch.arange(num_data) % 3, ScaleKernel(base, outputscale_prior=prior), likelihood)
    return model, torch.full((8, 1), math.log(outputscale), dtype=torch.float64)


@pytest.mark.parametrize("outputscale", [1.0, 30.0])
def test_where_f_is_white_noise_each_of_three_classes_has_a_third(outputscale):
    # Laplace's estimates are 0.8 nats low of 12 labels at 30: all of them, so nothing shows.
    model, theta = far_apart(12, outputscale)
    estimator = tg.evidence.importance(model, tg.approximations.ClassEP(), num_importance=1024)
    value = estimator.draw(theta, torch.Generator().manual_seed(0)).value
    torch.testing.assert_close(value.exp().mean().log(), torch.tensor(-12 * math.log(3.0), dtype=torch.float64), atol=0.05, rtol=0)


def six_clusters(num_data):
    """Inputs around a centre for each of six classes, which overlap."""
    classes = torch.arange(num_data) % 6
    generator = torch.Generator().manual_seed(0)
    x, centres = (torch.randn(size, 2, generator=generator, dtype=torch.float64) for size in (num_data, 6))
    kernel = ScaleKernel(RBFKernel(lengthscale_prior=NormalPrior(0.0, 1.0)), outputscale_prior=NormalPrior(0.0, 1.0))
    likelihood = tg.likelihoods.Softmax(num_classes=6, mixing_weights=False)
    return tg.GP(x + 1.2 * centres[classes], classes, kernel, likelihood)


def test_sites_that_cannot_be_matched_end_where_they_were_nearest(monkeypatch):
    model, theta = six_clusters(60), torch.tensor([[3.5, 0.7], [3.5, 0.0], [4.0, 0.5], [1.0, 0.5]], dtype=torch.float64)
    prior, seen = model.prior(theta), []
    sweep = class_ep._sweep

    def noted(problem, state, rule, tolerance):
        found = sweep(problem, state, rule, tolerance)
        seen.append(found[0].mismatch)
        return found

    monkeypatch.setattr(class_ep, "_sweep", noted)
    for row in range(len(theta)):
        seen.clear()
        one = model.prior(theta[row : row + 1])
        found = tg.approximations.ClassEP().importance_density(model, one)
        history = torch.cat(seen)
        assert len(history) <= 12  # one that wandered off took all fifty
        assert float(history[-1]) == pytest.approx(float(history.min()))
        torch.testing.assert_close(found.mean, tg.approximations.ClassEP().importance_density(model, prior).mean[row : row + 1])


@pytest.mark.parametrize("evidence", [tg.approximations.ClassEP(max_iterations=4), tg.Laplace()])
def test_sites_that_cannot_be_matched_miss_no_part_of_the_evidence(evidence):
    # Sites that wandered off had all estimates of such labels 3 nats low, of 183 in six classes 9, and they looked even.
    model, theta = six_clusters(60), torch.tensor([[3.5, 0.7]], dtype=torch.float64)
    repeated = theta.expand(8, -1)
    few = tg.evidence.importance(model, tg.approximations.ClassEP(), num_importance=64)
    many = tg.evidence.importance(model, evidence, num_importance=1024)
    values = [estimator.draw(repeated, torch.Generator().manual_seed(0)).value for estimator in (few, many)]
    ours, theirs = (torch.logsumexp(value, 0) - math.log(8) for value in values)
    assert abs(float(ours - theirs)) < 1.5


def test_other_likelihoods_are_refused():
    model = gp("probit", 4)
    with pytest.raises(ValueError, match="differences"):
        tg.approximations.ClassEP().importance_density(model, model.prior(torch.zeros(1, model.layout.size, dtype=torch.float64)))
    mixed = tg.likelihoods.Softmax(num_classes=3, num_features=2, mixing_weights_prior=NormalPrior(0.0, 1.0))
    model = tg.GP(inputs(3), torch.arange(3), RBFKernel(lengthscale_prior=GammaPrior(2.0, 1.0)), mixed)
    with pytest.raises(ValueError, match="mixing weights"):
        tg.sample(model, tg.AMIS(approximation=tg.approximations.ClassEP()), num_samples=10, progress=False)


@pytest.mark.parametrize(
    "method", [tg.NUTS(marginal=tg.approximations.ClassEP()), tg.PseudoMarginal(approximation=tg.approximations.ClassEP())]
)
def test_methods_that_need_its_evidence_say_so(method):
    with pytest.raises(ValueError, match="no evidence"):
        tg.sample(softmax(4), method, num_samples=4, warmup_steps=4, num_chains=2, progress=False)


def test_annealing_cannot_begin_at_it():
    with pytest.raises(ValueError, match="annealed"):
        tg.evidence.annealed(softmax(4), tg.approximations.ClassEP())


@pytest.mark.parametrize("method", [tg.AMIS, tg.PseudoMarginal])
def test_one_latent_function_is_refused_before_a_run_begins(method):
    settings = Settings(10, None, None, None)
    with pytest.raises(ValueError, match=r"ClassEP\(\) is for .* Expected Softmax"):
        method(approximation=tg.approximations.ClassEP()).prepare(gp("probit"), settings)
