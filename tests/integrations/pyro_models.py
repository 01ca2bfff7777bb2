"""The Pyro models that tests and benchmarks share; float64, so that rounding hides nothing."""

import pyro
import pyro.distributions as dist
import torch
from gpytorch.kernels import PeriodicKernel, RBFKernel, ScaleKernel
from gpytorch.means import ConstantMean
from gpytorch.priors import GammaPrior, NormalPrior

from torchgpmc.integrations.pyro import GP

F64 = torch.float64
ZERO = torch.zeros((), dtype=F64)


def numbers(*shape, seed=0):
    return torch.randn(*shape, dtype=F64, generator=torch.Generator().manual_seed(seed))


def binary_data(num_data, num_columns=2, seed=0):
    x = numbers(num_data, num_columns, seed=seed)
    return x, (x.sum(-1) + 0.5 * numbers(num_data, seed=seed + 1) > 0).double()


def eight_schools(y=None):
    mean = pyro.sample("mean", dist.Normal(ZERO, 10.0))
    spread = pyro.sample("spread", dist.HalfCauchy(ZERO + 5.0))
    with pyro.plate("schools", 8):
        away = pyro.sample("away", dist.Normal(ZERO, 1.0))
        errors = torch.tensor([15.0, 10.0, 16.0, 11.0, 9.0, 11.0, 10.0, 18.0], dtype=F64)
        pyro.sample("y", dist.Normal(mean + spread * away, errors), obs=y)


SCHOOLS = (torch.tensor([28.0, 8.0, -3.0, 7.0, -1.0, 1.0, 18.0, 12.0], dtype=F64),)


def logistic(x, y=None):
    slopes = pyro.sample("slopes", dist.Normal(torch.zeros(x.shape[1], dtype=F64), 1.0).to_event(1))
    level = pyro.sample("level", dist.Normal(ZERO, 10.0))
    with pyro.plate("data", len(x)):
        pyro.sample("y", dist.Bernoulli(logits=x @ slopes + level), obs=y)


def written_out_gp(x, y=None):
    lengthscale = pyro.sample("lengthscale", dist.Gamma(ZERO + 2.0, 2.0))
    scale = pyro.sample("scale", dist.Gamma(ZERO + 2.0, 1.0))
    square = (x[:, None] - x[None]).square().sum(-1)
    covariance = scale * torch.exp(-0.5 * square / lengthscale**2) + 1e-6 * torch.eye(len(x), dtype=F64)
    v = pyro.sample("v", dist.Normal(torch.zeros(len(x), dtype=F64), 1.0).to_event(1))
    with pyro.plate("data", len(x)):
        pyro.sample("y", dist.Bernoulli(logits=torch.linalg.cholesky(covariance) @ v), obs=y)


def shares_and_correlations(y, z):
    shares = pyro.sample("shares", dist.Dirichlet(torch.tensor([1.0, 2.0, 3.0], dtype=F64)))
    factor = pyro.sample("factor", dist.LKJCholesky(3, ZERO + 2.0))
    scale = pyro.sample("scale", dist.HalfNormal(torch.ones(3, dtype=F64)).to_event(1))
    with pyro.plate("labels", len(y)):
        pyro.sample("y", dist.Categorical(probs=shares), obs=y)
    with pyro.plate("vectors", len(z)):
        pyro.sample("z", dist.MultivariateNormal(torch.zeros(3, dtype=F64), scale_tril=scale[:, None] * factor), obs=z)


SHARES = torch.arange(12) % 3, numbers(15, 3)


def scaled_rbf(num_columns=2):
    base = RBFKernel(ard_num_dims=num_columns, lengthscale_prior=GammaPrior(2.0, 2.0))
    return ScaleKernel(base, outputscale_prior=GammaPrior(2.0, 1.0))


def one_lengthscale():
    """The kernel of :func:`written_out_gp`."""
    return ScaleKernel(RBFKernel(lengthscale_prior=GammaPrior(2.0, 2.0)), outputscale_prior=GammaPrior(2.0, 1.0))


def sum_of_kernels():
    """A kernel without a closed form here, some parameters fixed."""
    periodic = PeriodicKernel(lengthscale_prior=GammaPrior(2.0, 2.0))
    periodic.raw_period_length.requires_grad_(False)
    return scaled_rbf() + periodic


def gp_model(site):
    """A classifier on a GP made beforehand; of f at ``x_new`` too."""

    def model(y=None, x_new=None):
        f = site()
        with pyro.plate("data", len(f)):
            pyro.sample("y", dist.Bernoulli(logits=f), obs=y)
        if x_new is not None:
            pyro.sample("f_new", site(x_new))

    return model


def gp_of(x, kernel=None, mean=None):
    return GP("f", x, kernel or scaled_rbf(x.shape[1]), mean)


def constant():
    return ConstantMean(constant_prior=NormalPrior(0.0, 1.0))


def problems(num_data=12, num_columns=3):
    """Name -> model and its arguments."""
    x, y = binary_data(num_data)
    return {
        "eight schools": (eight_schools, SCHOOLS),
        "logistic regression": (logistic, binary_data(2 * num_data, num_columns)),
        "GP classifier": (written_out_gp, (x, y)),
        "Dirichlet and LKJ": (shares_and_correlations, SHARES),
        "GP site": (gp_model(gp_of(x, mean=constant())), (y,)),
        "GP site, other kernel": (gp_model(gp_of(x, sum_of_kernels())), (y,)),
    }
