"""A word on posteriors in which no datum informs another: lengthscales in other units than the inputs."""

from __future__ import annotations

import torch
from torch import Tensor

from torchgpmc.checks import warn
from torchgpmc.models.gp_model import GPModel
from torchgpmc.posterior import Posterior

_LEAST = 1e-3  # correlation of f between some two data, in any draw looked at
_DRAWS, _DATA = 5, 1000


def warn_of_isolated_data(posterior: Posterior) -> None:
    """Says so where f at each datum is independent of f at all others, or at all inducing points, in every draw looked at.

    Such draws are right, and may be trusted, but what is predicted anywhere else is the prior.

    Args:
        posterior: of any method; five of its draws are looked at, and a thousand data.

    Warns:
        UserWarning: with the remedy.

    Example:
        >>> import torch, torchgpmc as tg, warnings
        >>> from gpytorch.kernels import RBFKernel
        >>> from gpytorch.priors import GammaPrior
        >>> x = torch.linspace(0, 1e6, 8)  # metres, with a prior for kilometres
        >>> model = tg.GP(x, (x > 5e5).int(), RBFKernel(lengthscale_prior=GammaPrior(2.0, 1.0)), tg.likelihoods.Bernoulli())
        >>> with warnings.catch_warnings(record=True) as said:
        ...     warnings.simplefilter("always")
        ...     posterior = tg.sample(model, tg.AMIS(), num_samples=500, progress=False)
        >>> "no datum says anything of another" in str(said[-1].message)
        True
    """
    model = posterior.model
    if len(model.train_x) < 2 or model.targets.one_a_chain:
        return
    theta = posterior.theta.flatten(0, 1)
    count = min(_DRAWS, len(theta))
    if posterior.log_weights is None:
        rows = torch.linspace(0, len(theta) - 1, count).long()
    else:
        # As far apart in weight as those in number: the heaviest may be the few of a place that proposals hardly reach.
        reached = posterior.log_weights.flatten().softmax(0).cumsum(0)
        rows = torch.searchsorted(reached, (torch.arange(count).to(reached) + 0.5) / count * reached[-1])
    with torch.no_grad():
        largest = _largest_correlation(model, theta[rows].to(model.train_x))
    if bool((largest < _LEAST).all()):
        others = "another" if model.has_latents_at_data else "any inducing point"
        warn(
            f"no datum says anything of {others}: the largest correlation of f is {float(largest.max()):.1g} under the draws, and "
            f"predictions away from the data are the prior's. Expected lengthscales of the order of the distances between inputs: "
            f"standardise the columns of x, or give the lengthscale a prior in their units.",
            UserWarning,
        )


def _largest_correlation(model: GPModel, theta: Tensor) -> Tensor:
    """Of f between two data, or between a datum and an inducing point: one a draw."""
    values = model.layout.raw_values(theta).by_module["kernel"]
    data, others = model.train_x[:_DATA], model.latent_inputs[:_DATA]
    scale, other_scale = (model.covariance.diagonal(values, x).sqrt() for x in (data, others))
    covariance = model.covariance.bind(data, others)(values)
    correlation = (covariance / scale.unsqueeze(-1) / other_scale.unsqueeze(-2)).abs()
    return (correlation.tril(-1) if model.has_latents_at_data else correlation).amax((-2, -1))
