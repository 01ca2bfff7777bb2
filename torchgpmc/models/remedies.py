"""What a refusal names instead: methods that take the model at hand, and models."""

from __future__ import annotations

from typing import Any

import gpytorch

from torchgpmc.models.gp_model import GPModel


def checked_model(model: Any) -> GPModel:
    """``model``, if it is one.

    Raises:
        TypeError: it is not; with the call that makes one of a gpytorch model.

    Example:
        >>> checked_model("GP")
        Traceback (most recent call last):
            ...
        TypeError: model is str. Expected a torchgpmc.GP, SparseGP or GPRegression.
    """
    if isinstance(model, GPModel):
        return model
    remedy = " Convert it: torchgpmc.from_gpytorch(model, likelihood, x, y)." if isinstance(model, gpytorch.models.GP) else ""
    got = f"the class {model.__name__}, without data" if isinstance(model, type) else type(model).__name__
    raise TypeError(f"model is {got}. Expected a torchgpmc.GP, SparseGP or GPRegression.{remedy}")


def what_samples(model: GPModel) -> str:
    """Methods, in words, that sample this model as it is.

    Example:
        >>> import torch, torchgpmc as tg
        >>> from gpytorch.kernels import RBFKernel
        >>> x = torch.linspace(0, 1, 8)
        >>> model = tg.GP(x, (x > 0.5).int(), RBFKernel().requires_grad_(False), tg.likelihoods.Bernoulli())
        >>> what_samples(model)
        'EllipticalSlice() or AuxiliaryGradient()'
    """
    if not model.layout.size:
        return what_moves(model, "EllipticalSlice()", *["AuxiliaryGradient()"] * model.is_smooth)
    return "NUTS()" if model.is_smooth else "Slice() or AdaptiveMH(), or Gibbs(latent=EllipticalSlice())"


def what_moves(model: GPModel, *moves: str) -> str:
    """Moves of the latents as methods, in words: with the hyperparameters, where those are not fixed."""
    return " or ".join(f"Gibbs(latent={move})" if model.layout.size else move for move in moves)
