"""Which importance estimator of p(y | theta) serves a model."""

from __future__ import annotations

from torch import Tensor

from torchgpmc.adapter.conversion import as_likelihood
from torchgpmc.approximations import EP, Approximation, Laplace, Variational
from torchgpmc.approximations.gaussian_form import check_model
from torchgpmc.checks import check_count
from torchgpmc.evidence.importance_sampling import ImportanceEstimator
from torchgpmc.evidence.inducing_estimator import InducingEstimator
from torchgpmc.evidence.mixtures import MixtureEstimator
from torchgpmc.models.gp_model import GPModel
from torchgpmc.models.targets import Targets


def importance(
    model: GPModel,
    approximation: Approximation | None = None,
    *,
    num_importance: int = 16,
    antithetic: bool | None = None,
    targets: Tensor | Targets | None = None,
) -> ImportanceEstimator:
    """An unbiased estimator of p(y | theta) by importance sampling from a Gaussian approximation.

    Args:
        model: a :class:`GP` with a factorised likelihood, or a :class:`SparseGP` with a log-concave one of one latent function.
        approximation: :class:`Laplace` (default), or :class:`EP` for one latent function; of a sparse model, for which it is the
            default, :class:`Variational`.
        num_importance: latent vectors an estimate, N_imp.
        antithetic: draw them in pairs mirrored at the approximation's mean, which cancels the odd part of the error for free; by
            default where ``num_importance`` is even.
        targets: ``(N,)``, or ``(C, N)`` for one data set a row; the model's own by default.

    Returns:
        A function ``(theta (C, P), generator) -> LogEstimate``.

    Raises:
        ValueError: ``num_importance`` below 1, or odd where pairs are wanted; a model that cannot be approximated so.

    Example:
        >>> import torch, torchgpmc as tg
        >>> from gpytorch.kernels import RBFKernel
        >>> from gpytorch.priors import GammaPrior
        >>> kernel = RBFKernel(lengthscale_prior=GammaPrior(2.0, 1.0))
        >>> model = tg.GP(torch.rand(5, 2), torch.tensor([0, 1, 1, 0, 1]), kernel, tg.likelihoods.Bernoulli())
        >>> estimator = tg.evidence.importance(model, tg.EP(), num_importance=8)
        >>> estimator(torch.zeros(3, 1, dtype=torch.float64), torch.Generator().manual_seed(0)).value.shape
        torch.Size([3])
    """
    check_count("num_importance", num_importance)
    pairs = num_importance % 2 == 0 if antithetic is None else antithetic
    if pairs and num_importance % 2:
        raise ValueError(f"num_importance is {num_importance} with antithetic=True. Expected an even number: draws come in pairs.")
    if approximation is None:
        approximation = Laplace() if model.has_latents_at_data else Variational()
    check_model(model, f"evidence.importance with {type(approximation).__name__}", approximation)
    likelihood = as_likelihood(model.likelihood)
    # EP's normal density takes in where a likelihood levels off, Laplace's is of one mode.
    one_density = likelihood.is_log_concave or (likelihood.levels_off and isinstance(approximation, EP))
    at_data = ImportanceEstimator if one_density else MixtureEstimator
    kind = at_data if model.has_latents_at_data else InducingEstimator
    return kind(model, approximation, num_importance, pairs, model.as_targets(targets))
