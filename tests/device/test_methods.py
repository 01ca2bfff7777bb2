"""Every method, model, likelihood and prediction on a device that is not the CPU, with the draws that the CPU gives."""

import copy
import dataclasses
import functools

import pytest
import torch

import torchgpmc as tg
from tests.device.other import DEVICE, is_real
from tests.problems import LIKELIHOODS, NOT_SMOOTH, gp, gp_regression, inputs, sparse_gp, targets
from tests.speed import quick
from tests.test_conformance import METHODS, MODELS, NEED_START, OF_CLASSES, OF_LATENTS, WEIGHTED, quiet_sample

WEIGHTED_RUN = {"num_samples": 16, "num_chains": None, "warmup_steps": None}
CHAINS = {"num_samples": 2, "warmup_steps": 3}
HMC = tg.HMC(num_steps=2)


def of_latents(made):
    for part in (made.kernel, made.likelihood):
        part.requires_grad_(False)
    made.refresh()
    return made


def used(posterior, likelihood="probit"):
    """All that a prediction gives."""
    prediction = posterior.predict(inputs(2, seed=5).to(DEVICE))
    found = [prediction.latent_mean, prediction.latent_variance, prediction.mean, prediction.variance]
    found += [prediction.log_prob(targets(likelihood, 2).to(DEVICE)), prediction.sample(2), prediction.sample(2, joint=True)]
    model = prediction._model.likelihood
    if getattr(model, "is_classification", False):
        found.append(prediction.probs)
    if getattr(model, "is_ordered", True):
        found += [prediction.quantile([0.1, 0.5], num_samples=20), *prediction.interval(num_samples=20)]
    if getattr(model, "has_intensity", False):
        found += [prediction.intensity.mean, prediction.intensity.quantile(0.3), *prediction.intensity.interval(0.9)]
    assert all(value.device == DEVICE for value in found)
    return found


def agree(make, method, by_orthants=False, precision=1.0, **options):
    """The same run on both devices; rounding, which warm-up and searches amplify, may differ, ``precision`` times as much."""
    precision *= 100.0 if is_real() else 1.0
    there, here = (quiet_sample(make(device=device), method, **{**CHAINS, **options}) for device in (DEVICE, "cpu"))
    torch.testing.assert_close(there.theta, here.theta, rtol=1e-6 * precision, atol=1e-8 * precision)
    if not by_orthants:  # whose order of variables rounding decides where two are as hard
        torch.testing.assert_close(there.whitened, here.whitened, rtol=1e-5 * precision, atol=1e-7 * precision)
    return there


def agree_around_a_start(method):
    """Of three latent functions, in coordinates that follow theta."""
    start = tg.initialize(sparse_gp("softmax", num_data=12), optimize_inducing_points=False, progress=False)
    there = dataclasses.replace(start, model=copy.deepcopy(start.model).to(DEVICE))
    found = [quiet_sample(fit.model, method, start=fit, **CHAINS).whitened for fit in (there, start)]
    torch.testing.assert_close(*found, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("name", quick(["PCN", "AdaptiveMH"], METHODS))
def test_methods(name):
    if name in NEED_START:
        agree_around_a_start(METHODS[name])
        return

    def make(device):
        made = gp("softmax" if name in OF_CLASSES else "probit", num_data=4, device=device)
        return of_latents(made) if name in OF_LATENTS else made

    agree(make, METHODS[name], name == "OrthantGPC", **(WEIGHTED_RUN if name in WEIGHTED else {}))


SMALL = {"num_data": 4}
VARIANTS = {
    "white under Laplace": (gp, tg.NUTS(max_tree_depth=2, whitening=tg.Laplace())),
    "noise variances": (lambda **options: gp("student_t", **options), tg.HMC(num_steps=2, noise_variances=True)),
    "given noise variances": (
        lambda **options: gp("student_t", **options),
        tg.HMC(num_steps=2, noise_variances=True, given_variances=True),
    ),
    "white under EP": (gp, tg.HMC(num_steps=2, whitening=tg.EP())),
    "sparse, white under Laplace": (sparse_gp, tg.HMC(num_steps=2, whitening=tg.Laplace())),
    "marginal Laplace, weighted, from the mode": (
        gp,
        tg.NUTS(max_tree_depth=2, marginal=tg.Laplace(), importance_weights=4, from_mode=True),
    ),
    "marginal EP": (gp, tg.HMC(num_steps=2, marginal=tg.EP())),
    "marginal ChEES": (gp, tg.ChEES(max_steps=2, marginal=tg.Laplace())),
    "marginal random walk": (gp, tg.AdaptiveMH(marginal=tg.EP())),
    "exact marginal": (gp_regression, tg.NUTS(max_tree_depth=2)),
    "exact evidence": (gp_regression, tg.AMIS(begin=tg.AtModes(1))),
    "correlated": (gp, tg.PseudoMarginal(num_importance=4, correlation=0.9)),
    "delayed": (gp, tg.PseudoMarginal(num_importance=4, delayed_acceptance=True)),
    "latents moved": (gp, tg.PseudoMarginal(num_importance=4, latent_steps=2)),
    "independent proposals, EP in single precision": (gp, tg.PseudoMarginal(tg.EP(), num_importance=4, independent_share=0.5)),
    "by orthants": (gp, tg.PseudoMarginal(evidence=tg.evidence.Orthant(8))),
    "white noise integrated out": (gp, tg.PseudoMarginal(evidence=tg.evidence.SmoothProbit())),
    "inducing values integrated out": (sparse_gp, tg.PseudoMarginal(num_importance=4, latent_steps=1)),
    "inducing values, weighted": (functools.partial(sparse_gp, "poisson"), tg.AMIS(num_importance=4, begin=tg.AtModes(1))),
    "several latents": (functools.partial(gp, "softmax"), tg.PseudoMarginal(num_importance=4)),
    "several modes": (functools.partial(gp, "student_t"), tg.PseudoMarginal(num_importance=4)),
    "normal proposals": (
        gp,
        tg.AMIS(
            num_importance=4,
            begin=tg.AtModes(1),
            degrees_of_freedom=None,
            diagonal=True,
            normal_scale=False,
            switch_to_modified_after=1,
        ),
    ),
    "smoothed weights": (gp, tg.AMIS(tg.EP(tolerance=1e-6), num_importance=4, begin=tg.AtModes(1), smooth=True)),
    "screened candidates": (gp, tg.AMIS(num_importance=4, begin=tg.AtModes(1), screen=tg.Screen())),
    "weights by orthants": (gp, tg.AMIS(begin=tg.AtModes(1), evidence=tg.evidence.Orthant(8))),
    "in chunks of data": (functools.partial(sparse_gp, data_chunk=3), HMC),
    "data in single precision": (functools.partial(sparse_gp, data_dtype=torch.float32), HMC),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", VARIANTS)
def test_options_of_methods(name):
    make, method = VARIANTS[name]
    weighted = type(method).__name__ in WEIGHTED
    precision = 100.0 if "single precision" in name else 1.0
    agree(functools.partial(make, num_data=4), method, "orthants" in name, precision, **(WEIGHTED_RUN if weighted else {}))


@pytest.mark.slow
@pytest.mark.parametrize("mass_matrix", tg.MassMatrix)
def test_mass_matrices(mass_matrix):
    agree(functools.partial(gp, num_data=4), tg.HMC(num_steps=2, mass_matrix=mass_matrix), warmup_steps=25)


@pytest.mark.parametrize("name", quick(["GP"], MODELS))
def test_models_and_predictions(name):
    likelihood = "gaussian" if name == "GPRegression" else "probit"
    used(agree(functools.partial(MODELS[name], likelihood, num_data=4), HMC), likelihood)


@pytest.mark.slow
@pytest.mark.parametrize("model", ["GP", "SparseGP"])
@pytest.mark.parametrize("likelihood", [*LIKELIHOODS, *NOT_SMOOTH])
def test_likelihoods_and_predictions(model, likelihood):
    method = tg.AdaptiveMH() if model == "GP" and likelihood in NOT_SMOOTH else HMC
    used(agree(functools.partial(MODELS[model], likelihood, num_data=4), method), likelihood)
