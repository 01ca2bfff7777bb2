"""Which engines this project's own measurements favour for a model, in order: which of the modules ``..._engines`` serves it."""

from __future__ import annotations

from torchgpmc.approximations.class_ep import sees_differences
from torchgpmc.calls.candidate import WANTED, Candidate
from torchgpmc.calls.chain_engines import chains, together
from torchgpmc.calls.inducing_engines import of_inducing_values
from torchgpmc.calls.one_latent_engines import of_one_latent
from torchgpmc.calls.regression_engines import of_regression
from torchgpmc.calls.several_latents_engines import of_classes, of_noise
from torchgpmc.calls.weighted_engines import MANY_HYPERPARAMETERS
from torchgpmc.evidence import is_heteroskedastic
from torchgpmc.methods import NUTS, AuxiliaryGradient, EllipticalSlice, Gibbs, Method, Slice
from torchgpmc.models import GPModel, checked_model
from torchgpmc.runs.parameterizations import Interwoven

_MANY_CHAINS = 16  # of sweeps by slices, whose draws hang together: of ten labels 400 of each are worth 490
_WARM_UP = 1000  # of chains that are not judged
_BY_SLICES = Gibbs(hyper=Slice(), latent=EllipticalSlice(), parameterization=Interwoven(), latent_steps=10)


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
    return next(engine.method for engine in candidates(model) if not engine.only_begins)


def candidates(model: GPModel, wanted: int = WANTED) -> list[Candidate]:
    """The engines to try for ``wanted`` effective draws, best first, by what the model can do."""
    size = checked_model(model).layout.size
    if model.targets.one_a_chain:
        why = "every chain has a data set, and a posterior, of its own: there is nothing to judge draws by."
        return [chains(model, NUTS(), why, _WARM_UP, model.targets.num_data_sets)]
    if size == 0:
        why = "every hyperparameter is fixed, and one factorisation serves all draws of the latents."
        return [chains(model, AuxiliaryGradient() if model.is_smooth else EllipticalSlice(), why, 200)]
    if not model.is_smooth:
        why = "the likelihood is a step in f, which has no slopes to follow; a SparseGP would be sampled much faster."
        return [chains(model, _BY_SLICES, why, 150, _MANY_CHAINS)]
    if model.is_conjugate or model.collapses:
        return of_regression(model, wanted)
    if not model.has_latents_at_data:
        return of_inducing_values(model, wanted)
    if model.factorises and model.num_latents == 1:
        return of_one_latent(model, wanted)
    if size <= MANY_HYPERPARAMETERS and is_heteroskedastic(model):
        return of_noise(model, wanted)
    if model.factorises and sees_differences(model):
        return of_classes(model, wanted)
    return together(model)
