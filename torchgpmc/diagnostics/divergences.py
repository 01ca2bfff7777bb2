"""Whether transitions that diverged speak against the draws."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor

# By these a region that chains cannot enter holds about a fiftieth at most, and moves means by their own Monte Carlo error.
MAX_SHARE_OF_EFFECTIVE = 0.02
_MAX_SCORE = 3.5  # standard deviations of a mean, the largest of some ten quantities


def about_divergences(diverging: Tensor, columns: Iterable[tuple[str, Tensor]], effective: float) -> list[str]:
    """That a region may be missed, where trajectories leave their level set; empty if nothing says so.

    A region of mass m that chains cannot enter is tried about m times an effective draw, each time by a divergence: divergences
    over effective draws bound m. They are forgiven up to a fiftieth, if the draws where they happened are spread like all others:
    that the mean of their normal scores is within a few standard deviations of zero for every quantity.

    Args:
        diverging: which transitions did, ``(C, S)``.
        columns: names and draws ``(C, S)`` of scalar quantities.
        effective: draws of the quantity that has fewest.

    Source: the second criterion is the remedy that Betancourt 2017, section 6.2, names for telling false from true alarms.

    Example:
        >>> import torch
        >>> draws = torch.randn(4, 1000, generator=torch.Generator().manual_seed(0))
        >>> scattered, outer = draws.abs() < 0.002, draws > draws.flatten().sort().values[-6]
        >>> about_divergences(scattered, [("x", draws)], 900.0), len(about_divergences(outer, [("x", draws)], 900.0))
        ([], 1)
    """
    count = int(diverging.sum())
    if not count:
        return []
    words = f"{count} of {diverging.numel()} transitions diverged (stats['diverging'] says which)"
    remedy = "the draws may miss a region; raise target_accept_prob, or use stronger priors."
    if count > MAX_SHARE_OF_EFFECTIVE * effective:
        return [f"{words}, which is many beside {effective:.0f} effective draws: {remedy}"]
    where = diverging.bool().flatten()
    scores = {name: math.sqrt(count) * float(_normal_scores(values.flatten())[where].mean()) for name, values in columns}
    name, score = max(scores.items(), key=lambda item: abs(item[1]), default=("", 0.0))
    if abs(score) <= _MAX_SCORE:
        return []
    return [f"{words}, where '{name}' is {'large' if score > 0 else 'small'}: {remedy}"]


def _normal_scores(values: Tensor) -> Tensor:
    """Ranks of ``(S,)`` on the standard normal scale; ties share their mean rank."""
    _, place, counts = torch.unique(values, return_inverse=True, return_counts=True)
    middle = counts.cumsum(0) - 0.5 * counts.double()
    return torch.special.ndtri(middle / len(values))[place]
