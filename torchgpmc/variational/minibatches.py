"""The variational fit on minibatches: natural gradients for q(v), Adam for theta and the inducing points."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor
from tqdm.auto import tqdm

from torchgpmc.approximations.normal_latents import GaussianLatents, expected_log_likelihood
from torchgpmc.models.gp_model import GPModel, LatentsAt
from torchgpmc.numerics.linalg import cholesky, identity_matrix, normal_from_natural, triangular_log_determinant
from torchgpmc.numerics.random import make_generator
from torchgpmc.variational.bound import Positions

_LEARNING_RATE = 0.03  # of Adam, on logs of scales and on inducing points in deviations of the inputs
_NATURAL_SHARE = 0.1  # of the way to the natural gradient's goal, in the first steps
_SETTLING = 100  # steps after which that is halved, and so on, until q remembers a pass over the data
_STILL = 1 / 20  # of the passes, before which inducing points stay where they are
_PATIENCE = 3, 100, 0.1  # passes, steps and share of the passes without a better bound: a search that had as many has converged
_AGAIN = 0.15  # share of Adam's first step with which a search goes on
_LATE = 2 / 3  # of the passes, after which q's steps shrink, to ...
_LAST = 0.02  # ... that share by the last pass


class MinibatchFit(NamedTuple):
    """Where the search ended."""

    model: GPModel  # at its theta and inducing points
    latents: GaussianLatents  # of one theta
    converged: bool  # the bound no longer rose before q's steps shrank
    rise: float  # of the bound's mean over a pass, in the last pass before q's steps shrank


def ascend_by_minibatches(
    model: GPModel,
    positions: Positions,
    batch_size: int,
    max_passes: int,
    seed: int,
    bar: tqdm,
    begin: GaussianLatents | None = None,
) -> MinibatchFit:
    """Steps for q, theta and the inducing points together, for so many passes over the data.

    A step takes q's natural parameters a share of the way to where the minibatch, counted N / batch_size fold, would have them,
    with negative precisions of sites cut off, so that q's precision is always above the prior's. q knows the data of its last few
    steps alone, and its bound is lower by about half its number of latents times N over the count of those data: so the share
    falls, soon, from a tenth to a minibatch's share of the data, lest theta and inducing points move to where so noisy a q is best,
    and in the last third of the passes further, until all passes count. Adam's steps fall as half a cosine over all passes.
    Inducing points begin to move after a twentieth of the passes.

    Args:
        model: a sparse model with a factorised likelihood and one data set.
        positions: whether, and on which scale, inducing points move.
        batch_size: data a step.
        max_passes: over the data.
        seed: of the minibatches.
        bar: shows the bound.
        begin: q of an earlier fit, of one theta, which ended at the model's hyperparameters and inducing points; these move at
            once then, in shorter steps, and q's remember a pass from the first: longer ones would forget what q knows. By
            default the prior.
    """
    generator = make_generator(seed, model.train_x.device)
    count, (latents, size) = len(model.train_x), model.latent_shape
    theta = model.layout.present(model).detach().requires_grad_(True)
    zeta = theta.new_zeros(positions.moving_size).requires_grad_(True)
    adam = torch.optim.Adam([theta, zeta], lr=_LEARNING_RATE)
    unit = identity_matrix(size, theta).expand(1, latents, size, size)
    natural = _Natural.of(GaussianLatents(theta.new_zeros(1, latents, size), unit) if begin is None else begin)
    means: list[float] = []
    learning_rate = _LEARNING_RATE * (1.0 if begin is None else _AGAIN)
    num_worse, settled = 0, False
    patience = max(_PATIENCE[0], math.ceil(_PATIENCE[1] * batch_size / count), math.ceil(_PATIENCE[2] * max_passes))
    pace = _Pace(math.ceil(count / batch_size), max_passes, begin is not None)
    for number in range(max_passes):
        bounds, moves = [], begin is not None or number >= _STILL * max_passes
        for step, rows in enumerate(torch.randperm(count, generator=generator, device=theta.device).split(batch_size)):
            scale = count / len(rows)
            progress = pace.progress(number, step)
            with torch.enable_grad():
                part = positions.model_at(model, zeta, train_x=model.train_x[rows], train_y=model.train_y[rows])
                hyperparameters, log_prior = model.layout.raw_values_and_log_prior(theta)
                at = part.at_data(hyperparameters)
                q = natural.moments()
                mean, variance = _marginals(at, q, model.data_dtype)
                expected = scale * expected_log_likelihood(part, at, mean, variance, part.targets, rows).sum()
                objective = expected + log_prior.sum()
                leaves = [leaf for leaf in (theta, zeta) if leaf.requires_grad and leaf.numel()]
                slopes = torch.autograd.grad(objective, [mean, variance, *leaves], allow_unused=True)
            goal = _goal(at, q, slopes[0], slopes[1], model.data_dtype)
            natural = natural.towards(goal, pace.natural_share(progress))
            for leaf, slope in zip(leaves, slopes[2:], strict=True):
                leaf.grad = None if slope is None or (leaf is zeta and not moves) else -slope
            adam.param_groups[0]["lr"] = learning_rate * 0.5 * (1 + math.cos(math.pi * progress))
            adam.step()
            bounds.append(float(objective.detach() - q.divergence))
            bar.update()
            bar.set_postfix(bound=f"{bounds[-1]:.2f}", passes=number, refresh=False)
        means.append(sum(bounds) / len(bounds))
        num_worse = 0 if means[-1] == max(means) else num_worse + 1
        settled = settled or (num_worse >= patience and number + 1 < _LATE * max_passes)
    with torch.no_grad():
        found = positions.model_at(model, zeta.detach()).with_theta(theta.detach()[0])
    end = min(len(means), math.ceil(_LATE * max_passes))
    rise = means[end - 1] - means[end - 2] if end > 1 else math.inf
    return MinibatchFit(found, natural.latents(), settled, rise)


class _Pace(NamedTuple):
    """How far a search has come, and how long q's steps are then."""

    num_steps: int  # a pass
    max_passes: int
    goes_on: bool  # from an earlier fit, whose q knows all data

    def progress(self, passes: int, step: int) -> float:
        """The share of all steps made."""
        return (passes + step / self.num_steps) / self.max_passes

    def natural_share(self, progress: float) -> float:
        """Of the way to the natural gradient's goal."""
        remembers_a_pass = min(_NATURAL_SHARE, 1 / self.num_steps)
        made = progress * self.num_steps * self.max_passes
        share = remembers_a_pass if self.goes_on else max(remembers_a_pass, _NATURAL_SHARE / (1 + made / _SETTLING))
        return float(share * _LAST ** max(0.0, (progress - _LATE) / (1 - _LATE)))


class _Moments(NamedTuple):
    """Those of q."""

    mean: Tensor  # (1, K, M)
    covariance: Tensor  # (1, K, M, M)
    divergence: float  # KL(q(v) | N(0, I))


class _Natural(NamedTuple):
    """q's natural parameters."""

    precision: Tensor  # (1, K, M, M)
    linear: Tensor  # (1, K, M), precision times mean

    @classmethod
    def of(cls, q: GaussianLatents) -> _Natural:
        """Those of a normal density."""
        precision = torch.cholesky_inverse(q.scale)
        return cls(precision, (precision @ q.mean.unsqueeze(-1)).squeeze(-1))

    def towards(self, goal: _Natural, share: float) -> _Natural:
        """A share of the way."""
        return _Natural(*(torch.lerp(old, new, share) for old, new in zip(self, goal, strict=True)))

    def latents(self) -> GaussianLatents:
        mean, scale, _ = normal_from_natural(*self)
        return GaussianLatents(mean, scale)

    def moments(self) -> _Moments:
        """Without the covariance's root, which costs as much again as all of them."""
        root = cholesky(self.precision).factor
        covariance = torch.cholesky_inverse(root).mT  # LAPACK's memory, read by rows
        mean = (covariance @ self.linear.unsqueeze(-1)).squeeze(-1)
        squares = covariance.diagonal(dim1=-2, dim2=-1).sum() + mean.square().sum() - mean.numel()
        return _Moments(mean, covariance, float(0.5 * squares + triangular_log_determinant(root).sum()))


def _marginals(at: LatentsAt, q: _Moments, dtype: torch.dtype | None) -> tuple[Tensor, Tensor]:
    """Mean and variance of f under a constant q, differentiable in ``at``: a'Sa has the slope 2 Sa, without a further product."""
    projection = at.projection.unsqueeze(1).to(dtype)
    turned = _by_function(q.covariance.to(projection.dtype), projection.detach())
    explained = (projection * turned).sum(-2).to(at.variance.dtype)
    mean = at.mean.unsqueeze(1) + q.mean @ at.projection
    return mean, at.variance.unsqueeze(1) + 2 * explained - explained.detach()


def _goal(at: LatentsAt, q: _Moments, mean_slope: Tensor, variance_slope: Tensor, dtype: torch.dtype | None) -> _Natural:
    """Natural parameters at which the bound of this minibatch would be stationary, were its slopes those."""
    projection = at.projection.detach()
    precision = (-2 * variance_slope).clamp_min(0.0)
    part = projection.unsqueeze(1).to(dtype)
    inner = _by_function(part * precision.unsqueeze(-2).to(part.dtype), part.mT).to(projection.dtype)
    inner.diagonal(dim1=-2, dim2=-1).add_(1.0)
    linear = (mean_slope + precision * (q.mean @ projection)) @ projection.mT
    return _Natural(inner, linear)


def _by_function(left: Tensor, right: Tensor) -> Tensor:
    """``(1, K, M, R)`` times ``(1, 1, R, B)``, as one product: ``(1, K, M, B)``."""
    return (left.flatten(0, 2) @ right[0, 0]).view(*left.shape[:3], right.shape[-1])
