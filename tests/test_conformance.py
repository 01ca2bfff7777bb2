"""Every public sampler, method, model and likelihood keeps its contract; and none is missing from the tables."""

import copy
import dataclasses
import inspect
import io
import itertools
import pickle

import gpytorch
import pytest
import torch
from gpytorch.priors import LogNormalPrior

import torchgpmc as tg
from tests.problems import (
    LIKELIHOODS,
    NOT_SMOOTH,
    conditioned_gp,
    fitc,
    fixed_kernel,
    gp,
    gp_regression,
    inputs,
    make,
    projected_process,
    sparse_gp,
    targets,
)
from tests.speed import quick
from tests.statistical.kernels import EXACT, SAMPLERS, position_of
from tests.statistical.pseudo_marginal import KERNELS, kernel
from torchgpmc.calls.engines import candidates
from torchgpmc.models import JointLogDensity
from torchgpmc.trees import pack

METHODS = {
    "NUTS": tg.NUTS(max_tree_depth=4),
    "HMC": tg.HMC(num_steps=3),
    "ChEES": tg.ChEES(max_steps=4),
    "StochasticGradientHMC": tg.StochasticGradientHMC(batch_size=5, num_steps=2),
    "AdaptiveMH": tg.AdaptiveMH(),
    "Slice": tg.Slice(),
    "EllipticalSlice": tg.EllipticalSlice(),
    "PCN": tg.PCN(),
    "AuxiliaryGradient": tg.AuxiliaryGradient(),
    "GibbsLike": tg.GibbsLike(),
    "LocalRegions": tg.LocalRegions(),
    "ControlVariables": tg.ControlVariables(),
    "Gibbs": tg.Gibbs(latent_steps=2),
    "ClassGibbs": tg.ClassGibbs(num_steps=3),
    "PseudoMarginal": tg.PseudoMarginal(num_importance=4),
    "PseudoMarginalSlice": tg.PseudoMarginalSlice(num_importance=4),
    "AMIS": tg.AMIS(num_importance=4),
    "MAMIS": tg.MAMIS(num_importance=4),
    "OrthantGPC": tg.OrthantGPC(num_points=16),
    "EmulatedHMC": tg.EmulatedHMC(num_importance=4, num_trajectories=2),
}
INTEGRATE_LATENTS = ("PseudoMarginal", "PseudoMarginalSlice", "AMIS", "MAMIS", "EmulatedHMC")  # at the data, or inducing values
NEED_LATENTS_AT_DATA = ("GibbsLike", "OrthantGPC")  # which some have not
# Alone at fixed hyperparameters.
OF_LATENTS = ("EllipticalSlice", "PCN", "AuxiliaryGradient", "GibbsLike", "LocalRegions", "ControlVariables")
OF_CLASSES = ("ClassGibbs",)  # at the data
NEED_START = ("StochasticGradientHMC",)  # and data that are no latents
BIASED = ("StochasticGradientHMC",)
WEIGHTED = ("AMIS", "MAMIS", "OrthantGPC")
WEIGHTED_CHAINS = ("EmulatedHMC",)
MODELS = {
    "GP": gp,
    "ConditionedGP": conditioned_gp,
    "SparseGP": sparse_gp,
    "GPRegression": gp_regression,
    "FITC": fitc,
    "ProjectedProcess": projected_process,
}


def quiet_sample(*args, **options):
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", tg.SamplingWarning)
        return tg.sample(*args, **{"progress": False, "seed": 1, "num_samples": 6, "warmup_steps": 5, "num_chains": 2, **options})


def model_for(method, model="GP", likelihood="probit", device="cpu"):
    likelihood = "softmax" if method in OF_CLASSES else likelihood
    made = MODELS[model]("gaussian" if model == "GPRegression" else likelihood, device=device)
    if method in OF_LATENTS:
        for part in (made.kernel, made.likelihood):
            part.requires_grad_(False)
        made.refresh()
    return made


def test_no_method_is_missing_from_the_table():
    public = {name for name in tg.__all__ if hasattr(getattr(tg, name), "prepare")}
    assert public == set(METHODS)


def test_no_model_is_missing_from_the_table():
    assert {
        name for name in tg.__all__ if inspect.isclass(getattr(tg, name)) and issubclass(getattr(tg, name), torch.nn.Module)
    } == set(MODELS)


def test_biased_methods_are_never_recommended():
    assert set(BIASED) < set(METHODS) and len(SAMPLERS) - len(EXACT) == len(BIASED)
    for made, likelihood in itertools.product((gp, sparse_gp), ("probit", "softmax")):
        assert not any(type(engine.method).__name__ in BIASED for engine in candidates(made(likelihood)))


@pytest.mark.parametrize("name", METHODS)
def test_methods_are_frozen_option_sets(name):
    method = METHODS[name]
    assert dataclasses.is_dataclass(method) and type(method).__dataclass_params__.frozen
    assert type(method)() == type(method)()


# Every method on one model, and one method on every model; methods that take many densities a draw are not quick.
DEAR = ("NUTS", "ChEES", "Slice", "PseudoMarginalSlice", "AMIS", "MAMIS")
PAIRS = list(itertools.product(METHODS, MODELS))
QUICK = [("HMC", model) for model in MODELS] + [(method, "GP") for method in METHODS if method not in DEAR]
REFUSED = [(method, "SparseGP") for method in NEED_LATENTS_AT_DATA + OF_CLASSES] + [
    (method, "ProjectedProcess") for method in INTEGRATE_LATENTS
]


@pytest.mark.parametrize(("method", "model"), quick(QUICK + REFUSED, PAIRS))
def test_methods_give_an_ordinary_posterior(method, model, device):
    refuses = NEED_LATENTS_AT_DATA + OF_CLASSES
    if (method, model) in REFUSED or (model == "ProjectedProcess" and method in refuses):
        with pytest.raises(ValueError, match=model):
            quiet_sample(model_for(method, model, device=device), METHODS[method])
        return
    if model == "GPRegression" and method in OF_CLASSES:
        with pytest.raises(ValueError, match="Expected a GP with Softmax"):
            quiet_sample(model_for(method, model, device=device), METHODS[method])
        return
    if model == "GPRegression" and method == "OrthantGPC":
        with pytest.raises(ValueError, match="probit classification"):
            quiet_sample(model_for(method, model, device=device), METHODS[method])
        return
    made, options = model_for(method, model, device=device), {}
    if method in NEED_START:
        if model not in ("SparseGP", "ProjectedProcess"):
            with pytest.raises(ValueError, match=f"{model}.*Expected a SparseGP"):
                quiet_sample(made, METHODS[method])
            return
        options["start"] = tg.initialize(made, optimize_inducing_points=False, progress=False)
        made = options["start"].model
    weighted = method in WEIGHTED
    alone = {"warmup_steps": None, "num_chains": None} if weighted else {}
    shape = (1, 40) if weighted else (2, 20)
    posterior = quiet_sample(made, METHODS[method], num_samples=shape[1], **alone, **options)
    assert posterior.whitened.shape == (*shape, made.latent_size)
    assert ({"lp", "n_failures"} if weighted else {"lp", "acceptance_rate", "n_steps", "n_failures"}) <= set(posterior.stats)
    assert all(value.shape == shape for value in posterior.stats.values())
    assert (posterior.log_weights is not None) == (weighted or method in WEIGHTED_CHAINS)
    for entry in made.layout.entries:
        assert posterior.samples[entry.name].shape == (*shape, *entry.shape)
    prediction = posterior.predict(inputs(3, seed=5).to(device))
    assert prediction.mean.shape == ((3, 3) if method in OF_CLASSES else (3,))
    assert len(torch.unique(posterior.whitened.flatten(0, 1), dim=0)) > 2, "the chains did not move"
    joint = tg.joint_log_density(made)
    position = torch.cat([posterior.theta, posterior.whitened], -1)[:, -1].to(device)
    torch.testing.assert_close(joint(position).cpu(), posterior.stats["lp"][:, -1], rtol=1e-9, atol=1e-9)


WITH_LIKELIHOODS = [*itertools.product(["GP", "SparseGP"], LIKELIHOODS), *(("SparseGP", name) for name in NOT_SMOOTH)]


@pytest.mark.parametrize(
    ("model", "likelihood"), quick([("GP", "gaussian"), ("GP", "softmax"), ("SparseGP", "poisson")], WITH_LIKELIHOODS)
)
def test_models_with_every_likelihood(model, likelihood, device):
    made = MODELS[model](likelihood, device=device)
    posterior = quiet_sample(made, METHODS["HMC"])
    prediction = posterior.predict(inputs(3, seed=5).to(device))
    assert prediction.mean.shape[0] == 3 and bool(torch.isfinite(prediction.mean).all())
    assert prediction.log_prob(targets(likelihood, 3).to(device)).shape == (3,)
    assert prediction.sample(4).shape == (4, 3)


def _own_options(model):
    names = ("inducing_points", "known_inputs", "known_values")
    return {name: getattr(model, name) for name in names if hasattr(model, name)}


@pytest.mark.parametrize("dtype", quick([torch.float64], [torch.float64, torch.float32]))
@pytest.mark.parametrize("model", MODELS)
def test_models_pickle_copy_move_and_reload(model, dtype):
    made = MODELS[model]("gaussian", dtype=dtype)
    # v is not zero, so that f depends on the data and the kernel.
    size = made.layout.size + made.latent_size
    position = torch.stack([torch.linspace(-0.6, 0.7, size, dtype=dtype), torch.linspace(0.9, -0.4, size, dtype=dtype)])
    value = tg.joint_log_density(made)(position)
    buffer = io.BytesIO()
    torch.save(made.state_dict(), buffer)
    buffer.seek(0)
    reloaded = MODELS[model]("gaussian", dtype=dtype)
    reloaded.load_state_dict(torch.load(buffer, weights_only=True))
    for other in (pickle.loads(pickle.dumps(made)), copy.deepcopy(made), reloaded, copy.deepcopy(made).to("cpu")):
        torch.testing.assert_close(tg.joint_log_density(other)(position), value)
    other_x = made.train_x.flip(0) * 2
    other_data = type(made)(other_x, made.train_y, made.kernel, made.likelihood, dtype=dtype, **_own_options(made))
    assert not torch.allclose(tg.joint_log_density(other_data)(position), value)
    other_data.load_state_dict(made.state_dict())
    torch.testing.assert_close(tg.joint_log_density(other_data)(position), value)
    doubled = copy.deepcopy(made).double()
    assert tg.joint_log_density(doubled)(position.double()).dtype == torch.float64


@pytest.mark.parametrize("likelihood", ["student_t", "beta", "laplace", "negative_binomial"])
def test_priors_that_gpytorch_sets_by_lambdas_pickle(likelihood):
    period = gpytorch.kernels.PeriodicKernel(
        period_length_prior=LogNormalPrior(0.0, 1.0), lengthscale_prior=LogNormalPrior(0.0, 1.0)
    )
    made = tg.GP(
        inputs(5),
        targets(likelihood, 5),
        period + gpytorch.kernels.LinearKernel(variance_prior=LogNormalPrior(0.0, 1.0)),
        make(likelihood),
    )
    other = pickle.loads(pickle.dumps(made))
    position = torch.linspace(-0.5, 0.5, made.layout.size + made.latent_size, dtype=torch.float64)[None]
    assert other.layout.names == made.layout.names
    torch.testing.assert_close(tg.joint_log_density(other)(position), tg.joint_log_density(made)(position))


def test_no_sampler_is_missing_from_the_tables():
    makers = {name for name in tg.samplers.__all__ if inspect.isfunction(getattr(tg.samplers, name))}
    public = {name for name in makers if inspect.signature(getattr(tg.samplers, name)).return_annotation == "Sampler"}
    assert public == {row.public for row in (*SAMPLERS.values(), *KERNELS.values())}
    assert makers - public == {"given_the_rest"}  # a part of a sweep


@pytest.mark.parametrize("name", SAMPLERS)
def test_samplers_are_two_functions_on_named_tuples(name, generator):
    model = gp("probit").with_targets(torch.stack([targets("probit", 6, seed) for seed in range(3)]))
    position = torch.zeros(3, model.layout.size + model.latent_size, dtype=torch.float64)
    _check_sampler(SAMPLERS[name].make(model, JointLogDensity(model), position), position, generator)


@pytest.mark.parametrize("name", KERNELS)
def test_samplers_of_estimates_are_two_functions_on_named_tuples(name, generator):
    model = gp("probit")
    _, _, sampler = kernel(name, model, torch.stack([targets("probit", 6, seed) for seed in range(3)]))
    _check_sampler(sampler, torch.zeros(3, model.layout.size, dtype=torch.float64), generator)


def _check_sampler(sampler, position, generator):
    assert sampler._fields == ("init", "step")
    state = sampler.init(position, generator)
    before = copy.deepcopy(pack(state))
    new, info = sampler.step(state, generator)
    torch.testing.assert_close(pack(state), before, rtol=0, atol=0, equal_nan=True)  # a step must not write to its state
    assert type(new) is type(state) and position_of(new).shape == position.shape
    for field in ("acceptance_rate", "n_steps", "n_failures"):
        assert getattr(info, field).shape == (3,)


def test_no_factorisation_in_the_likelihood(monkeypatch):
    """All O(N^3) work is in prior(theta): elliptical slice sampling factorises once a run, whatever its length."""
    counts = []
    original = torch.linalg.cholesky_ex
    monkeypatch.setattr(torch.linalg, "cholesky_ex", lambda *args, **options: counts.append(1) or original(*args, **options))
    model = tg.GP(inputs(6), targets("probit", 6), fixed_kernel(), LIKELIHOODS["probit"]())
    totals = []
    for num_samples in (2, 20):
        counts.clear()
        quiet_sample(model, tg.EllipticalSlice(), num_samples=num_samples)
        totals.append(len(counts))
    assert totals[0] == totals[1] <= 2  # one is the fingerprint's
    for made in (gp("probit"), sparse_gp("probit")):
        prior = made.prior(torch.zeros(2, made.layout.size, dtype=torch.float64))
        before = len(counts)
        made.log_likelihood(made.at(prior), torch.zeros(2, made.latent_size, dtype=torch.float64))
        assert len(counts) == before
