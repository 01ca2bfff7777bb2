"""Models of gpytorch scripts, converted: the same prior and posterior; what has no counterpart is refused in a sentence."""

import gpytorch
import pytest
import torch
from gpytorch.kernels import RBFKernel, ScaleKernel
from gpytorch.likelihoods import GaussianLikelihood
from gpytorch.priors import GammaPrior, NormalPrior

import torchgpmc as tg
from tests.problems import inputs
from torchgpmc.approximations import Conjugate

X = inputs(8)
Y = torch.sin(3 * X[:, 0])


class Exact(gpytorch.models.ExactGP):
    def __init__(self, likelihood, with_priors=True, features=None):
        super().__init__(X, Y, likelihood)
        priors = {"lengthscale_prior": GammaPrior(2.0, 2.0)} if with_priors else {}
        self.mean_module = gpytorch.means.ConstantMean(constant_prior=NormalPrior(0.0, 1.0) if with_priors else None)
        self.covar_module = ScaleKernel(RBFKernel(**priors), outputscale_prior=GammaPrior(2.0, 1.0) if with_priors else None)
        self.features = features
        self.double()

    def forward(self, x):
        x = x if self.features is None else self.features(x)
        return gpytorch.distributions.MultivariateNormal(self.mean_module(x), self.covar_module(x))


def noise(with_prior=True):
    return GaussianLikelihood(noise_prior=GammaPrior(1.1, 5.0) if with_prior else None).double()


def test_an_exact_model_keeps_its_trained_values_and_evidence():
    likelihood = noise()
    trained = Exact(likelihood)
    trained.covar_module.outputscale, trained.covar_module.base_kernel.lengthscale, likelihood.noise = 1.7, 0.4, 0.2
    trained.mean_module.constant.data.fill_(0.3)
    model = tg.from_gpytorch(trained, likelihood)
    assert isinstance(model, tg.GPRegression)
    prior = model.prior(model.layout.present(model))
    theirs = likelihood(trained.forward(X)).log_prob(Y)
    torch.testing.assert_close(Conjugate().evidence(model, prior).log_evidence[0], theirs, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(float(trained.covar_module.outputscale), 1.7)  # the original is left alone
    other = tg.from_gpytorch(trained, likelihood, X[:5], Y[:5].numpy())
    assert len(other.train_x) == 5


def test_all_missing_priors_are_listed_at_once():
    likelihood = noise(False)
    with pytest.raises(ValueError, match=r"(?s)4 parameters have no prior.*outputscale.*lengthscale.*constant.*noise") as caught:
        tg.from_gpytorch(Exact(likelihood, with_priors=False), likelihood)
    assert "noise_prior=gpytorch.priors.GammaPrior(1.1, 10.0), or likelihood.noise_covar.raw_noise.req" in str(caught.value)


def test_several_outputs_are_refused_as_such():
    likelihood = gpytorch.likelihoods.MultitaskGaussianLikelihood(num_tasks=2)
    several = Exact(likelihood)
    several.set_train_data(targets=torch.stack([Y, Y], 1), strict=False)
    with pytest.raises(ValueError, match=r"Exact has several outputs: .* targets of shape \(8, 2\).*one by one"):
        tg.from_gpytorch(several, likelihood)


def test_a_forward_that_does_more_is_refused():
    likelihood = noise()
    with pytest.raises(ValueError, match=r"forward gives is not that of.*GPRegression\(features\(x\), y"):
        tg.from_gpytorch(Exact(likelihood, features=torch.nn.Linear(2, 2).double()), likelihood)


class Approximate(gpytorch.models.ApproximateGP):
    def __init__(self):
        q = gpytorch.variational.CholeskyVariationalDistribution(4)
        super().__init__(gpytorch.variational.VariationalStrategy(self, X[:4].clone(), q))
        self.mean_module = gpytorch.means.ZeroMean()
        self.covar_module = RBFKernel(lengthscale_prior=GammaPrior(2.0, 2.0))
        self.double()

    def forward(self, x):
        return gpytorch.distributions.MultivariateNormal(self.mean_module(x), self.covar_module(x))


def test_an_approximate_model_keeps_its_inducing_points():
    model = tg.from_gpytorch(Approximate(), tg.likelihoods.Bernoulli(), X, Y > 0)
    assert isinstance(model, tg.SparseGP)
    assert torch.equal(model.inducing_points, X[:4])
    with pytest.raises(ValueError, match="does not hold its data"):
        tg.from_gpytorch(Approximate(), tg.likelihoods.Bernoulli())


def test_what_is_no_model_is_refused_and_sample_names_the_conversion():
    with pytest.raises(TypeError, match=r"Expected a gpytorch.models.ExactGP or ApproximateGP"):
        tg.from_gpytorch(RBFKernel(), noise())
    with pytest.raises(TypeError, match=r"Convert it: torchgpmc.from_gpytorch\(model, likelihood, x, y\)"):
        tg.sample(Exact(noise()), tg.NUTS())
