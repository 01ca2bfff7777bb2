"""Whether log p(y | f) curves in f, as Newton's iteration needs."""

from __future__ import annotations

from torchgpmc.models.gp_model import GPModel
from torchgpmc.models.latents import likelihood_parameters
from torchgpmc.numerics.random import make_generator, normal_like

_SETTINGS = 8


def is_curved(model: GPModel) -> bool:
    """Whether log p(y_n | f_n) of one latent has a second derivative anywhere, at drawn parameters and f.

    That of Laplace's noise is two straight lines: :class:`Laplace` has no precision to go by.

    Example:
        >>> import torch, torchgpmc as tg
        >>> from gpytorch.likelihoods import LaplaceLikelihood
        >>> from gpytorch.kernels import RBFKernel
        >>> from gpytorch.priors import GammaPrior
        >>> x, prior = torch.linspace(0, 1, 8), GammaPrior(2.0, 4.0)
        >>> is_curved(tg.GP(x, x.sin(), RBFKernel(lengthscale_prior=prior), LaplaceLikelihood(noise_prior=prior)))
        False
    """
    generator = make_generator(0, model.train_x.device)
    theta = model.layout.starting_points(_SETTINGS, generator)
    values = likelihood_parameters(model.layout.raw_values(theta).by_module["likelihood"])
    targets = model.targets.values
    f = model.unit**0.5 * normal_like(targets.new_zeros(_SETTINGS, targets.shape[-1]), generator)
    second = model.likelihood_function(values, lambda likelihood: likelihood.derivatives(f, targets).second)
    return bool((second != 0).any())
