"""Importance estimates of models with inducing points whose values one normal density may not hold: several functions, or modes."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from torchgpmc.adapter.conversion import as_likelihood
from torchgpmc.approximations.gaussian_form import without_it
from torchgpmc.approximations.nearest_normal import nearest_normal
from torchgpmc.approximations.normal_latents import LatentSites, joint_precision
from torchgpmc.checks import check_count
from torchgpmc.evidence.defended import LEAST_DRAWS, chosen_draws, defended_draws, mean_weight
from torchgpmc.evidence.latent_estimates import LatentEstimate, stacked_latents
from torchgpmc.models.gp_model import GPModel
from torchgpmc.models.latents import LatentsAt, likelihood_values
from torchgpmc.models.targets import Targets
from torchgpmc.numerics.random import normal_like
from torchgpmc.numerics.threads import even_slices, side_by_side

_CHUNK_ELEMENTS = 1_300_000
_NODES = 40  # of an expectation, at most
_NEAR, _MOST_STEPS = 0.1, 100  # of the search for the nearest normal density


@dataclass(frozen=True)
class InducingMixture:
    """Evidence of a :class:`SparseGP` or :class:`ProjectedProcess` by importance sampling of v, its whitened inducing values.

    Draws are around the normal density nearest to p(v | y, theta), of all latent functions together, others around one with a
    quarter of what the data add to its precision, and a tenth from the prior, each weighed by the mixture of the three. Of one
    latent function and log-concave likelihoods ``AMIS()`` alone is cheaper.

    Args:
        num_importance: draws of v an estimate, at least 10.

    Raises:
        ValueError: when an engine prepares a model whose latents are f at the data, or whose likelihood does not factorise; or
            counts are out of range.

    Example:
        >>> import torch, torchgpmc as tg
        >>> from gpytorch.kernels import RBFKernel
        >>> from gpytorch.priors import GammaPrior
        >>> x, kernel = torch.linspace(0, 1, 9), RBFKernel(lengthscale_prior=GammaPrior(2.0, 4.0))
        >>> likelihood = tg.likelihoods.RobustMax(num_classes=3)
        >>> model = tg.SparseGP(x, torch.arange(9) // 3, kernel, likelihood, inducing_points=x[::3])
        >>> method = tg.AMIS(evidence=tg.evidence.InducingMixture(), begin=tg.AtPrior())
        >>> tg.sample(model, method, num_samples=500, progress=False).whitened.shape
        torch.Size([1, 500, 9])
    """

    num_importance: int = 64

    def estimator(self, model: GPModel, targets: Targets | None = None) -> InducingMixtureEstimator:
        """See :class:`torchgpmc.evidence.Evidence`."""
        if not serves_inducing_mixture(model):
            raise ValueError(
                f"InducingMixture integrates out inducing values under a likelihood that factorises, and this model is "
                f"{type(model).__name__} with {type(model.likelihood).__name__}. Expected a SparseGP or a ProjectedProcess; "
                f"{without_it(model)}."
            )
        check_count("num_importance", self.num_importance, LEAST_DRAWS)
        return InducingMixtureEstimator(model, model.as_targets(targets), self.num_importance)


def serves_inducing_mixture(model: GPModel) -> bool:
    """Whether the latents are values at inducing points, and p(y | v) a product over data of functions of f's marginals.

    Example:
        >>> import torch, torchgpmc as tg
        >>> from gpytorch.kernels import RBFKernel
        >>> kernel, x = RBFKernel().requires_grad_(False), torch.linspace(0, 1, 8)
        >>> of_data = x, (x > 0.5).int(), kernel, tg.likelihoods.Bernoulli()
        >>> serves_inducing_mixture(tg.GP(*of_data)), serves_inducing_mixture(tg.SparseGP(*of_data, inducing_points=x[::2]))
        (False, True)
    """
    return model.factorises and not model.has_latents_at_data and model.is_smooth


@dataclass(frozen=True, eq=False)
class InducingMixtureEstimator:
    """Unbiased estimates of the integral over v, each with a draw of it; made by :class:`InducingMixture`.

    Example:
        >>> import torch, torchgpmc as tg
        >>> from gpytorch.kernels import RBFKernel
        >>> kernel, x = RBFKernel().requires_grad_(False), torch.linspace(0, 1, 6)
        >>> likelihood = tg.likelihoods.Softmax(num_classes=3, mixing_weights=False)
        >>> model = tg.SparseGP(x, torch.arange(6) // 2, kernel, likelihood, inducing_points=x[::3])
        >>> estimator = tg.evidence.InducingMixture(num_importance=100).estimator(model)
        >>> found = estimator.draw(torch.zeros(1, 0).double(), torch.Generator().manual_seed(0))
        >>> found.whitened.shape, bool(found.variance < 0.01)  # two inducing values of three functions
        (torch.Size([1, 6]), True)
    """

    model: GPModel
    targets: Targets
    num_importance: int

    @property
    def auxiliary_size(self) -> int:
        """Standard normals an estimate: a vector a draw, and one number to choose the kept draw."""
        return self.model.latent_size * self.num_importance + 1

    def draw(self, theta: Tensor, generator: torch.Generator, start: Tensor | None = None, num_latents: int = 1) -> LatentEstimate:
        """Estimates from fresh random numbers, with J latent vectors each; ``start``, sites of another theta, saves work."""
        theta = self.model.layout.checked(theta)
        return self.evaluate(theta, normal_like(theta.new_empty(len(theta), self.auxiliary_size), generator), start, num_latents)

    def evaluate(self, theta: Tensor, auxiliary: Tensor, start: Tensor | None = None, num_latents: int = 1) -> LatentEstimate:
        """Estimates as a function of standard normals ``(C, auxiliary_size)``."""

        def estimate(rows: slice) -> LatentEstimate:
            part = self.select(rows)
            return part._evaluate(theta[rows], auxiliary[rows], None if start is None else start[rows], num_latents)

        with torch.no_grad():
            parts = side_by_side(estimate, self._chunks(theta), theta.device)
        return LatentEstimate(*(torch.cat(columns) for columns in zip(*parts, strict=True)))

    def start_at(self, theta: Tensor) -> Tensor:
        """Sites ``(C, R, N)``."""

        def start(rows: slice) -> Tensor:
            at = self.model.at(self.model.prior(theta[rows]))
            found = nearest_normal(self.model, at, self.select(rows).targets, (), _NEAR, _MOST_STEPS, roughly=self._roughly)
            return found.sites.stacked()

        with torch.no_grad():
            return torch.cat(side_by_side(start, self._chunks(theta), theta.device))

    def move(self, theta: Tensor, estimate: LatentEstimate, num_steps: int, generator: torch.Generator) -> LatentEstimate:
        """Not to be had."""
        raise ValueError("evidence=InducingMixture() cannot be combined with latent_steps. Expected latent_steps=0.")

    def select(self, rows: Tensor | slice) -> InducingMixtureEstimator:
        """The same for some of the chains, each with targets of its own."""
        return replace(self, targets=self.targets.select(rows))

    def _chunks(self, theta: Tensor) -> list[slice]:
        return even_slices(len(theta), max(1, _CHUNK_ELEMENTS // max(self.model.latent_size**2, self._nodes)), theta.device)

    @property
    def _roughly(self) -> bool:
        """Whether searches may take expectations over few points: any density leaves estimates unbiased."""
        likelihood = as_likelihood(self.model.likelihood)
        return self.model.takes_expectations and self.model.num_latents > 1 and likelihood.is_log_concave

    @property
    def _nodes(self) -> int:
        """Numbers in the expectations of one v."""
        return _NODES * len(self.model.train_x) * self.model.num_latents

    def _evaluate(self, theta: Tensor, auxiliary: Tensor, start: Tensor | None, num_latents: int) -> LatentEstimate:
        model, draws = self.model, self.num_importance
        prior = model.prior(theta)
        at = model.at(prior)
        starts = () if start is None else (LatentSites.from_stacked(start, model.num_latents),)
        found = nearest_normal(model, at, self.targets, starts, _NEAR, _MOST_STEPS, roughly=self._roughly)
        noise = auxiliary[:, :-1].view(len(theta), draws, -1)
        v, log_ratio = defended_draws(found.latents.mean.flatten(1), joint_precision(at, found.sites), noise)
        log_likelihood = self._log_likelihood(at, v)
        log_weight = torch.nan_to_num(log_likelihood - log_ratio, nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf)
        value, variance = mean_weight(log_weight)
        value = torch.where(prior.ok, value, -torch.inf)
        chosen = chosen_draws(log_weight, auxiliary[:, -1], num_latents)
        rows = torch.arange(len(theta), device=theta.device)
        kept = [v[rows, index] for index in chosen.unbind(-1)]
        own = log_likelihood[rows, chosen[:, 0]]
        more, work = stacked_latents(kept[1:], theta, model.latent_size), found.num_iterations.to(value) + 3
        return LatentEstimate(value, variance, kept[0], more, own, work, found.converged)

    def _log_likelihood(self, at: LatentsAt, v: Tensor) -> Tensor:
        """log p(y | v), or what the model has in its place, of several v a theta ``(C, draws, V)``: ``(C, draws)``.

        A few thetas at once, unlike searches, which have one v of each.
        """
        values = likelihood_values(at.prior)
        rows = even_slices(len(v), max(1, _CHUNK_ELEMENTS // (self.num_importance * self._nodes)), v.device)
        return torch.cat([self.select(part)._of_rows(at, values, v, part) for part in rows])

    def _of_rows(self, at: LatentsAt, values: dict[str, Tensor], v: Tensor, rows: slice) -> Tensor:
        model, targets = self.model, self.targets.for_draws()
        white = v[rows].unflatten(-1, model.latent_shape)
        moved = (white.flatten(1, 2) @ at.projection[rows]).unflatten(1, white.shape[1:3])
        mean = at.mean[rows, None, None] + moved
        variance = at.variance[rows, None, None].expand_as(mean)
        f, spread = (part.squeeze(2) if model.num_latents == 1 else part.mT for part in (mean, variance))
        spread_values = {name: value[rows].unsqueeze(1) for name, value in values.items()}
        if model.takes_expectations:
            parts = model.likelihood_function(spread_values, lambda one: one.expected_log_likelihood(f, spread, targets))
        else:
            parts = model.likelihood_function(spread_values, lambda one: one.pointwise_log_prob(f, targets))
        found: Tensor = parts.sum(-1)
        return found
