"""A trial of the contract for models: FITC in thirty lines, taken by every engine that its capabilities allow."""

import pytest
import torch
from gpytorch.kernels import RBFKernel
from gpytorch.priors import GammaPrior

import torchgpmc as tg
from tests.speed import quick
from tests.test_conformance import METHODS, NEED_START, OF_CLASSES, OF_LATENTS, WEIGHTED, quiet_sample
from torchgpmc.models import GPModel
from torchgpmc.models.latents import Cross
from torchgpmc.numerics.linalg import cholesky, solve_lower


class FITC(GPModel):
    """f = m + Q^1/2 a + (K - Q)_nn^1/2 e, Q = K_fz K_zz^-1 K_zf: a residual a datum (Snelson & Ghahramani 2006)."""

    def __init__(self, train_x, train_y, kernel, likelihood, *, inducing_points, **options):
        super().__init__(train_x, train_y, kernel, likelihood, extra_inputs={"inducing_points": inducing_points}, **options)

    def _root(self, values, inputs):
        """R with Q(inputs, inputs') = R' R' ``(C, M, N)``, and whether K_zz was factorised."""
        z = self.inducing_points
        inner = self.covariance.bind(z, z)(values) + self.jitter * torch.eye(len(z)).to(z)
        factor, ok = cholesky(inner)
        return solve_lower(factor, self.covariance.bind(z, inputs)(values)), ok

    def prior_at(self, hyperparameters, inputs=None):
        values, count = hyperparameters
        root, ok = self._root(values["kernel"], self.train_x)
        explained = root.mT @ root
        rest = self.covariance.diagonal(values["kernel"], self.train_x) - explained.diagonal(dim1=-2, dim2=-1) + self.jitter
        mean = self.mean_function(values["mean"], self.train_x, count)
        prior = self._factorised(values, mean, (explained + torch.diag_embed(rest)).expand(count, -1, -1))
        return prior._replace(ok=prior.ok & ok)

    def cross(self, prior, inputs):
        values, count = prior.values["kernel"], len(prior.ok)
        covariance = self._root(values, self.train_x)[0].mT @ self._root(values, inputs)[0]
        mean = self.mean_function(prior.values["mean"], inputs, count)
        return Cross(mean, covariance.expand(count, -1, -1), self.covariance.diagonal(values, inputs).expand(count, -1))


def model_of(kind, **options):
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(6, 1, generator=generator, dtype=torch.float64)
    kernel = RBFKernel(lengthscale_prior=GammaPrior(2.0, 4.0))
    return kind(x, (x[:, 0] > 0.5).int(), kernel, tg.likelihoods.Bernoulli(), **options)


QUICK = ["HMC", "ChEES", "AdaptiveMH", "EllipticalSlice", "PCN", "Gibbs", "PseudoMarginal"]


@pytest.mark.parametrize("method", quick(QUICK, [name for name in METHODS if name not in (*NEED_START, *OF_CLASSES)]))
def test_every_method_takes_it(method):
    model = model_of(FITC, inducing_points=torch.tensor([[0.2], [0.8]]))
    if method in OF_LATENTS:
        model.kernel.requires_grad_(False)
    options = {} if method not in WEIGHTED else {"warmup_steps": None, "num_chains": None, "num_samples": 100}
    posterior = quiet_sample(model, METHODS[method], **options)
    assert posterior.latents.shape[-1] == 6
    assert bool(torch.isfinite(posterior.predict(torch.rand(3, 1)).log_prob(torch.ones(3))).all())


@pytest.mark.parametrize("method", NEED_START)
def test_minibatches_are_refused_where_every_datum_has_a_latent(method):
    model = model_of(FITC, inducing_points=torch.tensor([[0.2], [0.8]]))
    with pytest.raises(ValueError, match="FITC with Bernoulli has a latent for every datum"):
        tg.sample(model, METHODS[method], num_samples=10, progress=False)


@pytest.mark.slow
@pytest.mark.parametrize("method", [tg.NUTS(whitening=tg.Laplace()), tg.NUTS(marginal=tg.Laplace())], ids=["white", "marginal"])
def test_so_do_white_coordinates_and_marginals(method):
    posterior = quiet_sample(model_of(FITC, inducing_points=torch.tensor([[0.2], [0.8]])), method)
    assert bool(torch.isfinite(posterior.theta).all())


def test_with_inducing_points_at_the_data_it_is_the_full_gp():
    full = model_of(tg.GP, jitter=1e-8)
    same = model_of(FITC, inducing_points=full.train_x, jitter=1e-8)
    position = 0.3 * torch.randn(3, 7, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    found, expected = (tg.joint_log_density(model).value_and_grad(position) for model in (same, full))
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)
    evidences = [tg.approximations.laplace(model, position[:, :1]).log_evidence for model in (same, full)]
    torch.testing.assert_close(*evidences, rtol=1e-5, atol=1e-5)


def test_it_is_refused_with_a_true_sentence_where_f_at_the_data_is_no_latent():
    sparse = model_of(tg.SparseGP, inducing_points=torch.tensor([[0.2], [0.8]]))
    with pytest.raises(ValueError, match="f at the data, which is not a latent of SparseGP"):
        tg.sample(sparse, tg.NUTS(marginal=tg.Laplace()), num_samples=10, progress=False)
