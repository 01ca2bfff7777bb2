"""Unbiased importance estimates of p(y | theta) from a Gaussian approximation (paper A, section 3.3.1)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from torchgpmc.approximations import Approximation, GaussianApproximation
from torchgpmc.approximations.gaussian_form import LatentProblem, matrix_size, problem_of, without_graph
from torchgpmc.density import mask_value
from torchgpmc.diagnostics.weights import pareto_khat
from torchgpmc.evidence.gaussian_draws import WeightedDraws, draws_around, log_likelihoods, or_prior, quadratic, stacked_mean
from torchgpmc.evidence.latent_estimates import spread_levels, stacked_latents
from torchgpmc.models.gp_model import GPModel
from torchgpmc.models.latents import LatentPrior, likelihood_values
from torchgpmc.models.targets import Targets
from torchgpmc.numerics.linalg import apply_factor, times_blocks
from torchgpmc.numerics.random import normal_like
from torchgpmc.numerics.threads import even_slices, side_by_side
from torchgpmc.samplers.elliptical_slice import EllipticalSliceState, elliptical_slice
from torchgpmc.types import LogEstimate

# Elements of the matrices handled at once: a chunk's few matrices should stay in a core's cache on CPU.
_CHUNK_ELEMENTS = {"cpu": 1_300_000, "cuda": 200_000_000}
_WORTH_A_THREAD = 100_000


class ImportanceEstimate(NamedTuple):
    """Estimates at C thetas, with one of the latent vectors each was made from, chosen by its weight.

    Given theta and the estimate's place in a pseudo-marginal chain, (theta, f) is a joint posterior draw.

    Example:
        >>> import torch, torchgpmc as tg
        >>> from gpytorch.kernels import RBFKernel
        >>> kernel = RBFKernel().requires_grad_(False)
        >>> model = tg.GP(torch.linspace(0, 1, 8), torch.arange(8) > 3, kernel, tg.likelihoods.Bernoulli())
        >>> theta, generator = torch.zeros(1, 0).double(), torch.Generator().manual_seed(0)  # one setting, nothing to sample
        >>> found = tg.evidence.importance(model, num_importance=16).draw(theta, generator, num_latents=4)
        >>> found.value.shape, found.whitened.shape, found.further_whitened.shape
        (torch.Size([1]), torch.Size([1, 8]), torch.Size([1, 3, 8]))
    """

    value: Tensor  # (C,), log of the unbiased estimate of p(y | theta); -inf where K could not be factorised
    variance: Tensor  # (C,), relative variance of the estimate; NaN where it rests on a single weight
    whitened: Tensor  # (C, V), the kept draw
    further_whitened: Tensor  # (C, J - 1, V), chosen as the kept one was, of J that were asked for
    log_likelihood: Tensor  # (C,), log p(y | f) of the kept draw
    log_rest: Tensor  # (C,), log of the sum of the weights that do not change when the kept draw moves
    alpha: Tensor  # (C, V), of the importance density
    precision: Tensor  # (C, N), the same
    log_constant: Tensor  # (C,), the part of every log weight that does not depend on f
    num_factorizations: Tensor  # (C,)
    converged: Tensor  # (C,), whether the approximation did


@dataclass(frozen=True, eq=False)
class ImportanceEstimator:
    r"""The estimate of eq. 25 in paper A, :math:`\tilde p(y | \theta) = \frac{1}{M} \sum_j p(y | f_j) p(f_j | \theta) / q(f_j)`.

    With f = m + K alpha + delta, delta ~ N(0, (K^-1 + W)^-1), a log weight is

    .. math:: \log p(y | f) - \tfrac12 \alpha' K \alpha - \alpha' \delta + \tfrac12 \delta' W \delta - \tfrac12 \log |B|

    whatever alpha and W are, so the approximation need not be exact for the estimate to be unbiased. delta is drawn by Matheron's
    rule, u - K R u - K W^1/2 B^-1 e with u ~ N(0, K), e ~ N(0, I): no factor of its covariance is needed. For several latents it is
    L H^-T/2 e, H = I + L' W L.

    Made by :func:`torchgpmc.evidence.importance`.

    Example:
        >>> import torch, torchgpmc as tg
        >>> from gpytorch.kernels import RBFKernel
        >>> kernel = RBFKernel().requires_grad_(False)
        >>> model = tg.GP(torch.linspace(0, 1, 8), torch.arange(8) > 3, kernel, tg.likelihoods.Bernoulli())
        >>> theta, generator = torch.zeros(1, 0).double(), torch.Generator().manual_seed(0)  # one setting, nothing to sample
        >>> found = tg.evidence.importance(model, num_importance=4)(theta.expand(2000, 0), generator)
        >>> exact = tg.evidence.Orthant(num_points=4096).estimator(model).draw(theta, generator).value
        >>> ((found.value - exact).exp().mean() - 1).abs() < 0.01  # unbiased, of few latent vectors too
        tensor(True)
    """

    model: GPModel
    approximation: Approximation
    num_importance: int
    antithetic: bool
    targets: Targets

    @property
    def num_directions(self) -> int:
        """Independent deltas an estimate."""
        return self.num_importance // 2 if self.antithetic else self.num_importance

    @property
    def auxiliary_size(self) -> int:
        """Standard normals an estimate: a vector or two a direction, and one number to choose the draw that is kept."""
        return self._vectors_a_direction * self.num_directions * self.model.latent_size + 1

    def __call__(self, theta: Tensor, generator: torch.Generator) -> LogEstimate:
        """Log estimates at ``theta`` ``(C, P)`` with their relative variances; differentiable (once) if ``theta`` is.

        The gradient is the self-normalised estimate of Fisher's identity, E[d log p(y | f(theta, v)) / d theta | y, theta].
        """
        theta = self.model.layout.checked(theta)
        auxiliary = self._normals(theta, generator)
        found = self.evaluate(theta.detach(), auxiliary)
        if not (theta.requires_grad and torch.is_grad_enabled()):
            return LogEstimate(found.value, found.variance)
        linear = self._linearised(theta, auxiliary)
        return LogEstimate(found.value + (linear - linear.detach()), found.variance)

    def draw(
        self, theta: Tensor, generator: torch.Generator, start: Tensor | None = None, num_latents: int = 1
    ) -> ImportanceEstimate:
        """Estimates from fresh random numbers; ``start``, of an approximation at a nearby theta, saves iterations."""
        theta = self.model.layout.checked(theta)
        return self.evaluate(theta, self._normals(theta, generator), start, num_latents)

    def evaluate(self, theta: Tensor, auxiliary: Tensor, start: Tensor | None = None, num_latents: int = 1) -> ImportanceEstimate:
        """Estimates as a function of standard normals ``(C, auxiliary_size)``."""

        def estimate(rows: slice) -> ImportanceEstimate:
            begun = None if start is None else start[rows]
            return self._at(rows)._evaluate(theta[rows], auxiliary[rows], begun, num_latents)[0]

        with torch.no_grad():
            return _joined(side_by_side(estimate, self.chunks(theta), theta.device))

    def log_weights(self, theta: Tensor, generator: torch.Generator) -> Tensor:
        """The log weights ``(C, num_importance)`` whose mean weight an estimate is."""
        theta = self.model.layout.checked(theta)
        auxiliary = self._normals(theta, generator)
        with torch.no_grad():
            return torch.cat([self._at(rows)._evaluate(theta[rows], auxiliary[rows], None)[1] for rows in self.chunks(theta)])

    def pareto_khat(self, theta: Tensor, generator: torch.Generator) -> Tensor:
        """Pareto k-hat of the weights at each theta ``(C,)``: above 0.7, the importance density misses a part of the posterior."""
        weights = self.log_weights(theta, generator)
        return torch.tensor([pareto_khat(row) for row in weights.cpu()], dtype=theta.dtype)

    def start_at(self, theta: Tensor) -> Tensor:
        """What the approximation at ``theta`` leaves for those at nearby thetas to start from ``(C, ...)``."""

        def start(rows: slice) -> Tensor:
            targets = self._at(rows).targets
            return self.approximation.importance_density(self.model, self.model.prior(theta[rows]), targets).start

        with torch.no_grad():
            return torch.cat(side_by_side(start, self.chunks(theta), theta.device))

    def select(self, rows: Tensor | slice) -> ImportanceEstimator:
        """The same for some of the chains, each with targets of its own."""
        return replace(self, targets=self.targets.select(rows)) if self.targets.one_a_chain else self

    def _at(self, rows: slice) -> ImportanceEstimator:
        return self.select(rows)

    def _normals(self, theta: Tensor, generator: torch.Generator) -> Tensor:
        return normal_like(theta.new_empty(len(theta), self.auxiliary_size), generator)

    def chunks(self, theta: Tensor) -> list[slice]:
        """Thetas that are worked out at once."""
        elements = _CHUNK_ELEMENTS.get(theta.device.type, _CHUNK_ELEMENTS["cuda"])
        least = _WORTH_A_THREAD // self._elements
        return even_slices(len(theta), max(1, elements // self._elements), theta.device, max(1, least))

    @property
    def _elements(self) -> int:
        """Numbers in the largest tensor that one theta takes."""
        return matrix_size(self.model)

    def _evaluate(
        self, theta: Tensor, auxiliary: Tensor, start: Tensor | None, num_latents: int = 1
    ) -> tuple[ImportanceEstimate, Tensor]:
        return self.at_prior(self.model.prior(theta), auxiliary, start, num_latents)

    def at_prior(
        self, prior: LatentPrior, auxiliary: Tensor, start: Tensor | None, num_latents: int = 1
    ) -> tuple[ImportanceEstimate, Tensor]:
        """Estimates of the integral of p(y | f) under C priors of f, and the log weights ``(C, draws)``."""
        spread = self._draws(prior, auxiliary, start)
        log_weight, log_likelihood = spread.weigh(self.antithetic)
        value, variance = self._average(log_weight)
        value = torch.where(spread.ok, value, -torch.inf)
        chosen, *others = _choose(log_weight, torch.special.ndtr(auxiliary[:, -1]), num_latents).unbind(-1)
        column = chosen.unsqueeze(-1)
        estimate = ImportanceEstimate(
            value,
            variance,
            spread.whitened_at(chosen),
            stacked_latents([spread.whitened_at(other) for other in others], auxiliary, self.model.latent_size),
            log_likelihood.gather(-1, column).squeeze(-1),
            self._log_rest(log_weight, chosen),
            spread.found.alpha,
            spread.found.precision,
            spread.log_constant,
            spread.found.num_iterations.to(value) + 1,
            spread.found.converged,
        )
        return estimate, log_weight

    def _draws(self, prior: LatentPrior, auxiliary: Tensor, start: Tensor | None) -> WeightedDraws:
        problem, found = self._approximate(prior, start)
        return draws_around(prior, problem, found, self._directions(auxiliary))

    def _approximate(self, prior: LatentPrior, start: Tensor | None) -> tuple[LatentProblem, GaussianApproximation]:
        problem = without_graph(problem_of(self.model, prior, self.targets))
        found = self.approximation.importance_density(self.model, prior, self.targets, start)
        return problem, or_prior(self.model, found, prior)

    @property
    def _vectors_a_direction(self) -> int:
        by_matheron = self.model.num_latents == 1 or self.approximation.has_no_root
        return 2 if by_matheron else 1

    def _directions(self, auxiliary: Tensor) -> Tensor:
        return auxiliary[:, :-1].reshape(len(auxiliary), self._vectors_a_direction, self.num_directions, self.model.latent_size)

    def _average(self, log_weight: Tensor) -> tuple[Tensor, Tensor]:
        """Log mean weight and its relative variance, from pair averages where draws come in pairs."""
        value = torch.logsumexp(log_weight, -1) - math.log(self.num_importance)
        if self.antithetic:
            log_weight = torch.logaddexp(*log_weight.chunk(2, -1)) - math.log(2.0)
        relative = (log_weight - value.unsqueeze(-1)).exp()
        count = relative.shape[-1]
        variance = relative.var(-1) / count if count > 1 else torch.full_like(value, torch.nan)
        return value, variance

    def _log_rest(self, log_weight: Tensor, chosen: Tensor) -> Tensor:
        index = torch.arange(self.num_importance, device=chosen.device)
        together = index % self.num_directions == (chosen % self.num_directions).unsqueeze(-1)
        return torch.logsumexp(log_weight.masked_fill(together, -torch.inf), -1)

    def _linearised(self, theta: Tensor, auxiliary: Tensor) -> Tensor:
        """A function of theta ``(C,)`` with the gradient of Fisher's identity, its expectation over the weighted draws."""
        parts = []
        for rows in self.chunks(theta):
            part = self._at(rows)
            prior = part.model.prior(theta[rows])
            with torch.no_grad():
                spread = part._draws(prior, auxiliary[rows], None)
                weights = torch.softmax(spread.weigh(part.antithetic)[0], -1)
                v = spread.whitened(part.antithetic)
            blocks = v.view(len(v), -1, prior.mean.shape[-1])  # a row a draw and latent
            f = prior.mean.unsqueeze(1) + apply_factor(prior.covariance, prior.factor, blocks)
            values = likelihood_values(prior)
            parts.append((weights * log_likelihoods(part.model, values, f.view(v.shape), part.targets)).sum(-1))
        return torch.cat(parts)

    def move(self, theta: Tensor, estimate: ImportanceEstimate, num_steps: int, generator: torch.Generator) -> ImportanceEstimate:
        """Elliptical slice steps on the kept draws given theta; its weight, and its antithetic twin's, are worked out again.

        This leaves the extended target of the pseudo-marginal chain invariant: given theta and its index, the kept draw is
        distributed as p(f | y, theta), and the other weights do not depend on it.
        """
        with torch.no_grad():
            prior = self.model.prior(theta)
            at = self.model.at(prior)
            problem = without_graph(problem_of(self.model, prior, self.targets))

            def log_likelihood(v: Tensor) -> Tensor:
                return mask_value(self.model.log_likelihood(at, v, self.targets))

            state = EllipticalSliceState(estimate.whitened, estimate.log_likelihood)
            for _ in range(num_steps):
                state, _ = elliptical_slice(log_likelihood).step(state, generator)
            moved = estimate._replace(whitened=state.position, log_likelihood=state.log_density)
            return self._with_kept(prior, problem, moved, generator)

    def given(self, theta: Tensor, whitened: Tensor, generator: torch.Generator) -> ImportanceEstimate:
        """Estimates among whose draws is ``whitened`` ``(C, V)``, the one that is kept; the others are fresh.

        What the extended target of a pseudo-marginal chain says of them, given theta and the kept draw (Andrieu, Doucet &
        Holenstein 2010, section 4.5): where (theta, f) is a draw from the posterior, all of it together is one from that target.
        """
        auxiliary = self._normals(theta, generator)

        def rest(rows: slice) -> ImportanceEstimate:
            estimate, log_weight = self._at(rows)._evaluate(theta[rows], auxiliary[rows], None)
            first = torch.zeros(len(log_weight), dtype=torch.long, device=log_weight.device)
            return estimate._replace(log_rest=self._log_rest(log_weight, first))

        with torch.no_grad():
            others = _joined(side_by_side(rest, self.chunks(theta), theta.device))
            prior = self.model.prior(theta)
            log_likelihood = self.model.log_likelihood(self.model.at(prior), whitened, self.targets)
            kept = others._replace(whitened=whitened, log_likelihood=log_likelihood)
            problem = without_graph(problem_of(self.model, prior, self.targets))
            kept = self._with_kept(prior, problem, kept, generator)
        return kept._replace(num_factorizations=others.num_factorizations + 1)

    def _with_kept(
        self, prior: LatentPrior, problem: LatentProblem, kept: ImportanceEstimate, generator: torch.Generator
    ) -> ImportanceEstimate:
        """The estimate with the kept draw where it is now."""
        weights = [kept.log_rest, *self._weights_of_kept(prior, problem, kept, generator)]
        return kept._replace(value=torch.logsumexp(torch.stack(weights), 0) - math.log(self.num_importance))

    def _weights_of_kept(
        self, prior: LatentPrior, problem: LatentProblem, kept: ImportanceEstimate, generator: torch.Generator
    ) -> list[Tensor]:
        """Log weights ``(C,)`` of the kept draw and, if there is one, of its twin."""
        middle = times_blocks(kept.alpha, prior.covariance)
        delta = times_blocks(kept.whitened, prior.factor.mT) - middle
        linear = (kept.alpha * delta).sum(-1)
        common = kept.log_constant + 0.5 * quadratic(kept.precision, delta.unsqueeze(1)).squeeze(1)
        weights = [kept.log_likelihood + common - linear]
        if self.antithetic:
            twin = stacked_mean(self.model, prior) + middle - delta
            other = log_likelihoods(self.model, problem.values, twin.unsqueeze(1), self.targets).squeeze(-1)
            weights.append(other + common + linear)
        return weights


def _joined(parts: Sequence[ImportanceEstimate]) -> ImportanceEstimate:
    return ImportanceEstimate(*(torch.cat(columns) for columns in zip(*parts, strict=True)))


def _choose(log_weight: Tensor, uniform: Tensor, count: int) -> Tensor:
    """Indices ``(C, count)``, each drawn with probabilities proportional to the weights, by inversion of :func:`spread_levels`."""
    cumulative = torch.softmax(torch.nan_to_num(log_weight, neginf=-1e300), -1).cumsum(-1)
    # A uniform of one, or a sum that rounds to less, must not point beyond the last draw, nor to one of weight zero.
    total = cumulative[:, -1:]
    level = torch.minimum(spread_levels(uniform, count) * total, total * (1 - 1e-12))
    return torch.searchsorted(cumulative, level, right=True).clamp_max(log_weight.shape[-1] - 1)
