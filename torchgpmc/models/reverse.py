"""The gradient of the full GP's joint density part by part: written out where a part knows its derivatives, else by autograd.

What a graph of small tensor operations costs is mostly the graph.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchgpmc.adapter.closed_form import BoundClosedForm, Values
from torchgpmc.adapter.covariance import Covariance
from torchgpmc.adapter.mean_function import MeanFunction
from torchgpmc.likelihoods.log_likelihood import LogLikelihood
from torchgpmc.models.gp_model import GPModel
from torchgpmc.models.latents import likelihood_parameters
from torchgpmc.models.targets import Targets
from torchgpmc.models.whitening import GaussianSites, white_under_prior, white_under_sites
from torchgpmc.numerics.linalg import cholesky
from torchgpmc.numerics.special import log_standard_normal
from torchgpmc.overriding import is_newest, keeps_methods, methods_of


class Part(NamedTuple):
    """A value, and the derivatives of sum(gradient * value) in a module's sampled parameters, which may take over its memory."""

    value: Tensor
    slopes: Callable[[Tensor], dict[str, Tensor]]


def by_autograd(function: Callable[[Values], Tensor], values: dict[str, Tensor], sampled: list[str]) -> Part:
    """The part that ``function`` of a module's parameters gives, at ``values``."""
    leaves = {name: values[name].detach().requires_grad_(True) for name in sampled}
    with torch.set_grad_enabled(bool(leaves)):
        value = function({**values, **leaves})

    def slopes(gradient: Tensor) -> dict[str, Tensor]:
        if not value.requires_grad:
            return {}
        found = torch.autograd.grad(value, list(leaves.values()), gradient, allow_unused=True)
        return {name: slope for name, slope in zip(leaves, found, strict=True) if slope is not None}

    return Part(value.detach(), slopes)


def mean_part(mean_function: MeanFunction, values: dict[str, Tensor], sampled: list[str], x: Tensor, count: int) -> Part:
    """The prior mean at inputs ``(N, D)``: ``(C, N)``."""
    if mean_function.is_zero or mean_function.constant is None:
        return by_autograd(lambda parameters: mean_function(parameters, x, count), values, [] if mean_function.is_zero else sampled)
    name = mean_function.constant
    value = values[name].reshape(count, 1).expand(-1, len(x))
    return Part(value, lambda gradient: {name: gradient.sum(-1).view(values[name].shape)} if sampled else {})


def covariance_part(covariance_at: Covariance, values: dict[str, Tensor], sampled: list[str]) -> Part:
    """A covariance of the model's own inputs ``(C, N, N)``, jitter not included."""
    if isinstance(covariance_at, BoundClosedForm) and covariance_at.has_slopes():
        covariance, slopes = covariance_at.with_slopes(values)
        return Part(covariance, slopes if sampled else lambda gradient: {})
    return by_autograd(covariance_at, values, sampled)


class PriorPart(NamedTuple):
    """p(f | theta) at some inputs: mean and covariance, with the derivatives of sums over both in all sampled parameters."""

    mean: Tensor  # (C, N)
    covariance: Tensor  # (C, N, N), jitter not included
    slopes: Callable[[Tensor, Tensor], dict[str, dict[str, Tensor]]]  # of gradients in covariance and mean; by module


def prior_part(model: GPModel, covariance_at: Covariance, x: Tensor, values: dict[str, dict[str, Tensor]], count: int) -> PriorPart:
    """The GP as it is at inputs ``x``, of which ``covariance_at`` gives covariances, at C settings."""
    kernel = covariance_part(covariance_at, values["kernel"], model.layout.sampled_names("kernel"))
    mean = mean_part(model.mean_function, values["mean"], model.layout.sampled_names("mean"), x, count)
    return PriorPart(
        mean.value, kernel.value, lambda covariance, shift: {"kernel": kernel.slopes(covariance), "mean": mean.slopes(shift)}
    )


_NOT_WRITTEN = methods_of(LogLikelihood, ("log_prob_and_slope",))


def has_slope(likelihood: Any) -> bool:
    """Whether the derivative of the very density that ``log_prob`` gives is in closed form."""
    kind: Any = type(likelihood)
    written = isinstance(likelihood, LogLikelihood) and not keeps_methods(kind, _NOT_WRITTEN)
    return written and is_newest(kind, "log_prob_and_slope", ("log_prob", "pointwise_log_prob", "forward"))


class LikelihoodPart(NamedTuple):
    """log p(y given f) with its derivatives in f and in the likelihood's sampled parameters."""

    log_prob: Tensor  # (C,)
    latent_slope: Tensor  # (C, N) or (C, N, K)
    slopes: dict[str, Tensor]


def likelihood_part(model: GPModel, values: dict[str, Tensor], sampled: list[str], f: Tensor, targets: Targets) -> LikelihoodPart:
    """At f ``(C, N)``, of several latents ``(C, N, K)``."""
    if not sampled and has_slope(model.likelihood):
        log_prob, slope = model.likelihood_function(
            likelihood_parameters(values), lambda module: module.log_prob_and_slope(f, targets.values)
        )
        return LikelihoodPart(log_prob, slope, {})
    leaves = {name: values[name].detach().requires_grad_(True) for name in sampled}
    leaf = f.detach().requires_grad_(True)
    with torch.enable_grad():
        parameters = likelihood_parameters({**values, **leaves})
        log_prob = model.likelihood_function(parameters, lambda module: module.log_prob(leaf, targets.values))
        slope, *others = torch.autograd.grad(log_prob.sum(), [leaf, *leaves.values()], allow_unused=True)
    slopes = {name: other for name, other in zip(leaves, others, strict=True) if other is not None}
    return LikelihoodPart(log_prob.detach(), torch.zeros_like(f) if slope is None else slope, slopes)


# Methods of a model that its gradient by parts is written out for.
DENSITY = "prior_at", "latents", "log_likelihood"


def value_and_grad_by_parts(
    model: GPModel,
    prior_at: Callable[[dict[str, dict[str, Tensor]], int], PriorPart],
    jitter: Tensor,
    theta: Tensor,
    white: Tensor,
    targets: Targets,
    sites: GaussianSites | None = None,
) -> tuple[Tensor, Tensor]:
    """Log density of [theta, w] for a full GP ``(C,)`` and its gradient ``(C, P + V)``; NaN where K does not factorise.

    Args:
        model: a GP with f at the data.
        prior_at: its prior there, from parameters and the number of their settings.
        jitter: added to the covariance, ``(N, N)``.
        theta: ``(C, P)``.
        white: w ``(C, V)``, white under the prior (then w = v) or under the sites.
        targets: of one data set, or one a chain.
        sites: see :mod:`torchgpmc.models.whitening`.
    """
    layout = model.layout
    with torch.no_grad():
        at = layout.evaluate(theta)
        values: dict[str, Any] = at.hyperparameters.by_module
        prior = prior_at(values, len(theta))
        factor, ok = cholesky((prior.covariance + jitter).expand(len(theta), -1, -1))
        shaped = white.view(len(white), *model.latent_shape)
        latents = white_under_prior(factor, shaped) if sites is None else white_under_sites(factor, prior.mean, sites, shaped)
        f = latents.centred + prior.mean.unsqueeze(1)
        single = model.num_latents == 1
        likelihood = likelihood_part(
            model, values["likelihood"], layout.sampled_names("likelihood"), f.squeeze(1) if single else f.mT, targets
        )
        found = latents.slopes(likelihood.latent_slope.unsqueeze(1) if single else likelihood.latent_slope.mT)
        slopes = {**prior.slopes(found.covariance, found.mean), "likelihood": likelihood.slopes}
        value = at.log_prior + log_standard_normal(latents.v.flatten(1)) + latents.log_volume + likelihood.log_prob
        theta_slope = torch.addcmul(at.log_prior_slope, at.derivative, layout.gather(slopes, theta))
        gradient = torch.cat([theta_slope, found.white.flatten(1)], -1)
    return torch.where(ok, value, torch.nan), gradient
