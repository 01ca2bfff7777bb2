"""What a refusal recommends does not refuse the same model: methods and their options on models and likelihoods of every kind."""

import dataclasses
import itertools
import re

import pytest
import torch
from gpytorch.kernels import RBFKernel
from gpytorch.priors import GammaPrior

import torchgpmc as tg
from tests.speed import quick
from tests.test_conformance import METHODS, MODELS
from torchgpmc.runs.run import Settings

CASES = {
    **METHODS,
    "white": tg.NUTS(whitening=tg.Laplace()),
    "white, EP": tg.NUTS(whitening=tg.EP(max_iterations=20)),
    "from a mode": tg.NUTS(from_mode=True),
    "normal scale": tg.NUTS(normal_scale=True),
    "weights alone": tg.NUTS(importance_weights=4),
    "marginal": tg.NUTS(marginal=tg.Laplace()),
    "marginal, EP": tg.NUTS(marginal=tg.EP()),
    "marginal, Variational": tg.NUTS(marginal=tg.approximations.Variational()),
    "marginal on the normal scale": tg.NUTS(marginal=tg.EP(), normal_scale=True),
    "slice, marginal": tg.Slice(marginal=tg.Laplace()),
    **{
        f"AMIS, {type(kind).__name__}": tg.AMIS(approximation=kind)
        for kind in (tg.EP(), tg.approximations.ClassEP(), tg.approximations.Variational())
    },
    **{
        f"{type(evidence).__name__}, {type(begin).__name__}": tg.AMIS(evidence=evidence, begin=begin)
        for evidence, begin in itertools.product(
            (tg.evidence.SmoothProbit(), tg.evidence.Orthant(), tg.evidence.NoiseAlone(), tg.evidence.InducingMixture()),
            (tg.AtPrior(), tg.AtModes()),
        )
    },
    "chains, InducingMixture": tg.PseudoMarginal(evidence=tg.evidence.InducingMixture()),
    **{
        f"Gibbs, {type(latent).__name__}": tg.Gibbs(latent=latent)
        for latent in (tg.HMC(), tg.EllipticalSlice(), tg.GibbsLike(), tg.ControlVariables(), tg.LocalRegions())
    },
    "Gibbs by gradients": tg.Gibbs(hyper=tg.NUTS()),
    "Gibbs through estimates": tg.Gibbs(hyper=tg.PseudoMarginal()),
    "Gibbs, Surrogate": tg.Gibbs(parameterization=tg.Surrogate()),
    "Gibbs, white": tg.Gibbs(parameterization=tg.Surrogate(whitening=tg.Laplace())),
    "Gibbs, parts": tg.Gibbs(parts=tg.Slice()),
    "Gibbs, invariance": tg.Gibbs(invariance_steps=1),
}
LIKELIHOODS = ("probit", "gaussian", "student_t", "softmax", "heteroskedastic", "robust_max", "transcription")
# Those with brackets, and options set to nothing.
CALL = re.compile(r"(?:\b(\w+)=)?((?:\w+\.)*[A-Z]\w*\((?:[^()]|\((?:[^()]|\([^()]*\))*\))*\)|(?<==)(?:None|False|0)\b)")
NAMES = {"torchgpmc": tg, **{name: getattr(tg, name) for name in tg.__all__}}
SETTINGS = Settings(num_samples=2, warmup_steps=None, num_chains=None, chain_chunk=None)


def build(kind, likelihood):
    if likelihood != "transcription":
        return MODELS[kind](likelihood)
    grid = torch.linspace(0, 12, 13, dtype=torch.float64)
    transcription = tg.likelihoods.Transcription(
        grid, grid[::4], num_genes=2, num_replicates=1, response=tg.likelihoods.Activation()
    )
    options = {
        "ConditionedGP": {"known_inputs": torch.full((1,), -1.0), "known_values": torch.zeros(1)},
        "FITC": {"inducing_points": grid[::4]},
        "ProjectedProcess": {"inducing_points": grid[::4]},
    }.get(kind, {})
    kernel = RBFKernel(lengthscale_prior=GammaPrior(2.0, 1.0))
    return getattr(tg, kind)(grid, torch.rand(1, 2, 4).double() + 0.5, kernel, transcription, **options)


def refusal(method, model):
    """What a method says of a model; ``None`` where it takes it."""
    try:
        method.prepare(model, SETTINGS)
    except ValueError as error:
        return str(error)
    return None


def recommended(method, text):
    """The methods that a refusal of ``method`` names, and whether each only leaves out an option."""
    for option, source in CALL.findall(text.partition("Expected ")[2]):
        value = eval(source, dict(NAMES))
        if isinstance(value, torch.nn.Module):
            continue
        if not option and not hasattr(value, "prepare"):
            assert hasattr(value, "importance_density") or isinstance(value, tg.Ancillary | tg.Sufficient), source
            option = "parameterization" if isinstance(value, tg.Ancillary | tg.Sufficient) else _approximation_of(method)
        yield dataclasses.replace(method, **{option: value}) if option else value, not value


def _approximation_of(method):
    return next(name for name in ("marginal", "approximation") if getattr(method, name, None) is not None)


PAIRS = [
    (model, likelihood)
    for model, likelihood in itertools.product(MODELS, LIKELIHOODS)
    if (model != "GPRegression" or likelihood == "gaussian") and (model, likelihood) != ("SparseGP", "transcription")
]
QUICK = [(kind, name) for kind in ("GP", "ProjectedProcess") for name in ("softmax", "robust_max", "transcription")]


@pytest.mark.parametrize(("kind", "likelihood"), quick([*QUICK, ("SparseGP", "gaussian"), ("SparseGP", "robust_max")], PAIRS))
@pytest.mark.parametrize("fixed", [False, True])
def test_what_a_refusal_recommends_takes_the_model(kind, likelihood, fixed):
    model = build(kind, likelihood)
    if fixed:
        for part in (model.kernel, model.likelihood):
            part.requires_grad_(False)
        model.refresh()
    for name, method in CASES.items():
        text = refusal(method, model)
        if text is None or "needs a start" in text:
            continue
        # Where several options are at odds with the model one refusal may follow another.
        for other, leaves_out in recommended(method, text):
            said = refusal(other, model)
            assert said is None or (leaves_out and said != text), f"{name}: {text}\n{other}: {said}"


def test_refusals_are_looked_at():
    """Of every second method there is one, and each names something that is tried."""
    model = build("ProjectedProcess", "robust_max")
    texts = {name: refusal(method, model) for name, method in CASES.items()}
    refused = {name: list(recommended(CASES[name], text)) for name, text in texts.items() if text is not None}
    assert len(refused) > len(CASES) / 2 and all(refused.values())
