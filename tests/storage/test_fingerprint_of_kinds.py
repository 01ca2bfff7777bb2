"""What files know of models, kernels and likelihoods that hold more than modules and hyperparameters."""

import pytest
import torch
from gpytorch.kernels import RBFKernel
from gpytorch.likelihoods import FixedNoiseGaussianLikelihood
from gpytorch.priors import GammaPrior, UniformPrior

import torchgpmc as tg
from tests.problems import conditioned_gp, fitc, inputs, projected_process
from tests.storage.test_fingerprint import X, check_told_apart, model
from torchgpmc.likelihoods import Activation, Linear, Repression, Response, Transcription

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore::torchgpmc.checks.SamplingWarning")]
LEVELS = X.mul(3).floor()
GRID = torch.linspace(0, 12, 9, dtype=torch.float64)


def moved(value, c, by=1e-6):
    """The second model's number is this one, a little off."""
    return value + c * by


def kernel():
    return RBFKernel(lengthscale_prior=GammaPrior(2.0, 4.0))


def saas(scale, seed=3):
    made = tg.kernels.SAAS(2)
    made.tausq_prior.scale = torch.tensor(scale, dtype=torch.float64)
    return model(made, x=inputs(6, seed=seed))


def inducing(kind, c):
    points = torch.tensor([0.1, 0.5, moved(0.8, c)], dtype=torch.float64)
    return model(kind=kind, inducing_points=points)


def classes(likelihood):
    return tg.SparseGP(X, LEVELS, kernel(), likelihood, inducing_points=X[::2])


class Hill(Response):
    """One's own response, whose number no buffer holds."""

    def __init__(self, power):
        self.power = power

    def __call__(self, log_concentration, log_michaelis):
        return torch.sigmoid(self.power * log_concentration)


def transcription(response, grid=GRID, times=(0, 3, 8), variances=None, **options):
    likelihood = Transcription(
        grid, grid[list(times)], num_genes=2, num_replicates=1, response=response, variances=variances, **options
    )
    y = 0.5 + torch.rand(1, 2, len(times), generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return tg.GP(GRID, y, kernel(), likelihood)


def measured(c):
    variances = torch.full((1, 2, 3), 0.1, dtype=torch.float64)
    variances[0, 1, 2] = moved(0.1, c)
    return variances


PAIRS = {
    "FITC's inducing points": lambda c: inducing(tg.FITC, c),
    "projected process's inducing points": lambda c: inducing(tg.ProjectedProcess, c),
    "FITC or projected process": lambda c: (fitc, projected_process)[c](),
    "known values": lambda c: conditioned_gp(known_values=torch.tensor([0.8, moved(-0.5, c, 1e-3)])),
    "known inputs": lambda c: conditioned_gp(known_inputs=inputs(2, seed=9) + moved(0.0, c)),
    "SAAS prior": lambda c: saas((0.1, 0.2)[c]),
    "SAAS's columns": lambda c: model((tg.kernels.SAAS(1), tg.kernels.SAAS(1, active_dims=(1,)))[c], x=inputs(6)),
    "nugget": lambda c: model(RBFKernel(lengthscale_prior=GammaPrior(2.0, 4.0)) + tg.kernels.White(moved(1e-3, c))),
    "exposure": lambda c: model(y=LEVELS, likelihood=tg.likelihoods.Poisson(exposure=moved(torch.ones(6), c, 1e-3))),
    "count's likelihood": lambda c: model(
        y=LEVELS, likelihood=(tg.likelihoods.Poisson(), tg.likelihoods.NegativeBinomial(dispersion_prior=GammaPrior(2.0, 4.0)))[c]
    ),
    "dispersion's prior": lambda c: model(
        y=LEVELS, likelihood=tg.likelihoods.NegativeBinomial(dispersion_prior=GammaPrior(2.0, (4.0, 4.001)[c]))
    ),
    "number of levels": lambda c: model(y=LEVELS.clamp_max(2), likelihood=tg.likelihoods.Ordinal(num_levels=3 + c)),
    "scale of noise with a latent": lambda c: model(y=X, likelihood=tg.likelihoods.HeteroskedasticGaussian(scale=moved(0.5, c))),
    "share of wrong labels": lambda c: classes(tg.likelihoods.RobustMax(num_classes=4, epsilon=moved(1e-3, c))),
    "prior of wrong labels": lambda c: classes(
        tg.likelihoods.RobustMax(num_classes=4, epsilon_prior=UniformPrior(0.0, (0.5, 0.6)[c]))
    ),
    "softmax or robust max": lambda c: classes((tg.likelihoods.Softmax(num_classes=4), tg.likelihoods.RobustMax(num_classes=4))[c]),
    "known noise": lambda c: model(y=X, likelihood=FixedNoiseGaussianLikelihood(moved(torch.full((6,), 0.1), c, 1e-4))),
    "response": lambda c: transcription((Activation(), Repression())[c]),
    "response without a constant": lambda c: transcription((Linear(), Hill(1.0))[c]),
    "one's own response": lambda c: transcription(Hill((1.0, 1.001)[c])),
    "measured variances": lambda c: transcription(Linear(), variances=measured(c)),
    "grid's spacing": lambda c: transcription(Linear(), grid=moved(1.0, c) * GRID),
    "times": lambda c: transcription(Linear(), times=((0, 3, 8), (0, 4, 8))[c]),
    "variances integrated out": lambda c: transcription(
        Linear(), integrate_variances=True, precision_prior=GammaPrior(1.0, (0.1, 0.101)[c])
    ),
    "prior of kinetics": lambda c: transcription(Linear(), kinetics_prior=GammaPrior(2.0, (1.0, 1.001)[c])),
}


@pytest.mark.parametrize("build", PAIRS.values(), ids=PAIRS)
def test_models_of_other_densities_are_told_apart(build, tmp_path):
    check_told_apart(build, tmp_path)
