"""What BoTorch's probabilistic models say, as a :class:`GPRegression`; and draws in the form that BoTorch loads."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from botorch.models.fully_bayesian import LinearPyroModel, MaternPyroModel, PyroModel, SaasPyroModel
from botorch.models.fully_bayesian_multitask import MultitaskSaasPyroModel
from botorch.models.utils.gpytorch_modules import MIN_INFERRED_NOISE_LEVEL
from gpytorch.constraints import GreaterThan
from gpytorch.kernels import Kernel, MaternKernel
from gpytorch.likelihoods import FixedNoiseGaussianLikelihood, GaussianLikelihood
from gpytorch.means import ConstantMean, Mean
from gpytorch.priors import LogNormalPrior, NormalPrior
from torch import Tensor

from torchgpmc.integrations.botorch.modules import SparseLinear, TaskKernel, TaskMean, Warped
from torchgpmc.kernels import SAAS, saas_lengthscale
from torchgpmc.models import GPRegression
from torchgpmc.posterior import Posterior
from torchgpmc.priors import ShiftedGammaPrior

# BoTorch has none: ours is taken from the noise, which is at least 1e-4, so that data vary as in BoTorch. Without, K of a linear
# kernel or of inputs that repeat would have no factor.
_JITTER = 1e-6


def _matern(model: Any) -> Kernel:
    """Lengthscales LogNormal(sqrt(2) + log(D) / 2, sqrt(3)), variance 1 (Hvarfner, Hellsten & Nardi 2024)."""
    columns = model.ard_num_dims
    prior = LogNormalPrior(math.sqrt(2) + 0.5 * math.log(columns), math.sqrt(3))
    return MaternKernel(nu=2.5, ard_num_dims=columns, lengthscale_prior=prior)


def _saas_by_task(model: Any) -> Kernel:
    task = model.task_feature
    columns = [column for column in range(model.ard_num_dims + 1) if column != task]
    return SAAS(model.ard_num_dims, active_dims=columns) * TaskKernel(model.num_tasks, model.task_rank, active_dims=[task])


# By the very class: what a subclass of somebody else's samples, nobody can tell.
_KERNELS: dict[type, Callable[[Any], Kernel]] = {
    LinearPyroModel: lambda model: SparseLinear(model.ard_num_dims),
    MaternPyroModel: _matern,
    MultitaskSaasPyroModel: _saas_by_task,
    SaasPyroModel: lambda model: SAAS(model.ard_num_dims),
}


def regression_of(model: PyroModel) -> GPRegression:
    """The same posterior as a model of ours, in float64.

    Args:
        model: the ``pyro_model`` of a fully Bayesian model, with its data.

    Raises:
        NotImplementedError: a model that this does not know, or warping of a multitask model.
    """
    if type(model) not in _KERNELS:
        known = ", ".join(sorted(kind.__name__ for kind in _KERNELS))
        raise NotImplementedError(
            f"pyro_model is a {type(model).__name__}, whose density is known to BoTorch's JAX code alone. Expected one of {known}; "
            f"for another write a torchgpmc.GPRegression, or use botorch.fit.fit_fully_bayesian_model_nuts."
        )
    kernel = _KERNELS[type(model)](model)
    by_task = hasattr(model, "num_tasks")
    if model.use_input_warping:
        if by_task:
            raise NotImplementedError("a multitask model cannot warp its inputs. Expected use_input_warping=False.")
        kernel = Warped(kernel, range(model.ard_num_dims) if model.indices is None else model.indices)
    mean: Mean = TaskMean(model.num_tasks, model.task_feature) if by_task else ConstantMean(constant_prior=NormalPrior(0.0, 1.0))
    x = model.train_X.detach().double()
    return GPRegression(x, model.train_Y.detach().double().squeeze(-1), kernel, _likelihood(model), mean=mean, jitter=_JITTER)


def _likelihood(model: Any) -> Any:
    if model.train_Yvar is not None:
        return FixedNoiseGaussianLikelihood(noise=model.train_Yvar.detach().double().squeeze(-1) - _JITTER)
    least = MIN_INFERRED_NOISE_LEVEL - _JITTER
    return GaussianLikelihood(noise_prior=ShiftedGammaPrior(0.9, 10.0, least), noise_constraint=GreaterThan(least))


def loadable(posterior: Posterior, num_samples: int, thinning: int) -> dict[str, Tensor]:
    """Every ``thinning``-th of ``num_samples`` draws under BoTorch's names, latest first, chain after chain."""
    found = {}
    for name, value in posterior.samples.items():
        flat = value.flatten(0, 1)[-num_samples:].flip(0)[::thinning]
        found[name.rpartition(".")[2]] = flat
    names = {"constant": "mean", "outputscale": "outputscale", "noise": "noise", "c0": "c0", "c1": "c1"}
    names |= {"latent_features": "latent_features", "task_lengthscale": "task_lengthscale", "lengthscale": "lengthscale"}
    loaded = {names[name]: value for name, value in found.items() if name in names}
    if "tausq" in found:
        shrunk = saas_lengthscale(found["tausq"], found["relevance"])
        loaded |= {"lengthscale": shrunk} if "outputscale" in found else {"weight_variance": 1 / shrunk}
    for name in ("lengthscale", "weight_variance", "c0", "c1", "task_lengthscale"):
        if name in loaded:
            loaded[name] = loaded[name].squeeze(-2)
    if "noise" in loaded:
        loaded["noise"] = loaded["noise"].squeeze(-1) + _JITTER
    return loaded


def largest_rhat(posterior: Posterior) -> float:
    """Of all hyperparameters; NaN where there are too few draws to tell."""
    rhats = torch.tensor([row.rhat for row in posterior.summary().rows])
    return float(rhats.nan_to_num(-math.inf).max()) if bool(torch.isfinite(rhats).any()) else math.nan
