"""Gauss-Hermite expectations over scalar normal variables."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

DEFAULT_NODES = 20


@lru_cache(maxsize=32)
def gauss_hermite(num_nodes: int, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    """Nodes and weights ``(num_nodes,)`` such that sum w g(x) is E g(x), x standard normal.

    Example:
        >>> import torch
        >>> x, w = gauss_hermite(20, torch.float64, torch.device("cpu"))
        >>> round(float((w * x**4).sum()), 10)
        3.0
    """
    nodes, weights = np.polynomial.hermite_e.hermegauss(num_nodes)
    weights = weights / weights.sum()
    return torch.as_tensor(nodes, dtype=dtype, device=device), torch.as_tensor(weights, dtype=dtype, device=device)


def evaluation_points(mean: Tensor, variance: Tensor, num_nodes: int = DEFAULT_NODES) -> tuple[Tensor, Tensor]:
    """Points ``(num_nodes, ...)`` and weights for expectations under N(mean, variance), both of shape ``...``."""
    nodes, weights = gauss_hermite(num_nodes, mean.dtype, mean.device)
    shape = (-1,) + (1,) * mean.dim()
    return mean + variance.sqrt() * nodes.view(shape), weights.view(shape)


def expectation(function: Callable[[Tensor], Tensor], mean: Tensor, variance: Tensor, num_nodes: int = DEFAULT_NODES) -> Tensor:
    """E function(f), f ~ N(mean, variance), elementwise.

    Args:
        function: maps ``(num_nodes, ...)`` to the same shape.
        mean: any shape ``...``.
        variance: the same shape, positive; a variance, not a standard deviation.
        num_nodes: order of the rule.
    """
    points, weights = evaluation_points(mean, variance, num_nodes)
    return (weights * function(points)).sum(0)


def log_expectation(
    log_function: Callable[[Tensor], Tensor], mean: Tensor, variance: Tensor, num_nodes: int = DEFAULT_NODES
) -> Tensor:
    """Log of E exp(log_function(f)), f ~ N(mean, variance), without underflow; arguments as in :func:`expectation`."""
    points, weights = evaluation_points(mean, variance, num_nodes)
    return torch.logsumexp(log_function(points) + weights.log(), 0)


@lru_cache(maxsize=32)
def normal_points(dimension: int, dtype: torch.dtype, device: torch.device, num_points: int = 256) -> Tensor:
    """Quasi-random standard normal points ``(num_points, dimension)``: a Sobol sequence, scrambled with a fixed seed."""
    uniform = torch.quasirandom.SobolEngine(dimension, scramble=True, seed=0).draw(num_points, dtype=torch.float64)
    return torch.special.ndtri(uniform.clamp(1e-12, 1 - 1e-12)).to(dtype=dtype, device=device)
