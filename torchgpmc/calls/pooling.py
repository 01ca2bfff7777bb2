"""Weighted draws of several independent runs as those of one: by their evidence, or, of chains, by what they are worth."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from itertools import combinations
from typing import Any

import torch
from torch import Tensor

from torchgpmc.diagnostics.weights import effective_size_of_chains, kish_effective_size
from torchgpmc.posterior import Posterior
from torchgpmc.storage.draws import Draws
from torchgpmc.storage.fingerprint import differences, model_fingerprint

_FAR_APART = 4.0  # errors of the difference of two means: of 61 hyperparameters one of runs alike is once in 260 times


def pool(posteriors: Sequence[Posterior]) -> Posterior:
    r"""Weighted draws of independent runs on one model, from other seeds or by other options, as one posterior.

    The mean of a run's weights w is its estimate of p(y), by which it enters: :math:`\bar h = \sum_{ri} w_{ri} h_{ri} /
    \sum_{ri} w_{ri}` over draws i of runs r. The verdict on the pool rests on how far the runs agree: where they do, draws are
    worth Kish's size however uneven their weights. What every run misses does not show, so let them begin apart.

    Args:
        posteriors: of :class:`AMIS` or :class:`MAMIS`, with any estimates of the evidence, or pooled before.

    Returns:
        All draws ``(1, S)``; ``stats["run"]`` says which run each is of.

    Raises:
        TypeError: not a list of posteriors.
        ValueError: fewer than two, of different models, or not importance samples of hyperparameters.

    Example:
        >>> import torch, torchgpmc as tg
        >>> from gpytorch.kernels import RBFKernel
        >>> from gpytorch.priors import GammaPrior
        >>> x, kernel = torch.linspace(0, 1, 8), RBFKernel(lengthscale_prior=GammaPrior(2.0, 4.0))
        >>> model = tg.GP(x, (x > 0.5).int(), kernel, tg.likelihoods.Bernoulli())
        >>> runs = [tg.sample(model, tg.AMIS(), num_samples=500, seed=seed, progress=False) for seed in (0, 1)]
        >>> tg.pool(runs).log_weights.shape
        torch.Size([1, 1000])
    """
    given = list(posteriors) if isinstance(posteriors, Iterable) else [posteriors]
    strange = [type(posterior).__name__ for posterior in given if not isinstance(posterior, Posterior)]
    if strange:
        raise TypeError(f"posteriors hold {strange[0]}. Expected a list of torchgpmc.sample's results for several seeds.")
    if len(given) < 2:
        raise ValueError(f"{len(given)} posteriors were given. Expected two or more, of different seeds.")
    for posterior in given:
        if not can_be_pooled(posterior):
            raise ValueError(
                f"draws of {posterior.info.get('method')} cannot be pooled by weight. Expected those of AMIS() or MAMIS(), whose "
                f"mean weight is the evidence; of chains, run more at once."
            )
    if any(torch.equal(one.theta, other.theta) for one, other in combinations(given, 2)):
        raise ValueError("two of the posteriors have the same draws. Expected independent runs: give each another seed.")
    first, *others = (model_fingerprint(posterior.model) for posterior in given)
    for other in others:
        different = differences(first, other)
        if different:
            raise ValueError(f"the posteriors are of different models: {different}. Expected runs on one model.")
    return pooled(given)


def can_be_pooled(posterior: Posterior) -> bool:
    """Whether the mean of the weights is an estimate of p(y)."""
    return posterior.log_weights is not None and posterior.num_chains == 1 and "log_evidence" in posterior.info


def pooled(posteriors: Sequence[Posterior]) -> Posterior:
    """:func:`pool` of posteriors that are known to be of one model."""
    runs = _runs(posteriors)
    log_weights = torch.cat([_log_weights(posterior) for posterior in posteriors], 1)
    info = {**_totals(posteriors), **_evidence([posterior.info for posterior in posteriors], runs)}
    return Posterior(posteriors[0].model, _draws(posteriors, log_weights), {**_stats(posteriors), "run": runs}, info)


def can_be_joined(one: Posterior, other: Posterior) -> bool:
    """Whether they are as many chains of weighted draws, which agree on every hyperparameter's mean, by its errors.

    Means are on the unconstrained scale, where few tails are heavy.
    """
    if one.log_weights is None or other.log_weights is None or one.num_chains == 1 or one.num_chains != other.num_chains:
        return False
    if _latents_besides(one) != _latents_besides(other):
        return False
    (mean, error), (other_mean, other_error) = (_means_with_errors(posterior) for posterior in (one, other))
    return bool(((mean - other_mean).abs() <= _FAR_APART * (error.square() + other_error.square()).sqrt()).all())


def joined(posteriors: Sequence[Posterior]) -> Posterior:
    r"""Chains of weighted draws, those of one run after those of another, for which :func:`can_be_joined` holds.

    The mean of a run's weights is no evidence, since it is relative to a density that is not normalised. So a run enters by what
    its weights are worth, by Kish's size: means are :math:`\sum_r n_r \bar h_r / \sum_r n_r`, each :math:`\bar h_r` a run's own.
    """
    parts = [_log_weights(posterior) for posterior in posteriors]
    shares = [part - torch.logsumexp(part.flatten(), 0) + math.log(kish_effective_size(part)) for part in parts]
    draws = _draws(posteriors, torch.cat(shares, 1))
    return Posterior(posteriors[0].model, draws, _stats(posteriors), _totals(posteriors))


def _latents_besides(posterior: Posterior) -> int | None:
    """How many further latent vectors each theta has; ``None`` where a run keeps none."""
    return None if posterior._further is None else posterior._further.shape[2]


def _means_with_errors(posterior: Posterior) -> tuple[Tensor, Tensor]:
    """Weighted means of theta, unconstrained, and their standard errors, each ``(P,)``."""
    theta, log_weights = posterior.theta.double(), _log_weights(posterior)
    weights = torch.softmax(log_weights.double().flatten(), 0)
    flat = theta.flatten(0, 1)
    mean = weights @ flat
    variance = weights @ (flat - mean).square()
    sizes = [effective_size_of_chains(values, log_weights) for values in theta.unbind(-1)]
    return mean, (variance / torch.tensor(sizes, dtype=mean.dtype)).sqrt()


def _log_weights(posterior: Posterior) -> Tensor:
    assert posterior.log_weights is not None
    return posterior.log_weights


def _draws(posteriors: Sequence[Posterior], log_weights: Tensor) -> Draws:
    theta, whitened = (torch.cat([getattr(posterior, name) for posterior in posteriors], 1) for name in ("theta", "whitened"))
    further = [posterior._further for posterior in posteriors if posterior._further is not None]
    return Draws(theta, whitened, log_weights, further_whitened=torch.cat(further, 1) if len(further) == len(posteriors) else None)


def _stats(posteriors: Sequence[Posterior]) -> dict[str, Tensor]:
    """Those that all have."""
    names = set.intersection(*(set(posterior.stats) for posterior in posteriors)) - {"run"}
    return {name: torch.cat([posterior.stats[name] for posterior in posteriors], 1) for name in sorted(names)}


def _runs(posteriors: Sequence[Posterior]) -> Tensor:
    """The number of each draw's run; one that was pooled already brings several."""
    numbers: list[Tensor] = []
    for posterior in posteriors:
        own = posterior.stats.get("run", torch.zeros(1, posterior.num_draws, dtype=torch.float64))
        numbers.append(own + (float(numbers[-1].max()) + 1 if numbers else 0.0))
    return torch.cat(numbers, 1)


def _totals(posteriors: Sequence[Posterior]) -> dict[str, Any]:
    """What was run, in all."""
    infos = [posterior.info for posterior in posteriors]
    totals = ("seconds", "warmup_seconds", "num_evaluations")
    return {
        **infos[-1],
        **{name: sum(info[name] for info in infos) for name in totals},
        "interrupted": any(info["interrupted"] for info in infos),
        "method": "; ".join(info["method"] for info in infos),
        "num_runs": sum(info.get("num_runs", 1) for info in infos),
    }


def _evidence(infos: Sequence[dict[str, Any]], runs: Tensor) -> dict[str, float]:
    """The mean of the runs', each by its draws."""
    shares = torch.bincount(runs.flatten().long()).double()
    counts = [info.get("num_runs", 1) for info in infos]
    log_draws = torch.stack([part.sum() for part in shares.split(counts)]).log()
    log_parts = log_draws + torch.tensor([info["log_evidence"] for info in infos], dtype=torch.float64)
    errors = torch.tensor([info["log_evidence_error"] for info in infos], dtype=torch.float64)
    return {
        "log_evidence": float(torch.logsumexp(log_parts, 0)) - math.log(runs.numel()),
        "log_evidence_error": float((torch.softmax(log_parts, 0) * errors).square().sum().sqrt()),
    }
