"""Geweke's test of every pseudo-marginal kernel, one importance sample included, and of importance densities that see the state."""

import itertools

import pytest
import torch
from gpytorch.kernels import RBFKernel, ScaleKernel
from gpytorch.priors import GammaPrior

import torchgpmc as tg
from tests.calibration import without_jacobian
from tests.problems import gp, inputs, targets
from tests.statistical import pseudo_marginal as pseudo_marginal_states
from tests.statistical.pseudo_marginal import KERNELS, extended_state, kernel
from tests.statistical.test_geweke import draw_targets, excess_over_the_joint, functions, joint_draws
from torchgpmc.evidence import ImportanceEstimator, gaussian_draws, importance_sampling, smooth_probit
from torchgpmc.evidence.inducing_estimator import InducingDraws
from torchgpmc.runs.anchors import MarginalDensity
from torchgpmc.samplers import IndependentProposal


def rough_probit():
    """Most of f is white noise."""
    base = RBFKernel(lengthscale_prior=GammaPrior(2.0, 20.0))
    kernel = ScaleKernel(base, outputscale_prior=GammaPrior(4.0, 1.0))
    return tg.GP(inputs(3), targets("probit", 3), kernel, tg.likelihoods.Bernoulli())


MODELS = {
    "probit": lambda: gp("probit", num_data=3),
    "poisson": lambda: gp("poisson", num_data=3),
    "student_t": lambda: gp("student_t", num_data=3),
    "rough probit": rough_probit,
}


def served(likelihood, name):
    if likelihood == "student_t":
        return name in ("one sample", "pairs, latent moves", "correlated")
    return likelihood == "probit" or ("evidence" in KERNELS[name].options) == (likelihood == "rough probit")


CHAINS = 17_000  # see as much as 20,000 without the further draws: a chain that rejects half its proposals remembers its start
SLICE_CHAINS = 2000  # which makes some twenty estimates a step
# Every kernel with the likelihood that is quickest; those whose planted errors need another, with that as well.
REPEATS = [("poisson", name) for name in KERNELS if name not in ("one sample", "pairs, latent moves", "correlated")]


def cases():
    """Pairs of a likelihood and a kernel; what only repeats a kernel on another likelihood is for ``make test-long``."""
    for case in itertools.product(MODELS, KERNELS):
        if served(*case):
            yield pytest.param(*case, marks=pytest.mark.long if case in REPEATS else ())


def geweke(model, name, seed, *, rounds=4, steps=2, chains=None, prepare=None, **changes):
    """Alarm level: above 1 is an alarm."""
    chains = chains or (SLICE_CHAINS if name == "slice" else CHAINS)
    generator = torch.Generator().manual_seed(seed)
    position, y = joint_draws(model, chains, generator)
    theta, v = position.split([model.layout.size, model.latent_size], -1)
    start = functions(model, position, y)
    for last in [False] * (rounds - 1) + [True]:
        density, cheap, sampler = kernel(name, model, y, **changes)
        keeps = name in ("correlated", "white noise out, correlated", "slice")
        state = extended_state(density, cheap if name == "delayed" else None, theta, v, generator, keeps_auxiliary=keeps)
        for _ in range(steps):
            if prepare is not None:
                prepare(density, state)
            state, _ = sampler.step(state, generator)
        theta, v = state.position, state.payload.whitened
        position = torch.cat([theta, v], -1)
        # Latents that had not seen y would pass with targets that were drawn from them: the last round's are those they were given.
        y = y if last else draw_targets(model, position, generator)
    return excess_over_the_joint(model, start, functions(model, position, y), generator)


@pytest.mark.slow
@pytest.mark.statistical
@pytest.mark.parametrize(("likelihood", "name"), cases())
def test_kernels_leave_the_joint_distribution_as_it_is(name, likelihood):
    # Nine densities an estimate.
    assert geweke(MODELS[likelihood](), name, seed=31, chains=4000 if likelihood == "student_t" else None) < 1


@pytest.mark.slow
@pytest.mark.statistical
@pytest.mark.parametrize("name", ["one sample", "pairs, latent moves", "correlated"])
def test_kernels_with_several_latents_leave_the_joint_distribution_as_it_is(name):
    assert geweke(gp("softmax", num_data=3), name, seed=37, chains=7000) < 1


def inducing_at_the_data():
    """The sparse density is a bound, not p(y | theta, v), unless Z = X makes the bound tight."""
    x = inputs(3)
    base = RBFKernel(lengthscale_prior=GammaPrior(2.0, 8.0))
    kernel = ScaleKernel(base, outputscale_prior=GammaPrior(4.0, 4.0))
    return tg.SparseGP(x, targets("poisson", 3), kernel, tg.likelihoods.Poisson(), inducing_points=x, jitter=1e-8)


@pytest.mark.slow
@pytest.mark.statistical
@pytest.mark.parametrize("name", ["one sample", "pairs, latent moves", pytest.param("correlated", marks=pytest.mark.long)])
def test_kernels_with_inducing_values_leave_the_joint_distribution_as_it_is(name):
    assert geweke(inducing_at_the_data(), name, seed=41, chains=7000) < 1


@pytest.mark.slow
def test_weights_of_inducing_values_without_the_density_they_are_from_are_caught(monkeypatch):
    original = InducingDraws.__init__

    def without_square(self, *arguments):
        original(self, *arguments)
        self.half_square = torch.zeros_like(self.half_square)

    monkeypatch.setattr(InducingDraws, "__init__", without_square)
    assert geweke(inducing_at_the_data(), "pairs, latent moves", seed=42, rounds=3, chains=3500) > 1


@pytest.mark.slow
@pytest.mark.parametrize("name", ["one sample", "pairs, latent moves"])
def test_weights_of_several_latents_without_their_curvature_are_caught(name, monkeypatch):
    for user in (importance_sampling, gaussian_draws):
        monkeypatch.setattr(user, "quadratic", lambda precision, delta: torch.zeros_like(delta[..., 0]))
    assert geweke(gp("softmax", num_data=3), name, seed=38, rounds=15, chains=3500) > 1


class SeesTheState(MarginalDensity):
    """Planted error: Newton starts at the latents of the chain's present state instead of a function of theta."""

    present = None

    def _start(self, theta):
        return super()._start(theta) if SeesTheState.present is None else SeesTheState.present


@pytest.mark.slow
@pytest.mark.statistical
def test_a_crude_density_that_sees_theta_alone_is_exact():
    """The control of the test below: one Newton step from an anchor is a poor importance density, and harmless."""
    assert geweke(MODELS["poisson"](), "one sample", seed=32, approximation=tg.Laplace(max_iterations=1)) < 1


@pytest.mark.slow
def test_a_warm_start_that_depends_on_the_state_is_caught(monkeypatch):
    def prepare(density, state):
        prior = density.estimator.model.prior(state.position)
        alpha = torch.linalg.solve_triangular(prior.factor.mT, state.payload.whitened.unsqueeze(-1), upper=True).squeeze(-1)
        f = (prior.factor @ state.payload.whitened.unsqueeze(-1)).squeeze(-1)
        monkeypatch.setattr(SeesTheState, "present", torch.cat([alpha.clamp(-2, 2), f], -1))

    def forget(*_):
        monkeypatch.setattr(SeesTheState, "present", None)

    original = extended_state

    def honest(*arguments, **options):
        forget()
        return original(*arguments, **options)

    monkeypatch.setattr("tests.statistical.test_pseudo_marginal.extended_state", honest)
    found = geweke(
        MODELS["poisson"](),
        "one sample",
        seed=32,
        approximation=tg.Laplace(max_iterations=1),
        density=SeesTheState,
        prepare=prepare,
    )
    assert found > 1


@pytest.mark.slow
@pytest.mark.parametrize("name", ["one sample", "correlated"])
def test_a_halved_evidence_is_caught(name, monkeypatch):
    original = ImportanceEstimator.evaluate

    def halved(self, *arguments):
        found = original(self, *arguments)
        return found._replace(value=0.5 * found.value)

    monkeypatch.setattr(ImportanceEstimator, "evaluate", halved)
    assert geweke(MODELS["poisson"](), name, seed=33, rounds=15, chains=4000) > 1


@pytest.mark.slow
@pytest.mark.parametrize("name", KERNELS)
def test_a_missing_jacobian_is_caught(name, monkeypatch):
    without_jacobian(monkeypatch)
    assert geweke(MODELS["probit"](), name, seed=35, rounds=3, chains=1200) > 1


@pytest.mark.slow
def test_independent_proposals_taken_as_a_random_walks_are_caught(monkeypatch):
    monkeypatch.setattr(IndependentProposal, "log_density", lambda self, preconditioner, position: torch.zeros(len(position)))
    assert geweke(MODELS["probit"](), "independent proposals", seed=36, chains=1200) > 1


@pytest.mark.slow
@pytest.mark.parametrize("error", ["noise that has not seen the label", "too much noise"])
def test_a_wrong_draw_of_what_was_integrated_out_is_caught(error, monkeypatch):
    if error == "too much noise":
        original = smooth_probit.solve_lower
        monkeypatch.setattr(smooth_probit, "solve_lower", lambda factor, right: 1.1 * original(factor, right))
    else:
        everywhere = lambda uniform, lower, upper: torch.special.ndtri(uniform)  # noqa: E731
        monkeypatch.setattr(smooth_probit, "interval_quantile", everywhere)
    monkeypatch.setattr(pseudo_marginal_states, "check_kept_draw", lambda *_: None)
    assert geweke(rough_probit(), "white noise out", seed=39) > 1


@pytest.mark.slow
def test_latents_moved_under_half_their_likelihood_are_caught(monkeypatch):
    whole = tg.GP.log_likelihood
    monkeypatch.setattr(tg.GP, "log_likelihood", lambda self, *arguments: 0.5 * whole(self, *arguments))
    assert geweke(MODELS["poisson"](), "pairs, latent moves", seed=34) > 1
