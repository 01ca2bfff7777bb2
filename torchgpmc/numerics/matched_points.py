"""Few points for means under normal densities, of a smooth function and roughly."""

from __future__ import annotations

import torch
from torch import Tensor

from torchgpmc.numerics.quadrature import normal_points


def matched_points(dimension: int, num_pairs: int, like: Tensor) -> Tensor:
    """Points and their mirror images ``(2 num_pairs, dimension)`` whose covariance is that of a standard normal density.

    Of more dimensions than ``num_pairs`` there are as many pairs as dimensions, since fewer span fewer.

    Example:
        >>> points = matched_points(2, 4, torch.zeros(()).double())
        >>> torch.allclose(points.mT @ points / 8, torch.eye(2).double())
        True
    """
    points = normal_points(dimension, torch.float64, like.device, max(num_pairs, dimension))
    points = torch.cat([points, -points])
    return (points @ torch.linalg.inv(torch.linalg.cholesky(points.mT @ points / len(points))).mT).to(like)
