"""Which method this project's own measurements favour for a model."""

from __future__ import annotations

from torchgpmc.methods import AMIS, NUTS, EllipticalSlice, Method, Slice
from torchgpmc.models import GPModel

# Importance weights collapse as hyperparameters multiply; `docs/results/theta_engines.md` has the table behind this limit.
MANY_HYPERPARAMETERS = 8
MANY_WITH_EXACT_EVIDENCE = 12


def recommend(model: GPModel) -> Method:
    """The method to begin with; print ``explain(model)`` for the reason.

    Example:
        >>> import torch, torchgpmc as tg
        >>> from gpytorch.kernels import RBFKernel
        >>> from gpytorch.priors import GammaPrior
        >>> x = torch.linspace(0, 1, 10)
        >>> model = tg.GP(x, (x > 0.5).int(), RBFKernel(lengthscale_prior=GammaPrior(2.0, 4.0)), tg.likelihoods.Bernoulli())
        >>> type(tg.recommend(model)).__name__
        'AMIS'
    """
    return _choice(model)[0]


def explain(model: GPModel) -> str:
    """Why :func:`recommend` says what it says, in words.

    Example:
        >>> import torch, torchgpmc as tg
        >>> from gpytorch.kernels import RBFKernel
        >>> from gpytorch.priors import GammaPrior
        >>> x, kernel = torch.linspace(0, 1, 8), RBFKernel(lengthscale_prior=GammaPrior(2.0, 4.0))
        >>> model = tg.GP(x, (x > 0.5).int(), kernel, tg.likelihoods.Bernoulli())
        >>> tg.explain(model)
        'AMIS: the latents integrate out well and the hyperparameters are few: weighted draws, no warm-up.'
    """
    method, reason = _choice(model)
    return f"{type(method).__name__}: {reason}"


def _choice(model: GPModel) -> tuple[Method, str]:
    size = model.layout.size
    if size == 0:
        return EllipticalSlice(), "every hyperparameter is fixed, and one factorisation serves all draws of the latents."
    if not model.is_smooth:
        return Slice(), "the likelihood is a step in f, which has no slopes to follow; a SparseGP would be sampled much faster."
    integrates_out = model.has_latents_at_data and model.factorises and model.num_latents == 1
    if not integrates_out:
        return NUTS(), "the latents cannot be integrated out one site a datum, so hyperparameters and latents are sampled together."
    if size > (MANY_WITH_EXACT_EVIDENCE if model.is_conjugate else MANY_HYPERPARAMETERS):
        return NUTS(), f"{size} hyperparameters are more than importance weights survive."
    if model.is_conjugate:
        return AMIS(), "the evidence is exact and the hyperparameters are few: weighted draws, no warm-up."
    return AMIS(), "the latents integrate out well and the hyperparameters are few: weighted draws, no warm-up."
