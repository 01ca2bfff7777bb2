"""What the pseudo-marginal methods share: exact draws of (theta, f) from unbiased estimates of p(y | theta)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from torchgpmc.approximations import marginal_of
from torchgpmc.approximations.gaussian_form import check_approximation
from torchgpmc.checks import check_count
from torchgpmc.models.gp_model import GPModel
from torchgpmc.runs.anchors import AnchoredAdaptation, AnchoredTuning, MarginalDensity, no_anchors
from torchgpmc.runs.chain import ChainRun
from torchgpmc.runs.chain_targets import check_has_hyperparameters, estimated_target, estimator_for, suited_approximation
from torchgpmc.runs.run import Settings, chain_settings, check_mass_matrix, in_chunks
from torchgpmc.runs.starts import check_one_data_set
from torchgpmc.samplers.adaptation import Tuning, WindowedAdaptation
from torchgpmc.samplers.preconditioner import MassMatrix
from torchgpmc.samplers.pseudo_marginal import on_surrogate
from torchgpmc.types import LogDensity, Sampler

# The rest of warm-up runs the tuned kernel on the estimate, so that draws do not begin where the approximation left them.
_TUNING_SHARE = 0.8


class Kernels(NamedTuple):
    """What the two methods do not share."""

    of: Callable[[MarginalDensity, LogDensity, Tuning], Sampler]  # from the density, its surrogate and the tuning
    target_acceptance: float  # of the Metropolis on the surrogate
    mass_matrix: MassMatrix


def estimated_run(
    method: Any, model: GPModel, settings: Settings, kernels: Kernels, *, latent_steps: int = 0, from_mode: bool = False
) -> ChainRun:
    """Tuning on the approximate marginal likelihood (paper A, section 4.4), then draws from the exact kernel.

    Args:
        method: its options ``approximation``, ``num_importance``, ``antithetic``, ``evidence`` and ``thinning``.
        model: a GP with a factorised likelihood.
        settings: of the run.
        kernels: what the methods do not share.
        latent_steps: on the kept latents after each transition.
        from_mode: whether chains start at the mode of the approximate posterior.

    Raises:
        ValueError: options out of range, or a model that cannot be approximated so.
    """
    check_approximation("approximation", method.approximation)
    check_mass_matrix(kernels.mass_matrix)
    check_count("thinning", method.thinning)
    check_count("latent_steps", latent_steps, 0)
    check_has_hyperparameters(model, "the pseudo-marginal method")
    approximation = suited_approximation(model, method.approximation)
    check_one_data_set(model, from_mode)
    warmup, chains = chain_settings(settings)
    estimator = estimator_for(model, approximation, method.num_importance, method.antithetic, method.evidence)
    marginal = marginal_of(model, approximation)
    surrogate = in_chunks(marginal.roughly(), chains, settings.chain_chunk)
    size = model.layout.size
    adaptation = walk_adaptation(size, int(_TUNING_SHARE * warmup), kernels.mass_matrix, kernels.target_acceptance)
    density = MarginalDensity(model.layout, estimator, no_anchors(model.train_x), model.targets.one_a_chain, latent_steps)
    modes_of = marginal if from_mode else None

    def kernel(tuning: AnchoredTuning) -> Sampler:
        step_size, preconditioner = tuning.adaptation.step_size, tuning.adaptation.preconditioner
        estimated = kernels.of(density._replace(anchors=tuning.anchors), surrogate, tuning.adaptation)
        if tuning.on_estimates:
            return estimated
        return on_surrogate(estimated, surrogate, step_size=step_size, preconditioner=preconditioner)

    target = estimated_target(model, settings, density, surrogate, modes_of)
    warm_up = AnchoredAdaptation(adaptation, estimator)
    return ChainRun(target, kernel, warm_up, warmup, settings.num_samples, method.thinning)


def walk_adaptation(size: int, steps: int, mass_matrix: MassMatrix, target_acceptance: float) -> WindowedAdaptation:
    """Of a random walk in ``size`` hyperparameters, from a tenth of Roberts, Gelman & Gilks's optimum for a unit start."""
    return WindowedAdaptation(
        steps,
        mass_matrix,
        mass_matrix.dense_size(size, size),
        step_size=0.238 / size**0.5,
        target_acceptance=target_acceptance,
        averages_anew=False,
    )
