"""A word on targets in a unit that the priors do not reach, before anything is sampled."""

from __future__ import annotations

import torch
from torch import Tensor

from torchgpmc.adapter.conversion import as_likelihood
from torchgpmc.checks import warn
from torchgpmc.models.gp_model import GPModel
from torchgpmc.models.latents import likelihood_parameters
from torchgpmc.numerics.random import make_generator, normal_like

_DRAWS = 64  # from the priors
_BEYOND = 100.0  # times the largest of their mean squares, or the smallest of these times the targets'
_CHUNK_ELEMENTS = 4_000_000  # of targets drawn at once


def warn_of_unit(model: GPModel) -> None:
    """Says so where the mean square of targets, f plus noise, is far from that of all of some draws from the priors.

    A posterior is then where every prior is next to nothing, and engines find it late or not at all.

    Args:
        model: of other kinds of targets, or with a prior that cannot draw, nothing is said.

    Warns:
        SamplingWarning: with the remedy.

    Example:
        >>> import torch, torchgpmc as tg, warnings
        >>> from gpytorch.kernels import RBFKernel, ScaleKernel
        >>> from gpytorch.priors import GammaPrior
        >>> kernel = ScaleKernel(RBFKernel(lengthscale_prior=GammaPrior(2.0, 1.0)), outputscale_prior=GammaPrior(2.0, 1.0))
        >>> x, noise = torch.arange(4.0), tg.likelihoods.Gaussian(noise_prior=GammaPrior(2.0, 4.0))
        >>> with warnings.catch_warnings(record=True) as said:
        ...     warnings.simplefilter("always")
        ...     warn_of_unit(tg.GPRegression(x, [1120.0, 1160.0, 963.0, 1210.0], kernel, noise))  # 10^8 cubic metres a year
        >>> "in another unit" in str(said[-1].message)
        True
    """
    given = _mean_squares(model)
    if given is None:
        return
    largest, smallest = float(given.max()), float(given.min())
    found = float(model.train_y.square().mean())
    if not found > 0 or smallest / _BEYOND <= found <= _BEYOND * largest:
        return
    like = "at most" if found > largest else "at least"
    bound = largest if found > largest else smallest
    warn(
        f"train_y: its root mean square is {found**0.5:.3g}, and of {_DRAWS} draws from the priors {like} {bound**0.5:.3g}: the "
        f"priors of outputscale, noise and mean are in another unit. Expected targets in theirs, (y - y.mean()) / y.std(), or "
        f"priors in that of the targets; of a mean gpytorch.means.ConstantMean(constant_prior=...)."
    )


def _mean_squares(model: GPModel) -> Tensor | None:
    """Of targets drawn from the priors, those that are numbers; ``None`` where targets have no unit, or a prior cannot draw."""
    if not as_likelihood(model.likelihood).is_f_plus_noise or model.num_latents != 1 or model.targets.one_a_chain:
        return None
    generator = make_generator(0, model.train_x.device)
    try:
        theta = model.layout.sample_prior(_DRAWS, generator)
    except NotImplementedError:  # a prior of the user's own that has a density alone, which is enough to be sampled
        return None
    with torch.no_grad():
        parts = theta.split(max(1, _CHUNK_ELEMENTS // len(model.train_x)))
        squares = torch.cat([_drawn(model, part, generator).square().mean(-1) for part in parts])
    squares = squares[torch.isfinite(squares)]
    return squares if len(squares) else None


def _drawn(model: GPModel, theta: Tensor, generator: torch.Generator) -> Tensor:
    """Targets ``(C, N)`` at some thetas; f at one datum is independent of f at all others, which mean squares do not see."""
    values = model.layout.raw_values(theta).by_module
    variance = model.covariance.diagonal(values["kernel"], model.train_x).expand(len(theta), -1)
    mean = model.mean_function(values["mean"], model.train_x, len(theta))
    f = mean + variance.clamp_min(0.0).sqrt() * normal_like(variance, generator)
    parameters = likelihood_parameters(values["likelihood"])
    return model.likelihood_function(parameters, lambda likelihood: likelihood.sample(f, generator))
