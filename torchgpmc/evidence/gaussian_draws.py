"""Latent vectors drawn from Gaussian approximations, several a theta, with their importance weights."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor

from torchgpmc.approximations import ClassApproximation, GaussianApproximation
from torchgpmc.approximations.gaussian_form import LatentProblem
from torchgpmc.models.gp_model import GPModel
from torchgpmc.models.latents import LatentPrior
from torchgpmc.models.targets import Targets
from torchgpmc.numerics.linalg import times_blocks, triangular_log_determinant

_FEW_DIGITS = 0.01  # rounding of a draw, in deviations of the noise


def draws_around(prior: LatentPrior, problem: LatentProblem, found: GaussianApproximation, directions: Tensor) -> GaussianDraws:
    """Draws made from standard normals ``(C, 2, draws, N)``, or ``(C, 1, draws, V)`` for several latents."""
    if isinstance(found, ClassApproximation):
        return Classes(prior, problem, found, directions)
    kind = OneLatent if problem.model.num_latents == 1 else SeveralLatents
    return kind(prior, problem, found, directions)


class WeightedDraws(Protocol):
    """Latent vectors of C thetas with weights whose mean estimates p(y | theta)."""

    @property
    def found(self) -> Any:
        """The density they are from: ``alpha``, ``precision``, ``num_iterations``, ``converged``."""
        ...

    @property
    def ok(self) -> Tensor:
        """Whether there are any ``(C,)``: algebra has failed where not."""
        ...

    @property
    def log_constant(self) -> Tensor:
        """The part of every log weight in which the draw is not."""
        ...

    def weigh(self, antithetic: bool) -> tuple[Tensor, Tensor]:
        """Log weights and log likelihoods ``(C, draws)``, those of twins second."""
        ...

    def whitened(self, antithetic: bool) -> Tensor:
        """Every draw as v ``(C, draws, V)``."""
        ...

    def whitened_at(self, chosen: Tensor) -> Tensor:
        """The draws ``chosen`` ``(C,)`` as v ``(C, V)``."""
        ...


class GaussianDraws:
    """f = mean + delta with delta ~ N(0, (K^-1 + W)^-1), and with its mirror image if asked.

    A subclass sets ``delta`` ``(C, draws, V)`` and ``log_constant`` ``(C,)``, the part of every log weight in which f is not.
    """

    delta: Tensor
    log_constant: Tensor

    def __init__(self, prior: LatentPrior, problem: LatentProblem, found: Any):
        self.prior, self.problem, self.found = prior, problem, found
        self.ok = prior.ok

    def weigh(self, antithetic: bool) -> tuple[Tensor, Tensor]:
        """Log weights and log likelihoods ``(C, draws)``; with twins, those of m + K alpha - delta come second."""
        linear = (self.delta @ self.found.alpha.unsqueeze(-1)).squeeze(-1)
        common = self.log_constant.unsqueeze(-1) + 0.5 * quadratic(self.found.precision, self.delta)
        mean = self.found.mean.unsqueeze(1)
        log_likelihood = self._log_likelihood(mean + self.delta)
        log_weight = log_likelihood + common - linear
        if antithetic:
            twin = self._log_likelihood(mean - self.delta)
            log_likelihood = torch.cat([log_likelihood, twin], -1)
            log_weight = torch.cat([log_weight, twin + common + linear], -1)
        return torch.nan_to_num(log_weight, nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf), log_likelihood

    def whitened(self, antithetic: bool) -> Tensor:
        """Every draw as v = L^-1 (f - m), ``(C, draws, V)``."""
        rows = torch.arange(len(self.delta), device=self.delta.device).unsqueeze(-1)
        moved = self._moved(rows, torch.arange(self.delta.shape[1], device=self.delta.device).expand(len(rows), -1))
        middle = self._middle().unsqueeze(1)
        return torch.cat([middle + moved, middle - moved], 1) if antithetic else middle + moved

    def whitened_at(self, chosen: Tensor) -> Tensor:
        """The draws ``chosen`` ``(C,)`` as v ``(C, V)``."""
        count = self.delta.shape[1]
        rows = torch.arange(len(chosen), device=chosen.device)
        moved = self._moved(rows.unsqueeze(-1), (chosen % count).unsqueeze(-1)).squeeze(1)
        sign = torch.where(chosen < count, 1.0, -1.0).to(moved).unsqueeze(-1)
        return self._middle() + sign * moved

    def _middle(self) -> Tensor:
        """The mean as v ``(C, V)``; no solve, as L^-1 K = L'."""
        return times_blocks(self.found.alpha, self.prior.factor)

    def _moved(self, rows: Tensor, directions: Tensor) -> Tensor:
        """L^-1 delta of the given rows and directions."""
        raise NotImplementedError(f"{type(self).__name__} must define this")

    def _log_likelihood(self, f: Tensor) -> Tensor:
        return log_likelihoods(self.problem.model, self.problem.values, f, self.problem.targets)


def _has_digits(residual: Tensor) -> Tensor:
    """Whether draws by Matheron's rule solve its equations ``(C,)``; ``residual`` is by how much not, in deviations of the noise.

    It takes them apart as differences of numbers that are a deviation of the prior large. Where no digit of these is left, evidence
    comes out too high by hundreds of nats and more. Rounding being alike in all draws of a theta, one is looked at.
    """
    return residual.abs().flatten(1).amax(-1) < _FEW_DIGITS


class OneLatent(GaussianDraws):
    """By Matheron's rule, from two standard normals a datum."""

    def __init__(self, prior: LatentPrior, problem: LatentProblem, found: GaussianApproximation, directions: Tensor):
        super().__init__(prior, problem, found)
        root = found.precision.sqrt().unsqueeze(1)
        # (C, directions, N) is, transposed, the column-major layout that triangular solves take without a copy.
        self.normal, second = directions.unbind(1)
        u = self.normal @ prior.factor.mT
        half = torch.linalg.solve_triangular(found.factor, torch.addcmul(second, root, u).mT, upper=False)
        solved = torch.linalg.solve_triangular(found.factor.mT, half, upper=True).mT
        self.removed = solved * root
        self.delta = torch.baddbmm(u, self.removed, problem.covariance, alpha=-1)
        self.ok = prior.ok & _has_digits(solved[:, 0] - second[:, 0] - (root * self.delta)[:, 0])
        centred = found.mean - problem.mean
        log_determinant = triangular_log_determinant(found.factor)
        self.log_constant = -0.5 * (found.alpha * centred).sum(-1) - log_determinant

    def _moved(self, rows: Tensor, directions: Tensor) -> Tensor:
        return self.normal[rows, directions] - self.removed[rows, directions] @ self.prior.factor


class SeveralLatents(GaussianDraws):
    """By the factor of H = I + L' W L, the approximation's precision in whitened coordinates."""

    def __init__(self, prior: LatentPrior, problem: LatentProblem, found: GaussianApproximation, directions: Tensor):
        super().__init__(prior, problem, found)
        self.white = torch.linalg.solve_triangular(found.factor.mT, directions.squeeze(1).mT, upper=True).mT
        self.delta = times_blocks(self.white, prior.factor.mT)
        log_determinant = triangular_log_determinant(found.factor)
        self.log_constant = -0.5 * self._middle().square().sum(-1) - log_determinant

    def _moved(self, rows: Tensor, directions: Tensor) -> Tensor:
        return self.white[rows, directions]


class Classes(GaussianDraws):
    """By Matheron's rule, from two standard normals a datum and function; W has a root by way of its d."""

    def __init__(self, prior: LatentPrior, problem: LatentProblem, found: ClassApproximation, directions: Tensor):
        super().__init__(prior, problem, found)
        shape = (len(directions), directions.shape[2], *found.weight.shape[1:])
        self.normal, second = (part.view(shape) for part in directions.unbind(1))  # (C, directions, K, N)
        weight = found.weight.unsqueeze(1)
        total = weight.sum(2, keepdim=True)
        u = times_blocks(self.normal.flatten(2), prior.factor.mT).view(shape)
        root = weight.sqrt()
        # W = D^1/2 (I - e e') D^1/2, e = d^1/2 / |d^1/2|.
        noise = root * (second - root * (root * second).sum(2, keepdim=True) / total)

        def weighted(f: Tensor) -> Tensor:
            return weight * (f - (weight * f).sum(2, keepdim=True) / total)

        needed = noise - weighted(u)
        moved = times_blocks(needed.flatten(2), problem.covariance).view(shape)
        answer = found.under.respond(moved.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
        self.added = (needed - answer).flatten(2)
        self.delta = u.flatten(2) + times_blocks(self.added, problem.covariance)
        residual = self.added.view(shape) - noise + weighted(self.delta.view(shape))
        self.ok = prior.ok & _has_digits((residual / root)[:, 0])
        self.log_constant = -0.5 * self._middle().square().sum(-1) - 0.5 * found.log_determinant

    def _moved(self, rows: Tensor, directions: Tensor) -> Tensor:
        return self.normal.flatten(2)[rows, directions] + times_blocks(self.added[rows, directions], self.prior.factor)


def quadratic(precision: Tensor, delta: Tensor) -> Tensor:
    """delta' W delta of stacked latents ``(C, draws, V)``: ``(C, draws)``."""
    if precision.dim() == 2:
        return (delta.square() @ precision.unsqueeze(-1)).squeeze(-1)
    by_datum = _by_datum(delta, precision.shape[-1])
    return torch.einsum("csnk,cnkl,csnl->cs", by_datum, precision, by_datum)


def log_likelihoods(model: GPModel, values: dict[str, Tensor], f: Tensor, targets: Targets) -> Tensor:
    """log p(y | f) of several latent vectors a theta, ``(C, draws, V)`` to ``(C, draws)``."""
    spread = {name: value.unsqueeze(1) for name, value in values.items()}
    y = targets.for_draws()
    if model.num_latents > 1:
        f = _by_datum(f, model.num_latents)
    return model.likelihood_function(spread, lambda likelihood: likelihood.pointwise_log_prob(f, y)).sum(-1)


def _by_datum(stacked: Tensor, num_latents: int) -> Tensor:
    """``(C, draws, K N)`` as ``(C, draws, N, K)``."""
    return stacked.view(*stacked.shape[:-1], num_latents, -1).mT


def stacked_mean(model: GPModel, prior: LatentPrior) -> Tensor:
    """The prior's mean of all latents ``(C, V)``."""
    return prior.mean.repeat(1, model.num_latents)


def or_prior(model: GPModel, found: Any, prior: LatentPrior) -> Any:
    """The approximation, or the prior itself where it came out unusable: any density leaves the estimate unbiased."""
    sound = found.is_sound()
    return found if bool(sound.all()) else found.or_prior(sound, stacked_mean(model, prior))
