"""A model's dtype is its own: torch's default, which a user may have set either way, never enters its arithmetic."""

import pytest
import torch
from gpytorch.kernels import RBFKernel
from gpytorch.likelihoods import GaussianLikelihood
from gpytorch.priors import GammaPrior, HalfNormalPrior

import torchgpmc as tg
from tests.problems import conditioned_gp, fitc, fixed_kernel, gp, inputs, projected_process, sparse_gp, targets
from tests.speed import quick
from torchgpmc.evidence import Orthant, SmoothProbit

CHAINS = {"warmup_steps": 4, "num_chains": 2}
ENGINES = {
    "NUTS": (tg.NUTS(max_tree_depth=3), CHAINS),
    "whitening": (tg.NUTS(whitening=tg.Laplace(), max_tree_depth=3), CHAINS),
    "marginal": (tg.NUTS(marginal=tg.EP(), importance_weights=2, max_tree_depth=2), CHAINS),
    "HMC": (tg.HMC(num_steps=2), CHAINS),
    "ChEES": (tg.ChEES(max_steps=4), CHAINS),
    "AdaptiveMH": (tg.AdaptiveMH(), CHAINS),
    "Slice": (tg.Slice(), CHAINS),
    "PseudoMarginal": (tg.PseudoMarginal(independent_share=0.5, latent_steps=1), CHAINS),
    "from mode": (tg.PseudoMarginal(from_mode=True), CHAINS),
    "delayed": (tg.PseudoMarginal(delayed_acceptance=True), CHAINS),
    "correlated": (tg.PseudoMarginal(correlation=0.9), CHAINS),
    "PseudoMarginalSlice": (tg.PseudoMarginalSlice(), CHAINS),
    "AMIS": (tg.AMIS(begin=tg.AtModes(1)), {}),
    "MAMIS": (tg.MAMIS(begin=tg.AtModes(1), smooth=True), {}),
    "on logarithms": (tg.AMIS(begin=tg.AtModes(1), normal_scale=False, approximation=tg.EP()), {}),
    "OrthantGPC": (tg.OrthantGPC(num_points=8, proposals=tg.AMIS(begin=tg.AtModes(1))), {}),
    "Orthant": (tg.PseudoMarginal(evidence=Orthant(num_points=8)), CHAINS),
    "SmoothProbit": (tg.AMIS(begin=tg.AtModes(1), evidence=SmoothProbit()), {}),
}


@pytest.fixture(params=[torch.float32, torch.float64], ids=["float32 model", "float64 model"])
def dtype(request):
    """Of the model; torch's default is the other."""
    kept = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64 if request.param is torch.float32 else torch.float32)
    yield request.param
    torch.set_default_dtype(kept)


def check(model, method, settings, dtype):
    posterior = tg.sample(model, method, num_samples=12, seed=1, progress=False, **settings)
    prediction = posterior.predict(inputs(3, seed=5))
    found = {
        **posterior.samples,
        **posterior.stats,
        "theta": posterior.theta,
        "whitened": posterior.whitened,
        "latents": posterior.latents,
        "log weights": posterior.theta if posterior.log_weights is None else posterior.log_weights,
        "mean": prediction.mean,
        "variance": prediction.variance,
        "log_prob": prediction.log_prob(targets("probit", 3)),
        "draws": prediction.sample(2),
    }
    assert {name for name, value in found.items() if value.is_floating_point() and value.dtype != dtype} == set()


@pytest.mark.filterwarnings("ignore::torchgpmc.SamplingWarning")
@pytest.mark.parametrize("name", quick(["HMC", "AdaptiveMH", "PseudoMarginal", "AMIS", "OrthantGPC"], ENGINES))
def test_every_engine_under_the_other_default(name, dtype):
    check(gp("probit", num_data=5, dtype=dtype), *ENGINES[name], dtype)


@pytest.mark.filterwarnings("ignore::torchgpmc.SamplingWarning")
@pytest.mark.parametrize("method", [tg.EllipticalSlice(), tg.OrthantGPC()])
def test_fixed_hyperparameters_under_the_other_default(method, dtype):
    model = tg.GP(inputs(5), targets("probit", 5), fixed_kernel(), tg.likelihoods.Bernoulli(), dtype=dtype)
    check(model, method, CHAINS if isinstance(method, tg.EllipticalSlice) else {}, dtype)


@pytest.mark.filterwarnings("ignore::torchgpmc.SamplingWarning")
@pytest.mark.parametrize("given", [False, True])
def test_noise_variances_under_the_other_default(given, dtype):
    method = tg.HMC(num_steps=2, noise_variances=True, given_variances=given)
    check(gp("student_t", num_data=5, dtype=dtype), method, CHAINS, dtype)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::torchgpmc.SamplingWarning")
@pytest.mark.parametrize("name", ["NUTS", "whitening"])
def test_sparse_models_under_the_other_default(name, dtype):
    check(sparse_gp("probit", num_data=5, num_inducing=3, dtype=dtype), *ENGINES[name], dtype)


MODELS = {
    "FITC": fitc,
    "projected process": projected_process,
    "conditioned": conditioned_gp,
    "SAAS": lambda **options: tg.GP(inputs(6), targets("probit", 6), tg.kernels.SAAS(2), tg.likelihoods.Bernoulli(), **options),
    "robust max": lambda **options: sparse_gp("robust_max", **options),
}
LIKELIHOODS = "negative_binomial", "beta", "ordinal", "heteroskedastic"
MODELS |= {name: lambda name=name, **options: gp(name, **options) for name in LIKELIHOODS}


@pytest.mark.filterwarnings("ignore::torchgpmc.SamplingWarning")
@pytest.mark.parametrize("name", MODELS)
def test_every_model_under_the_other_default(name, dtype):
    settings = {**CHAINS, "num_samples": 3, "seed": 1, "progress": False}
    posterior = tg.sample(MODELS[name](dtype=dtype), tg.HMC(num_steps=2), **settings)
    prediction = posterior.predict(inputs(3, seed=5))
    found = [posterior.theta, posterior.whitened, posterior.stats["lp"], prediction.latent_mean, prediction.latent_variance]
    assert {value.dtype for value in found} == {dtype}


@pytest.mark.filterwarnings("ignore::torchgpmc.SamplingWarning")
def test_a_file_serves_its_model_under_the_other_default(dtype, tmp_path):
    # It was refused: a prior's 0.3 is 0.30000001192092896 in single precision, in which gpytorch keeps what was given as a float.
    def model(rate):
        kernel = RBFKernel(lengthscale_prior=GammaPrior(2.1, rate))
        likelihood = GaussianLikelihood(noise_prior=HalfNormalPrior(0.3))
        return tg.GPRegression(inputs(5), inputs(5).sum(-1), kernel, likelihood, dtype=dtype)

    posterior = tg.sample(model(0.3), tg.HMC(num_steps=1), num_samples=2, seed=1, progress=False, **CHAINS)
    posterior.save(tmp_path / "posterior.pt")
    torch.set_default_dtype(dtype)
    assert torch.equal(tg.Posterior.load(tmp_path / "posterior.pt", model(0.3)).theta, posterior.theta)
    with pytest.raises(ValueError, match="set_default_dtype"):
        tg.Posterior.load(tmp_path / "posterior.pt", model(0.300001))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::torchgpmc.SamplingWarning")
def test_fits_under_the_other_default(dtype):
    fitted = tg.fit(gp("probit", num_data=5, dtype=dtype), tg.Laplace(), num_starts=1)
    assert all(parameter.dtype == dtype for parameter in fitted.parameters())
