"""Pseudo-marginal kernels with frozen tuning, and extended states that are exact draws given (theta, v)."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

import torchgpmc as tg
from torchgpmc.approximations import ApproximateMarginal, Variational
from torchgpmc.evidence import importance
from torchgpmc.evidence.importance_sampling import _choose
from torchgpmc.evidence.mixtures import MixtureEstimator
from torchgpmc.evidence.smooth_probit import smoothed
from torchgpmc.numerics.linalg import times_blocks
from torchgpmc.runs.anchors import Anchors, MarginalDensity
from torchgpmc.runs.chain_targets import suited_approximation
from torchgpmc.samplers import (
    IndependentProposal,
    Preconditioner,
    correlated_pseudo_marginal,
    delayed_acceptance,
    pseudo_marginal,
    pseudo_marginal_slice,
)
from torchgpmc.samplers.pseudo_marginal import PseudoMarginalState
from torchgpmc.types import Sampler


def anchors(model, like):
    """Starting points for Newton that are functions of theta alone, and poor ones."""
    theta = torch.stack([torch.full((model.layout.size,), value) for value in (-1.0, 0.5)]).to(like)
    size = 2 * model.latent_size  # alpha and f
    start = torch.stack([torch.linspace(-0.4, 0.3, size), torch.linspace(0.5, -0.2, size)]).to(like)
    return Anchors(theta, start, torch.tensor(True))


def marginal_density(
    model, targets, num_importance, *, approximation=None, antithetic=None, latent_steps=0, density=MarginalDensity, evidence=None
):
    approximation = suited_approximation(model, tg.Laplace() if approximation is None else approximation)
    estimator = importance(model, approximation, num_importance=num_importance, antithetic=antithetic, targets=targets)
    if evidence is not None:
        estimator = evidence.estimator(model, targets)
    own = anchors(model, targets)
    if isinstance(approximation, tg.EP | Variational):
        sites = own.start[:, : model.latent_size]
        join = torch.stack if isinstance(approximation, Variational) else torch.cat
        own = own._replace(start=join([sites.abs(), sites], 1))
    if isinstance(estimator, MixtureEstimator) and model.num_latents == 1:
        # Of other modes one is said to be known, wherever it leads, and two are not.
        own = own._replace(start=torch.cat([own.start, -own.start, torch.zeros_like(own.start).repeat(1, 2)], 1))
    return density(model.layout, estimator, own, False, latent_steps)


def tuning(model, like):
    size = model.layout.size
    factor = (0.6 * torch.eye(size) + 0.2 * torch.ones(size, size).tril(-1)).to(like)
    return {"step_size": torch.tensor(0.9).to(like), "preconditioner": Preconditioner(factor, factor.new_zeros(0))}


def jumps(tune):
    """Off the middle of the prior, so that an error in the ratio shows."""
    factor = tune["preconditioner"].factor
    return IndependentProposal(0.7, torch.full_like(factor[0], -0.6))


class Row(NamedTuple):
    """A sampler with frozen tuning, for tests."""

    public: str  # its name in torchgpmc.samplers
    make: Callable[..., Sampler]  # from the estimated density, its tuning and its surrogate
    options: dict[str, Any]  # of the estimates


def _plain(density, tune, _):
    return pseudo_marginal(density, **tune)


def _correlated(density, tune, _):
    return correlated_pseudo_marginal(density, correlation=0.8, **tune)


KERNELS = {
    "one sample": Row("pseudo_marginal", _plain, {"num_importance": 1}),
    "pairs, latent moves": Row(
        "pseudo_marginal",
        lambda density, tune, _: pseudo_marginal(density, moves_latents=True, **tune),
        {"num_importance": 4, "latent_steps": 1},
    ),
    "independent proposals": Row(
        "pseudo_marginal",
        lambda density, tune, _: pseudo_marginal(density, independent=jumps(tune), **tune),
        {"num_importance": 1},
    ),
    "ep": Row("pseudo_marginal", _plain, {"num_importance": 1, "approximation": tg.EP(max_iterations=3)}),
    "white noise out": Row(
        "pseudo_marginal", _plain, {"num_importance": 1, "evidence": tg.evidence.SmoothProbit(num_importance=2)}
    ),
    "white noise out, correlated": Row(
        "correlated_pseudo_marginal", _correlated, {"num_importance": 1, "evidence": tg.evidence.SmoothProbit(num_importance=1)}
    ),
    "correlated": Row("correlated_pseudo_marginal", _correlated, {"num_importance": 1}),
    "delayed": Row(
        "delayed_acceptance", lambda density, tune, cheap: delayed_acceptance(density, cheap, **tune), {"num_importance": 1}
    ),
    "slice": Row(
        "pseudo_marginal_slice",
        lambda density, tune, _: pseudo_marginal_slice(density, width=torch.full_like(tune["preconditioner"].factor[0], 2.0)),
        {"num_importance": 2},
    ),
}


def kernel(name, model, targets, **changes):
    _, make, options = KERNELS[name]
    density = marginal_density(model, targets, **{**options, **changes})
    cheap = ApproximateMarginal(model, suited_approximation(model, tg.Laplace()), targets, loose=True)
    return density, cheap, make(density, tuning(model, targets), cheap)


def extended_state(density, cheap, theta, v, generator, *, keeps_auxiliary):
    """The pseudo-marginal state whose kept draw is v: the other draws and the random numbers as they are distributed given it."""
    estimator = density.estimator
    auxiliary = torch.randn(len(theta), estimator.auxiliary_size, generator=generator, dtype=theta.dtype)
    start = density._start(theta)
    if isinstance(estimator, tg.evidence.SmoothProbitEstimator):
        auxiliary = _given_f(estimator, theta, v, auxiliary, start, generator)
    else:
        auxiliary = _given_kept_draw(estimator, estimator.model.prior(theta), v, auxiliary, start, generator)
    log_density, payload = density.evaluate(theta, auxiliary)
    check_kept_draw(payload.whitened, v)
    kept = auxiliary if keeps_auxiliary else theta[:, :0]
    return PseudoMarginalState(theta, log_density, payload, kept, cheap(theta) if cheap is not None else theta[:, :0])


def check_kept_draw(found, v):
    torch.testing.assert_close(found, v, rtol=1e-5, atol=1e-6)


def _given_kept_draw(estimator, prior, v, auxiliary, start, generator):
    """An importance estimate's normals, given that the first draw is v and is the one that is kept."""
    if isinstance(estimator, MixtureEstimator):
        auxiliary = _make_first_draw_of_mixture(estimator, prior, v, auxiliary, start, generator)
    else:
        found = estimator.approximation.importance_density(estimator.model, prior, estimator.targets, start)
        auxiliary = _make_first_draw(estimator, prior, v, auxiliary, found)
    _, log_weight = estimator.at_prior(prior, auxiliary, start)
    # The number that chooses the kept draw, given that it chose the first.
    first = torch.softmax(log_weight, -1)[:, 0]
    uniform = first * torch.rand(len(v), generator=generator, dtype=v.dtype)
    auxiliary = torch.cat([auxiliary[:, :-1], torch.special.ndtri(uniform.clamp(1e-300, 1 - 1e-15)).unsqueeze(-1)], -1)
    assert bool((_choose(log_weight, torch.special.ndtr(auxiliary[:, -1]), 1) == 0).all())
    return auxiliary


def _given_f(estimator, theta, v, auxiliary, start, generator):
    """The normals of an estimate with white noise integrated out, given f: first that noise e, f = m + g + e, then the rest.

    g given f has mean c - D K^-1 c, c = f - m, and covariance D - D K^-1 D.
    """
    model, size = estimator.inner.model, v.shape[-1]
    prior = model.prior(theta)
    of_h = smoothed(prior)
    d = of_h.noise
    assert bool((d > 0).any())
    c = times_blocks(v, prior.factor.mT)
    inverse = torch.cholesky_inverse(prior.factor)
    eye = torch.eye(size, dtype=v.dtype)
    covariance = torch.where(d.unsqueeze(-1) > 0, torch.diag_embed(d) - d.unsqueeze(-1) * inverse * d.unsqueeze(-2), eye)
    noise = torch.randn(v.shape, generator=generator, dtype=v.dtype)
    noise = (torch.linalg.cholesky(covariance) @ noise.unsqueeze(-1)).squeeze(-1)
    g = torch.where(d > 0, c - d * (inverse @ c.unsqueeze(-1)).squeeze(-1) + noise, c)
    e, h = c - g, g / (1 + d).sqrt()
    white = torch.where(d > 0, torch.linalg.solve_triangular(of_h.prior.factor, h.unsqueeze(-1), upper=False).squeeze(-1), v)
    base = _given_kept_draw(estimator.inner, of_h.prior, white, auxiliary[:, : -2 * size], start, generator)
    # The probit's own noise is on the side of -f that the label says.
    sign = 2 * estimator.inner.targets.values - 1
    f, cdf = prior.mean + c, torch.special.ndtr
    uniform = torch.rand(v.shape, generator=generator, dtype=v.dtype)
    z = (e - sign * torch.special.ndtri(uniform * cdf(sign * f))) / (1 + d).sqrt()
    first = torch.special.ndtri((1 - cdf(-sign * z) / cdf(sign * (of_h.prior.mean + h))).clamp(1e-15, 1 - 1e-15))
    second = (e - d / (1 + d).sqrt() * z) / (d / (1 + d)).sqrt()
    free = auxiliary[:, -2 * size :].split(size, -1)  # where nothing is integrated out
    return torch.cat([base, *(torch.where(d > 0, part, other) for part, other in zip((first, second), free, strict=True))], -1)


def _make_first_draw_of_mixture(estimator, prior, v, auxiliary, start, generator):
    """The component of the first direction given its draw, by dense densities; then its normals given both."""
    _, densities, share, _ = estimator.components(prior, start)
    f = prior.mean + (prior.factor @ v.unsqueeze(-1)).squeeze(-1)
    logs = []
    for found in densities:
        precision = torch.cholesky_inverse(prior.factor) + torch.diag_embed(found.precision)
        normal = torch.distributions.MultivariateNormal(found.mean, precision_matrix=precision, validate_args=False)
        logs.append(normal.log_prob(f))
    component = torch.distributions.Categorical(logits=torch.stack(logs, -1) + share.log()).probs
    component = torch.multinomial(component, 1, generator=generator)
    high = share.cumsum(-1).gather(-1, component)
    level = high - share.gather(-1, component) * torch.rand(len(v), 1, generator=generator, dtype=v.dtype)
    rows = torch.arange(len(v))
    fields = ("alpha", "precision", "factor")
    taken = {name: torch.stack([getattr(found, name) for found in densities], 1)[rows, component[:, 0]] for name in fields}
    count = estimator.num_directions
    rest = _make_first_draw(estimator, prior, v, auxiliary[:, count:], densities[0]._replace(**taken))
    return torch.cat([torch.special.ndtri(level), auxiliary[:, 1:count], rest], -1)


def _make_first_draw(estimator, prior, v, auxiliary, found):
    """Conditions the first direction's normals (z, e) on delta = A (z, e): adds A' Sigma^-1 (delta - A (z0, e0))."""
    model = estimator.model
    size, count = model.latent_size, estimator.num_directions
    if not model.has_latents_at_data:  # v = mean + S e
        normals = auxiliary[:, :-1].reshape(len(v), count, size).clone()
        mean, scale = (part.squeeze(1) for part in found.latents)
        normals[:, 0] = torch.linalg.solve_triangular(scale, (v - mean).unsqueeze(-1), upper=False).squeeze(-1)
        return torch.cat([normals.reshape(len(v), -1), auxiliary[:, -1:]], -1)
    if model.num_latents > 1:  # one vector a direction: e = G' (v - v at the mode), G G' = H
        mode = times_blocks(found.alpha, prior.factor)
        normals = auxiliary[:, :-1].reshape(len(v), count, size).clone()
        normals[:, 0] = (found.factor.mT @ (v - mode).unsqueeze(-1)).squeeze(-1)
        return torch.cat([normals.reshape(len(v), -1), auxiliary[:, -1:]], -1)
    root = found.precision.sqrt()
    eye = torch.eye(size, dtype=v.dtype)
    inverse_b = torch.cholesky_inverse(found.factor)
    r = root.unsqueeze(-1) * inverse_b * root.unsqueeze(-2)
    a_z = (eye - prior.covariance @ r) @ prior.factor
    a_e = -prior.covariance @ (root.unsqueeze(-1) * inverse_b)
    a = torch.cat([a_z, a_e], -1)
    normals = auxiliary[:, :-1].reshape(len(v), 2, count, size).clone()
    old = normals[:, :, 0].reshape(len(v), 2 * size, 1)
    centred = prior.factor @ v.unsqueeze(-1) - prior.covariance @ found.alpha.unsqueeze(-1)
    new = old + a.mT @ torch.linalg.solve(a @ a.mT, centred - a @ old)
    normals[:, :, 0] = new.reshape(len(v), 2, size)
    return torch.cat([normals.reshape(len(v), -1), auxiliary[:, -1:]], -1)
