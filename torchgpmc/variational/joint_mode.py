"""The normal approximation at the mode of [theta, v] together, for likelihoods that do not factorise over data."""

from __future__ import annotations

import torch
from torch import Tensor
from tqdm.auto import tqdm

from torchgpmc.approximations.normal_latents import GaussianLatents
from torchgpmc.importance import find_modes
from torchgpmc.models.gp_model import GPModel
from torchgpmc.models.joint_density import JointLogDensity
from torchgpmc.numerics.random import make_generator, normal_like
from torchgpmc.variational.start import Start

_ROUND_MOVES = 20  # of L-BFGS, as in the rounds of other fits
_NUM_CANDIDATES, _NUM_STARTS = 9, 2  # present values and draws from the prior, of which searches start from the best
_CHUNK_ELEMENTS = 2_000_000  # of covariances
_NUM_DRAWS = 256  # of q(v), over which the bound is averaged


def start_at_joint_mode(
    model: GPModel, max_iterations: int, num_starts: int | None, start: Start | None, seed: int, bar: tqdm
) -> Start:
    r"""A :class:`Start` from the curvature H of minus the log joint density at its mode :math:`(\hat\theta, \hat v)`.

    .. math:: mean(\theta) = \hat v - H_{vv}^{-1} H_{v \theta} (\theta - \hat\theta), \quad scale_k scale_k^T = (H_{vv}^{-1})_{kk}

    For least squares H is, but for the residuals, J'J of the fit plus the priors' curvature: dense in v, which no sites at single
    inputs are.

    Args:
        model: of [theta, v], with one data set and a smooth likelihood.
        max_iterations: rounds of twenty moves of L-BFGS, of each search at most; it ends where nothing rises any more.
        num_starts: searches, from the best of the present values and draws from the prior; ``None``: two.
        start: an earlier fit, from whose mode a search begins too.
        seed: of the draws from the prior that searches start from, and of the normal draws in the bound.
        bar: counts gradients.

    Raises:
        ValueError: no mode with a positive definite curvature.
    """
    size, (num_latents, num_inputs) = model.layout.size, model.latent_shape
    num_starts = _NUM_STARTS if num_starts is None else num_starts
    generator = make_generator(seed, model.train_x.device)
    drawn = model.layout.starting_points(max(_NUM_CANDIDATES, num_starts) - 1, generator)
    theta = torch.cat([model.layout.present(model), drawn]).detach()
    candidates = torch.cat([theta, theta.new_zeros(len(theta), model.latent_size)], -1)
    if start is not None:
        candidates[0] = torch.cat([start.theta, start.mean.flatten()])
    density = _InChunks(model, bar)
    starts = candidates[density(candidates).argsort(descending=True)[: num_starts if size else 1]]
    modes = find_modes(density, starts, max_iterations=_ROUND_MOVES * max_iterations)
    if not modes:
        raise ValueError(
            f"no mode of the hyperparameters and latents together was found in {len(starts)} searches of {max_iterations} rounds. "
            f"Expected one with a positive definite curvature; raise max_iterations, or sample this model without a start."
        )
    position, covariance = modes[0].position, modes[0].covariance
    of_theta, shared = covariance[:size, :size], covariance[size:, :size]
    slope = torch.linalg.solve(of_theta, shared.mT).mT if size else shared
    rest = (covariance[size:, size:] - slope @ shared.mT).view(num_latents, num_inputs, num_latents, num_inputs)
    blocks = rest.diagonal(dim1=0, dim2=2).permute(2, 0, 1)
    mean, scale = position[size:].view(num_latents, num_inputs), torch.linalg.cholesky(0.5 * (blocks + blocks.mT))
    elbo = _bound(model, position[:size], GaussianLatents(mean[None], scale[None]), generator)
    return Start(model.with_theta(position[:size]), position[:size], mean, scale, of_theta, slope, elbo, converged=True)


def _bound(model: GPModel, theta: Tensor, latents: GaussianLatents, generator: torch.Generator) -> float:
    """The ELBO of q(v) at theta ``(P,)``, its expectation over draws: there are no marginals to integrate over."""
    noise = normal_like(latents.mean.expand(_NUM_DRAWS, -1, -1), generator).unsqueeze(-2)
    v = (latents.mean + (noise @ latents.scale.mT).squeeze(-2)).flatten(1)
    with torch.no_grad():
        at = model.at_data(model.layout.raw_values(theta[None]))
        return float(model.log_likelihood(at, v).mean() - latents.divergence())


class _InChunks:
    """The joint density, of as many rows at once as memory is given for: a curvature takes two rows a coordinate."""

    def __init__(self, model: GPModel, bar: tqdm):
        self.joint = JointLogDensity(model)
        self.bar = bar
        self.chunk = max(1, _CHUNK_ELEMENTS // model.latent_shape[1] ** 2)

    def __call__(self, position: Tensor) -> Tensor:
        return torch.cat([self.joint(part) for part in position.split(self.chunk)])

    def value_and_grad(self, position: Tensor) -> tuple[Tensor, Tensor]:
        self.bar.update()
        values, gradients = zip(*(self.joint.value_and_grad(part) for part in position.split(self.chunk)), strict=True)
        return torch.cat(values), torch.cat(gradients)

    def select(self, rows: Tensor) -> _InChunks:
        return self  # of one data set
