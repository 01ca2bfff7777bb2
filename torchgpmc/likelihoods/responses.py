"""How fast genes are transcribed at a concentration of their transcription factor."""

from __future__ import annotations

import torch
from torch import Tensor


class Response:
    """g, how fast a gene is transcribed at a log concentration; a subclass may be one's own.

    ``has_michaelis_constant``: whether g has a parameter gamma, one a gene, above zero.

    Example:
        >>> import torch
        >>> class Cooperative(Response):  # two molecules bind together: c^2 / (gamma^2 + c^2)
        ...     has_michaelis_constant = True
        ...     def __call__(self, log_concentration, log_michaelis):
        ...         return torch.sigmoid(2 * (log_concentration - log_michaelis))
        >>> Cooperative()(torch.tensor([2.0]).log(), torch.zeros(1))
        tensor([0.8000])
    """

    has_michaelis_constant = False
    # The power a of g(b c; b gamma) = b^a g(c; gamma), g(b c) = b^a g(c) without gamma, for all b > 0; None where there is none.
    homogeneity: float | None = None

    def __call__(self, log_concentration: Tensor, log_michaelis: Tensor) -> Tensor:
        """g and nothing else, elementwise; ``log_michaelis`` is log gamma, or zero for a response without one."""
        raise NotImplementedError(f"{type(self).__name__} must define __call__(log_concentration, log_michaelis)")

    def slope(self, rate: Tensor, log_concentration: Tensor, log_michaelis: Tensor) -> Tensor | None:
        """The derivative of g in the log concentration, ``rate`` being g there; ``None`` to have it by autograd."""
        return None


class Linear(Response):
    """g = c, c being the concentration (Barenco et al. 2006).

    Example:
        >>> import torch
        >>> Linear()(torch.zeros(1), torch.zeros(1))
        tensor([1.])
    """

    homogeneity = 1.0

    def __call__(self, log_concentration: Tensor, log_michaelis: Tensor) -> Tensor:
        return log_concentration.exp()

    def slope(self, rate: Tensor, log_concentration: Tensor, log_michaelis: Tensor) -> Tensor:
        return rate


class Activation(Response):
    """g = c / (gamma + c), which saturates (Michaelis & Menten; paper C, eq. 1.22).

    Example:
        >>> import torch
        >>> Activation()(torch.zeros(1), torch.zeros(1))
        tensor([0.5000])
    """

    has_michaelis_constant = True
    homogeneity = 0.0

    def __call__(self, log_concentration: Tensor, log_michaelis: Tensor) -> Tensor:
        return torch.sigmoid(log_concentration - log_michaelis)

    def slope(self, rate: Tensor, log_concentration: Tensor, log_michaelis: Tensor) -> Tensor:
        return rate * (1 - rate)


class Repression(Response):
    """g = 1 / (gamma + c): the more of the factor, the less expression (paper C, eq. 1.23).

    Example:
        >>> import torch
        >>> Repression()(torch.zeros(1), torch.zeros(1))
        tensor([0.5000])
    """

    has_michaelis_constant = True
    homogeneity = -1.0

    def __call__(self, log_concentration: Tensor, log_michaelis: Tensor) -> Tensor:
        return torch.sigmoid(log_michaelis - log_concentration) * (-log_michaelis).exp()

    def slope(self, rate: Tensor, log_concentration: Tensor, log_michaelis: Tensor) -> Tensor:
        return -rate * torch.sigmoid(log_concentration - log_michaelis)
