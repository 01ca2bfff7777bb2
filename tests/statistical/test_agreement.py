"""Every engine on one model: posterior means of hyperparameters and latents agree with NUTS's, and with a grid over theta."""

import math

import pytest
import torch

import torchgpmc as tg
from tests.calibration import z_limit
from tests.problems import inputs, kernel, sparse_gp
from torchgpmc.approximations import Variational
from torchgpmc.diagnostics import chain_statistics
from torchgpmc.evidence import gaussian_draws
from torchgpmc.evidence.inducing_estimator import InducingDraws
from torchgpmc.models.following import FollowingMap

ENGINES = {
    "Laplace, 16": tg.PseudoMarginal(),
    "Laplace, 1": tg.PseudoMarginal(num_importance=1),
    "EP, 4": tg.PseudoMarginal(approximation=tg.EP(), num_importance=4),
    "correlated": tg.PseudoMarginal(num_importance=1, correlation=0.9),
    "delayed": tg.PseudoMarginal(delayed_acceptance=True),
    "independent proposals": tg.PseudoMarginal(num_importance=4, independent_share=0.9),
    "latent moves": tg.PseudoMarginal(num_importance=4, latent_steps=1),
    "slice": tg.PseudoMarginalSlice(num_importance=2),
    "NUTS on Laplace's marginal, weighted": tg.NUTS(marginal=tg.Laplace(), importance_weights=16),
    "slice on [theta, v]": tg.Slice(),
    "NUTS, white under Laplace's sites": tg.NUTS(whitening=tg.Laplace()),
    "HMC, white under EP's sites": tg.HMC(num_steps=6, whitening=tg.EP()),
    "ChEES": tg.ChEES(),
    "AMIS": tg.AMIS(),
    "white noise out": tg.PseudoMarginal(evidence=tg.evidence.SmoothProbit(num_importance=4)),
    "orthant integrals, pseudo-marginal": tg.PseudoMarginal(evidence=tg.evidence.Orthant(num_points=16)),
    "orthant integrals, correlated": tg.PseudoMarginal(evidence=tg.evidence.Orthant(num_points=2), correlation=0.9),
    "orthant integrals, AMIS": tg.OrthantGPC(num_points=16),
    "on an emulator, weighted": tg.EmulatedHMC(num_importance=16),
}
# Short chains, many of them: a step of thirty-two costs little more than one of eight, and means use all their draws.
CHAINS = {"num_chains": 32}
DRAWS = {"slice": 48, "slice on [theta, v]": 75, "NUTS on Laplace's marginal, weighted": 75}
WARMUP_STEPS = {"on an emulator, weighted": 12, "slice": 30, "slice on [theta, v]": 50, "NUTS on Laplace's marginal, weighted": 75}


def model():
    x = inputs(10, 1, seed=3)
    y = (torch.sin(8 * x[:, 0]) > 0).double()
    return tg.GP(x, y, kernel(1), tg.likelihoods.Bernoulli())


def quantities(posterior):
    """theta, its square, and three latents: (chains, draws, 7)."""
    theta = posterior.theta
    latents = posterior.latents.flatten(2)  # of several at a datum, one after the other
    return torch.cat([theta, theta.square(), latents[..., [0, 4, 7]]], -1)


def mean_and_error(posterior, values=None):
    """Weighted means with their Monte Carlo errors, autocorrelation and weights counted."""
    values = quantities(posterior) if values is None else values
    weights = torch.ones(values.shape[:2], dtype=torch.float64)
    if posterior.log_weights is not None:
        weights = torch.softmax(posterior.log_weights.flatten(), 0).view(values.shape[:2])
    weights = weights / weights.mean()
    mean = (weights.unsqueeze(-1) * values).mean((0, 1))
    terms = weights.unsqueeze(-1) * (values - mean)  # a ratio estimate's linearisation
    sizes = torch.tensor([chain_statistics.ess(terms[..., i].numpy(), "mean") for i in range(values.shape[-1])])
    return mean, terms.flatten(0, 1).std(0) / sizes.sqrt()


@pytest.fixture(scope="module")
def reference():
    return mean_and_error(tg.sample(model(), tg.NUTS(), num_samples=375, warmup_steps=150, seed=1, progress=False, **CHAINS))


def alarm(found, truth):
    (mean, error), (true_mean, true_error) = found, truth
    z = (mean - true_mean).abs() / (error.square() + true_error.square()).sqrt()
    return float(z.max()) / z_limit(len(z))


def run(name):
    if name in ("AMIS", "orthant integrals, AMIS"):
        return tg.sample(model(), ENGINES[name], num_samples=6000, seed=2, progress=False)
    steps = {"num_samples": DRAWS.get(name, 200), "warmup_steps": WARMUP_STEPS.get(name, 150)}
    return tg.sample(model(), ENGINES[name], seed=2, progress=False, **steps, **CHAINS)


@pytest.mark.slow
@pytest.mark.statistical
@pytest.mark.filterwarnings("ignore::torchgpmc.SamplingWarning")
@pytest.mark.parametrize("name", ENGINES)
def test_engines_agree_with_nuts(name, reference):
    assert alarm(mean_and_error(run(name)), reference) < 1


def from_a_start(method):
    start = tg.initialize(model(), progress=False)
    return mean_and_error(
        tg.sample(start.model, method, start=start, num_samples=200, warmup_steps=100, seed=2, progress=False, **CHAINS)
    )


@pytest.mark.slow
@pytest.mark.statistical
@pytest.mark.filterwarnings("ignore::torchgpmc.SamplingWarning")
@pytest.mark.parametrize("method", [tg.NUTS(), tg.HMC(num_steps=6)], ids=lambda method: type(method).__name__)
def test_chains_from_a_variational_start_agree_with_nuts(method, reference):
    assert alarm(from_a_start(method), reference) < 1


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::torchgpmc.SamplingWarning")
def test_a_density_at_other_latents_than_are_read_does_not_agree(reference, monkeypatch):
    """v in the density is that of another w, half a deviation off in each direction."""
    mapped = FollowingMap.mapped
    monkeypatch.setattr(FollowingMap, "mapped", lambda self, theta, w: mapped(self, theta, w + 0.5))
    assert alarm(from_a_start(tg.HMC(num_steps=6)), reference) > 1


INDUCING = {
    "pseudo-marginal": (tg.PseudoMarginal(num_importance=4, independent_share=0.9), 100, {"warmup_steps": 100, **CHAINS}),
    "NUTS on the bound, weighted": (
        tg.NUTS(marginal=Variational(), importance_weights=4),
        30,
        {"warmup_steps": 50, "num_chains": 64},
    ),
    "AMIS": (tg.AMIS(num_importance=4), 4000, {}),
}


def with_inducing_points(method, draws, **options):
    model = sparse_gp("poisson", num_data=8, num_inducing=3, num_columns=1)
    posterior = tg.sample(model, method, num_samples=draws, progress=False, **options)
    v = posterior.whitened
    return mean_and_error(posterior, torch.cat([posterior.theta, posterior.theta.square(), v, v.square()], -1))


@pytest.fixture(scope="module")
def reference_of_inducing_values():
    return with_inducing_points(tg.NUTS(), 100, warmup_steps=100, seed=1, **CHAINS)


@pytest.mark.slow
@pytest.mark.statistical
@pytest.mark.filterwarnings("ignore::torchgpmc.SamplingWarning")
@pytest.mark.parametrize("name", ["pseudo-marginal", "AMIS", pytest.param("NUTS on the bound, weighted", marks=pytest.mark.long)])
def test_engines_of_a_sparse_model_agree_with_nuts(name, reference_of_inducing_values):
    method, draws, options = INDUCING[name]
    assert alarm(with_inducing_points(method, draws, seed=2, **options), reference_of_inducing_values) < 1


@pytest.mark.slow
def test_inducing_values_that_stay_in_the_middle_do_not_agree(reference_of_inducing_values, monkeypatch):
    monkeypatch.setattr(InducingDraws, "whitened_at", lambda self, chosen: self.mean)
    assert alarm(with_inducing_points(tg.AMIS(num_importance=4), 4000, seed=2), reference_of_inducing_values) > 1


SEVERAL = {
    "pseudo-marginal": (tg.PseudoMarginal(), 100),
    "NUTS on Laplace's marginal, weighted": (tg.NUTS(marginal=tg.Laplace(), importance_weights=16), 64),
    "AMIS": (tg.AMIS(), 3000),
    "classes in turn": (tg.ClassGibbs(), 100),
}


def three_classes(method, draws, **options):
    x = inputs(8, 1, seed=3)
    made = tg.GP(x, (3 * x[:, 0]).floor(), kernel(1), tg.likelihoods.Softmax(num_classes=3, mixing_weights=False))
    return mean_and_error(tg.sample(made, method, num_samples=draws, progress=False, **options))


@pytest.fixture(scope="module")
def reference_of_several():
    return three_classes(tg.NUTS(), 250, warmup_steps=150, seed=1, **CHAINS)


@pytest.mark.slow
@pytest.mark.statistical
@pytest.mark.filterwarnings("ignore::torchgpmc.SamplingWarning")
@pytest.mark.parametrize("name", SEVERAL)
def test_engines_agree_with_nuts_on_several_latents(name, reference_of_several):
    method, draws = SEVERAL[name]
    options = {} if name == "AMIS" else {"warmup_steps": 75, **CHAINS}
    assert alarm(three_classes(method, draws, seed=2, **options), reference_of_several) < 1


@pytest.mark.slow
@pytest.mark.statistical
def test_nuts_agrees_with_a_grid_over_theta(reference, grid):
    assert grid_alarm(reference, *grid, tempering=1.0) < 1


@pytest.mark.slow
def test_a_grid_of_half_the_evidence_does_not_agree(reference, grid):
    assert grid_alarm(reference, *grid, tempering=0.5) > 1


@pytest.fixture(scope="module")
def grid():
    """Theta on a grid with its log prior and log evidence, by importance sampling so long that its error does not show."""
    made = model()
    axes = torch.linspace(-5, 4.5, 58, dtype=torch.float64), torch.linspace(-7, 4.5, 62, dtype=torch.float64)
    grid = torch.cartesian_prod(*axes)
    estimate = tg.evidence.importance(made, tg.EP(), num_importance=100).draw(grid, torch.Generator().manual_seed(0))
    return grid, made.layout.log_prior(grid), estimate.value


def grid_alarm(reference, grid, log_prior, log_evidence, tempering):
    weights = torch.softmax(log_prior + tempering * log_evidence, 0)
    truth = torch.cat([weights @ grid, weights @ grid.square()])
    mean, error = reference[0][:4], reference[1][:4]
    assert float(weights.view(58, 62)[[0, -1]].sum() + weights.view(58, 62)[:, [0, -1]].sum()) < 1e-4
    assert math.isfinite(float(truth.sum()))
    return float(((mean - truth).abs() / error).max()) / z_limit(4)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::torchgpmc.SamplingWarning")
def test_a_halved_evidence_does_not_agree(reference, monkeypatch):
    original = tg.evidence.ImportanceEstimator.evaluate

    def halved(self, *arguments):
        found = original(self, *arguments)
        return found._replace(value=0.5 * found.value)

    monkeypatch.setattr(tg.evidence.ImportanceEstimator, "evaluate", halved)
    assert alarm(mean_and_error(run("Laplace, 16")), reference) > 1


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::torchgpmc.SamplingWarning")
def test_weights_of_several_latents_without_their_curvature_do_not_agree(reference_of_several, monkeypatch):
    monkeypatch.setattr(gaussian_draws, "quadratic", lambda precision, delta: torch.zeros_like(delta[..., 0]))
    assert alarm(three_classes(tg.AMIS(), 3000, seed=2), reference_of_several) > 1
