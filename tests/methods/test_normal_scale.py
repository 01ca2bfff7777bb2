"""Chains on theta in z, on which each prior is standard normal: the same posterior, from sites that are held."""

import pytest
import torch
from gpytorch.kernels import RBFKernel, ScaleKernel
from gpytorch.means import ConstantMean
from gpytorch.priors import GammaPrior, HalfCauchyPrior, LogNormalPrior, NormalPrior

import torchgpmc as tg
from tests.problems import gp, gp_regression, inputs, targets
from torchgpmc.approximations import held_sites, single_precision
from torchgpmc.approximations.held_sites import HeldSitesMarginal, can_hold_sites

QUIET = {"progress": False, "seed": 1}


def rough_labels(num_columns=2, rows=12):
    kernel = RBFKernel(ard_num_dims=num_columns, lengthscale_prior=GammaPrior(2.0, 2.0))
    kernel = ScaleKernel(kernel, outputscale_prior=GammaPrior(2.0, 0.5))
    return tg.GP(inputs(rows, num_columns), targets("probit", rows), kernel, tg.likelihoods.Bernoulli())


def held(model, tolerance=None):
    ep = tg.EP(tolerance=tolerance)
    theta = model.layout.starting_points(1, torch.Generator().manual_seed(3))
    sites = tg.EP().importance_density(model, model.prior(theta)).start.squeeze(0)
    return HeldSitesMarginal(model, ep, sites)


@pytest.mark.parametrize("make", [rough_labels, lambda: gp("logit"), lambda: gp("poisson"), lambda: gp("ordinal")])
def test_held_sites_that_converge_give_eps_own_density_and_gradient(make):
    model = make()
    theta = model.layout.starting_points(6, torch.Generator().manual_seed(0))
    value, gradient = held(model, 1e-7).value_and_grad(theta)
    expected, slope = tg.approximations.ApproximateMarginal(model, tg.EP(tolerance=1e-7)).value_and_grad(theta)
    torch.testing.assert_close(value, expected, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(gradient, slope, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("tolerance", [None, 0.02])
def test_slopes_in_a_mean_are_those_of_sites_that_are_found(tolerance, generator):
    """What is off by a little at each of a hundred counts adds up: 33 was found for a slope of -1.5, and searches failed."""
    x = torch.randn(100, 2, generator=generator, dtype=torch.float64)
    y = torch.poisson(torch.full((100,), 4.0), generator=generator).long()
    kernel = RBFKernel(lengthscale_prior=GammaPrior(2.0, 2.0))
    kernel = ScaleKernel(kernel, outputscale_prior=HalfCauchyPrior(1.0))
    mean = ConstantMean(constant_prior=NormalPrior(1.3, 1.0))
    model = tg.GP(x, y, kernel, tg.likelihoods.Poisson(), mean=mean)
    theta = torch.tensor([[scale, -0.5, 1.4] for scale in range(-9, 0)]).double()  # log outputscales
    middle = torch.tensor([[0.0, 0.0, 1.3]]).double()
    _, slope = HeldSitesMarginal.at(model, tg.EP(tolerance=tolerance), middle).value_and_grad(theta)
    _, expected = tg.approximations.ApproximateMarginal(model, tg.EP(tolerance=1e-9)).value_and_grad(theta)
    torch.testing.assert_close(slope, expected, rtol=0.0, atol=0.3)


@pytest.mark.parametrize("tolerance", [None, 0.02])
@pytest.mark.parametrize("make", [rough_labels, lambda: gp("logit")])
def test_single_precision_is_nowhere_near_the_weights_noise(make, tolerance, monkeypatch):
    model = make()
    theta = model.layout.starting_points(6, torch.Generator().manual_seed(0))
    density = held(model, tolerance)
    value, gradient = density.value_and_grad(theta)
    monkeypatch.setattr(single_precision, "_LEAST", torch.inf)
    expected, slope = density.value_and_grad(theta)
    assert not torch.equal(value, expected)
    torch.testing.assert_close(value, expected, rtol=0.0, atol=1e-3)
    torch.testing.assert_close(gradient, slope, rtol=1e-3, atol=1e-3)
    assert value.dtype == gradient.dtype == torch.float64


def test_single_precision_keeps_no_chain_from_large_outputscales(monkeypatch):
    # Of separable labels with long lengthscales the density hardly falls; single precision alone had no value from e^14 on.
    x = inputs(100, 3)
    base = RBFKernel(lengthscale_prior=LogNormalPrior(1.5, 1.0))
    kernel = ScaleKernel(base, outputscale_prior=LogNormalPrior(2.0, 3.0))
    model = tg.GP(x, (x.sum(-1) > 0).int(), kernel, tg.likelihoods.Bernoulli())
    theta = torch.cartesian_prod(torch.arange(0.0, 20.0, 2.0), torch.tensor([1.5, 3.0])).double()
    density = held(model)
    value = density(theta)
    monkeypatch.setattr(single_precision, "_LEAST", torch.inf)
    expected = density(theta)
    assert bool(torch.isfinite(expected).all())
    # Where rounding decides whether a search takes a sweep more, values are as far apart as that takes them: 0.07 on one processor.
    torch.testing.assert_close(value, expected, rtol=0.0, atol=held_sites._LOOSE)


def test_counts_keep_double_precision():
    # Sites of large counts are all but all that a marginal knows: of cavities single precision leaves nothing.
    model = gp("poisson")
    many = model.with_targets(1e6 + model.targets.values)
    theta = many.layout.starting_points(2, torch.Generator().manual_seed(0))
    assert bool(torch.isfinite(held(many).value_and_grad(theta)[0]).all())


def test_a_value_depends_on_its_theta_alone():
    # Else chains would not be reversible, and their density not known where weights need it.
    density = held(rough_labels())
    theta = density.model.layout.starting_points(5, torch.Generator().manual_seed(0))
    value, gradient = density.value_and_grad(theta)
    density.value_and_grad(theta + 0.3)
    for row in range(5):
        again, slope = density.value_and_grad(theta[row : row + 1])
        torch.testing.assert_close(again, value[row : row + 1], rtol=1e-12, atol=1e-10)
        torch.testing.assert_close(slope, gradient[row : row + 1], rtol=1e-9, atol=1e-9)


def test_models_whose_sites_cannot_be_held_are_known():
    base = rough_labels()
    assert can_hold_sites(base)
    known = tg.ConditionedGP(
        base.train_x,
        base.train_y,
        base.kernel,
        base.likelihood,
        known_inputs=inputs(2, 2, seed=9),
        known_values=torch.zeros(2).double(),
    )
    assert not can_hold_sites(known)


def weighted_mean(posterior):
    weights = torch.softmax(posterior._log_weights(), 0)
    theta = posterior.theta.flatten(0, 1)
    mean = weights @ theta
    return mean, (weights @ (theta - mean).square()).sqrt()


def test_weighted_chains_in_z_have_the_exact_posterior():
    # Of theta itself: without the slope of the map in the weights means are a quarter of a deviation off.
    model = rough_labels()
    estimates = tg.evidence.SmoothProbit(tg.EP(), 64)
    on_theta = {"marginal": tg.EP(), "importance_weights": estimates, "normal_scale": True}
    method = tg.HMC(num_steps=6, least_steps=3, mass_matrix=tg.samplers.MassMatrix.IDENTITY, **on_theta)
    chains = tg.sample(model, method, num_samples=250, warmup_steps=100, num_chains=16, **QUIET)
    other = tg.sample(model, tg.AMIS(evidence=estimates), num_samples=4000, **QUIET)
    (mean, sd), (expected, scale) = weighted_mean(chains), weighted_mean(other)
    assert float(((mean - expected) / scale).abs().max()) < 0.12
    assert float((sd / scale - 1).abs().max()) < 0.12
    assert float(chains.log_weights.std()) < 0.3 and not chains.complaints()


def test_exact_evidence_may_be_sampled_in_z_too():
    model = gp_regression()
    method = tg.HMC(num_steps=6, least_steps=3, normal_scale=True)
    chains = tg.sample(model, method, num_samples=500, warmup_steps=100, num_chains=8, **QUIET)
    other = tg.sample(model, tg.AMIS(), num_samples=6000, **QUIET)
    (mean, sd), (expected, scale) = weighted_mean(chains), weighted_mean(other)
    assert float(((mean - expected) / scale).abs().max()) < 0.12 and float((sd / scale - 1).abs().max()) < 0.15


@pytest.mark.filterwarnings("ignore::torchgpmc.SamplingWarning")  # one dimension: half a period later lp is what it was
def test_lengths_are_drawn_from_the_least_on_and_leave_a_skewed_density_alone():
    def density(x):  # of the log of a Gamma(2, 1) draw
        return (2 * x - x.exp()).sum(-1)

    method = tg.HMC(num_steps=6, least_steps=4)
    posterior = tg.sample_density(density, torch.zeros(32, 1).double(), method, num_samples=500, warmup_steps=100, **QUIET)
    assert set(posterior.stats["n_steps"].unique().tolist()) == {4.0, 5.0, 6.0}
    draws = posterior.position.flatten()
    euler = 0.5772156649
    assert abs(float(draws.mean()) - (1 - euler)) < 0.03 and abs(float(draws.exp().mean()) - 2) < 0.06


@pytest.mark.parametrize(
    ("method", "message"),
    [
        (tg.HMC(normal_scale=True), "normal_scale=True is for chains on theta"),
        (tg.HMC(normal_scale="z", marginal=tg.EP()), "normal_scale is 'z'"),
        (tg.HMC(normal_scale=True, from_mode=True, marginal=tg.EP()), "from_mode=True begins at a mode"),
        (tg.HMC(num_steps=3, least_steps=4), "least_steps is 4 with num_steps=3"),
        (tg.HMC(least_steps=0), "least_steps"),
    ],
)
def test_options_at_odds_are_named(method, message):
    with pytest.raises(ValueError, match=message):
        tg.sample(gp("probit"), method, num_samples=4, **QUIET)
