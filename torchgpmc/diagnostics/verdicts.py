"""Whether draws are to be trusted: rank R-hat, bulk and tail effective sizes, k-hat, and warnings in plain words."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from torchgpmc.diagnostics.divergences import about_divergences
from torchgpmc.diagnostics.noisy_evidence import complaints_about_noise, complaints_about_stays, estimate_noise
from torchgpmc.diagnostics.summaries import Source, Summary, effective_sizes, scalar_columns
from torchgpmc.diagnostics.weights import (
    MAX_KHAT,
    MIN_DRAWS_FOR_KHAT,
    error_by_runs,
    evidence_error_by_runs,
    is_heavy_tailed,
    kish_effective_size,
    pareto_khat,
)

MAX_RHAT = 1.01  # Vehtari et al. 2021, section 4
MAX_LATENT_RHAT = 1.1  # Gelman et al. 2013, section 11.4; of hundreds of latents the worst exceeds 1.01 by chance
MIN_ESS_PER_CHAIN = 100  # the same
ENOUGH_ESS = 400  # the same, of four chains; of more chains it is as many draws
MAX_FAILED_SHARE = 0.01  # of weighted draws
MAX_HEAT = 0.1  # by which the temperature of stochastic gradients may miss 1, and variances with it
MIN_EFFICIENCY = 0.1  # Kish's size over draws; ours: at 4 % most of a posterior was missed (docs/results/theta_engines.md)
MAX_RUN_ERRORS = 3.0  # by which independent runs may differ: two of them alike in 12 means do in 3 of 100 pools
MAX_NOISE_OF_RUNS = 0.02  # as above; Laplace's estimates that missed most of a posterior in every run had 0.04 and more


def worst_latent(whitened: Tensor) -> tuple[int, float]:
    """The latent whose chains agree least, and its rank R-hat (Vehtari et al. 2021); NaN where there are too few draws.

    The latent is found by split R-hat of all at once, which costs next to nothing; only its own R-hat is worked out by ranks.

    Args:
        whitened: ``(C, S, V)``.

    Example:
        >>> import torch
        >>> draws = torch.randn(4, 500, 3, generator=torch.Generator().manual_seed(0))
        >>> worst_latent(draws)[1] < 1.1
        True
        >>> draws[:2, :, 1] += 5.0  # two chains elsewhere
        >>> worst_latent(draws)[0], worst_latent(draws)[1] > 1.1
        (1, True)
    """
    draws = whitened.shape[1]
    if draws < 4:
        return 0, math.nan
    half = draws // 2
    halves = torch.cat([whitened[:, :half], whitened[:, draws - half :]])
    between, within = halves.mean(1).var(0), halves.var(1).mean(0)
    worst = int(torch.nan_to_num(between / within, nan=0.0).argmax())
    return worst, effective_sizes(whitened[..., worst].cpu())[2]


def least_effective(summary: Summary, whitened: Tensor, log_weights: Tensor | None) -> tuple[str, float]:
    """The quantity worth the fewest draws, and how many: of the summary's, by bulk and tail, and of chains the worst latent.

    Zero draws where there are too few to say.

    Args:
        summary: of the hyperparameters and ``lp``.
        whitened: latents ``(C, S, V)``.
        log_weights: ``(C, S)`` for weighted draws.

    Example:
        >>> import torch
        >>> from torchgpmc.diagnostics.summaries import summarise
        >>> draws = torch.randn(4, 500, 2, generator=torch.Generator().manual_seed(0))
        >>> draws[..., 1] = draws[..., 1].repeat_interleave(10, 1)[:, :500]  # every value ten times: a tenth as many
        >>> name, size = least_effective(summarise({"a": draws[..., 0], "b": draws[..., 1]}), draws[..., :0], None)
        >>> name, 100 < size < 300
        ('b', True)
    """
    sizes = [(row.name, 1.0 if row.stands_still else min(row.ess_bulk, row.ess_tail)) for row in summary.rows]
    if log_weights is None and whitened.shape[-1]:
        index, _ = worst_latent(whitened)
        sizes.append((f"latent {index}", effective_sizes(whitened[..., index].cpu())[0]))
    return min(((name, 0.0 if math.isnan(size) else size) for name, size in sizes), key=lambda named: named[1])


def verdict(summary: Summary, least: tuple[str, float], found: list[str], biased: str | None = None) -> str:
    """Whether to trust draws, in one line.

    Args:
        summary: of the draws.
        least: what :func:`least_effective` says.
        found: what :func:`complaints` and :func:`complaints_about_latents` say.
        biased: why the draws would not be exact however many there were, if so.

    Example:
        >>> import torch
        >>> from torchgpmc.diagnostics.summaries import summarise
        >>> summary = summarise({"a": torch.randn(4, 500, generator=torch.Generator().manual_seed(0))})
        >>> verdict(summary, ("a", 1800.0), [])
        'Trustworthy: worst effective size 1800 (a), R-hat 1.00...'
        >>> verdict(summary, ("a", 1800.0), ["the chains have not mixed.", "a region may be missed."])
        'Do not trust: the chains have not mixed. (and 1 more: see complaints())'
    """
    if found:
        more = f" (and {len(found) - 1} more: see complaints())" if len(found) > 1 else ""
        return f"Do not trust: {found[0]}{more}"
    if not least[1]:
        return "Do not trust: the draws are too few to judge them."
    rhats = [row.rhat for row in summary.rows if math.isfinite(row.rhat)]
    agreement = f", R-hat {max(rhats):.3f}" if rhats else ""
    judged = "Trustworthy" if biased is None else f"Biased: {biased}"
    return f"{judged}: worst effective size {least[1]:.0f} ({least[0]}){agreement}.{_about_heavy_means(summary)}"


def _about_heavy_means(summary: Summary) -> str:
    """That a mean is a poor summary; even weights of draws from a heavy-tailed posterior say so, and are not at fault."""
    heavy = [row for row in summary.rows if row.is_heavy_tailed]
    if not heavy:
        return ""
    worst = max(heavy, key=lambda row: row.khat)
    named = f"'{worst.name}' (k-hat {worst.khat:.2f})"
    if len(heavy) > 1:
        return f" The means of {named} and {len(heavy) - 1} more rest on a few draws far from them, quantiles do not."
    return f" The mean of {named} rests on a few draws far from it, its quantiles do not."


def complaints_about_divergences(samples: Mapping[str, Tensor], summary: Summary, stats: Mapping[str, Tensor]) -> list[str]:
    """That a region may be missed; see :func:`torchgpmc.diagnostics.divergences.about_divergences`.

    Args:
        samples: ``{name: (C, S, *shape)}``.
        summary: of them.
        stats: per-draw statistics ``(C, S)``.

    Example:
        >>> import torch
        >>> from torchgpmc.diagnostics.summaries import summarise
        >>> samples = {"a": torch.randn(4, 500, generator=torch.Generator().manual_seed(0))}
        >>> complaints_about_divergences(samples, summarise(samples), {"diverging": samples["a"] > 2.5})  # all in one tail
        ["... of 2000 transitions diverged (stats['diverging'] says which), where 'a' is large: ..."]
    """
    sizes = [min(row.ess_bulk, row.ess_tail) for row in summary.rows if math.isfinite(row.ess_bulk)]
    return about_divergences(stats["diverging"], scalar_columns(samples), min(sizes, default=0.0)) if "diverging" in stats else []


def complaints_about_latents(whitened: Tensor) -> list[str]:
    """That chains are in different modes of f, which hyperparameters and densities need not show; empty if nothing says so.

    Args:
        whitened: ``(C, S, V)``.

    Source: rank R-hat of Vehtari et al. 2021.

    Example:
        >>> import torch
        >>> v = torch.randn(4, 500, 3, generator=torch.Generator().manual_seed(0))
        >>> complaints_about_latents(v)
        []
        >>> v[3, :, 2] -= 5.0  # one chain in another mode
        >>> complaints_about_latents(v)
        ['R-hat of latent 2 is ...']
    """
    index, rhat = worst_latent(whitened)
    if not rhat > MAX_LATENT_RHAT:
        return []
    return [
        f"R-hat of latent {index} is {rhat:.3f} (at most {MAX_LATENT_RHAT} is reliable for the worst of {whitened.shape[-1]}): the "
        f"chains are in different places, maybe one in each mode of f, whatever hyperparameters and lp look like, and how many are "
        f"in each says nothing of how probable it is. Run longer; where latents can be integrated out, compare with AMIS(), which "
        f"searches for modes."
    ]


def complaints(
    summary: Summary, stats: Mapping[str, Tensor], num_chains: int, log_weights: Tensor | None, begun: str | None = None
) -> list[str]:
    """What speaks against trusting these draws, one sentence each, with the remedy; empty if nothing does.

    Args:
        summary: of the hyperparameters and ``lp``.
        stats: per-draw statistics ``(C, S)``.
        num_chains: C.
        log_weights: ``(C, S)`` for weighted draws.
        begun: at which of several optima chains began, in words.

    Source: Vehtari et al. 2021 for chains, 2024 for k-hat; the other limits are this module's, with their reasons.

    Example:
        >>> import torch
        >>> from torchgpmc.diagnostics.summaries import summarise
        >>> draws = torch.randn(4, 500, generator=torch.Generator().manual_seed(0))
        >>> complaints(summarise({"a": draws}), {}, 4, None)
        []
        >>> complaints(summarise({"a": draws[:, :80]}), {}, 4, None)
        ["'a' has ... effective draws (at least 400 for 4 chains is reliable): increase num_samples."]
        >>> weights = torch.zeros(1, 2000).index_fill(1, torch.tensor(7), 20.0)  # one draw that weighs more than all others
        >>> complaints(summarise({"a": draws.view(1, -1)}, weights), {}, 1, weights)[0]
        'the importance weights have k-hat ... (at most 0.7 is reliable): draw more, use heavier tails, or NUTS.'
    """
    found = _complaints_about_draws(summary)
    if log_weights is not None:
        khat = pareto_khat(log_weights)
        if math.isnan(khat):
            found.append(
                f"{log_weights.numel()} weighted draws are too few to judge their weights: draw at least {MIN_DRAWS_FOR_KHAT}."
            )
        elif is_heavy_tailed(log_weights, khat):
            found.append(
                f"the importance weights have k-hat {khat:.2f} (at most {MAX_KHAT} is reliable): "
                f"draw more, use heavier tails, or NUTS."
            )
        elif not kish_effective_size(log_weights) > 0:
            found.append("the importance weights are no numbers, or all zero: the evidence failed; use stronger priors, or NUTS().")
        elif _efficiency(stats, log_weights) < MIN_EFFICIENCY and not _agreement_tells(stats, log_weights):
            found.append(_about_efficiency(stats, log_weights))
        found += _complaints_about_mixing(summary)  # of several chains, whose draws are weighted: weights do not make up for it
        found += [] if found else _complaints_about_size(summary, num_chains)
        return found + complaints_about_noise(stats, log_weights) + _complaints_about_failures(stats, MAX_FAILED_SHARE)
    found += _complaints_about_mixing(summary, begun)
    found += _complaints_about_size(summary, num_chains)
    found += _complaints_about_temperature(stats) + complaints_about_noise(stats, None) + complaints_about_stays(stats)
    return found + _complaints_about_failures(stats, 0.0)


def complaints_about_choice(summary: Summary, source: Source) -> list[str]:
    """What speaks against draws chosen by weight from others: all that spoke against those, else that too few were chosen.

    Args:
        summary: of the chosen draws, by :meth:`Source.judged`.
        source: what they were chosen from.

    Example:
        >>> import torch
        >>> from torchgpmc.diagnostics.summaries import summarise
        >>> weighted = summarise({"a": torch.arange(400.0)[None]}, torch.zeros(1, 400))
        >>> source = Source(weighted.rows, [])
        >>> chosen = summarise({"a": torch.arange(50.0)[None]})
        >>> complaints_about_choice(Summary(source.judged(chosen.rows, 50)), source)
        ["'a' has 44 effective draws (at least 100 for one chain is reliable): increase num_draws."]
    """
    return list(source.complaints) or _complaints_about_size(summary, 1, "num_draws")


def _complaints_about_draws(summary: Summary) -> list[str]:
    """That draws are no numbers, or all the same, which effective sizes and R-hat do not show."""
    lost = [row.name for row in summary.rows if not math.isfinite(row.mean)]
    still = [row.name for row in summary.rows if row.stands_still]
    found = []
    if lost:
        found.append(f"'{lost[0]}' is infinite, or no number, in some draws: lighter tails, or float64, would keep it in range.")
    if still:
        found.append(
            f"'{still[0]}' never moved: all draws are the same, and say nothing of a posterior. Start each chain at another place, "
            f"and take smaller steps, or more warmup_steps for them to be learned."
        )
    return found


def _complaints_about_size(summary: Summary, num_chains: int, remedy: str = "num_samples") -> list[str]:
    """That there are too few effective draws of a quantity."""
    sizes = [(min(row.ess_bulk, row.ess_tail), row.name) for row in summary.rows if math.isfinite(row.ess_bulk)]
    least, name = min(sizes, default=(math.inf, ""))
    wanted, chains = min(MIN_ESS_PER_CHAIN * num_chains, ENOUGH_ESS), "one chain" if num_chains == 1 else f"{num_chains} chains"
    if least >= wanted:
        return []
    return [f"'{name}' has {least:.0f} effective draws (at least {wanted} for {chains} is reliable): increase {remedy}."]


def _complaints_about_mixing(summary: Summary, begun: str | None = None) -> list[str]:
    """That chains disagree."""
    rhats = [(row.rhat, row.name) for row in summary.rows if math.isfinite(row.rhat)]
    if not rhats or max(rhats)[0] <= MAX_RHAT:
        return []
    worst, name = max(rhats)
    if begun is not None and worst > MAX_LATENT_RHAT:
        return [
            f"R-hat of '{name}' is {worst:.3f} (at most {MAX_RHAT} is reliable): the chains began at {begun} and have not met, so "
            f"how many draws are at each says nothing of how probable it is; run longer, with more warmup_steps or num_samples, "
            f"or, where latents can be integrated out, compare with AMIS(), which weighs modes."
        ]
    return [
        f"R-hat of '{name}' is {worst:.4f} (at most {MAX_RHAT} is reliable): the chains have not mixed; "
        f"run longer, with more warmup_steps or num_samples."
    ]


def _complaints_about_temperature(stats: Mapping[str, Tensor]) -> list[str]:
    """That stochastic gradients, or long steps, have widened the draws, by more than chance would show."""
    if "temperature" not in stats:
        return []
    temperature = stats["temperature"].double()
    mean, error = float(temperature.nanmean()), math.nan
    size = effective_sizes(temperature)[0]
    if math.isfinite(size):
        error = float(temperature.std()) / math.sqrt(size)
    if not abs(mean - 1) > MAX_HEAT + 4 * error:
        return []
    return [
        f"the temperature of the chains is {mean:.2f} (1 but for the bias): steps too long, or gradients too noisy, have put the "
        f"draws at other places than the posterior's; use a smaller step_size or a larger batch_size."
    ]


def _agreement_tells(stats: Mapping[str, Tensor], log_weights: Tensor) -> bool:
    """Whether uneven weights are left to :func:`complaints_about_runs`: where there are several runs, with nearly exact evidence.

    What proposals miss one run finds and another does not. Estimates that miss p(f | y, theta) miss it in every run.
    """
    return "run" in stats and estimate_noise(stats, log_weights) <= MAX_NOISE_OF_RUNS


def _num_candidates(stats: Mapping[str, Tensor], log_weights: Tensor) -> int:
    """Draws, and those that were refused before they were made: proposals are judged by both."""
    return round(float(stats["n_candidates"].sum())) if "n_candidates" in stats else log_weights.numel()


def _efficiency(stats: Mapping[str, Tensor], log_weights: Tensor) -> float:
    return kish_effective_size(log_weights) / _num_candidates(stats, log_weights)


def _about_efficiency(stats: Mapping[str, Tensor], log_weights: Tensor) -> str:
    """Weights so uneven that what they do not show may matter more than what they do."""
    size, draws, count = kish_effective_size(log_weights), log_weights.numel(), _num_candidates(stats, log_weights)
    of = f"{count} candidates, {draws} of them weighted draws," if count > draws else f"{draws} weighted draws"
    return (
        f"{of} are worth {size:.0f} even ones ({size / count:.1%}; at least {MIN_EFFICIENCY:.0%} is reliable): "
        f"a part of the posterior may hardly have been seen, or its evidence estimates be too noisy, and means be off by more than "
        f"their errors say. Use EP(), more importance samples or (probit) evidence.Orthant(), and compare with NUTS(); or "
        f"pool() this run with others, from other seeds, which is reliable where they agree."
    )


def complaints_about_runs(samples: Mapping[str, Tensor], stats: Mapping[str, Tensor], log_weights: Tensor) -> list[str]:
    """That independent runs, pooled, differ by more than as many effective draws should; empty if nothing says so.

    Each mean's error, and the evidence's, by how runs differ is held against :data:`MAX_RUN_ERRORS` errors of Kish's size, or of
    400 draws where there are more: what is known so well is known well enough.

    Args:
        samples: ``{name: (1, S, *shape)}``.
        stats: per-draw statistics ``(1, S)``, among them ``run`` where there are several.
        log_weights: ``(1, S)``.

    Example:
        >>> import torch
        >>> values, run = torch.randn(1, 400, generator=torch.Generator().manual_seed(0)), torch.arange(400)[None] % 2
        >>> complaints_about_runs({"a": values}, {"run": run}, torch.zeros(1, 400))
        []
        >>> complaints_about_runs({"a": values + run}, {"run": run}, torch.zeros(1, 400))  # means that are 1 apart
        ["the 2 runs disagree: they differ as if the mean of 'a' were known to ..."]
    """
    if "run" not in stats:
        return []
    runs = stats["run"]
    limit = MAX_RUN_ERRORS / math.sqrt(min(kish_effective_size(log_weights), ENOUGH_ESS))
    errors = [(error_by_runs(values, log_weights, runs), f"the mean of '{name}'") for name, values in scalar_columns(samples)]
    worst, name = max([*errors, (evidence_error_by_runs(log_weights, runs), "the evidence")])
    if not worst > limit:
        return []
    unit = "relative" if name == "the evidence" else "in standard deviations"
    return [
        f"the {len(runs.unique())} runs disagree: they differ as if {name} were known to {worst:.2f}, {unit} (at most {limit:.2f} "
        f"is reliable), since some have hardly seen a part of the posterior that others have. Pool more runs, or longer ones."
    ]


def _complaints_about_failures(stats: Mapping[str, Tensor], tolerated: float) -> list[str]:
    """Approximations that did not converge, and densities that could not be worked out, of more draws than a tolerated share.

    A proposal that covers the whole prior meets a covariance without a factor now and then; a chain should not.
    """
    found = []
    if "approximation_converged" in stats:
        failed = 1 - float(stats["approximation_converged"].double().mean())
        if failed > 0.01:
            found.append(
                f"the Gaussian approximation did not converge for {failed:.0%} of the draws: estimates stay unbiased but noisy; "
                f"raise its max_iterations, or use the other of Laplace() and EP()."
            )
    failures = int(stats["n_failures"].sum()) if "n_failures" in stats else 0
    if failures and failures > tolerated * stats["n_failures"].numel():
        found.append(
            f"{failures} density evaluations failed (a Cholesky factorisation, or overflow) and counted as density zero: "
            f"if they are many, raise the model's jitter or use stronger priors."
        )
    return found
