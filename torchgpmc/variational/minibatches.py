"""The variational fit on minibatches: natural gradients for q(v), Adam for theta and the inducing points."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor
from tqdm.auto import tqdm

from torchgpmc.approximations.normal_latents import GaussianLatents, expected_log_likelihood
from torchgpmc.models.gp_model import GPModel, LatentsAt
from torchgpmc.numerics.linalg import identity_matrix, normal_from_natural
from torchgpmc.numerics.random import make_generator
from torchgpmc.variational.bound import Positions

_LEARNING_RATE = 0.03  # of Adam, on logs of scales and on inducing points in deviations of the inputs
_NATURAL_SHARE = 0.1  # of the way to the natural gradient's goal
_PATIENCE = 3, 100  # passes and steps without a better bound, after which inducing points begin to move, and then all steps shrink
_SHRINKAGE = 0.3
_LAST = 0.02  # share of the first step size below which the search has ended
_AGAIN = 0.15  # share of the first step size with which a search goes on
_LATE = 2 / 3  # of the passes, after which steps shrink whatever the bound does, to that share by the last pass


class MinibatchFit(NamedTuple):
    """Where the search ended."""

    model: GPModel  # at its theta and inducing points
    latents: GaussianLatents  # of one theta
    converged: bool  # the bound no longer rose before passes ran short
    rise: float  # of the bound's mean over a pass, in the last pass before they did


def ascend_by_minibatches(
    model: GPModel,
    positions: Positions,
    batch_size: int,
    max_passes: int,
    seed: int,
    bar: tqdm,
    begin: GaussianLatents | None = None,
) -> MinibatchFit:
    """Steps for q, theta and the inducing points together, until a pass over the data no longer raises the bound.

    A step takes q's natural parameters a tenth of the way to where the minibatch, counted N / batch_size fold, would have them,
    with negative precisions of sites cut off, so that q's precision is always above the prior's. When the bound, averaged over a
    pass, has not risen for a while, or after a third of the passes, inducing points begin to move; when it has not again, all step
    sizes shrink, and in the last third of the passes they do so in any case. q knows the data of its last few steps alone, and its
    bound is lower by about half its number of latents times N over the count of those data: only short steps see all of them.

    Args:
        model: a sparse model with a factorised likelihood and one data set.
        positions: whether, and on which scale, inducing points move.
        batch_size: data a step.
        max_passes: over the data.
        seed: of the minibatches.
        bar: shows the bound.
        begin: q of an earlier fit, of one theta, which ended at the model's hyperparameters and inducing points; these move at
            once then, in shorter steps: the first ones' length would forget what q knows. By default the prior.
    """
    generator = make_generator(seed, model.train_x.device)
    count, (latents, size) = len(model.train_x), model.latent_shape
    theta = model.layout.present(model).detach().requires_grad_(True)
    zeta = theta.new_zeros(positions.moving_size).requires_grad_(True)
    adam = torch.optim.Adam([theta, zeta], lr=_LEARNING_RATE)
    unit = identity_matrix(size, theta).expand(1, latents, size, size)
    natural = _Natural.of(GaussianLatents(theta.new_zeros(1, latents, size), unit) if begin is None else begin)
    means: list[float] = []
    shrinkage, num_worse, moves, settled = 1.0 if begin is None else _AGAIN, 0, begin is not None, False
    patience = max(_PATIENCE[0], math.ceil(_PATIENCE[1] * batch_size / count))
    for number in range(max_passes):
        bounds = []
        for rows in torch.randperm(count, generator=generator, device=theta.device).split(batch_size):
            scale = count / len(rows)
            with torch.enable_grad():
                part = positions.model_at(model, zeta, train_x=model.train_x[rows], train_y=model.train_y[rows])
                hyperparameters, log_prior = model.layout.raw_values_and_log_prior(theta)
                at = part.at_data(hyperparameters)
                q = natural.latents()
                mean, variance = _marginals(at, q, model.data_dtype)
                expected = scale * expected_log_likelihood(part, at, mean, variance, part.targets, rows).sum()
                objective = expected + log_prior.sum()
                leaves = [leaf for leaf in (theta, zeta) if leaf.requires_grad and leaf.numel()]
                slopes = torch.autograd.grad(objective, [mean, variance, *leaves], allow_unused=True)
            natural = natural.towards(_goal(at, q, slopes[0], slopes[1], model.data_dtype), _NATURAL_SHARE * shrinkage)
            for leaf, slope in zip(leaves, slopes[2:], strict=True):
                leaf.grad = None if slope is None or (leaf is zeta and not moves) else -slope
            adam.step()
            bounds.append(float(objective.detach() - q.divergence()))
            bar.update()
            bar.set_postfix(bound=f"{bounds[-1]:.2f}", passes=number, refresh=False)
        means.append(sum(bounds) / len(bounds))
        num_worse = 0 if means[-1] == max(means) else num_worse + 1
        if number + 1 >= _LATE * max_passes:
            shrinkage *= _LAST ** (1 / ((1 - _LATE) * max_passes))
        elif num_worse == patience:
            settled = moves or not zeta.numel()
            shrinkage, num_worse, moves = shrinkage * (_SHRINKAGE if settled else 1.0), 0, True
        adam.param_groups[0]["lr"] = _LEARNING_RATE * shrinkage
        if shrinkage < _LAST:
            break
        moves = moves or number + 1 >= max_passes / 3
    with torch.no_grad():
        found = positions.model_at(model, zeta.detach()).with_theta(theta.detach()[0])
    end = min(len(means), math.ceil(_LATE * max_passes))
    rise = means[end - 1] - means[end - 2] if end > 1 else math.inf
    return MinibatchFit(found, natural.latents(), settled, rise)


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


def _marginals(at: LatentsAt, q: GaussianLatents, dtype: torch.dtype | None) -> tuple[Tensor, Tensor]:
    """Mean and variance of f under a constant q, differentiable in ``at``: a'Sa has the slope 2 Sa, without a further product."""
    projection = at.projection.unsqueeze(1)
    turned = (q.scale @ q.scale.mT).to(dtype) @ projection.detach().to(dtype)
    explained = (projection * turned).sum(-2)
    mean = at.mean.unsqueeze(1) + q.mean @ at.projection
    return mean, at.variance.unsqueeze(1) + 2 * explained - explained.detach()


def _goal(at: LatentsAt, q: GaussianLatents, mean_slope: Tensor, variance_slope: Tensor, dtype: torch.dtype | None) -> _Natural:
    """Natural parameters at which the bound of this minibatch would be stationary, were its slopes those."""
    projection = at.projection.detach()
    precision = (-2 * variance_slope).clamp_min(0.0)
    part = projection.unsqueeze(1).to(dtype)
    inner = ((part * precision.unsqueeze(-2).to(dtype)) @ part.mT).to(projection.dtype)
    inner.diagonal(dim1=-2, dim2=-1).add_(1.0)
    linear = (mean_slope + precision * (q.mean @ projection)) @ projection.mT
    return _Natural(inner, linear)
