"""The transcription likelihood: its solution of the differential equation, its densities, its errors, and what a run gives."""

import copy
import itertools
import math
import pickle

import numpy as np
import pytest
import scipy.integrate
import scipy.stats
import torch
from gpytorch.kernels import RBFKernel
from gpytorch.priors import GammaPrior

import torchgpmc as tg
from tests.test_conformance import quiet_sample
from torchgpmc.likelihoods import Activation, Linear, Repression, Transcription
from torchgpmc.models import JointLogDensity
from torchgpmc.runs.blocks import JointWithPrior, LatentsGivenTheta

RESPONSES = {
    "activation": (Activation, lambda c, gamma: c / (gamma + c)),
    "repression": (Repression, lambda c, gamma: 1 / (gamma + c)),
    "linear": (Linear, lambda c, gamma: c),
}
BASAL, DECAY, SENSITIVITY, MICHAELIS, INITIAL = [0.2, 1.0], [0.3, 1.1], [0.8, 1.7], [0.6, 1.4], [2.0, 0.1]


def log_concentration(t, replicate):
    return np.sin(0.9 * np.asarray(t) + replicate) - 0.3 * replicate


def likelihood_of(response=Activation, num_points=121, times=(0.0, 2.0, 5.0, 12.0), replicates=2, set_values=True, **options):
    grid = torch.linspace(0, 12, num_points, dtype=torch.float64)
    times = torch.tensor(times, dtype=torch.float64)
    made = Transcription(grid, times, num_genes=2, num_replicates=replicates, response=response(), **options)
    if set_values:
        made.basal, made.decay, made.sensitivity = (torch.tensor(value) for value in (BASAL, DECAY, SENSITIVITY))
        if made.response.has_michaelis_constant:
            made.michaelis_constant = torch.tensor(MICHAELIS)
        if made.free_initial:
            made.initial = torch.tensor(INITIAL)
    return made


def latents_of(num_points=121, replicates=2):
    t = np.linspace(0, 12, num_points)
    f = torch.as_tensor(np.stack([log_concentration(t, r) for r in range(replicates)], -1)).unsqueeze(0)
    return f.squeeze(-1) if replicates == 1 else f


def solution(response, times, free_initial, replicates=2):
    """By an adaptive solver, (R, G, T)."""

    def gene(replicate, j):
        def slope(t, y):
            concentration = np.exp(log_concentration(t, replicate))
            return BASAL[j] + SENSITIVITY[j] * response(concentration, MICHAELIS[j]) - DECAY[j] * y

        start = INITIAL[j] if free_initial else BASAL[j] / DECAY[j]
        return scipy.integrate.solve_ivp(slope, (0, 12), [start], t_eval=times, rtol=1e-11, atol=1e-12).y[0]

    return torch.as_tensor(np.array([[gene(r, j) for j in range(2)] for r in range(replicates)]))


@pytest.mark.parametrize("free_initial", [False, True])
@pytest.mark.parametrize("name", RESPONSES)
def test_it_solves_the_differential_equation(name, free_initial):
    kind, response = RESPONSES[name]
    times = (0.0, 0.2, 2.0, 4.9, 12.0)
    found = likelihood_of(kind, times=times, free_initial=free_initial).expected_response(latents_of()).detach()
    error = (found[0] - solution(response, times, free_initial)).abs().amax((0, 1))
    assert error[[0, 1, 2, 4]].max() < 7e-6  # Simpson: 12 h^4 / 180 times a mean fourth derivative, of the order of one
    assert error[3] < 1e-4  # an odd number of intervals: h^4 / 24 more, times a third derivative of about 20


def test_the_error_is_of_fourth_order():
    times = (2.0, 6.0, 12.0)
    exact = solution(RESPONSES["linear"][1], times, False)
    errors = []
    for points in (25, 49, 97):
        found = likelihood_of(Linear, num_points=points, times=times).expected_response(latents_of(points))[0].detach()
        errors.append(float((found - exact).abs().max()))
    for coarse, fine in itertools.pairwise(errors):
        assert math.log2(coarse / fine) == pytest.approx(4, abs=0.3)


def test_one_replicate_is_as_several():
    several = likelihood_of(replicates=2).expected_response(latents_of(replicates=2))
    one = likelihood_of(replicates=1)
    assert one.num_latents == 1
    torch.testing.assert_close(one.expected_response(latents_of(replicates=1))[:, 0], several[:, 0])


def test_enormous_rates_neither_overflow_nor_lose_the_gradient():
    likelihood = likelihood_of(free_initial=True)
    likelihood.decay = torch.tensor([1e8, 1e-8])
    f = latents_of().requires_grad_(True)
    expected = likelihood.expected_response(f)
    (slope,) = torch.autograd.grad(expected.sum(), f)
    assert bool(torch.isfinite(expected).all()) and bool(torch.isfinite(slope).all())


def targets_of(likelihood, f, seed=0):
    return likelihood.sample(f, torch.Generator().manual_seed(seed)).detach()[0]


def test_log_densities_are_their_formulas():
    f = latents_of()
    variances = 0.05 + torch.rand(2, 2, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    known = likelihood_of(variances=variances)
    y = targets_of(known, f)
    residual = (y - solution(RESPONSES["activation"][1], [0.0, 2.0, 5.0, 12.0], False)).numpy()
    expected = scipy.stats.norm.logpdf(residual, scale=variances.sqrt().numpy()).sum()
    assert float(known.log_prob(f, y).detach()) == pytest.approx(expected, abs=1e-4)

    sampled = likelihood_of()
    sampled.noise_precision = torch.tensor([3.0, 0.5])
    by_gene = [scipy.stats.norm.logpdf(residual[:, j], scale=p**-0.5).sum() for j, p in enumerate([3.0, 0.5])]
    assert float(sampled.log_prob(f, y).detach()) == pytest.approx(sum(by_gene), abs=1e-4)

    integrated = likelihood_of(integrate_variances=True, precision_prior=GammaPrior(2.0, 0.4))
    student = scipy.stats.multivariate_t(np.zeros(8), 0.4 / 2.0 * np.eye(8), df=4.0)
    by_gene = [student.logpdf(residual[:, j].ravel()) for j in range(2)]
    assert float(integrated.log_prob(f, y).detach()) == pytest.approx(sum(by_gene), abs=1e-4)

    # The same by averaging over the prior of what is integrated out.
    precisions = torch.distributions.Gamma(torch.tensor(2.0).double(), torch.tensor(0.4).double()).sample((40_000, 1)).expand(-1, 2)
    square = torch.as_tensor(residual).square().sum((0, 2))
    logs = 4 * precisions.log() - 0.5 * precisions * square - 4 * math.log(2 * math.pi)
    average = torch.logsumexp(logs, 0) - math.log(len(logs))
    error = float(((logs - average).exp().var(0) / len(logs)).sqrt().sum())
    assert float(average.sum()) == pytest.approx(float(integrated.log_prob(f, y).detach()), abs=5 * error)


def model_of(likelihood, y=None):
    grid = torch.linspace(0, 12, likelihood.integral.num_points, dtype=torch.float64)
    shape = likelihood.target_shape(len(grid))
    y = 0.5 + torch.rand(shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64) if y is None else y
    return tg.GP(grid, y, RBFKernel(lengthscale_prior=GammaPrior(2.0, 1.0)), likelihood)


OPTIONS = {
    "measured": {"variances": torch.full((2, 2, 4), 0.1)},
    "sampled": {"free_initial": True},
    "integrated": {"integrate_variances": True, "response": Repression},
}


@pytest.mark.parametrize("options", OPTIONS)
def test_gradients_are_those_of_autograd(options):
    model = model_of(likelihood_of(num_points=25, set_values=False, **OPTIONS[options]))
    density = tg.joint_log_density(model)
    size = model.layout.size + model.latent_size
    position = 0.3 * torch.randn(3, size, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    value, gradient = density.value_and_grad(position)
    leaf = position.requires_grad_(True)
    expected = density(leaf)
    torch.testing.assert_close(value, expected.detach())
    torch.testing.assert_close(gradient, torch.autograd.grad(expected.sum(), leaf)[0])


class Doubled(Transcription):
    """A user's subclass, whose density is not its parent's."""

    def log_prob(self, f, targets):
        return 2 * super().log_prob(f, targets)


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("kind", [Transcription, Doubled])
def test_a_density_given_theta_is_the_joint_one(kind, options):
    """With what depends on theta alone worked out once, and its slopes in v."""
    likelihood = likelihood_of(num_points=25, set_values=False, **OPTIONS[options])
    likelihood.__class__ = kind
    joint = JointLogDensity(model_of(likelihood))
    size = joint.model.layout.size
    generator = torch.Generator().manual_seed(0)
    position = 0.3 * torch.randn(3, size + joint.model.latent_size, generator=generator, dtype=torch.float64)
    value, kept = JointWithPrior(joint).draw(position, generator)
    given = LatentsGivenTheta(joint, kept)
    found, slope = given.value_and_grad(position[:, size:])
    expected, gradient = joint.value_and_grad(position)
    for ours in (value, found, given(position[:, size:])):
        torch.testing.assert_close(ours, expected)
    torch.testing.assert_close(slope, gradient[:, size:])


def test_names_are_those_promised_and_gpytorchs():
    names = {options: model_of(likelihood_of(num_points=25, **OPTIONS[options])).layout.names for options in OPTIONS}
    kinetics = ["kernel.lengthscale", "likelihood.basal", "likelihood.decay", "likelihood.sensitivity"]
    assert names["measured"] == names["integrated"] == [*kinetics, "likelihood.michaelis_constant"]
    assert names["sampled"] == [*names["measured"], "likelihood.initial", "likelihood.noise_precision"]


@pytest.mark.slow
@pytest.mark.parametrize("options", OPTIONS)
def test_a_run_gives_fits_and_files(options, tmp_path):
    model = model_of(likelihood_of(num_points=13, **OPTIONS[options]))
    posterior = quiet_sample(pickle.loads(pickle.dumps(copy.deepcopy(model))), tg.NUTS(max_tree_depth=2))
    assert posterior.samples["likelihood.decay"].shape == (2, 6, 2)
    assert posterior.latents.shape == (2, 6, 13, 2)
    fitted = posterior.fitted()
    assert fitted.draws.shape == (2, 6, 2, 2, 4) and fitted.mean.shape == fitted.quantile(0.975).shape == (2, 2, 4)
    likelihood = copy.deepcopy(model.likelihood)
    for name, values in posterior.samples.items():
        if name.startswith("likelihood."):
            setattr(likelihood, name.removeprefix("likelihood."), values[1, 3])
    torch.testing.assert_close(likelihood.expected_response(posterior.latents[1, 3:4])[0], fitted.draws[1, 3])
    posterior.save(tmp_path / "run.pt")
    torch.testing.assert_close(tg.Posterior.load(tmp_path / "run.pt", model).fitted().mean, fitted.mean)


def test_chains_may_have_data_sets_of_their_own():
    likelihood = likelihood_of(num_points=13, **OPTIONS["measured"])
    model = model_of(likelihood)
    several = model.with_targets(torch.stack([model.train_y, model.train_y + 1.0]))
    position = torch.zeros(2, model.layout.size + model.latent_size, dtype=torch.float64)
    one, other = (tg.joint_log_density(made)(position) for made in (model, several))
    assert one[0] == other[0] and one[1] != other[1]


def test_bad_input_is_refused_with_a_sentence():
    grid, times = torch.linspace(0, 12, 13), torch.tensor([0.0, 6.0])

    def make(grid=grid, times=times, genes=2, replicates=2, response=Activation(), **options):  # noqa: B008
        return Transcription(grid, times, num_genes=genes, num_replicates=replicates, response=response, **options)

    good = torch.full((2, 2, 2), 0.1)
    bad = good.clone()
    bad[1, 0, 1] = 0.0
    cases = {
        r"times \[2.5, 13.0\] are not on the grid.*13 points from 0 to 12, 1 apart": {"times": torch.tensor([0.0, 2.5, 13.0])},
        r"grid has shape \(0,\).*linspace": {"grid": torch.zeros(0)},
        "grid has 2 points.*at least three": {"grid": torch.tensor([0.0, 6.0])},
        "grid has 3 points.*equally spaced": {"grid": torch.tensor([0.0, 1.0, 6.0])},
        r"times has shape \(0,\)": {"times": torch.zeros(0)},
        r"variances has shape \(2, 2\).*\(replicates, genes, times\) = \(2, 2, 2\)": {"variances": torch.ones(2, 2)},
        r"1 values that are not positive and finite, the first at \(1, 0, 1\): 0": {"variances": bad},
        "num_genes is 0": {"genes": 0},
        "num_replicates is 1.5": {"replicates": 1.5},
        "integrate_variances is of unknown variances": {"variances": good, "integrate_variances": True},
    }
    for message, options in cases.items():
        with pytest.raises(ValueError, match=message):
            make(**options)
    for message, options in {
        "grid is str 'even'. Expected numbers": {"grid": "even"},
        r"Expected a Response, for instance torchgpmc.likelihoods.Activation\(\)": {"response": Activation},
        "Expected a GammaPrior to integrate": {"precision_prior": tg.likelihoods.Gaussian(), "integrate_variances": True},
    }.items():
        with pytest.raises(TypeError, match=message):
            make(**options)


def test_a_model_says_what_does_not_fit():
    likelihood = likelihood_of(num_points=13)
    grid = torch.linspace(0, 12, 13)
    kernel = RBFKernel(lengthscale_prior=GammaPrior(2.0, 1.0))
    with pytest.raises(ValueError, match=r"train_y has shape \(4, 2\).*Expected \(2, 2, 4\)"):
        tg.GP(grid, torch.ones(4, 2), kernel, likelihood)
    with pytest.raises(ValueError, match=r"train_x has 12 rows but the likelihood's grid has 13 points"):
        tg.GP(grid[:-1], torch.ones(2, 2, 4), kernel, likelihood)
    for other in (grid.flip(0), grid.square(), torch.zeros(13)):
        with pytest.raises(ValueError, match=r"train_x .* is not the likelihood's grid: .* Expected the grid as train_x"):
            tg.GP(other, torch.ones(2, 2, 4), kernel, likelihood)
    tg.GP(60 * grid.float(), torch.ones(2, 2, 4), kernel, likelihood)  # in minutes
    y = torch.ones(2, 2, 4)
    y[1, 1] = -0.5
    with pytest.warns(UserWarning, match="expression of gene 1 is negative on average.*natural scale"):
        tg.GP(grid, y, kernel, likelihood)


def test_times_and_variances_come_as_arrays_and_lists():
    grid, times, variances = torch.linspace(0, 12, 13).double(), torch.tensor([0.0, 6.0]).double(), torch.ones(1, 2, 2).double()
    options = {"num_genes": 2, "num_replicates": 1, "response": Activation()}
    expected = tg.likelihoods.Transcription(grid, times, variances=variances, **options)
    for kind in (torch.Tensor.numpy, torch.Tensor.tolist):
        found = tg.likelihoods.Transcription(kind(grid), kind(times), variances=kind(variances), **options)
        assert torch.equal(found.elapsed, expected.elapsed) and torch.equal(found.variances, expected.variances)
