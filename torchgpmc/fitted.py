"""What a likelihood expects at the data, draw by draw."""

from __future__ import annotations

import torch
from torch import Tensor

from torchgpmc.checks import check_positive


class Fitted:
    """The expected response at the data under each draw, noise left out: how a model's mean curve fits, and how well it is known.

    Made by :meth:`Posterior.fitted`.

    Args:
        draws: ``(chains, draws, *shape)``, the shape being that of the targets; classes last where the response is a class.
        log_weights: of the draws ``(chains * draws,)``, unnormalised.

    Attributes:
        draws: as above.

    Example:
        >>> import torch
        >>> fitted = Fitted(torch.arange(8.0).view(2, 2, 2), torch.zeros(4))
        >>> fitted.mean, fitted.quantile(0.75)
        (tensor([3., 4.]), tensor([4., 5.]))
    """

    def __init__(self, draws: Tensor, log_weights: Tensor):
        self.draws = draws
        self._weights = torch.softmax(log_weights.to(draws), 0)

    @property
    def mean(self) -> Tensor:
        """Posterior mean, ``shape``."""
        weighing = self._weights > 0  # of the others a response may be infinite
        return torch.tensordot(self._weights[weighing], self.draws.flatten(0, 1)[weighing], 1)

    def quantile(self, q: float) -> Tensor:
        """Posterior quantiles, each the smallest draw up to which lies a share ``q`` of the weight: ``shape``.

        Raises:
            ValueError: ``q`` is not between 0 and 1.
        """
        check_positive("q", q, 0.0, 1.0)
        values, order = self.draws.flatten(0, 1).sort(0)
        below = (self._weights[order].cumsum(0) < q - 1e-9).sum(0, keepdim=True)  # room for rounding of the sum
        return values.gather(0, below.clamp_max(len(values) - 1)).squeeze(0)
