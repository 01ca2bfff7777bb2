"""Where to put inducing points."""

from __future__ import annotations

import torch
from numpy.typing import ArrayLike
from sklearn.cluster import KMeans
from torch import Tensor

from torchgpmc.arrays import as_tensor
from torchgpmc.checks import is_count
from torchgpmc.models.validation import check_inputs


def kmeans_inducing_points(train_x: Tensor | ArrayLike, num_inducing: int, *, seed: int = 0) -> Tensor:
    """Centres of ``num_inducing`` clusters of the inputs, by scikit-learn's k-means.

    Args:
        train_x: inputs ``(N, D)``, or ``(N,)``; scale the columns first, as k-means sees Euclidean distances.
        num_inducing: M, at least 1 and at most the number of distinct rows.
        seed: of the k-means++ start.

    Returns:
        Inducing points ``(M, D)`` with the dtype and device of ``train_x``; of whole numbers, in double precision.

    Raises:
        ValueError: ``num_inducing`` out of range, or inputs that :class:`GP` would refuse.

    Example:
        >>> import torch
        >>> kmeans_inducing_points(torch.tensor([0.0, 0.1, 1.0, 1.1]), 2).sort(0).values
        tensor([[0.0500],
                [1.0500]])
    """
    given = as_tensor("train_x", train_x)
    x = check_inputs("train_x", given, torch.float64)
    distinct = len(torch.unique(x, dim=0))
    if not (is_count(num_inducing) and num_inducing <= distinct):
        raise ValueError(
            f"num_inducing is {num_inducing!r} and train_x has {distinct} distinct rows. "
            f"Expected a whole number from 1 to {distinct}."
        )
    centres = KMeans(num_inducing, n_init=4, random_state=seed).fit(x.cpu().numpy()).cluster_centers_
    return torch.as_tensor(centres).to(given.device, given.dtype if given.is_floating_point() else torch.float64)
