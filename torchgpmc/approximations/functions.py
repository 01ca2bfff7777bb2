"""The approximations as functions of a batch of thetas, as a loss, and as a predictive distribution."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from torchgpmc.approximations.ep import EP
from torchgpmc.approximations.gaussian_form import Approximation, GaussianApproximation, check_model
from torchgpmc.approximations.laplace_mode import Laplace
from torchgpmc.models.gp_model import GPModel
from torchgpmc.models.latents import LatentPrior, conditional_variance, likelihood_values
from torchgpmc.models.validation import check_test_inputs
from torchgpmc.numerics.linalg import solve_lower
from torchgpmc.numerics.threads import threads_for
from torchgpmc.prediction import Prediction


def laplace(model: GPModel, theta: Tensor, *, tolerance: float | None = None, max_iterations: int = 100) -> GaussianApproximation:
    """Laplace's approximation of p(f | y, theta) at C thetas at once; see :class:`Laplace`.

    Args:
        model: a :class:`GP` with a factorised likelihood, of one latent function or several.
        theta: unconstrained hyperparameters ``(C, P)``; with ``requires_grad``, ``log_evidence`` is differentiable (once).
        tolerance: see :class:`Laplace`; 1e-14 by default.
        max_iterations: the same.

    Raises:
        ValueError: a model that cannot be approximated so.

    Example:
        >>> import torch, torchgpmc as tg
        >>> from gpytorch.kernels import RBFKernel
        >>> from gpytorch.priors import GammaPrior
        >>> kernel = RBFKernel(lengthscale_prior=GammaPrior(2.0, 1.0))
        >>> model = tg.GP(torch.rand(5, 2), torch.tensor([0, 1, 1, 0, 1]), kernel, tg.likelihoods.Bernoulli())
        >>> tg.approximations.laplace(model, torch.zeros(3, 1, dtype=torch.float64)).converged
        tensor([True, True, True])
    """
    return _at(model, theta, Laplace(tolerance, max_iterations))


def expectation_propagation(
    model: GPModel, theta: Tensor, *, tolerance: float | None = None, damping: float = 1.0, max_iterations: int = 200
) -> GaussianApproximation:
    """Expectation propagation at C thetas ``(C, P)`` at once, for one latent function; see :class:`EP` and :func:`laplace`.

    Args:
        model: a :class:`GP` with a factorised likelihood of one latent function.
        theta: unconstrained hyperparameters ``(C, P)``; with ``requires_grad``, ``log_evidence`` is differentiable (once).
        tolerance: see :class:`EP`; 1e-6 by default.
        damping: the same.
        max_iterations: the same.

    Raises:
        ValueError: a model that cannot be approximated so.

    Example:
        >>> import torch, torchgpmc as tg
        >>> from gpytorch.kernels import RBFKernel
        >>> from gpytorch.priors import GammaPrior
        >>> x, kernel = torch.linspace(0, 1, 8), RBFKernel(lengthscale_prior=GammaPrior(2.0, 4.0))
        >>> model = tg.GP(x, (x > 0.5).int(), kernel, tg.likelihoods.Bernoulli())
        >>> tg.approximations.expectation_propagation(model, torch.zeros(3, 1, dtype=torch.float64)).mean.shape
        torch.Size([3, 8])
    """
    return _at(model, theta, EP(tolerance, damping, max_iterations))


def _at(model: GPModel, theta: Tensor, approximation: Approximation) -> GaussianApproximation:
    check_model(model, type(approximation).__name__, approximation)
    with threads_for(len(theta) * model.operations):
        found = approximation.evidence(model, prior := model.prior(theta))
    return found._replace(converged=found.converged & prior.ok)


def negative_log_evidence(model: GPModel, approximation: Approximation | None = None, *, inputs: Tensor | None = None) -> Tensor:
    """Minus the approximate log evidence at the parameters that the model's modules now hold: a loss for training code.

    Gradients reach the raw parameters of ``model.kernel``, ``model.mean`` and ``model.likelihood``, and whatever made ``inputs``.

    Args:
        model: a :class:`GP`; its modules may be given to any torch optimiser.
        approximation: :class:`Laplace` (default), or :class:`EP` for one latent function.
        inputs: ``(N, D)`` in place of ``model.train_x``, for instance an ``nn.Module``'s features of it.

    Returns:
        A scalar tensor.

    Raises:
        ValueError: a model that cannot be approximated so, or whose K cannot be factorised at these parameters; inputs for a model
            with inducing points.

    Example:
        >>> import torch, torchgpmc as tg
        >>> from gpytorch.kernels import RBFKernel
        >>> from gpytorch.priors import GammaPrior
        >>> x, kernel = torch.linspace(0, 1, 8), RBFKernel(lengthscale_prior=GammaPrior(2.0, 4.0))
        >>> model = tg.GP(x, (x > 0.5).int(), kernel, tg.likelihoods.Bernoulli())
        >>> optimiser = torch.optim.Adam(model.kernel.parameters(), lr=0.1)
        >>> loss = tg.approximations.negative_log_evidence(model)
        >>> loss.backward()
        >>> optimiser.step()
        >>> bool(tg.approximations.negative_log_evidence(model) < loss)
        True
    """
    approximation = Laplace() if approximation is None else approximation
    check_model(model, type(approximation).__name__, approximation)
    if inputs is not None and not model.has_latents_at_data:
        raise ValueError(
            f"inputs take the place of train_x, and the latents of {type(model).__name__} are at its inducing points. Expected a "
            f"model of f at the data, such as GP; build this one with features as its train_x and inducing_points."
        )
    with threads_for(model.operations):
        prior = model.prior_at(model.layout.module_values(model), inputs)
        if not bool(prior.ok.all()):
            raise ValueError(
                f"the covariance could not be factorised at the model's present parameters. Expected it to be positive definite; "
                f"raise jitter (now {model.jitter:g}) or take smaller optimiser steps."
            )
        return -approximation.evidence(model, prior).log_evidence.sum()


def predict(model: GPModel, theta: Tensor, approximation: Approximation, x: Tensor) -> Prediction:
    """Predictions that integrate out f under the Gaussian approximation (paper A, eqs 7-8), averaged over C thetas.

    Args:
        model: a :class:`GP` with one latent function.
        theta: ``(C, P)``; one row for type-II maximum likelihood, posterior draws for "MCMC EP" of the paper.
        approximation: :class:`Laplace` or :class:`EP`.
        x: test inputs ``(T, D)``.

    Raises:
        ValueError: a model that cannot be approximated so, or inputs of the wrong shape.

    Example:
        >>> import torch, torchgpmc as tg
        >>> from gpytorch.kernels import RBFKernel
        >>> from gpytorch.priors import GammaPrior
        >>> x, kernel = torch.linspace(0, 1, 8), RBFKernel(lengthscale_prior=GammaPrior(2.0, 4.0))
        >>> model = tg.GP(x, (x > 0.5).int(), kernel, tg.likelihoods.Bernoulli())
        >>> fitted = tg.fit(model, maximum_a_posteriori=True)
        >>> theta = fitted.layout.present(fitted)
        >>> tg.approximations.predict(fitted, theta, tg.Laplace(), torch.tensor([0.1, 0.9])).probs > 0.5
        tensor([False,  True])
    """
    check_model(model, f"predict with {type(approximation).__name__}")
    x = check_test_inputs(x, model.train_x, model.columns)
    with torch.no_grad(), threads_for(len(theta) * model.operations):
        prior = model.prior(theta)
        found = approximation.evidence(model, prior)
        mean, variance = _latent_marginals(model, prior, found, x)
    log_weights = torch.full_like(mean[:, 0], -math.log(len(theta)))
    moments = mean.unsqueeze(1), variance.unsqueeze(1)
    return Prediction(model, lambda _: lambda _: moments, len(x), len(x), len(theta), likelihood_values(prior), log_weights)


def _latent_marginals(model: GPModel, prior: LatentPrior, found: GaussianApproximation, x: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and variance of f* ``(C, T)``: k*' alpha and k** - k*' R k*."""
    cross = model.cross(prior, x)
    mean = cross.mean + (cross.covariance * found.alpha.unsqueeze(-1)).sum(-2)
    half = solve_lower(found.factor, cross.covariance * found.precision.sqrt().unsqueeze(-1))
    return mean, conditional_variance(cross.variance, half.square().sum(-2))
