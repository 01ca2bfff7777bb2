"""A model whose likelihood's expectations are rough where they are long integrals, for what is only to lead somewhere."""

from __future__ import annotations

from typing import TypeVar

import torch

from torchgpmc.adapter.conversion import as_likelihood
from torchgpmc.models.gp_model import GPModel
from torchgpmc.models.sparse import SparseGP

Model = TypeVar("Model", bound=GPModel)


def has_long_expectations(model: GPModel) -> bool:
    """Whether expectations of the likelihood are integrals that take longer than a few points do."""
    if not model.factorises:
        return False
    likelihood = as_likelihood(model.likelihood)
    return likelihood.by_few_points() is not likelihood


def with_rough_expectations(model: Model) -> Model:
    """The model with expectations over few points, if it has long ones, else itself; data and modules are shared.

    Example:
        >>> import torch, torchgpmc as tg
        >>> from gpytorch.kernels import RBFKernel
        >>> from gpytorch.priors import GammaPrior
        >>> x, y, kernel = torch.linspace(0, 1, 8), torch.arange(8) % 4, RBFKernel(lengthscale_prior=GammaPrior(2.0, 4.0))
        >>> model = tg.SparseGP(x, y, kernel, tg.likelihoods.Softmax(num_classes=4), inducing_points=x[:3])
        >>> exact, rough = (tg.joint_log_density(one)(torch.zeros(1, 13)) for one in (model, with_rough_expectations(model)))
        >>> 0 < float((exact - rough).abs()) < 0.1
        True
    """
    if not has_long_expectations(model):
        return model
    found = _sharing_all(model)
    found._modules = {**model._modules, "likelihood": as_likelihood(model.likelihood).by_few_points()}
    found.refresh()
    return found


def with_rough_gradients(model: GPModel) -> GPModel:
    """The same, products with the data in single precision, and nothing refined: gradients for trajectories tested at their ends.

    Example:
        >>> import torch, torchgpmc as tg
        >>> from gpytorch.kernels import RBFKernel
        >>> from gpytorch.priors import GammaPrior
        >>> kernel = RBFKernel(lengthscale_prior=GammaPrior(2.0, 4.0))
        >>> model = tg.SparseGP([0.0, 1.0], [0, 1], kernel, tg.likelihoods.Bernoulli(), inducing_points=[0.5])
        >>> rough = with_rough_gradients(model)
        >>> rough.data_dtype, rough.train_x.dtype, model.data_dtype
        (torch.float32, torch.float64, None)
    """
    found = _sharing_all(with_rough_expectations(model))
    if isinstance(found, SparseGP) and found.train_x.dtype == torch.float64:
        found.data_dtype, found.refines_data = torch.float32, False
        found.refresh()
    return found


def _sharing_all(model: Model) -> Model:
    found = object.__new__(type(model))
    found.__dict__.update(model.__dict__)
    return found
