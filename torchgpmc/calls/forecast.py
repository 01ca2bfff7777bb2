"""About how long engines take on this machine, before they begin."""

from __future__ import annotations

from torchgpmc.calls.candidate import Candidate, described
from torchgpmc.calls.chain_engines import CHAINS_MAY_TAKE_LONG
from torchgpmc.calls.engines import candidates
from torchgpmc.calls.weighted_engines import operations_of_estimate
from torchgpmc.checks import warn
from torchgpmc.models import GPModel

_MAY_TAKE_LONG = 2e8  # operations an estimate: below, a run is soon done, and not timed before it begins
_LONG = 1.0  # minutes


def explain(model: GPModel) -> str:
    """Which engines ``sample(model)`` tries, in which order and why, and about how long each takes here.

    Seconds are those of one evaluation, timed now, times as many as a run that goes well takes; of chains in white coordinates
    those of their first transitions, for which this takes some seconds an engine.

    Example:
        >>> import torch, torchgpmc as tg
        >>> from gpytorch.kernels import RBFKernel
        >>> from gpytorch.priors import GammaPrior
        >>> x, kernel = torch.linspace(0, 1, 8), RBFKernel(lengthscale_prior=GammaPrior(2.0, 4.0))
        >>> model = tg.GP(x, (x > 0.5).int(), kernel, tg.likelihoods.Bernoulli())
        >>> print(tg.explain(model))  # doctest: +ELLIPSIS
        1. AMIS(...): the latents integrate out well and the hyperparameters are few: weighted draws, no warm-up. About ... seconds.
        2. ...
        sample(model) takes the first whose draws pass their own checks.
    """
    lines = []
    for number, candidate in enumerate(candidates(model), 1):
        lines.append(f"{number}. {described(candidate)}: {candidate.why} {_about(candidate)}")
    return "\n".join([*lines, "sample(model) takes the first whose draws pass their own checks."])


def warn_of_time(model: GPModel, candidate: Candidate) -> None:
    """Says what an engine will cost before it begins, where that may be minutes."""
    if operations_of_estimate(model) < (_MAY_TAKE_LONG if candidate.num_chains is None else CHAINS_MAY_TAKE_LONG):
        return
    try:
        minutes = candidate.seconds() / 60
    except ValueError:  # it has its turn to say so
        return
    if minutes > _LONG:
        warn(
            f"{described(candidate)} will take about {minutes:.0f} minutes here, if it goes well (hyperparameters: "
            f"{model.layout.size}, latent functions: {model.num_latents}, points: {len(model.latent_inputs)}). A SparseGP with "
            f"fewer inducing points, or fewer rows, takes less."
        )


def _about(candidate: Candidate) -> str:
    try:
        return f"About {_duration(candidate.seconds())}."
    except ValueError as error:
        return f"It fails here: {error}"


def _duration(seconds: float) -> str:
    """To two digits, in minutes from two of them on.

    Example:
        >>> _duration(0.4711), _duration(99.6), _duration(254.0)
        ('0.47 seconds', '100 seconds', '4.2 minutes')
    """
    number, unit = (seconds, "seconds") if seconds < 120 else (seconds / 60, "minutes")
    return f"{number:.0f} {unit}" if number >= 10 else f"{number:.2g} {unit}"
