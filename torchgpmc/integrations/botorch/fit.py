"""The sampler behind BoTorch's fully Bayesian models."""

from __future__ import annotations

import math
import warnings
from typing import Any, NamedTuple

from torchgpmc.calls.sampling import sample
from torchgpmc.checks import SamplingWarning, check_count, warn
from torchgpmc.diagnostics import MAX_LATENT_RHAT
from torchgpmc.diagnostics.summaries import Summary
from torchgpmc.integrations.botorch.counterparts import largest_rhat, loadable, regression_of
from torchgpmc.methods import NUTS


class Sampling(NamedTuple):
    """How a model's draws were made, and what speaks against them."""

    rhat: float  # the largest of all hyperparameters
    summary: Summary  # of every draw, those that thinning leaves out included
    complaints: list[str]  # as of every posterior here, most of all that a few draws are few; empty if nothing does
    info: dict[str, Any]


def fit_fully_bayesian_model_nuts(
    model: Any,
    max_tree_depth: int = 6,
    warmup_steps: int = 150,
    num_samples: int = 256,
    thinning: int = 16,
    disable_progbar: bool = False,
    jit_compile: bool = False,
    seed: int = 0,
    *,
    num_chains: int = 8,
) -> None:
    """Samples a fully Bayesian model's hyperparameters by NUTS and loads them, as BoTorch's function of this name does by JAX.

    Several chains move together, so that R-hat can tell whether they agree; ``model.sampling`` keeps it, with the summary and the
    complaints. All computation is in float64, and no global random generator is touched.

    Args:
        model: one of this package's fully Bayesian models, or of BoTorch's own.
        max_tree_depth: at most ``2 ** max_tree_depth - 1`` gradients a transition.
        warmup_steps: of each chain, before the first kept draw.
        num_samples: of all chains together, before thinning.
        thinning: keep one draw in this many: 16 of 256.
        disable_progbar: whether to show no progress.
        jit_compile: ignored, as by BoTorch.
        seed: of all randomness.
        num_chains: chains run together as one batch.

    Raises:
        TypeError: not a fully Bayesian model.
        ValueError: a number out of range.
        NotImplementedError: a model whose density only BoTorch's JAX code knows.

    Example:
        >>> import torch
        >>> from torchgpmc.integrations.botorch import SaasFullyBayesianSingleTaskGP
        >>> x = torch.rand(8, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        >>> model = SaasFullyBayesianSingleTaskGP(x, (x[:, :1] - x[:, :1].mean()) / x[:, :1].std())
        >>> fit_fully_bayesian_model_nuts(model, disable_progbar=True)
        >>> model.num_mcmc_samples, model.posterior(x[:3]).mixture_mean.shape
        (16, torch.Size([3, 1]))
    """
    for name, value in (("num_samples", num_samples), ("thinning", thinning), ("num_chains", num_chains)):
        check_count(name, value)
    if not hasattr(model, "pyro_model"):
        raise TypeError(
            f"model is {type(model).__name__}. Expected a fully Bayesian model, for instance SaasFullyBayesianSingleTaskGP; others "
            f"are fitted by botorch.fit.fit_gpytorch_mll."
        )
    regression = regression_of(model.pyro_model)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SamplingWarning)  # of few draws, mainly, which is what was asked for
        posterior = sample(
            regression,
            # Learning the mass matrix from scratch would take two thirds of all gradients.
            NUTS(max_tree_depth=max_tree_depth, from_mode=True),
            num_samples=math.ceil(num_samples / num_chains),
            warmup_steps=warmup_steps,
            num_chains=num_chains,
            seed=seed,
            progress=not disable_progbar,
        )
        model.sampling = Sampling(largest_rhat(posterior), posterior.summary(), posterior.complaints(), posterior.info)
    model.train()
    like = model.pyro_model.train_X
    model.load_mcmc_samples({name: value.to(like) for name, value in loadable(posterior, num_samples, thinning).items()})
    model.eval()
    if model.sampling.rhat > MAX_LATENT_RHAT:
        warn(
            f"R-hat of the hyperparameters is {model.sampling.rhat:.2f} (at most {MAX_LATENT_RHAT} is reliable for the worst of so "
            f"many): the chains have not mixed. Raise num_samples, now {num_samples} of all chains together, and thinning with it; "
            f"where that does not help warmup_steps, now {warmup_steps}. model.sampling.summary says more."
        )
