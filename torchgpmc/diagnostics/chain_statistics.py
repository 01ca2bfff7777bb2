"""The estimators of arviz-stats that we use, and its container; on Python 3.10, which it no longer serves, those of ArviZ."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

# Of chains that do not move a variance is zero: what comes out, NaN or infinite, says so without numpy's words.
_in_silence = np.errstate(divide="ignore", invalid="ignore")

if sys.version_info >= (3, 11):
    from arviz_stats.base import array_stats

    @_in_silence
    def ess(chains: np.ndarray, method: str, prob: tuple[float, float] | None = None) -> float:
        """Effective size of ``(C, S)``."""
        return float(array_stats.ess(chains, method=method, prob=prob))

    @_in_silence
    def rhat(chains: np.ndarray) -> float:
        """Rank R-hat of ``(C, S)``."""
        return float(array_stats.rhat(chains, method="rank"))

    @_in_silence
    def rhat_nested(chains: np.ndarray, superchain_ids: Sequence[int]) -> float:
        """Nested R-hat of ``(C, S)``."""
        return float(array_stats.rhat_nested(chains, superchain_ids=np.asarray(superchain_ids), method="rank"))

    def psislw(log_weights: np.ndarray) -> tuple[np.ndarray, float]:
        """Pareto-smoothed log weights, which sum to one, and k-hat."""
        # It takes log likelihoods, which it negates.
        smoothed, khat = array_stats.psislw(-log_weights)
        return smoothed, float(khat)

else:
    import arviz

    @_in_silence
    def ess(chains: np.ndarray, method: str, prob: tuple[float, float] | None = None) -> float:
        """Effective size of ``(C, S)``."""
        return float(arviz.ess(chains, method=method, prob=prob))

    @_in_silence
    def rhat(chains: np.ndarray) -> float:
        """Rank R-hat of ``(C, S)``."""
        return float(arviz.rhat(chains, method="rank"))

    def rhat_nested(chains: np.ndarray, superchain_ids: Sequence[int]) -> float:
        """Not to be had."""
        raise NotImplementedError("nested R-hat comes from arviz-stats, which needs Python 3.11. Expected Python 3.11 or later.")

    def psislw(log_weights: np.ndarray) -> tuple[np.ndarray, float]:
        """Pareto-smoothed log weights, which sum to one, and k-hat."""
        # It works in the memory of what it is given, which may be a caller's tensor.
        smoothed, khat = arviz.psislw(log_weights.copy())
        return smoothed, float(khat)


def as_datatree(groups: Mapping[str, Mapping[str, Any]]) -> Any:
    """An ArviZ ``DataTree`` of arrays ``(C, S, ...)``, by group and name; needs the extra ``arviz``."""
    try:
        from arviz_base import from_dict
    except ImportError as error:
        raise ImportError("to_arviz needs arviz-base. Install it with: pip install 'torchgpmc[arviz]'") from error
    return from_dict(groups)
