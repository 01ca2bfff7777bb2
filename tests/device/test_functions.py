"""What is called beside ``tg.sample``, on a device that is not the CPU, with the CPU's answers."""

import warnings

import gpytorch
import pytest
import torch
from gpytorch.kernels import MaternKernel, PeriodicKernel, RQKernel, ScaleKernel
from gpytorch.priors import GammaPrior, NormalPrior

import torchgpmc as tg
from tests.device.other import DEVICE
from tests.problems import gp, inputs, kernel, make, sparse_gp, targets
from tests.speed import quick
from tests.test_conformance import quiet_sample
from torchgpmc.adapter import stationary
from torchgpmc.numerics import smooth_rules


def both(function, **tolerances):
    """``function(device)``, whose tensors live there, on both devices."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", tg.SamplingWarning)
        there, here = function(DEVICE), function(torch.device("cpu"))
    for one, other in zip(there, here, strict=True):
        assert one.device == DEVICE
        torch.testing.assert_close(one.detach().cpu(), other.detach(), **{"rtol": 1e-6, "atol": 1e-9, **tolerances})


def estimated(estimator, model, device):
    theta = torch.zeros(2, model.layout.size, dtype=torch.float64, device=device)
    generator = torch.Generator(device=device).manual_seed(1)
    found = getattr(estimator, "draw", estimator)(theta, generator)
    return [found.value, found.variance]


EVIDENCE = {
    "Laplace": lambda model: tg.evidence.importance(model, num_importance=4),
    "EP": lambda model: tg.evidence.importance(model, tg.EP(tolerance=1e-6), num_importance=4),
    "EP in single precision": lambda model: tg.evidence.importance(model, tg.EP(), num_importance=4),
    "annealed": lambda model: tg.evidence.annealed(model, num_importance=4, num_temperatures=2),
    "data in turn": lambda model: tg.evidence.SequentialImportance(8, tg.EP(tolerance=1e-6)).estimator(model),
    "orthants": lambda model: tg.evidence.Orthant(8).estimator(model),
    "smooth probit": lambda model: tg.evidence.SmoothProbit().estimator(model),
}


@pytest.mark.parametrize("name", quick(["orthants"], EVIDENCE))
def test_estimates_of_the_evidence(name):
    def evaluate(device):
        model = gp(device=device)
        return estimated(EVIDENCE[name](model), model, device)

    # Sites and guides to draw from are of single precision, which another device rounds otherwise: seven digits of them, fewer of a
    # variance.
    both(evaluate, **({"rtol": 1e-3} if name in ("EP in single precision", "orthants") else {}))


@pytest.mark.parametrize("likelihood", quick(["softmax"], ["softmax", "student_t"]))
def test_estimates_with_several_latents_or_modes(likelihood):
    def evaluate(device):
        model = gp(likelihood, device=device)
        return estimated(tg.evidence.importance(model, num_importance=4), model, device)

    both(evaluate)


def test_estimates_of_classes_in_turn():
    """Candidates are in single precision, which another device rounds otherwise."""

    def evaluate(device):
        model = gp("softmax", device=device)
        return estimated(tg.evidence.SequentialCandidates(8, 8).estimator(model), model, device)

    both(evaluate, rtol=1e-4)


def covariance(size, device):
    x = torch.linspace(0, 1, size, dtype=torch.float64, device=device) ** 1.7  # no symmetry, which rounding would decide
    return (-3 * (x[:, None] - x).square()).exp() + 0.2 * torch.eye(size, dtype=torch.float64, device=device)


ORTHANTS = {
    "by quadrature": (3, tg.orthant.Quadrature()),
    "by separation": (5, tg.orthant.SeparationOfVariables()),
    "tilted": (5, tg.orthant.MinimaxTilting()),
    "sequential": (5, tg.orthant.Sequential()),
    "known noise": (5, tg.orthant.KnownSplit(0.1)),
}


@pytest.mark.parametrize("name", quick(["by separation", "tilted", "sequential"], ORTHANTS))
def test_orthants(name):
    size, method = ORTHANTS[name]
    both(lambda device: [tg.orthant.log_probability(covariance(size, device), lower=0.0, method=method, num_points=64).value])


@pytest.mark.slow
def test_gradient_of_an_orthant_and_limits_on_the_device():
    def evaluate(device):
        given = covariance(4, device).requires_grad_(True)
        lower = torch.linspace(-1, 0, 4, dtype=torch.float64, device=device)
        tg.orthant.log_probability(given, mean=lower / 2, lower=lower, upper=2.0, num_points=64).value.backward()
        return [given.grad]

    both(evaluate)


def test_truncated_draws():
    both(lambda device: [tg.orthant.truncated_normal_samples(covariance(4, device), lower=0.0, num_samples=5)])


@pytest.mark.slow
def test_classification_by_orthants():
    def evaluate(device):
        model = gp(device=device)
        theta = torch.zeros(1, model.layout.size, dtype=torch.float64, device=device)
        found = tg.evidence.classify(model, theta, num_points=16)
        generator = torch.Generator(device=device).manual_seed(0)
        draws = tg.evidence.exact_latents(model, theta, 3, generator)
        return [found.log_evidence, found.probabilities(inputs(2, seed=5).to(device)), draws.whitened]

    both(evaluate)


@pytest.mark.slow
@pytest.mark.parametrize("approximation", [tg.Laplace(), tg.EP()])
def test_fit_and_approximate_predictions(approximation):
    def evaluate(device):
        model = gp(device=device)
        fitted = tg.fit(model, approximation, maximum_a_posteriori=True, num_starts=1, max_iterations=3)
        theta = fitted.layout.present(fitted)
        found = tg.approximations.predict(fitted, theta, approximation, inputs(2, seed=5).to(device))
        tg.approximations.negative_log_evidence(model, approximation).backward()
        return [theta, found.probs, found.log_prob(torch.ones(2, device=device)), model.kernel.raw_outputscale.grad]

    both(evaluate, rtol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"optimize_inducing_points": True}, {"batch_size": 4}])
def test_variational_start(options):
    def evaluate(device):
        model = sparse_gp(num_data=6, num_inducing=3, device=device)
        start = tg.initialize(model, max_iterations=3, **options)
        posterior = quiet_sample(start.model, tg.HMC(num_steps=2), start=start, num_samples=2, warmup_steps=2)
        return [start.predict(inputs(2, seed=5).to(device)).probs, posterior.theta.to(device)]

    both(evaluate, rtol=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("method", [tg.NUTS(max_tree_depth=2), tg.ChEES(max_steps=2), tg.AdaptiveMH(), tg.Slice()])
def test_densities(method):
    def evaluate(device):
        start = torch.zeros(2, 2, dtype=torch.float64, device=device)
        options = {"num_samples": 4, "warmup_steps": 4, "seed": 0, "progress": False}
        draws = tg.sample_density(lambda x: -0.5 * x.square().sum(-1), start, method, **options)
        return [draws.position.to(device)]

    both(evaluate)


@pytest.mark.slow
def test_other_kernels_and_means():
    def evaluate(device):
        parts = [MaternKernel(nu=nu, ard_num_dims=2, lengthscale_prior=GammaPrior(2.0, 3.0)) for nu in (0.5, 1.5, 2.5)]
        periodic = PeriodicKernel(lengthscale_prior=GammaPrior(2.0, 3.0), period_length_prior=GammaPrior(2.0, 3.0))
        rational = RQKernel(lengthscale_prior=GammaPrior(2.0, 3.0), alpha_constraint=gpytorch.constraints.Positive())
        rational.register_prior("alpha_prior", GammaPrior(2.0, 3.0), "alpha")
        total = parts[0] + parts[1] * parts[2] + ScaleKernel(periodic, outputscale_prior=GammaPrior(2.0, 1.0)) + rational
        mean = gpytorch.means.ConstantMean(constant_prior=NormalPrior(0.0, 1.0))
        model = tg.GP(inputs(4), targets("probit", 4), total, make("probit"), mean=mean).to(device)
        position = torch.full((2, model.layout.size + 4), 0.1, dtype=torch.float64, device=device)
        return tg.joint_log_density(model).value_and_grad(position)

    both(evaluate)


@pytest.mark.slow
def test_models_made_of_parts_that_are_there():
    def evaluate(device):
        x, y = inputs(4).to(device), targets("poisson", 4).to(device)
        likelihood = tg.likelihoods.Poisson(exposure=torch.linspace(1, 2, 4).to(device))
        model = tg.GP(x, y, kernel().to(device), likelihood.to(device))
        posterior = quiet_sample(model, tg.HMC(num_steps=2), num_samples=2, warmup_steps=2)
        prediction = posterior.predict(x[:2], exposure=torch.ones(2).to(device))
        return [prediction.mean, prediction.sample(2), *prediction.intensity.interval(0.9)]

    both(evaluate)


@pytest.mark.slow
def test_posteriors_and_checkpoints_are_files_for_either_device(tmp_path):
    def run(device, **options):
        return quiet_sample(gp(num_data=4, device=device), tg.HMC(num_steps=2), num_samples=8, warmup_steps=2, **options)

    first = run(DEVICE, checkpoint=tg.Checkpoint(tmp_path / "run", every=3))
    again = run(DEVICE, checkpoint=tg.Checkpoint(tmp_path / "run", every=3))
    assert torch.equal(first.theta, again.theta)
    first.save(tmp_path / "posterior")
    there, here = (tg.Posterior.load(tmp_path / "posterior", gp(num_data=4, device=device)) for device in (DEVICE, "cpu"))
    torch.testing.assert_close(there.latents, here.latents)
    torch.testing.assert_close(there.fitted().mean, here.fitted().mean)
    assert there.to_arviz() is not None


def test_what_needs_numpy_converts():
    def evaluate(device):
        probabilities, labels = torch.tensor([0.2, 0.8, 0.7], device=device), torch.tensor([0, 1, 1], device=device)
        scores = [function(probabilities, labels) for function in (tg.scores.brier, tg.scores.capacity_auc)]
        binned = tg.bin_events(torch.tensor([[0.1, 0.2], [0.9, 0.4]], device=device), [(0.0, 1.0), (0.0, 1.0)], (4, 3))
        return [torch.tensor(scores, device=device), *binned, tg.kmeans_inducing_points(inputs(6).to(device), 2)]

    both(evaluate)


@pytest.mark.slow
def test_tuned_trajectories():
    tuned = tg.tune_hmc(gp(num_data=4, device=DEVICE), max_steps=2, num_trials=6, trial_steps=2, warmup_steps=2, seed=0)
    assert tuned.num_steps in (1, 2)


@pytest.mark.parametrize("num_nodes", [64, 100])
def test_rules_that_each_normal_chooses_agree_with_one_for_all(num_nodes):
    """Over normals whose widths straddle every change of the rule; Gauss-Legendre nodes alone lose narrow ones to rounding."""

    mean = torch.linspace(-3, 3, 20, dtype=torch.float64)[:, None]

    def evaluate(device, variance):
        leaves = [
            leaf.to(device).clone().requires_grad_(True) for leaf in (mean.expand(-1, len(variance)), variance.expand(20, -1))
        ]
        value = smooth_rules.expectation_about(torch.nn.functional.softplus, *leaves, 0.0, torch.pi, num_nodes)
        return [value, *torch.autograd.grad(value.sum(), leaves)]

    variances = torch.logspace(-8, 4, 30, dtype=torch.float64)
    together = evaluate(DEVICE, variances)
    alone = [evaluate("cpu", variance.view(1)) for variance in variances]
    for there, here in zip(together, zip(*alone, strict=True), strict=True):
        torch.testing.assert_close(there.detach().cpu(), torch.cat(here, 1).detach(), rtol=1e-8, atol=1e-9)


@pytest.mark.parametrize("most", [0, stationary._MOST_KEPT])
def test_distances_kept_or_not_give_one_covariance(monkeypatch, most):
    """Also at a lengthscale so short that products of inputs would be noise."""
    monkeypatch.setattr(stationary, "_MOST_KEPT", most)

    def evaluate(device):
        model = gp(device=device)
        theta = torch.zeros(3, model.layout.size, dtype=torch.float64, device=device)
        theta[1:, :2] = torch.tensor([[0.3, -1.0], [-18.0, -19.0]], device=device)
        position = torch.cat([theta, 0.3 * torch.ones(3, 6, dtype=torch.float64, device=device)], -1)
        return [model.prior(theta).covariance, *tg.joint_log_density(model).value_and_grad(position)]

    both(evaluate)
