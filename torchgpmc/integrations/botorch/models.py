"""BoTorch's fully Bayesian models with a constructor that asks for no JAX; all else is BoTorch's."""

from __future__ import annotations

from typing import Any

import torch
from botorch.models import fully_bayesian, fully_bayesian_multitask
from botorch.models.multitask import MultiTaskGP
from botorch.models.transforms.input import InputTransform
from botorch.models.transforms.outcome import OutcomeTransform
from botorch.models.utils import validate_input_scaling
from botorch.models.utils.gpytorch_modules import MIN_INFERRED_NOISE_LEVEL
from gpytorch.likelihoods import GaussianLikelihood
from gpytorch.models import ExactGP
from torch import Tensor

from torchgpmc.checks import described


def _check_shapes(train_X: Any, train_Y: Any, train_Yvar: Any) -> None:
    for name, value in (("train_X", train_X), ("train_Y", train_Y), ("train_Yvar", train_Yvar)):
        if not isinstance(value, Tensor) and not (value is None and name == "train_Yvar"):
            raise TypeError(f"{name} is {described(value)}. Expected a tensor: torch.as_tensor({name}, dtype=torch.float64).")
    if train_X.dim() != 2 or train_Y.shape != (len(train_X), 1):
        raise ValueError(
            f"train_X has shape {tuple(train_X.shape)} and train_Y {tuple(train_Y.shape)}. Expected (N, D) and (N, 1); several "
            f"outcomes or batches are several models."
        )
    if train_Yvar is not None and train_Yvar.shape != train_Y.shape:
        raise ValueError(
            f"train_Yvar has shape {tuple(train_Yvar.shape)}. Expected that of train_Y, {tuple(train_Y.shape)}, or None."
        )


def _transformed(
    model: Any, X: Tensor, Y: Tensor, Yvar: Tensor | None, inputs: InputTransform | None, outcome: OutcomeTransform | None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """The data as the model sees them; learns the transforms' numbers."""
    with torch.no_grad():
        X = model.transform_inputs(X=X, input_transform=inputs)
    if outcome is not None:
        outcome.train()
        Y, Yvar = outcome(Y=Y, Yvar=Yvar, X=X)
    return X, Y, None if Yvar is None else Yvar.clamp_min(MIN_INFERRED_NOISE_LEVEL)


def _set_data(pyro_model: Any, X: Tensor, Y: Tensor, Yvar: Tensor | None) -> None:
    """What the method ``set_inputs`` does, less its JAX arrays."""
    pyro_model.train_X, pyro_model.train_Y, pyro_model.train_Yvar = X, Y, Yvar
    pyro_model.ard_num_dims = X.shape[-1]


def _keep(model: Any, inputs: InputTransform | None, outcome: OutcomeTransform | None) -> None:
    """What BoTorch looks for among a model's modules where there is such a transform, and only there."""
    if outcome is not None:
        model.outcome_transform = outcome
    if inputs is not None:
        model.input_transform = inputs


class _SingleTask:
    """The constructor, and loading that can be repeated."""

    def __init__(
        self,
        train_X: Tensor,
        train_Y: Tensor,
        train_Yvar: Tensor | None = None,
        outcome_transform: OutcomeTransform | None = None,
        input_transform: InputTransform | None = None,
        use_input_warping: bool = False,
        indices_to_warp: list[int] | None = None,
    ):
        model: Any = self
        _check_shapes(train_X, train_Y, train_Yvar)
        X, Y, Yvar = _transformed(model, train_X, train_Y, train_Yvar, input_transform, outcome_transform)
        model._validate_tensor_args(X=X, Y=Y, Yvar=Yvar)
        validate_input_scaling(train_X=X, train_Y=Y, train_Yvar=Yvar)
        model._num_outputs, model._input_batch_shape = 1, torch.Size()
        inputs, targets, _ = model._transform_tensor_args(X=train_X, Y=Y)
        ExactGP.__init__(model, train_inputs=inputs, train_targets=targets, likelihood=GaussianLikelihood())
        # These come with the draws, whose number is not known before.
        model.mean_module = model.covar_module = model.likelihood = None
        model.pyro_model = model._pyro_model_class(use_input_warping=use_input_warping, indices_to_warp=indices_to_warp)
        _set_data(model.pyro_model, X, Y, Yvar)
        _keep(model, input_transform, outcome_transform)
        self._given_transform = [input_transform]  # in a list: as a module it would have a second place in the state dict

    def load_mcmc_samples(self, mcmc_samples: dict[str, Tensor]) -> None:
        """Loads draws; instead of earlier ones, whose warping BoTorch would keep in front of that of these."""
        model: Any = self
        if hasattr(model, "input_transform"):
            del model.input_transform
        _keep(model, self._given_transform[0], None)
        super().load_mcmc_samples(mcmc_samples)  # type: ignore[misc]  # BoTorch's, of the class that this is mixed into


class FullyBayesianSingleTaskGP(_SingleTask, fully_bayesian.FullyBayesianSingleTaskGP):  # type: ignore[misc]
    """BoTorch's model of this name, Matern-5/2 with priors that grow with the dimension, without JAX."""


class SaasFullyBayesianSingleTaskGP(_SingleTask, fully_bayesian.SaasFullyBayesianSingleTaskGP):  # type: ignore[misc]
    """BoTorch's model of this name, with the SAAS prior, without JAX."""


class FullyBayesianLinearSingleTaskGP(_SingleTask, fully_bayesian.FullyBayesianLinearSingleTaskGP):  # type: ignore[misc]
    """BoTorch's model of this name, linear with a sparse prior, without JAX."""


class SaasFullyBayesianMultiTaskGP(fully_bayesian_multitask.SaasFullyBayesianMultiTaskGP):  # type: ignore[misc]
    """BoTorch's model of this name, SAAS times a kernel between tasks, without JAX."""

    def __init__(
        self,
        train_X: Tensor,
        train_Y: Tensor,
        task_feature: int,
        train_Yvar: Tensor | None = None,
        output_tasks: list[int] | None = None,
        rank: int | None = None,
        all_tasks: list[int] | None = None,
        outcome_transform: OutcomeTransform | None = None,
        input_transform: InputTransform | None = None,
        pyro_model: fully_bayesian_multitask.MultitaskSaasPyroModel | None = None,
        validate_task_values: bool = True,
    ):
        _check_shapes(train_X, train_Y, train_Yvar)
        X, Y, Yvar = _transformed(self, train_X, train_Y, train_Yvar, input_transform, outcome_transform)
        MultiTaskGP.__init__(
            self,
            train_X=train_X,
            train_Y=Y,
            train_Yvar=Yvar,
            task_feature=task_feature,
            output_tasks=output_tasks,
            rank=rank,
            all_tasks=all_tasks,
            outcome_transform=None,  # the targets are transformed already
            validate_task_values=validate_task_values,
        )
        self.to(train_X)
        self.mean_module = self.covar_module = self.likelihood = None
        self.pyro_model = fully_bayesian_multitask.MultitaskSaasPyroModel() if pyro_model is None else pyro_model
        before, tasks, after = self._split_inputs(X)
        _set_data(self.pyro_model, torch.cat([before, tasks, after], -1), Y, Yvar)
        self.pyro_model.task_feature = task_feature % X.shape[-1]
        self.pyro_model.num_tasks = self.num_tasks
        self.pyro_model.task_rank = self._rank or self.num_tasks
        self.pyro_model.ard_num_dims = X.shape[-1] - 1
        _keep(self, input_transform, outcome_transform)
