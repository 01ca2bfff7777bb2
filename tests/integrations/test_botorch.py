"""BoTorch's fully Bayesian models under our sampler: densities as BoTorch states them, and models that BoTorch can use; no JAX."""

import copy
import pathlib
import re
import sys

import numpy as np
import pytest
import scipy.stats
import torch

import torchgpmc as tg
from torchgpmc.approximations import ApproximateMarginal, Conjugate
from torchgpmc.density import AutogradDensity

pytest.importorskip("botorch")

from botorch.acquisition.logei import qLogExpectedImprovement
from botorch.models import SingleTaskGP, fully_bayesian, fully_bayesian_multitask
from botorch.models.transforms import Normalize, Standardize
from botorch.optim import optimize_acqf
from botorch.posteriors.fully_bayesian import GaussianMixturePosterior

from torchgpmc.integrations import botorch as bridge
from torchgpmc.integrations.botorch.counterparts import loadable, regression_of

QUICK = {"warmup_steps": 3, "num_samples": 16, "thinning": 4, "max_tree_depth": 3, "disable_progbar": True}
pytestmark = pytest.mark.filterwarnings("ignore::torchgpmc.checks.SamplingWarning", "ignore:.*:UserWarning")


class NoJAX:
    """An importer that has none."""

    @staticmethod
    def find_spec(name, path=None, target=None):
        if name.partition(".")[0] in ("jax", "jaxlib", "numpyro"):
            raise ImportError(f"{name} is blocked")


@pytest.fixture(autouse=True)
def no_jax(monkeypatch):
    monkeypatch.setattr(sys, "meta_path", [NoJAX, *sys.meta_path])
    for module in (fully_bayesian, fully_bayesian_multitask):
        monkeypatch.setattr(module, "_HAS_JAX", False)


def data(count=7, columns=3):
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(count, columns, generator=generator, dtype=torch.float64)
    y = x.sum(-1, keepdim=True).sin() + 0.1 * torch.randn(count, 1, generator=generator, dtype=torch.float64)
    return x, (y - y.mean()) / y.std()


def single(number):
    """As gpytorch keeps the numbers of priors."""
    return float(np.float32(number))


def matern(gap):
    r = np.sqrt((gap**2).sum(-1))
    return (1 + np.sqrt(5) * r + 5 * r**2 / 3) * np.exp(-np.sqrt(5) * r)


def log_evidence(x, y, values, noise=None):
    """log p(y | ...) and log p(...) of constrained values, as BoTorch's documentation and code state them; in numpy."""
    prior = 0.0
    if "c0" in values:
        for name in ("c0", "c1"):
            prior += scipy.stats.lognorm(single(0.1**0.5)).logpdf(values[name]).sum()
        inside = 1e-7 + (1 - 2e-7) * x
        x = 1 - (1 - inside ** values["c1"]) ** values["c0"]
    gap = x[:, None] - x[None]
    mean = values["constant"]
    prior += scipy.stats.norm.logpdf(mean).sum()
    if "tausq" in values:
        prior += scipy.stats.halfcauchy(scale=single(0.1)).logpdf(values["tausq"])
        prior += scipy.stats.halfcauchy.logpdf(values["relevance"]).sum()
    if "lengthscale" in values:
        location, scale = np.sqrt(2) + 0.5 * np.log(x.shape[1]), np.sqrt(3)
        prior += scipy.stats.norm(single(location), single(scale)).logpdf(np.log(values["lengthscale"])).sum()
        prior -= np.log(values["lengthscale"]).sum()
        k = matern(gap / values["lengthscale"])
    elif "outputscale" in values:
        prior += scipy.stats.gamma(2.0, scale=1 / single(0.15)).logpdf(values["outputscale"])
        k = values["outputscale"] * matern(gap * np.sqrt(values["tausq"] * values["relevance"]))
    else:
        k = ((x - 0.5) * np.sqrt(values["tausq"] * values["relevance"])) @ (x - 0.5).T
    if noise is None:
        prior += scipy.stats.gamma(single(0.9), scale=0.1).logpdf(values["noise"] - 1e-4)
        noise = values["noise"]
    total = k + noise * np.eye(len(x))
    return prior + scipy.stats.multivariate_normal.logpdf(y, np.full(len(x), mean), total)


MODELS = {
    "saas": lambda x, y: bridge.SaasFullyBayesianSingleTaskGP(x, y),
    "matern": lambda x, y: bridge.FullyBayesianSingleTaskGP(x, y),
    "linear": lambda x, y: bridge.FullyBayesianLinearSingleTaskGP(x, y),
    "saas, known noise": lambda x, y: bridge.SaasFullyBayesianSingleTaskGP(x, y, torch.full_like(y, 0.02)),
    "matern, warped": lambda x, y: bridge.FullyBayesianSingleTaskGP(x, y, use_input_warping=True),
    "linear, warped": lambda x, y: bridge.FullyBayesianLinearSingleTaskGP(x, y, use_input_warping=True),
}


def values_at(model, theta):
    """BoTorch's numbers by the last part of our names, the jitter counted as noise."""
    found = {name.rpartition(".")[2]: value.squeeze(0).numpy() for name, value in model.layout.constrain(theta).items()}
    found = {name: value.squeeze(0) if value.ndim > 1 and len(value) == 1 else value for name, value in found.items()}
    return {**found, "noise": found["noise"] + model.jitter} if "noise" in found else found


@pytest.mark.parametrize("name", MODELS)
def test_the_density_is_the_one_that_botorch_states(name):
    x, y = data()
    model = regression_of(MODELS[name](x, y).pyro_model)
    theta = 0.5 * torch.randn(2, model.layout.size, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    density = ApproximateMarginal(model, Conjugate())
    value, gradient = density.value_and_grad(theta)
    torch.testing.assert_close(gradient, AutogradDensity.value_and_grad(density, theta)[1], rtol=1e-6, atol=1e-6)
    jacobian = model.layout.log_prior(theta) - model.layout.log_prior_of_values(theta)
    noise = 0.02 if "known" in name else None
    for row, found in zip(theta, value - jacobian, strict=True):
        expected = log_evidence(x.numpy(), y[:, 0].numpy(), values_at(model, row[None]), noise)
        np.testing.assert_allclose(float(found), float(np.squeeze(expected)), rtol=1e-8)


@pytest.mark.parametrize("name", MODELS)
def test_loaded_draws_predict_as_our_posterior_does_and_survive_a_state_dict(name):
    x, y = data(6, 2)
    model = MODELS[name](x, y)
    regression = regression_of(model.pyro_model)
    posterior = tg.sample(
        regression, tg.NUTS(max_tree_depth=2, from_mode=True), num_samples=2, warmup_steps=3, num_chains=8, seed=0, progress=False
    )
    for _ in range(2):  # a second time instead of the first: warping must not pile up
        model.load_mcmc_samples(loadable(posterior, 16, 4))
    model.eval()
    assert model.num_mcmc_samples == 4
    test = torch.rand(4, 2, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    found = model.posterior(test)
    assert isinstance(found, GaussianMixturePosterior)
    # The same draws under the exact conditional: theirs are every fourth, from the last.
    theta = posterior.theta.flatten(0, 1).flip(0)[::4]
    prior = regression.prior(theta)
    u = Conjugate().importance_density(regression, prior)
    cross = regression.cross(prior, test)
    expected = cross.mean + (cross.covariance * u.alpha.unsqueeze(-1)).sum(1)
    torch.testing.assert_close(found.mean.squeeze(-1), expected, rtol=2e-3, atol=2e-3)
    twin = MODELS[name](x, y)
    twin.load_state_dict(model.state_dict())
    twin.eval()
    torch.testing.assert_close(twin.posterior(test).mean, found.mean, rtol=1e-6, atol=1e-6)


def test_fits_repeat_and_say_how_good_they_are():
    model = bridge.SaasFullyBayesianSingleTaskGP(*data())
    for _ in range(2):
        with pytest.warns(tg.SamplingWarning, match=r"R-hat of the hyperparameters is .*\. Raise num_samples, now 40 "):
            bridge.fit_fully_bayesian_model_nuts(model, **{**QUICK, "num_samples": 40})
        assert model.num_mcmc_samples == 10
        assert model.sampling.rhat > 1.1 and "effective draws" in " ".join(model.sampling.complaints)
    repeated = copy.deepcopy(model).median_lengthscale
    bridge.fit_fully_bayesian_model_nuts(model, **{**QUICK, "num_samples": 40})
    torch.testing.assert_close(model.median_lengthscale, repeated)
    assert copy.deepcopy(model).sampling.info["seed"] == 0


def test_an_acquisition_function_is_optimised_under_transforms():
    x, y = data()
    bounds = torch.tensor([[0.0] * 3, [10.0] * 3], dtype=torch.float64)
    transforms = {"input_transform": Normalize(3, bounds=bounds), "outcome_transform": Standardize(1)}
    model = bridge.SaasFullyBayesianSingleTaskGP(10 * x, 5 + y, **transforms)
    bridge.fit_fully_bayesian_model_nuts(model, **QUICK)
    candidate, value = optimize_acqf(
        qLogExpectedImprovement(model, best_f=float(5 + y.max())),
        bounds,
        q=1,
        num_restarts=2,
        raw_samples=8,
        options={"maxiter": 5},
    )
    assert candidate.shape == (1, 3) and bool(torch.isfinite(value))
    assert bool(((candidate >= 0) & (candidate <= 10)).all())


def test_tasks_have_means_and_a_kernel_between_them():
    x, y = data(8, 2)
    by_task = torch.cat([x[:, :1], torch.tensor([[3.0], [7.0]]).repeat(4, 1), x[:, 1:]], 1)
    model = bridge.SaasFullyBayesianMultiTaskGP(by_task, y, task_feature=1)
    regression = regression_of(model.pyro_model)
    theta = 0.5 * torch.randn(2, regression.layout.size, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    density = ApproximateMarginal(regression, Conjugate())
    found = density.value_and_grad(theta)[0] - regression.layout.log_prior(theta)
    task = np.tile([0, 1], 4)
    for row, log_probability in zip(theta, found, strict=True):
        values = values_at(regression, row[None])
        k = values["outputscale"] * matern((x[:, None] - x[None]).numpy() * np.sqrt(values["tausq"] * values["relevance"]))
        features = (
            regression.layout.constrain(row[None])["kernel.kernels.1.latent_features"][0].numpy() / values["task_lengthscale"]
        )
        k = k * matern(features[task][:, None] - features[task][None]) + values["noise"] * np.eye(8)
        expected = scipy.stats.multivariate_normal.logpdf(y[:, 0], values["constant"][task], k)
        np.testing.assert_allclose(float(log_probability), expected, rtol=1e-7)
    bridge.fit_fully_bayesian_model_nuts(model, **QUICK)
    assert isinstance(model.posterior(x), GaussianMixturePosterior) and model.posterior(x).mixture_mean.shape == (8, 2)
    twin = bridge.SaasFullyBayesianMultiTaskGP(by_task, y, task_feature=1)
    twin.load_state_dict(model.state_dict())
    twin.eval()
    torch.testing.assert_close(twin.posterior(x).mean, model.posterior(x).mean, rtol=1e-6, atol=1e-6)


@pytest.mark.slow
def test_the_programs_in_the_documents_run():
    page = (pathlib.Path(__file__).parents[2] / "docs" / "for" / "botorch.md").read_text()
    torch.manual_seed(0)
    for program in re.findall(r"```python\n(.*?)```", page, flags=re.DOTALL):
        shorter = program.replace("nuts(model)", "nuts(model, **QUICK)").replace("=200, warmup_steps=150", "=2, warmup_steps=3")
        assert shorter != program
        exec(compile(shorter, "botorch.md", "exec"), names := {"QUICK": QUICK})
        assert "posterior" in names


def test_draws_are_spread_over_chains():
    class Draws:
        samples = {"kernel.outputscale": torch.arange(256.0).view(8, 32), "mean.constant": torch.arange(256.0).view(8, 32)}

    loaded = loadable(Draws, 256, 16)["outputscale"]
    assert len(loaded) == 16 and torch.unique(loaded // 32).tolist() == list(range(8))


def test_what_is_not_there_is_refused_in_a_sentence():
    x, y = data()
    with pytest.raises(ImportError, match="JAX"):
        fully_bayesian.FullyBayesianSingleTaskGP(x, y)  # JAX is indeed blocked
    model = bridge.FullyBayesianSingleTaskGP(x, y)
    with pytest.raises(RuntimeError, match="not been fitted"):
        model.posterior(x)
    model.pyro_model.__class__ = type("Mine", (fully_bayesian.MaternPyroModel,), {})
    with pytest.raises(NotImplementedError, match="pyro_model is a Mine, whose density"):
        bridge.fit_fully_bayesian_model_nuts(model)
    with pytest.raises(ValueError, match="several outcomes"):
        bridge.FullyBayesianSingleTaskGP(x, torch.cat([y, y], 1))
    with pytest.raises(ValueError, match="num_chains is 0"):
        bridge.fit_fully_bayesian_model_nuts(bridge.FullyBayesianSingleTaskGP(x, y), num_chains=0)
    with pytest.raises(TypeError, match=r"model is SingleTaskGP. Expected a fully Bayesian model"):
        bridge.fit_fully_bayesian_model_nuts(SingleTaskGP(x, y))
    for given in ((x.numpy(), y), (x, y.tolist()), (x, y, 0.1)):
        with pytest.raises(TypeError, match=r"train_(X|Y|Yvar) is .*\. Expected a tensor: torch.as_tensor\(train_"):
            bridge.FullyBayesianSingleTaskGP(*given)
