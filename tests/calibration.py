"""Statistical verdicts with a stated false-alarm rate.

The whole suite is to raise a false alarm less than once in a thousand runs (over seeds; the seeds themselves are fixed). Each test
marked ``statistical`` gets an equal share of that, and divides it among its own comparisons (Bonferroni).
"""

import numpy as np
import scipy.stats
import torch

from torchgpmc.parameters.layout import Layout

FALSE_ALARMS = 1e-3
MAX_STATISTICAL_TESTS = 320
SHARE = FALSE_ALARMS / MAX_STATISTICAL_TESTS


def z_limit(num_comparisons, num_replicates=10**6):
    """Largest |t| a single test lets pass over this many two-sided comparisons of means of this many replicates."""
    return float(scipy.stats.t.isf(SHARE / num_comparisons / 2, num_replicates - 1))


def z_scores(replicates, expected=0.0):
    """t statistics of independent replicates ``(R, ...)`` of quantities whose mean should be ``expected``."""
    replicates = torch.as_tensor(replicates).detach().double().flatten(1)
    error = replicates.std(0) / replicates.shape[0] ** 0.5
    return ((replicates.mean(0) - torch.as_tensor(expected).detach().double().flatten()) / error.clamp_min(1e-300)).numpy()


def worst_excess(replicates, expected=0.0):
    """Largest |t| over its limit: above 1 is an alarm."""
    scores = np.abs(z_scores(replicates, expected))
    return float(scores.max() / z_limit(scores.size, len(replicates)))


def rank_excess(ranks, num_ranks):
    """Alarm level of ranks ``(R, Q)`` that should be uniform on 0..num_ranks-1: chi-square over its limit, worst of Q."""
    ranks = np.asarray(ranks)
    limit = scipy.stats.chi2.isf(SHARE / ranks.shape[1], num_ranks - 1)
    expected = len(ranks) / num_ranks
    counts = np.stack([np.bincount(column, minlength=num_ranks) for column in ranks.T])
    return float((((counts - expected) ** 2 / expected).sum(1)).max() / limit)


def without_jacobian(monkeypatch):
    """The planted error of densities of theta that leave out the Jacobian, in value and derivative alike."""
    evaluate, values_and_log_prior = Layout.evaluate, Layout.raw_values_and_log_prior

    def log_jacobian(layout, theta):
        parts = zip(layout._blocks, theta.split([block.size for block in layout._blocks], -1), strict=True)
        found = [(part, block.interval.log_jacobian(part), block.interval.jacobian_slope(part)) for block, part in parts]
        return torch.cat([value for _, value, _ in found], -1).sum(-1), torch.cat(
            [0 * part + slope for part, _, slope in found], -1
        )

    def planted_evaluate(layout, theta):
        found, (value, slope) = evaluate(layout, theta), log_jacobian(layout, theta)
        return found._replace(log_prior=found.log_prior - value, log_prior_slope=found.log_prior_slope - slope)

    def planted_values_and_log_prior(layout, theta):
        values, log_prior = values_and_log_prior(layout, theta)
        return values, log_prior - log_jacobian(layout, theta)[0]

    monkeypatch.setattr(Layout, "evaluate", planted_evaluate)
    monkeypatch.setattr(Layout, "raw_values_and_log_prior", planted_values_and_log_prior)
