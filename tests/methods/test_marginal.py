"""What pseudo-marginal methods promise: errors before sampling, labels, work counted, warnings in plain words."""

import pytest
import torch
from gpytorch.kernels import RBFKernel, ScaleKernel
from gpytorch.priors import LogNormalPrior

import torchgpmc as tg
from tests.problems import LIKELIHOODS, SEVERAL_LATENTS, fixed_kernel, gp, inputs, sparse_gp, targets
from tests.speed import quick
from torchgpmc.diagnostics.noisy_evidence import _longest_stay
from torchgpmc.diagnostics.summaries import summarise
from torchgpmc.diagnostics.verdicts import (
    complaints,
)

OPTIONS = {"num_samples": 30, "warmup_steps": 30, "num_chains": 2, "seed": 1, "progress": False}


def quiet(model, method, **options):
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", tg.SamplingWarning)
        return tg.sample(model, method, **{**OPTIONS, **options})


@pytest.mark.parametrize("name", quick(["probit"], [name for name in LIKELIHOODS if name not in (*SEVERAL_LATENTS, "beta")]))
@pytest.mark.parametrize("approximation", [tg.Laplace(), tg.EP()])
def test_every_factorised_likelihood_is_served(name, approximation):
    posterior = quiet(gp(name), tg.PseudoMarginal(approximation=approximation, num_importance=4), num_samples=4, warmup_steps=4)
    assert bool(torch.isfinite(posterior.stats["lp"]).all())
    assert len(posterior.predict(inputs(3, seed=5)).mean) == 3


@pytest.mark.parametrize(
    ("method", "message"),
    [
        (tg.PseudoMarginal(num_importance=0), "num_importance"),
        (tg.PseudoMarginal(correlation=1.0), "correlation"),
        (tg.PseudoMarginal(correlation=0.5, latent_steps=1), "correlation"),
        (tg.PseudoMarginal(correlation=0.5, delayed_acceptance=True), "correlation"),
        (tg.PseudoMarginal(delayed_acceptance=True, latent_steps=2), "latent_steps"),
        (tg.PseudoMarginal(latent_steps=-1), "latent_steps"),
        (tg.PseudoMarginal(independent_share=1.5), "independent_share"),
        (tg.PseudoMarginal(independent_share=0.5, correlation=0.5), "independent_share"),
        (tg.PseudoMarginal(independent_share=True), "independent_share is True"),
        (tg.PseudoMarginal(thinning=0), "thinning"),
        (tg.PseudoMarginal(target_accept_prob=1.5), "target_accept_prob"),
        (tg.PseudoMarginalSlice(max_steps_out=0), "max_steps_out"),
        (tg.NUTS(importance_weights=4), "importance_weights"),
        (tg.NUTS(marginal=tg.Laplace(), importance_weights=-1), "importance_weights"),
    ],
)
def test_options_out_of_range_are_named(method, message):
    with pytest.raises(ValueError, match=message):
        tg.sample(gp("probit"), method, **OPTIONS)


@pytest.mark.parametrize("method", [tg.PseudoMarginal(), tg.PseudoMarginalSlice(), tg.NUTS(marginal=tg.EP())])
def test_models_that_cannot_be_served_are_named(method):
    with pytest.raises(ValueError, match=r"(SparseGP|StudentT may give them several modes).*NUTS"):
        tg.sample(sparse_gp("student_t"), method, **OPTIONS)
    fixed = tg.GP(inputs(6), targets("probit", 6), fixed_kernel(), tg.likelihoods.Bernoulli())
    with pytest.raises(ValueError, match="EllipticalSlice"):
        tg.sample(fixed, method, **OPTIONS)


def test_weights_from_something_else_are_refused():
    with pytest.raises(TypeError, match="evidence is 'many'"):
        tg.sample(gp("probit"), tg.NUTS(marginal=tg.Laplace(), importance_weights="many"), **OPTIONS)
    with pytest.raises(ValueError, match=r"importance_weights is Orthant"):
        tg.sample(gp("probit"), tg.NUTS(importance_weights=tg.evidence.Orthant()), **OPTIONS)


def test_a_likelihood_that_does_not_factorise_is_named():
    class Joint(tg.likelihoods.LogLikelihood, __import__("gpytorch").likelihoods.Likelihood):
        def forward(self, function_samples):
            raise NotImplementedError

        def log_prob(self, f, targets):
            return -0.5 * (f.sum(-1) - targets.sum()) ** 2

    model = tg.GP(inputs(5), torch.randn(5), gp("probit").kernel, Joint())
    with pytest.raises(ValueError, match="factorises"):
        tg.sample(model, tg.PseudoMarginal(), **OPTIONS)


@pytest.mark.slow
def test_an_approximation_that_fails_everywhere_is_an_error():
    with pytest.raises(ValueError, match=r"failed for 2 of 2 chains.*EP"):
        tg.sample(gp("probit"), tg.PseudoMarginal(approximation=tg.Laplace(tolerance=1e-30, max_iterations=1)), **OPTIONS)


@pytest.mark.parametrize(
    "method",
    [
        pytest.param(tg.NUTS(max_tree_depth=3, marginal=tg.Laplace()), marks=pytest.mark.slow),
        tg.HMC(num_steps=2, marginal=tg.EP()),
        tg.AdaptiveMH(marginal=tg.EP()),
        pytest.param(tg.Slice(marginal=tg.Laplace()), marks=pytest.mark.slow),
    ],
)
def test_draws_of_an_approximate_marginal_say_so(method):
    posterior = quiet(gp("probit"), method, num_samples=5, warmup_steps=5)
    assert "not the exact posterior" in posterior.info["target"] and posterior.log_weights is None


@pytest.mark.slow
def test_pseudo_marginal_draws_are_exact_and_say_so():
    assert quiet(gp("probit"), tg.PseudoMarginal()).info["target"] == "the exact posterior"


@pytest.mark.slow
@pytest.mark.parametrize("weights", [4000, tg.evidence.Orthant(4000)])
def test_importance_weights_are_estimate_over_approximation(weights):
    model = gp("probit")
    posterior = quiet(model, tg.NUTS(max_tree_depth=3, marginal=tg.Laplace(), importance_weights=weights), num_samples=5)
    theta = posterior.theta.flatten(0, 1)
    exact = tg.evidence.importance(model, tg.EP(), num_importance=20_000)(theta, torch.Generator().manual_seed(0)).value
    approximate = tg.approximations.laplace(model, theta).log_evidence
    torch.testing.assert_close(posterior.log_weights.flatten(), exact - approximate, atol=0.02, rtol=0)
    assert float((exact - approximate).abs().max()) > 0.05
    assert "weighted" in posterior.info["target"]


def test_work_is_counted(monkeypatch):
    counted = []
    original = torch.linalg.cholesky_ex
    model = gp("probit")
    posterior = quiet(model, tg.PseudoMarginal(), num_samples=1, warmup_steps=0, num_chains=1)
    monkeypatch.setattr(torch.linalg, "cholesky_ex", lambda matrix, **o: counted.append(len(matrix)) or original(matrix, **o))
    estimator = tg.evidence.importance(model, num_importance=16)
    estimate = estimator.draw(posterior.theta[:, 0], torch.Generator().manual_seed(0))
    assert float(estimate.num_factorizations.sum()) == sum(counted)
    assert float(posterior.stats["n_factorizations"].min()) >= 2


@pytest.mark.slow
@pytest.mark.parametrize(
    "method",
    [
        tg.PseudoMarginal(),
        tg.PseudoMarginal(delayed_acceptance=True),
        pytest.param(tg.PseudoMarginalSlice(num_importance=4), marks=pytest.mark.slow),
    ],
)
def test_chains_have_data_of_their_own(method):
    y = torch.stack([torch.zeros(5), torch.full((5,), 6.0)]).double()
    posterior = quiet(gp("poisson", 5).with_targets(y), method, num_samples=60)
    low, high = posterior.latents.mean((1, 2))
    assert low < high - 1


def stats(**changes):
    draws = {"lp": torch.randn(2, 500), "n_factorizations": torch.ones(2, 500), "log_evidence": torch.randn(2, 500)}
    return draws | {"log_evidence_variance": torch.full((2, 500), 0.1), "approximation_converged": torch.ones(2, 500)} | changes


def complaints_of(**changes):
    return " ".join(complaints(summarise({}), stats(**changes), 2, None))


def test_complaints_about_estimates():
    assert complaints_of() == ""
    assert "relative variance 0.7" in complaints_of(log_evidence_variance=torch.full((2, 500), 0.7))
    stuck = torch.randn(2, 500)
    stuck[1, 100:300] = 7.0
    assert "200 transitions" in complaints_of(log_evidence=stuck)
    assert "did not converge for 50%" in complaints_of(approximation_converged=torch.arange(1000).view(2, 500) % 2)


def test_noise_is_that_of_the_draws_that_weigh():
    """One estimate in fifty hit what the others missed."""
    variance = torch.full((1, 500), 0.1)
    variance[0, ::50] = 1.0
    even, lucky = torch.zeros(1, 500), 6.0 * (variance > 0.5)
    assert complaints(summarise({}), {"log_evidence_variance": variance}, 1, even) == []
    assert "relative variance 0.9" in " ".join(complaints(summarise({}), {"log_evidence_variance": variance}, 1, lucky))
    single = {"log_evidence_variance": torch.full((1, 500), torch.nan)}
    assert complaints(summarise({}), single, 1, even) == []


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::torchgpmc.SamplingWarning")
@pytest.mark.parametrize("method", [tg.AMIS(), tg.PseudoMarginal()])
def test_estimates_that_miss_most_of_a_rough_posterior_are_complained_about(method):
    """Labels of forty inputs far apart: f is white noise, and the evidence by Laplace's densities is low by nats."""
    x = torch.linspace(0, 400, 40, dtype=torch.float64)
    labels = torch.rand(40, generator=torch.Generator().manual_seed(0)) > 0.5
    kernel = ScaleKernel(RBFKernel(), outputscale_prior=LogNormalPrior(3.0, 0.3))
    kernel.base_kernel.requires_grad_(False)
    model = tg.GP(x, labels.long(), kernel, tg.likelihoods.Bernoulli())
    steps = {} if isinstance(method, tg.AMIS) else {"warmup_steps": 100, "num_chains": 2}
    posterior = tg.sample(model, method, num_samples=200, seed=0, progress=False, **steps)
    assert any("relative variance" in complaint for complaint in posterior.complaints())


def test_the_longest_stay():
    assert _longest_stay(torch.tensor([[1.0, 1.0, 1.0, 2.0, 3.0], [1.0, 2.0, 3.0, 4.0, 4.0]]))[0] == 3
    assert _longest_stay(torch.ones(1, 7))[0] == 7
