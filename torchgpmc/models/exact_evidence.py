"""The exact evidence under Gaussian noise with its gradient, written out: one factorisation and one inverse."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchgpmc.likelihoods.gaussian import Gaussian
from torchgpmc.models.gp_model import GPModel
from torchgpmc.models.latents import likelihood_parameters
from torchgpmc.models.reverse import Part, by_autograd, covariance_part, mean_part
from torchgpmc.models.targets import Targets
from torchgpmc.numerics.linalg import (
    cholesky,
    cholesky_in_place,
    identity_matrix,
    solve_lower,
    times_vector,
    triangular_log_determinant,
)
from torchgpmc.numerics.special import log_standard_normal
from torchgpmc.overriding import keeps_methods, methods_of

_WRITTEN_OUT = methods_of(GPModel, ("prior_at",))


class LowRank(NamedTuple):
    """N(mean, root' root + diag(rest)), of f at the data."""

    mean: Tensor  # (C, N)
    root: Tensor  # (C, M, N)
    rest: Tensor  # (C, N)
    ok: Tensor  # (C,)


def evidence_and_grad_by_parts(model: GPModel, theta: Tensor, targets: Targets) -> tuple[Tensor, Tensor] | None:
    r"""log p(theta) N(y | m, A), A = K + diag(noise), and its gradient; ``None`` for a model with another prior on f.

    .. math:: \bar A = \tfrac12 (\alpha \alpha^T - A^{-1}), \quad \alpha = A^{-1} (y - m)

    (Rasmussen & Williams 2006, eqs 2.30 and 5.9.) The kernel's part is written out for RBF and Matern kernels.

    Args:
        model: with Gaussian noise.
        theta: ``(C, P)``.
        targets: real.

    Returns:
        Log densities of theta ``(C,)``, NaN where A does not factorise, and gradients ``(C, P)``.
    """
    if not has_the_kernels_prior(model):
        return None

    def noise(values: dict[str, Tensor]) -> Part:
        return _noise_part(model, values, model.layout.sampled_names("likelihood"))

    found = evidence_given_noise(model, theta, targets, noise)
    return found.value, found.gradient


def has_the_kernels_prior(model: GPModel) -> bool:
    """Whether the covariance of f at the data is the kernel's own."""
    return keeps_methods(model, _WRITTEN_OUT)


class GivenNoise(NamedTuple):
    """log p(theta) N(y | m, A), A = K + diag(noise), and its slopes."""

    value: Tensor  # (C,), NaN where A does not factorise
    gradient: Tensor  # in theta (C, P)
    of_noise: dict[str, Tensor]  # what the noise's part makes of slopes in the noise
    rounding: Tensor  # (C,), by which pivots of A may be off at worst, over themselves: trace(A) eps / least pivot


def evidence_given_noise(
    model: GPModel, theta: Tensor, targets: Targets, noise_at: Callable[[dict[str, Tensor]], Part], most_rounding: float = math.inf
) -> GivenNoise:
    """log p(theta) N(y | m, A) with its gradient, of a model with the kernel's own prior, by algebra in the dtype of its inputs.

    Args:
        model: a :class:`GP` or :class:`GPRegression`.
        theta: ``(C, P)``.
        targets: real.
        noise_at: from the likelihood's parameters to variances ``(C, 1)`` or ``(C, N)`` and what their slopes make.
        most_rounding: where all thetas have more, or fail, slopes, which are two thirds of the work, are left out: NaN.
    """
    layout, count, dtype = model.layout, len(theta), model.train_x.dtype
    with torch.no_grad():
        at = layout.evaluate(theta)
        values = at.hyperparameters.by_module
        of_kernel = {name: value.to(dtype) for name, value in values["kernel"].items()}
        kernel = covariance_part(model.bindings.among_latents, of_kernel, layout.sampled_names("kernel"))
        mean = mean_part(model.mean_function, values["mean"], layout.sampled_names("mean"), model.train_x, count)
        noise = noise_at(values["likelihood"])
        residual = (targets.values - mean.value).expand(count, -1).to(dtype)
        factor, log_density, trace = _normal(model, kernel.value, noise.value, residual)
        value, pivots = at.log_prior + log_density, factor.diagonal(dim1=-2, dim2=-1).square().amin(-1)
        rounding = trace * torch.finfo(dtype).eps / pivots
        if most_rounding < math.inf and bool(((rounding > most_rounding) | torch.isnan(log_density)).all()):
            unknown = torch.full_like(noise.value, torch.nan)
            return GivenNoise(value, torch.full_like(theta, torch.nan), noise.slopes(unknown), rounding)
        inverse = torch.cholesky_inverse(factor)
        alpha = times_vector(inverse, residual)
        slope = inverse.mul_(-0.5).addcmul_(alpha.unsqueeze(-1), alpha.unsqueeze(-2), value=0.5)
        diagonal = slope.diagonal(dim1=-2, dim2=-1).to(theta.dtype)
        of_noise = noise.slopes(diagonal.sum(-1, keepdim=True) if noise.value.shape[-1] == 1 else diagonal)
        slopes = {
            "mean": mean.slopes(alpha.to(theta.dtype)),
            "likelihood": of_noise,
            # Last, as it takes over the memory.
            "kernel": {name: part.to(theta.dtype) for name, part in kernel.slopes(slope).items()},
        }
        gradient = torch.addcmul(at.log_prior_slope, at.derivative, layout.gather(slopes, theta))
    return GivenNoise(value, gradient, of_noise, rounding)


def log_evidence_given_noise(
    model: GPModel, theta: Tensor, targets: Targets, noise_at: Callable[[dict[str, Tensor]], Tensor]
) -> Tensor:
    """The value of :func:`evidence_given_noise` alone ``(C,)``, for a third of the work."""
    with torch.no_grad():
        hyperparameters, log_prior = model.layout.raw_values_and_log_prior(theta)
        values = hyperparameters.by_module
        mean = model.mean_function(values["mean"], model.train_x, len(theta))
        residual = (targets.values - mean).expand(len(theta), -1)
        kernel = model.bindings.among_latents(values["kernel"])
        return log_prior + _normal(model, kernel, noise_at(values["likelihood"]), residual).log_density


class _Normal(NamedTuple):
    factor: Tensor  # of A; ones where there is none
    log_density: Tensor  # log N(residual | 0, A) (C,), NaN where A does not factorise
    trace: Tensor  # of A (C,)


def _normal(model: GPModel, kernel: Tensor, noise: Tensor, residual: Tensor) -> _Normal:
    """Of A = K + diag(noise), by one factorisation."""
    total = kernel.expand(len(residual), -1, -1).clone(memory_format=torch.contiguous_format)
    total.diagonal(dim1=-2, dim2=-1).add_(noise + model.jitter)
    trace = total.diagonal(dim1=-2, dim2=-1).sum(-1)
    factor, ok = cholesky_in_place(total)
    factor.masked_fill_(~ok[:, None, None], 1.0)  # one failed factor would fail the inverse of the whole batch
    white = solve_lower(factor, residual.unsqueeze(-1)).squeeze(-1)
    log_density = log_standard_normal(white) - triangular_log_determinant(factor)
    return _Normal(factor, torch.where(ok, log_density, torch.nan), trace)


def low_rank_evidence_and_grad(model: GPModel, theta: Tensor, targets: Targets) -> tuple[Tensor, Tensor] | None:
    r"""log p(theta) N(y | m, R'R + D) and its gradient in O(N M^2), for a model that knows ``low_rank``; else ``None``.

    .. math:: \log |A| = \log |D| + \log |S|, \quad A^{-1} = D^{-1} - D^{-1} R^T S^{-1} R D^{-1}, \quad S = I + R D^{-1} R^T

    (Woodbury's identity.) Where next to no noise is left, its differences lose digits: it is to find modes by.

    Args:
        model: with Gaussian noise.
        theta: ``(C, P)``.
        targets: real.
    """
    low_rank: Any = getattr(model, "low_rank", None)
    if low_rank is None:
        return None
    with torch.enable_grad():
        theta = theta.detach().requires_grad_(True)
        hyperparameters, log_prior = model.layout.raw_values_and_log_prior(theta)
        parts = low_rank(hyperparameters)
        if parts is None:
            return None
        likelihood = likelihood_parameters(hyperparameters.by_module["likelihood"])
        diagonal = parts.rest + model.likelihood_function(likelihood, lambda module: module.noise)
        scaled = parts.root * diagonal.rsqrt().unsqueeze(-2)
        inner = scaled @ scaled.mT
        factor, ok = cholesky(inner + identity_matrix(inner.shape[-1], inner))
        residual = (targets.values - parts.mean) * diagonal.rsqrt()
        explained = solve_lower(factor, scaled @ residual.unsqueeze(-1)).squeeze(-1)
        log_determinant = triangular_log_determinant(factor) + 0.5 * diagonal.log().sum(-1)
        value = log_prior + log_standard_normal(residual) + 0.5 * explained.square().sum(-1) - log_determinant
        (gradient,) = torch.autograd.grad(value.sum(), theta)
    return torch.where(ok & parts.ok, value, torch.nan).detach(), gradient


def _noise_part(model: GPModel, values: dict[str, Tensor], sampled: list[str]) -> Part:
    """Noise variances ``(C, 1)`` or ``(C, N)``."""
    if type(model.likelihood) is Gaussian:
        name = "noise_covar.raw_noise"
        return Part(values[name], lambda gradient: {name: gradient} if sampled else {})
    return by_autograd(
        lambda parameters: model.likelihood_function(likelihood_parameters(dict(parameters)), lambda module: module.noise),
        values,
        sampled,
    )
