"""The scale on which priors are standard normal: nearly so in fact, exactly so in its Jacobian."""

import math

import gpytorch
import pytest
import torch
from gpytorch.constraints import Interval, Positive
from gpytorch.priors import (
    GammaPrior,
    HalfCauchyPrior,
    LogNormalPrior,
    MultivariateNormalPrior,
    NormalPrior,
    SmoothedBoxPrior,
    UniformPrior,
)
from torch import nn

from torchgpmc.density import AutogradDensity
from torchgpmc.parameters.layout import build_layout
from torchgpmc.parameters.normal_scale import CentredScale, NormalScale, OnNormalScale, linear_scale, normal_scale


class Holder(gpytorch.Module):
    """One parameter with a prior."""

    def __init__(self, prior, constraint=None, size=1, dtype=torch.float64):
        super().__init__()
        self.register_parameter("raw_x", nn.Parameter(torch.zeros(size, dtype=dtype)))
        if constraint is not None:
            self.register_constraint("raw_x", constraint)
        self.register_prior("x_prior", prior, lambda module: module.x)

    @property
    def x(self):
        constraint = getattr(self, "raw_x_constraint", None)
        return self.raw_x if constraint is None else constraint.transform(self.raw_x)


class Flat(gpytorch.priors.Prior):
    """A user's own prior that has no distribution function, cannot draw, and does not integrate."""

    arg_constraints = {}
    support = torch.distributions.constraints.real

    def __init__(self):
        nn.Module.__init__(self)
        super().__init__(validate_args=False)
        self._transform = None

    def log_prob(self, x):
        return torch.zeros_like(x)

    def rsample(self, sample_shape=()):
        raise NotImplementedError


class TwoHumps(Flat):
    """Two narrow normal densities far apart."""

    def log_prob(self, x):
        return torch.logaddexp(-0.5 * ((x + 1.5) / 0.05) ** 2, -0.5 * ((x - 1.5) / 0.05) ** 2)


class SquareOfHalfNormal(Flat):
    """A user's own prior: of s = a^2, a half-normal with scale 2. Its density is infinite at 0, where exp(theta) underflows."""

    support = torch.distributions.constraints.positive

    def log_prob(self, s):
        root = s.sqrt()
        return -0.125 * s - (math.sqrt(2 * math.pi) * 2 * root).log()

    def rsample(self, sample_shape=()):
        return (2 * torch.randn(sample_shape)).square()


class Nowhere(Flat):
    """A user's own prior that is zero everywhere."""

    def log_prob(self, x):
        return torch.full_like(x, -torch.inf)


def layout_of(module, dtype=torch.float64):
    return build_layout({"module": module}, dtype, torch.device("cpu"))


PRIORS = {
    "gamma": (GammaPrior(1.1, 0.1), Positive()),
    "exponential": (GammaPrior(1.0, 0.7), Positive()),
    "lognormal": (LogNormalPrior(0.3, 0.8), Positive()),
    "half Cauchy": (HalfCauchyPrior(0.5), Positive()),
    "uniform": (UniformPrior(0.2, 3.0), Interval(0.2, 3.0)),
    "box": (SmoothedBoxPrior(0.1, 2.0, sigma=0.05), Positive()),
    "normal, narrow and far off": (NormalPrior(1000.0, 1e-3), None),
    "a square": (SquareOfHalfNormal(), Positive()),
}

OTHERS = {"humps": (TwoHumps(), None), "flat": (Flat(), None), "nowhere": (Nowhere(), None)}


@pytest.mark.parametrize("name", PRIORS)
def test_priors_are_standard_normal_there(name):
    layout = layout_of(Holder(*PRIORS[name]))
    z = torch.linspace(-5.5, 5.5, 401).double().unsqueeze(1)
    theta, log_slope = normal_scale(layout).theta(z)
    log_density = layout.log_prior(theta) + log_slope
    standard = -0.5 * z.squeeze(1).square() - 0.5 * math.log(2 * math.pi)
    gap = log_density - standard  # up to a constant: a prior without distribution function is not normalised
    assert (gap - gap[200]).abs().max() < 0.02


def centred_scale(layout):
    like = torch.ones(layout.size).double()
    return CentredScale(normal_scale(layout), 0.5 * like, 0.2 * like)


@pytest.mark.parametrize("make", [normal_scale, linear_scale, centred_scale])
@pytest.mark.parametrize("prior", [*PRIORS.values(), *OTHERS.values()], ids=[*PRIORS, *OTHERS])
def test_map_increases_and_its_jacobian_is_its_own(make, prior):
    """Far beyond the knots, too: weights stay exact whatever the map is, so long as the two agree."""
    scale = make(layout_of(Holder(*prior)))
    z = torch.cat([torch.linspace(-9.0, 9.0, 2001).double(), torch.tensor([-50.0, 50.0]).double()]).unsqueeze(1).requires_grad_()
    theta, log_slope = scale.theta(z)
    (slope,) = torch.autograd.grad(theta.sum(), z)
    assert (slope > 0).all()
    assert (slope.squeeze(1).log() - log_slope).abs().max() < 1e-9
    assert (theta.detach()[:2001].diff(dim=0) > 0).all()


def test_gradient_on_the_scale_is_that_of_finite_differences():
    mean, covariance = torch.tensor([0.2, -0.4]).double(), torch.tensor([[1.0, 0.6], [0.6, 0.9]]).double()
    layout = layout_of(Holder(MultivariateNormalPrior(mean, covariance), size=2))
    density = OnNormalScale(AutogradDensity(lambda theta: layout.log_prior(theta) - theta.exp().sum(-1)), normal_scale(layout))
    z = 2.5 * torch.randn(20, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    value, gradient = density.value_and_grad(z)
    assert torch.equal(value, density(z))
    step = 1e-5 * torch.eye(2).double()
    differences = torch.stack([(density(z + row) - density(z - row)) / 2e-5 for row in step], -1)
    assert (gradient - differences).abs().max() < 1e-4


def test_failed_rows_keep_a_gradient_of_zero():
    scale = NormalScale(0.0, 1.0, torch.tensor([[[0.0, 0.0, 2.0, 1.0]]]).double())
    density = OnNormalScale(AutogradDensity(lambda theta: theta.squeeze(-1).log()), scale)
    value, gradient = density.value_and_grad(torch.tensor([[-3.0], [0.0]]).double())
    assert value[0] == -torch.inf and gradient[0] == 0
    assert value[1] == pytest.approx(math.log(2.0)) and gradient[1] == pytest.approx(2.0)


def test_single_precision_layouts():
    layout = layout_of(Holder(GammaPrior(1.1, 0.1), Positive(), dtype=torch.float32), torch.float32)
    theta, log_slope = normal_scale(layout).theta(torch.linspace(-4.0, 4.0, 9).unsqueeze(1))
    assert theta.dtype == torch.float32 and torch.isfinite(theta).all() and torch.isfinite(log_slope).all()


def test_same_layout_same_map():
    layout = layout_of(Holder(GammaPrior(2.0, 1.0), Positive()))
    assert torch.equal(normal_scale(layout).coefficients, normal_scale(layout).coefficients)
