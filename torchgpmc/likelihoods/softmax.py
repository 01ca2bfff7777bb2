"""Multi-class classification with one latent function a class, or mixtures of several."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from gpytorch.likelihoods import SoftmaxLikelihood
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributions import Categorical

from torchgpmc.likelihoods.base import Curvature, Factorised, Moments, require_classes
from torchgpmc.quadrature import expectation_of_several, log_integral_of_several
from torchgpmc.random import log_uniform

_STEP = 0.5  # on the scale of a Gumbel variable, whose characteristic function is 3e-9 at the frequency of such a lattice
_REACH = 9  # deviations from the mean that matter to probabilities of 1e-12
_GUMBEL_REACH = 22  # above which a Gumbel variable lies with probability 3e-10
_MAX_EXPONENT = 700.0
_EULER = 0.5772156649015329
_WIDEST = 50.0  # the deviation up to which lattices are used: their cost grows with its square
_WIDE = 0.63  # the deviation from which the lattice is fine enough for the normal too


class Softmax(Factorised, SoftmaxLikelihood):
    r"""Classes 0..K-1 with :math:`p(y = k | f) \propto \exp((W f)_k)`; gpytorch's ``SoftmaxLikelihood`` at C settings.

    Takes gpytorch's arguments; ``mixing_weights=False`` gives one latent function a class. Unlike gpytorch's it never guesses
    from the shape of f which dimension holds the data. Without mixing weights predictive probabilities are right to 1e-6 in the
    logarithm (:func:`log_probabilities_of_normals`); with mixing weights they come from 4096 quasi-random points, right to about
    1e-3, and a warning says where they are worse than 1e-2.

    Example:
        >>> import torch
        >>> Softmax(num_classes=3, mixing_weights=False).log_prob(torch.zeros(1, 2, 3), torch.tensor([0.0, 2.0]))
        tensor([-2.1972])
    """

    is_classification = True
    is_ordered = False
    is_log_concave = True

    @property
    def num_latents(self) -> int:  # type: ignore[override]  # K is a setting of this likelihood
        """K, the number of latent functions."""
        return self.num_features

    def _log_probabilities(self, f: Tensor) -> Tensor:
        mixed = f if self.mixing_weights is None else f @ self.mixing_weights.mT
        return torch.log_softmax(mixed, -1)

    def forward(self, function_samples: Tensor) -> Categorical:  # type: ignore[override]  # unused extra arguments
        return Categorical(logits=self._log_probabilities(function_samples), validate_args=False)

    def validate_targets(self, targets: Tensor) -> Tensor:
        require_classes(targets, self.num_classes, "classes", "num_classes")
        return targets

    def pointwise_log_prob(self, f: Tensor, targets: Tensor) -> Tensor:
        logs = self._log_probabilities(f)
        index = targets.long().expand(logs.shape[:-1]).unsqueeze(-1)
        return logs.gather(-1, index).squeeze(-1)

    def curvature(self, f: Tensor, targets: Tensor) -> Curvature:
        """In closed form (Rasmussen & Williams 2006, eqs 3.33-3.38)."""
        logs = self._log_probabilities(f)
        probabilities = logs.exp()
        index = targets.long().expand(logs.shape[:-1]).unsqueeze(-1)
        first = torch.zeros_like(logs).scatter(-1, index, 1.0) - probabilities
        second = probabilities.unsqueeze(-1) * probabilities.unsqueeze(-2) - torch.diag_embed(probabilities)
        if self.mixing_weights is not None:
            weights = self.mixing_weights
            first, second = first @ weights, weights.mT.unsqueeze(-3) @ second @ weights.unsqueeze(-3)
        return Curvature(logs.gather(-1, index).squeeze(-1), first, second)

    def _predictive_log_probabilities(self, mean: Tensor, variance: Tensor) -> Tensor:
        """Of all classes, ``(..., num_classes)``."""
        if self.mixing_weights is None:
            return log_probabilities_of_normals(mean, variance)
        return log_integral_of_several(self._log_probabilities, mean, variance)

    def expected_log_likelihood(self, mean: Tensor, variance: Tensor, targets: Tensor) -> Tensor:
        """To 1e-6 without mixing weights (:func:`expected_log_sum_exp`); with them see :func:`quadrature.product_rule`."""
        if self.mixing_weights is not None:
            return super().expected_log_likelihood(mean, variance, targets)
        index = targets.long().expand(mean.shape[:-1]).unsqueeze(-1)
        return mean.gather(-1, index).squeeze(-1) - expected_log_sum_exp(mean, variance)

    def predictive_log_prob(self, mean: Tensor, variance: Tensor, targets: Tensor) -> Tensor:
        logs = self._predictive_log_probabilities(mean, variance)
        index = targets.long().expand(logs.shape[:-1]).unsqueeze(-1)
        return logs.gather(-1, index).squeeze(-1)

    def response_moments(self, mean: Tensor, variance: Tensor) -> Moments:
        """Class probabilities ``(..., num_classes)`` and their Bernoulli variances; mean and variance are ``(..., K)``."""
        probabilities = self._predictive_log_probabilities(mean, variance).exp()
        return Moments(probabilities, probabilities * (1 - probabilities))

    def expected_response(self, f: Tensor) -> Tensor:
        return self._log_probabilities(f).exp()

    def sample(self, f: Tensor, generator: torch.Generator) -> Tensor:
        logs = self._log_probabilities(f)
        gumbel = -torch.log(-log_uniform(logs.shape, logs, generator))
        return (logs + gumbel).argmax(-1).to(f.dtype)


def log_probabilities_of_normals(mean: Tensor, variance: Tensor) -> Tensor:
    r"""Log of E softmax(f), f independent normals, for all K classes: sums in one dimension, whatever K is.

    With standard Gumbel variables g, softmax(f)_j is the probability that :math:`f_j + g_j` is the greatest, so with :math:`H_k`
    the distribution function of :math:`f_k + g_k`

    .. math:: E\,\mathrm{softmax}(f)_j = \int H_j'(u) \prod_{k \ne j} H_k(u) \, du, \quad H_k(u) = E \exp(-e^{f_k - u})

    Both integrands are analytic in a strip, so sums over lattices converge geometrically (Trefethen & Weideman 2014): the error is
    below 1e-7, relative to each probability. Lattices grow with the normals: beyond standard deviations of 50 quasi-random points
    stand in (:func:`quadrature.log_integral_of_several`), right to about 1e-2 nats, with a warning where they are worse.

    Args:
        mean: ``(..., K)``.
        variance: the same shape.

    Returns:
        ``(..., K)``.

    Example:
        >>> import torch
        >>> log_probabilities_of_normals(torch.zeros(2).double(), torch.ones(2).double()).exp()
        tensor([0.5000, 0.5000], dtype=torch.float64)
    """
    _, log_densities = _greatest_of_sums(mean, variance.clamp_max(_WIDEST**2))
    found = (torch.logsumexp(log_densities, 0) + math.log(_STEP)).to(mean.dtype)
    too_wide = (variance > _WIDEST**2).any(-1, keepdim=True)
    if not bool(too_wide.any()):
        return found
    return torch.where(too_wide, log_integral_of_several(lambda f: torch.log_softmax(f, -1), mean, variance), found)


def expected_log_sum_exp(mean: Tensor, variance: Tensor) -> Tensor:
    r"""E log sum exp(f), f independent normals: ``(..., K)`` to ``(...)``; a sum in one dimension, whatever K is, to 1e-7.

    Given f, the greatest of all :math:`f_j + g_j` is a Gumbel variable about log sum exp(f), whose mean lies higher by Euler's
    constant. Beyond standard deviations of 50, where lattices would fill the memory, by :func:`quadrature.product_rule`, to about
    a twentieth of the deviation.

    Example:
        >>> import torch
        >>> expected_log_sum_exp(torch.zeros(3).double(), torch.full((3,), 1e-12).double()).exp()
        tensor(3.0000, dtype=torch.float64)
    """
    found = _ExpectedLogSumExp.apply(mean, variance.clamp_max(_WIDEST**2))
    too_wide = (variance > _WIDEST**2).any(-1)
    if not bool(too_wide.any()):
        return found
    return torch.where(too_wide, expectation_of_several(lambda f: torch.logsumexp(f, -1), mean, variance), found)


class _ExpectedLogSumExp(torch.autograd.Function):
    """With derivatives E s in the means and E s (1 - s) / 2 in the variances, s = softmax(f) (Bonnet's and Price's theorems)."""

    @staticmethod
    def forward(ctx: Any, mean: Tensor, variance: Tensor) -> Tensor:
        sums, density = _greatest_of_sums(mean, variance)
        softmax = _STEP * density.exp().sum(0)
        total = softmax.sum(-1)  # one, but for the rule's error
        center = mean.double().amax(-1)
        value = center + _STEP * ((sums.u.squeeze(-1) - center) * density.exp().sum(-1)).sum(0) / total - _EULER
        slope = _STEP * (sums.slope * (sums.log_cdf.sum(-1, keepdim=True) - sums.log_cdf).exp()).sum(0)
        ctx.save_for_backward(softmax.to(mean.dtype), 0.5 * slope.to(mean.dtype))
        return value.to(mean.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        mean_slope, variance_slope = ctx.saved_tensors
        return gradient.unsqueeze(-1) * mean_slope, gradient.unsqueeze(-1) * variance_slope


class _Sums(NamedTuple):
    """Of a normal f plus a standard Gumbel variable, on a lattice u."""

    u: Tensor  # (n, ..., 1)
    log_cdf: Tensor  # (n, ..., K)
    log_density: Tensor
    slope: Tensor  # of the density in the normal's mean


def _greatest_of_sums(mean: Tensor, variance: Tensor) -> tuple[_Sums, Tensor]:
    """The sums f_k + g_k, and the log density of the greatest of them where that is the j-th ``(n, ..., K)``."""
    mean, deviation = mean.double(), variance.double().sqrt()
    lowest = (mean - _REACH * deviation).detach().amax(-1, keepdim=True) - 4
    length = float(((mean + _REACH * deviation).detach().amax(-1, keepdim=True) + _GUMBEL_REACH - lowest).max())
    u = lowest + _STEP * torch.arange(int(length / _STEP) + 2, dtype=mean.dtype, device=mean.device).view(-1, *[1] * mean.dim())
    wide = deviation > _WIDE
    parts = _sum_over_nodes(mean, torch.where(wide, _WIDE, deviation), u)
    if bool(wide.any()):
        others = _sum_over_lattice(mean, torch.where(wide, deviation, _WIDE), u)
        parts = [torch.where(wide, other, part) for other, part in zip(others, parts, strict=True)]
    cdf, density, slope = parts
    tiny = torch.finfo(u.dtype).tiny
    sums = _Sums(u, cdf.clamp_min(tiny).log(), density.clamp_min(tiny).log(), slope)
    return sums, sums.log_density + sums.log_cdf.sum(-1, keepdim=True) - sums.log_cdf


def _sum_over_nodes(mean: Tensor, deviation: Tensor, u: Tensor) -> list[Tensor]:
    """Distribution function, density, and the density's slope in the mean, of a normal plus a Gumbel variable: narrow normals."""
    nodes = 0.8 * torch.arange(-8, 9, dtype=mean.dtype)
    weights = torch.softmax(-0.5 * nodes.square(), 0)
    at_mean = (mean - u).clamp_max(_MAX_EXPONENT).exp()
    cdf, density, slope = (torch.zeros_like(at_mean) for _ in range(3))
    for node, weight in zip(nodes.tolist(), weights.tolist(), strict=True):
        rate = at_mean * (deviation * node).exp()
        below = torch.exp(-rate)
        at_rate = rate * below
        cdf.add_(below, alpha=weight)
        density.add_(at_rate, alpha=weight)
        slope.add_(at_rate * (1 - rate), alpha=weight)
    return [cdf, density, slope]


def _sum_over_lattice(mean: Tensor, deviation: Tensor, u: Tensor) -> list[Tensor]:
    """The same for wide ones: f on the lattice of u, so that the Gumbel variable's functions are worked out once a difference."""
    half = int(_REACH * float(deviation.detach().max()) / _STEP) + 1
    offsets = _STEP * torch.arange(-half, half + 1, dtype=mean.dtype, device=mean.device).view(-1, *[1] * mean.dim())
    weights = torch.softmax(-0.5 * (offsets / deviation).square(), 0)
    differences = torch.cat([u[:1] + offsets[:half], u, u[-1:] + offsets[half + 1 :]])
    rates = (mean - differences).clamp_max(_MAX_EXPONENT).exp()
    below = torch.exp(-rates)
    at_rates = rates * below
    functions = below, at_rates, at_rates * (1 - rates)
    sums = [torch.zeros_like(rates[: len(u)]) for _ in functions]
    for j, weight in enumerate(weights.flip(0)):
        for total, values in zip(sums, functions, strict=True):
            total.addcmul_(weight, values[j : j + len(u)])
    return sums
