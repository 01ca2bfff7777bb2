"""The transcription model end to end: data sets drawn from its prior, one a chain, by NUTS on all unknowns."""

import warnings

import pytest
import torch
from gpytorch.kernels import RBFKernel
from gpytorch.priors import GammaPrior, LogNormalPrior

import torchgpmc as tg
from tests.calibration import worst_excess
from tests.statistical.test_calibration import calibration, simulate
from torchgpmc.likelihoods import Activation, Repression, Transcription
from torchgpmc.runs.likelihood_parts import PartsGivenF

pytestmark = pytest.mark.filterwarnings("ignore:the expression of gene")
TIMES = torch.tensor([0.0, 1.0, 2.0, 4.0], dtype=torch.float64)


def model_of(num_points=9, num_genes=2, num_replicates=1, **options):
    grid = torch.linspace(0, 4, num_points, dtype=torch.float64)
    options = {"response": Activation(), "kinetics_prior": LogNormalPrior(0.0, 0.5), **options}
    likelihood = Transcription(grid, TIMES, num_genes=num_genes, num_replicates=num_replicates, **options)
    y = torch.ones(likelihood.target_shape(num_points))
    kernel = RBFKernel(lengthscale_prior=GammaPrior(4.0, 4.0))
    known = {"known_inputs": grid[:1], "known_values": torch.tensor([-1.0])}
    return tg.ConditionedGP(grid, y, kernel, likelihood, **known)


def level_of_measured():
    """Alarm level with little noise, so that ranks tell how much the data are trusted."""
    model = model_of(variances=torch.full((1, 2, 4), 0.02))
    return calibration(model, tg.NUTS(thinning=4, max_tree_depth=5), warmup_steps=60, chains=240)


@pytest.mark.slow
@pytest.mark.statistical
def test_ranks_of_the_truth_are_uniform():
    assert level_of_measured() < 1


@pytest.mark.slow
def test_a_density_of_too_little_noise_is_caught(monkeypatch):
    original = Transcription.log_prob
    monkeypatch.setattr(Transcription, "log_prob", lambda self, f, targets: 2 * original(self, f, targets))
    assert level_of_measured() > 1


def level_of_sweeps():
    """Alarm level of a sweep that moves genes as blocks."""
    method = tg.Gibbs(latent=tg.EllipticalSlice(), hyper_steps=3, latent_steps=4, thinning=15)
    return calibration(model_of(variances=torch.full((1, 2, 4), 0.05)), method, warmup_steps=100, chains=240)


@pytest.mark.long
@pytest.mark.statistical
def test_ranks_of_the_truth_are_uniform_where_genes_are_blocks():
    assert level_of_sweeps() < 1


@pytest.mark.long
def test_genes_moved_by_anothers_likelihood_are_caught(monkeypatch):
    honest = PartsGivenF.likelihoods
    monkeypatch.setattr(PartsGivenF, "likelihoods", lambda self, decided, rows: honest(self, decided, rows).flip(-1))
    assert level_of_sweeps() > 1


def level_of_sweeps_along_levels():
    """Alarm level of a sweep in which f goes up with what takes it back, genes move along ridges, theta given noisy latents."""
    grid = torch.linspace(0, 4, 9, dtype=torch.float64)
    options = {"response": Repression(), "free_initial": True, "kinetics_prior": LogNormalPrior(0.0, 0.5)}
    likelihood = Transcription(grid, TIMES, num_genes=2, num_replicates=1, variances=torch.full((1, 2, 4), 0.05), **options)
    model = tg.GP(grid, torch.ones(1, 2, 4), RBFKernel(lengthscale_prior=GammaPrior(4.0, 4.0)), likelihood)
    blocks = {"parts": tg.HMC(num_steps=6), "invariance_steps": 1, "parameterization": tg.Surrogate(precision=2.0)}
    method = tg.Gibbs(latent=tg.EllipticalSlice(), hyper_steps=3, latent_steps=4, thinning=10, **blocks)
    return calibration(model, method, warmup_steps=100, chains=240)


@pytest.mark.long
@pytest.mark.statistical
def test_ranks_of_the_truth_are_uniform_where_f_moves_with_what_takes_it_back():
    assert level_of_sweeps_along_levels() < 1


@pytest.mark.long
def test_a_level_that_is_not_taken_back_is_caught(monkeypatch):
    monkeypatch.setattr(Transcription, "levels", lambda self: {"michaelis_constant": 1.0, "sensitivity": -1.0})
    assert level_of_sweeps_along_levels() > 1


@pytest.mark.long
@pytest.mark.statistical
@pytest.mark.parametrize(
    "options",
    [
        {"response": Repression(), "free_initial": True, "precision_prior": GammaPrior(4.0, 0.4)},
        {"response": Repression(), "integrate_variances": True, "precision_prior": GammaPrior(4.0, 0.4)},
        {"num_replicates": 2, "variances": torch.full((2, 2, 4), 0.1)},
    ],
    ids=["sampled variances", "integrated variances", "two replicates"],
)
def test_ranks_of_the_truth_are_uniform_with_other_options(options):
    assert calibration(model_of(**options), tg.NUTS(thinning=6, max_tree_depth=7), warmup_steps=150, chains=400) < 1


@pytest.mark.long
@pytest.mark.statistical
def test_bands_cover_the_truth():
    """95 % bands of concentrations and decay rates, on data sets drawn from the prior."""
    made = model_of(num_points=17, num_genes=4, variances=torch.full((1, 4, 4), 0.05))
    theta, _, f, model = simulate(made, seed=3, chains=100)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # chains have different data, so R-hat across them means nothing here
        posterior = tg.sample(model, tg.NUTS(max_tree_depth=8), num_samples=400, warmup_steps=200, num_chains=100, progress=False)
    decay = made.layout.constrain(theta)["likelihood.decay"]
    for draws, truth in ((posterior.latents[..., 1:], f[:, 1:]), (posterior.samples["likelihood.decay"], decay)):
        low, high = torch.quantile(draws, 0.025, 1), torch.quantile(draws, 0.975, 1)
        covered = ((low < truth) & (truth < high)).double().mean(-1, keepdim=True)  # of each data set
        assert worst_excess(covered, 0.95) < 1
