"""From a gpytorch training script's model to one that can be sampled."""

from __future__ import annotations

from typing import Any

import torch
from gpytorch.models import ApproximateGP, ExactGP
from numpy.typing import ArrayLike
from torch import Tensor

from torchgpmc.models import GPModel, GPRegression
from torchgpmc.variational import Start
from torchgpmc.variational.gpytorch_parts import check_forward_is_the_prior


def from_gpytorch(
    model: ExactGP | ApproximateGP,
    likelihood: Any,
    train_x: Tensor | ArrayLike | None = None,
    train_y: Tensor | ArrayLike | None = None,
) -> GPModel:
    """A gpytorch ``ExactGP`` or ``ApproximateGP`` as a model of this package, at the values it has been trained to.

    An ``ExactGP`` becomes a :class:`GPRegression`, an ``ApproximateGP`` a :class:`SparseGP` with its inducing points. The original
    is not changed. :meth:`torchgpmc.Start.from_gpytorch` keeps an ``ApproximateGP``'s q(u) too, for chains to start from.

    Args:
        model: with ``mean_module`` and ``covar_module``, of which its ``forward`` must be the plain prior.
        likelihood: its likelihood.
        train_x: inputs ``(N, D)``; an ``ExactGP``'s own by default.
        train_y: targets ``(N,)``; an ``ExactGP``'s own by default.

    Raises:
        TypeError: neither kind of model.
        ValueError: a model with no counterpart here; data missing; parameters without a prior: all are listed, each with one that
            suits it.

    Example:
        >>> import gpytorch, torch, torchgpmc as tg
        >>> from gpytorch.priors import GammaPrior
        >>> class Model(gpytorch.models.ExactGP):
        ...     def __init__(self, x, y, likelihood):
        ...         super().__init__(x, y, likelihood)
        ...         self.mean_module = gpytorch.means.ZeroMean()
        ...         self.covar_module = gpytorch.kernels.RBFKernel(lengthscale_prior=GammaPrior(2.0, 4.0))
        ...     def forward(self, x):
        ...         return gpytorch.distributions.MultivariateNormal(self.mean_module(x), self.covar_module(x))
        >>> x, noise = torch.linspace(0, 1, 12), gpytorch.likelihoods.GaussianLikelihood(noise_prior=GammaPrior(1.1, 10.0))
        >>> trained = Model(x, torch.sin(6 * x), noise)  # and training, as ever
        >>> tg.from_gpytorch(trained, noise).layout.names
        ['kernel.lengthscale', 'likelihood.noise_covar.noise']
    """
    if isinstance(model, ApproximateGP):
        if train_x is None or train_y is None:
            raise ValueError("an ApproximateGP does not hold its data. Expected train_x and train_y, all of them.")
        return Start.from_gpytorch(model, likelihood, train_x, train_y).model
    if not isinstance(model, ExactGP):
        raise TypeError(
            f"model is {type(model).__name__}. Expected a gpytorch.models.ExactGP or ApproximateGP; with a kernel and a likelihood "
            f"alone use torchgpmc.GP(x, y, kernel, likelihood)."
        )
    converted = _regression(model, likelihood, train_x, train_y)
    check_forward_is_the_prior(model, converted)
    return converted


def _regression(model: ExactGP, likelihood: Any, train_x: Any, train_y: Any) -> GPRegression:
    inputs: Any = model.train_inputs
    if train_x is None:
        train_x = None if inputs is None else inputs[0]
    train_y = model.train_targets if train_y is None else train_y
    if train_x is None or train_y is None:
        raise ValueError("the ExactGP holds no data. Expected train_x and train_y.")
    if inputs is not None and len(inputs) != 1:
        raise ValueError(f"the ExactGP has {len(inputs)} inputs. Expected one tensor of inputs.")
    kernel, mean = getattr(model, "covar_module", None), getattr(model, "mean_module", None)
    if kernel is None or mean is None:
        raise ValueError(
            f"{type(model).__name__} has no covar_module and mean_module to take its prior from. Expected its forward to be "
            f"MultivariateNormal(mean_module(x), covar_module(x)); build a torchgpmc.GPRegression from its kernel and mean."
        )
    targets = model.train_targets
    if kernel.batch_shape != torch.Size([]) or (targets is not None and targets.squeeze(-1).dim() > 1):
        shape = None if targets is None else tuple(targets.shape)
        raise ValueError(
            f"{type(model).__name__} has several outputs: batch shape {tuple(kernel.batch_shape)}, targets of shape {shape}. "
            f"Expected one, with targets (N,); make a model of each output, and convert them one by one."
        )
    return GPRegression(train_x, train_y, kernel, likelihood, mean=mean)
