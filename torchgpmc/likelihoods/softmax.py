"""Multi-class classification with one latent function a class, or mixtures of several."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from gpytorch.likelihoods import SoftmaxLikelihood
from gpytorch.priors import Prior
from torch import Tensor
from torch.distributions import Categorical

from torchgpmc.likelihoods.few_points import log_sum_exp_by_points, rough_slopes_and_products
from torchgpmc.likelihoods.gumbel import WIDEST, Lattice, RuleEdges, by_rule
from torchgpmc.likelihoods.likelihood import Curvature, Factorised, Moments
from torchgpmc.likelihoods.log_likelihood import require_classes
from torchgpmc.likelihoods.log_sum_exp import expected_log_sum_exp, log_sum_exp_and_slopes, log_sum_exp_slopes_and_products
from torchgpmc.likelihoods.slopes import ExpectedSlopes, with_known_slopes
from torchgpmc.numerics.quadrature import log_integral_of_several
from torchgpmc.numerics.random import log_uniform

# Sums err by about a Gumbel variable's characteristic function at the frequency 2 pi / 0.5, 2e-8; beyond nine deviations of f
# nothing matters to probabilities of 1e-12.
_LATTICE = Lattice(step=0.5, reach=9.0)
_OPERATIONS_A_FUNCTION = 2.5e3
_PRODUCTS_HOLD = 1e-150  # probabilities beyond which products of distribution functions are far from underflow where they matter
_MOST_QUICK = 2  # functions whose expectations are short rules
_EDGES = RuleEdges((0.06, 0.22, 0.63, 1.5, 4.0, 12.0), _LATTICE.step, (0.8, 1.2, 2.0, 4.0, 8.0, 16.0))


class Softmax(Factorised, SoftmaxLikelihood):
    r"""Classes 0..K-1 with :math:`p(y = k | f) \propto \exp((W f)_k)`; gpytorch's ``SoftmaxLikelihood`` at C settings.

    Takes gpytorch's arguments; without ``num_features``, or with ``mixing_weights=False``, each class has a latent function of its
    own. Unlike gpytorch's it never guesses from the shape of f which dimension holds the data.

    Without mixing weights predictive probabilities are right to 1e-6 in the logarithm (:func:`log_probabilities_of_normals`). With
    mixing weights they come from 4096 quasi-random points, right to about 1e-3, and a warning says where they are worse than 1e-2.

    Args:
        num_features: K, the number of latent functions; by default as many as classes, each with one of its own.
        num_classes: how many.
        mixing_weights: whether W is a parameter, ``(classes, K)``; by default where ``num_features`` is given.
        mixing_weights_prior: a gpytorch prior, to sample W.

    Raises:
        ValueError: without ``num_classes``, or with ``mixing_weights=True`` without ``num_features``.

    Example:
        >>> import torch
        >>> Softmax(num_classes=3).log_prob(torch.zeros(1, 2, 3), torch.tensor([0.0, 2.0]))
        tensor([-2.1972])
    """

    is_classification = True
    is_ordered = False
    is_log_concave = True

    def __init__(
        self,
        num_features: int | None = None,
        num_classes: int | None = None,
        mixing_weights: bool | None = None,
        mixing_weights_prior: Prior | None = None,
    ):
        if num_classes is None:
            raise ValueError(
                f"num_classes is None{'' if num_features is None else f' and num_features, which comes first, {num_features}'}. "
                f"Expected how many classes there are, by name: Softmax(num_classes={num_features or 3})."
            )
        mixes = num_features is not None if mixing_weights is None else mixing_weights
        super().__init__(num_features, num_classes, mixes, mixing_weights_prior)

    @property
    def num_latents(self) -> int:  # type: ignore[override]  # K is a setting of this likelihood
        """K, the number of latent functions."""
        return self.num_features

    @property
    def expectation_operations(self) -> float:  # type: ignore[override]  # K is a setting of this likelihood
        """By how long rules take at deviations of f from 0.3 to 2, where nothing is decided; those of two classes are short."""
        return 0.0 if self.num_latents <= _MOST_QUICK else _OPERATIONS_A_FUNCTION * self.num_latents

    @property
    def sees_differences(self) -> bool:  # type: ignore[override]  # without mixing weights
        """Whether a shift of all latent functions together changes nothing."""
        return self.mixing_weights is None

    def _log_probabilities(self, f: Tensor) -> Tensor:
        mixed = f if self.mixing_weights is None else f @ self.mixing_weights.mT
        # Along the last dimension, of a few numbers, torch takes ten times as long.
        return torch.log_softmax(mixed.unsqueeze(0).mT, -2).mT.squeeze(0)

    def forward(self, function_samples: Tensor) -> Categorical:  # type: ignore[override]  # unused extra arguments
        return Categorical(logits=self._log_probabilities(function_samples), validate_args=False)

    def validate_targets(self, targets: Tensor) -> Tensor:
        require_classes(targets, self.num_classes, "classes", "num_classes")
        return targets

    def pointwise_log_prob(self, f: Tensor, targets: Tensor) -> Tensor:
        logs = self._log_probabilities(f)
        index = targets.long().expand(logs.shape[:-1]).unsqueeze(-1)
        return logs.gather(-1, index).squeeze(-1)

    def log_prob_and_slope(self, f: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        logs = self._log_probabilities(f)
        index = targets.long().expand(logs.shape[:-1]).unsqueeze(-1)
        slope = logs.exp().neg_().scatter_add_(-1, index, torch.ones_like(logs[..., :1]))
        if self.mixing_weights is not None:
            slope = slope @ self.mixing_weights
        return logs.gather(-1, index).sum((-2, -1)), slope

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
        """To 1e-6 without mixing weights, by :func:`expected_log_sum_exp`.

        With mixing weights by :func:`torchgpmc.numerics.quadrature.product_rule`, which is right only at variances below 1.
        """
        if self.mixing_weights is not None:
            return super().expected_log_likelihood(mean, variance, targets)
        index = targets.long().expand(mean.shape[:-1]).unsqueeze(-1)
        return mean.gather(-1, index).squeeze(-1) - expected_log_sum_exp(mean, variance)

    def expected_and_slopes(
        self, mean: Tensor, variance: Tensor, targets: Tensor, parameters: Sequence[Tensor] = ()
    ) -> ExpectedSlopes:
        if self.mixing_weights is not None or bool((variance > WIDEST**2).any()):
            return super().expected_and_slopes(mean, variance, targets, parameters)
        return self._slopes_of(mean, targets, *log_sum_exp_and_slopes(mean, variance))

    def expected_and_coupling(self, mean: Tensor, variance: Tensor, targets: Tensor) -> tuple[ExpectedSlopes, Tensor]:
        """By one sum, since minus the second derivatives in two means are -E s s'."""
        if self.mixing_weights is not None or bool((variance > WIDEST**2).any()):
            return super().expected_and_coupling(mean, variance, targets)
        *found, products = log_sum_exp_slopes_and_products(mean, variance)
        return self._slopes_of(mean, targets, *found), _of_pairs(products)

    def by_few_points(self) -> Softmax:
        """With mixing weights, of two classes, and of a subclass, which may have another density, itself."""
        if type(self) is not Softmax or not self.expectation_operations or self.mixing_weights is not None:
            return self
        found = object.__new__(_SoftmaxByFewPoints)
        found.__dict__.update(self.__dict__)
        return found

    def _slopes_of(self, mean: Tensor, targets: Tensor, value: Tensor, softmax: Tensor, slope: Tensor) -> ExpectedSlopes:
        """Of E log p(y | f), from E log sum exp(f) and its slopes."""
        index = targets.long().expand(mean.shape[:-1]).unsqueeze(-1)
        mean_slope = softmax.neg().scatter_add_(-1, index, torch.ones_like(mean[..., :1]))
        return ExpectedSlopes((mean.gather(-1, index).squeeze(-1) - value).sum(-1), mean_slope, -slope)

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


class _SoftmaxByFewPoints(Softmax):
    """Without mixing weights; expectations are means over 16 points."""

    expectation_operations = 0.0  # type: ignore[assignment]  # they are quick

    def expected_log_likelihood(self, mean: Tensor, variance: Tensor, targets: Tensor) -> Tensor:
        index = targets.long().expand(mean.shape[:-1]).unsqueeze(-1)
        return mean.gather(-1, index).squeeze(-1) - with_known_slopes(log_sum_exp_by_points, mean, variance)

    def expected_and_slopes(
        self, mean: Tensor, variance: Tensor, targets: Tensor, parameters: Sequence[Tensor] = ()
    ) -> ExpectedSlopes:
        return self._slopes_of(mean, targets, *log_sum_exp_by_points(mean, variance))

    def expected_and_coupling(self, mean: Tensor, variance: Tensor, targets: Tensor) -> tuple[ExpectedSlopes, Tensor]:
        *found, products = rough_slopes_and_products(mean, variance)
        return self._slopes_of(mean, targets, *found), _of_pairs(products)


def _of_pairs(products: Tensor) -> Tensor:
    """-E s s' of every two, from all of them."""
    first, second = torch.triu_indices(products.shape[-1], products.shape[-1], 1, device=products.device)
    return -products[..., first, second]


def log_probabilities_of_normals(mean: Tensor, variance: Tensor) -> Tensor:
    r"""Log of E softmax(f), f independent normals, for all K classes: sums in one dimension, whatever K is.

    With standard Gumbel variables g, softmax(f)_j is the probability that :math:`f_j + g_j` is the greatest, so with :math:`H_k`
    the distribution function of :math:`f_k + g_k`

    .. math:: E\,\mathrm{softmax}(f)_j = \int H_j'(u) \prod_{k \ne j} H_k(u) \, du, \quad H_k(u) = E \exp(-e^{f_k - u})

    Both integrands are analytic in a strip, so sums over lattices converge geometrically (Trefethen & Weideman 2014): the error is
    below 1e-7, relative to each probability. Lattices grow with the normals: beyond standard deviations of 50 quasi-random points
    stand in (:func:`torchgpmc.numerics.quadrature.log_integral_of_several`). They are right to about 1e-2 nats; a warning
    says where they are worse.

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
    (found,) = by_rule(_log_probabilities, mean, variance.clamp_max(WIDEST**2), _EDGES)
    too_wide = (variance > WIDEST**2).any(-1, keepdim=True)
    if not bool(too_wide.any()):
        return found
    return torch.where(too_wide, log_integral_of_several(lambda f: torch.log_softmax(f, -1), mean, variance), found)


def _log_probabilities(mean: Tensor, variance: Tensor) -> tuple[Tensor]:
    if not mean.numel():
        return (mean,)
    known = (torch.nan_to_num(part.double()).reshape(-1, mean.shape[-1]) for part in (mean, variance))
    weights, sums = _LATTICE.sums(*known)
    found = torch.cat([_log_masses(part, weights) for _, part in sums]).view(mean.shape)
    unknown = torch.isnan(mean + variance).any(-1, keepdim=True)
    return (found.to(mean.dtype).masked_fill(unknown, torch.nan),)


def _log_masses(functions: Tensor, weights: Tensor) -> Tensor:
    """Of ``(R, K, 2, n)``: logs of the sums over u of the densities with which each is the greatest, ``(R, K)``."""
    cdf, density = functions.clamp_min(torch.finfo(functions.dtype).tiny).unbind(2)
    if not functions.requires_grad:
        masses = (density / cdf * cdf.prod(1, keepdim=True)) @ weights
        if bool((masses > _PRODUCTS_HOLD).all()):
            return masses.log()
    log_cdf = cdf.log()
    return torch.logsumexp(density.log() + (log_cdf.sum(1, keepdim=True) + weights.log()) - log_cdf, -1)
