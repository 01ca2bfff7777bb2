"""Unbiased importance estimates of a sparse model's p(y | theta) from a normal density of its inducing values."""

from __future__ import annotations

import torch
from torch import Tensor

from torchgpmc.approximations.gaussian_form import LatentProblem
from torchgpmc.approximations.nearest_normal import NearestNormal, Variational
from torchgpmc.approximations.normal_latents import GaussianLatents, LatentSites
from torchgpmc.evidence.importance_sampling import ImportanceEstimate, ImportanceEstimator
from torchgpmc.models.gp_model import GPModel
from torchgpmc.models.latents import LatentPrior, LatentsAt, likelihood_values
from torchgpmc.models.targets import Targets
from torchgpmc.numerics.linalg import identity_matrix, times_matrix, triangular_log_determinant
from torchgpmc.trees import where

_NODES = 65  # of an expectation at most


class InducingEstimator(ImportanceEstimator):
    r"""The estimate of :class:`ImportanceEstimator` for the density that a sparse model has of v, its whitened inducing values.

    With v = mean + S e, e ~ N(0, I), a log weight of :math:`\int e^{E \log p(y | f)} N(v | 0, I) dv` is

    .. math:: E[\log p(y | f)] - \tfrac12 v'v + \tfrac12 e'e + \log |S|

    whatever mean and S are. With the sites' W, e'e = d'd + sum_n W_n (a_n'd)^2 at d = v - mean: field ``alpha`` of an
    estimate is the mean ``(C, M)``, and ``precision`` is W.

    Made by :func:`torchgpmc.evidence.importance`.

    Example:
        >>> import torch, torchgpmc as tg
        >>> from gpytorch.kernels import RBFKernel
        >>> kernel, x = RBFKernel().requires_grad_(False), torch.linspace(0, 1, 8)
        >>> model = tg.SparseGP(x, (x > 0.5).int(), kernel, tg.likelihoods.Bernoulli(), inducing_points=x[::2])
        >>> theta = torch.zeros(1, 0).double()
        >>> found = tg.evidence.importance(model, num_importance=64)(theta, torch.Generator().manual_seed(0))
        >>> bound = tg.approximations.Variational().evidence(model, model.prior(theta)).log_evidence
        >>> bool(bound < found.value), bool(found.variance < 1e-3)  # the bound is below what the estimates are of
        (True, True)
    """

    approximation: Variational

    @property
    def _elements(self) -> int:
        """Nodes of the expectations of all draws, mostly: out of the cache they take twice as long."""
        return max(super()._elements, _NODES * self.num_importance * len(self.model.train_x))

    @property
    def _vectors_a_direction(self) -> int:
        return 1

    def _draws(self, prior: LatentPrior, auxiliary: Tensor, start: Tensor | None) -> InducingDraws:
        at = self.model.at(prior)
        found = self.approximation.to_draw_from(self.model, at, self.targets, start)
        return InducingDraws(self.model, at, self.targets, _or_prior(found), self._directions(auxiliary).squeeze(1))

    def _linearised(self, theta: Tensor, auxiliary: Tensor) -> Tensor:
        parts = []
        for rows in self.chunks(theta):
            part = self._at(rows)
            at = part.model.at(part.model.prior(theta[rows]))
            with torch.no_grad():
                spread = part._draws(at.prior, auxiliary[rows], None)
                weights = torch.softmax(spread.weigh(part.antithetic)[0], -1)
                v = spread.whitened(part.antithetic)
            f = at.mean.unsqueeze(1) + v @ at.projection
            parts.append((weights * expectations(part.model, at, f, part.targets)).sum(-1))
        return torch.cat(parts)

    def _weights_of_kept(
        self, prior: LatentPrior, problem: LatentProblem, kept: ImportanceEstimate, generator: torch.Generator
    ) -> list[Tensor]:
        at = self.model.at(prior)
        delta = kept.whitened - kept.alpha
        moved = times_matrix(delta, at.projection)
        common = kept.log_constant + 0.5 * (delta.square().sum(-1) + (kept.precision * moved.square()).sum(-1))
        weights = [kept.log_likelihood - 0.5 * kept.whitened.square().sum(-1) + common]
        if self.antithetic:
            twin = kept.alpha - delta
            f = at.mean + times_matrix(twin, at.projection)
            other = expectations(self.model, at, f.unsqueeze(1), self.targets).squeeze(-1)
            weights.append(other - 0.5 * twin.square().sum(-1) + common)
        return weights


class InducingDraws:
    """v = mean + S e and, if asked, its mirror image mean - S e, of C thetas; as ``GaussianDraws`` are of f at the data.

    Args:
        model: with expectations in its density of v.
        at: f at the data given v.
        targets: of one data set, or one a theta.
        found: the density of v.
        directions: e ``(C, draws, M)``.
    """

    def __init__(self, model: GPModel, at: LatentsAt, targets: Targets, found: NearestNormal, directions: Tensor):
        self.model, self.at, self.targets = model, at, targets
        self.found, self.ok = found, at.prior.ok
        self.mean, scale = (part.squeeze(1) for part in found.latents)
        self.delta = directions @ scale.mT
        self.log_constant = triangular_log_determinant(scale)
        self.half_square = 0.5 * directions.square().sum(-1)

    def weigh(self, antithetic: bool) -> tuple[Tensor, Tensor]:
        """Log weights and log likelihoods ``(C, draws)``; with twins, those of mean - S e come second."""
        centre = (self.at.mean + times_matrix(self.mean, self.at.projection)).unsqueeze(1)
        shift = self.delta @ self.at.projection
        common = self.log_constant.unsqueeze(-1) + self.half_square
        f = torch.cat([centre + shift, centre - shift], 1) if antithetic else centre + shift
        log_likelihood = expectations(self.model, self.at, f, self.targets)
        common = torch.cat([common, common], -1) if antithetic else common
        log_weight = log_likelihood + common - 0.5 * self.whitened(antithetic).square().sum(-1)
        return torch.nan_to_num(log_weight, nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf), log_likelihood

    def whitened(self, antithetic: bool) -> Tensor:
        """Every draw ``(C, draws, M)``."""
        mean = self.mean.unsqueeze(1)
        return torch.cat([mean + self.delta, mean - self.delta], 1) if antithetic else mean + self.delta

    def whitened_at(self, chosen: Tensor) -> Tensor:
        """The draws ``chosen`` ``(C,)``: ``(C, M)``."""
        rows = torch.arange(len(chosen), device=chosen.device)
        return self.whitened(True)[rows, chosen]


def expectations(model: GPModel, at: LatentsAt, f: Tensor, targets: Targets) -> Tensor:
    """E log p(y | f) given several v a theta, from means ``f`` of f at the data ``(C, draws, N)``: ``(C, draws)``."""
    values = {name: value.unsqueeze(1) for name, value in likelihood_values(at.prior).items()}
    variance = at.variance.unsqueeze(1).expand_as(f)
    expected: Tensor = model.likelihood_function(
        values, lambda likelihood: likelihood.expected_log_likelihood(f, variance, targets.for_draws())
    )
    return expected.sum(-1)


def _or_prior(found: NearestNormal) -> NearestNormal:
    """The approximation, or the prior itself where it came out unusable: any density leaves the estimate unbiased."""
    (mean, scale), sites = found.latents, found.sites
    sound = torch.isfinite(mean.sum((-2, -1)) + scale.sum((-3, -2, -1)) + sites.precision.sum((-2, -1)))
    prior = GaussianLatents(torch.zeros_like(mean), identity_matrix(scale.shape[-1], scale).expand_as(scale))
    return found._replace(
        latents=where(sound, found.latents, prior),
        sites=where(sound, sites, LatentSites(*map(torch.zeros_like, sites))),
        converged=found.converged & sound,
    )
