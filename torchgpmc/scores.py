"""Scores of probabilistic binary classifiers, among them paper A's capacity under abstention (section 5.3)."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from sklearn.metrics import brier_score_loss, roc_auc_score
from torch import Tensor

from torchgpmc.checks import check_count


class AbstentionCurves(NamedTuple):
    """Accuracy and AUC of the answers given, as the threshold for giving one rises from 0 to 0.5; each ``(51,)``.

    NaN where no answer is left, or, for the AUC, answers of one class alone.

    Example:
        >>> import torch
        >>> curves = abstention_curves(torch.tensor([0.9, 0.6, 0.2]), torch.tensor([1, 0, 0]))
        >>> curves.threshold[[0, 20]], curves.accuracy[[0, 20]]  # the wrong answer, of 0.6, is the first that is not given
        (tensor([0.0000, 0.2000]), tensor([0.6667, 1.0000]))
    """

    threshold: Tensor
    abstention: Tensor  # share of test data within ``threshold`` of probability one half
    accuracy: Tensor
    auc: Tensor


def _checked(probs: Any, targets: Any) -> tuple[np.ndarray, np.ndarray]:
    p, y = np.asarray(torch.as_tensor(probs).cpu(), float), np.asarray(torch.as_tensor(targets).cpu(), float)
    if p.ndim != 1 or p.shape != y.shape or not len(p):
        raise ValueError(f"probs has shape {p.shape} and targets {y.shape}. Expected both (T,), one entry a test point.")
    if not ((p >= 0) & (p <= 1)).all():
        raise ValueError("probs holds values outside [0, 1]. Expected the probability of class 1, for instance prediction.probs.")
    if np.isin(y, (-1, 1)).all():
        y = (y + 1) / 2
    if not np.isin(y, (0, 1)).all():
        raise ValueError(f"targets holds {np.unique(y)[:5].tolist()}. Expected labels 0 and 1 (or -1 and +1).")
    return p, y


def abstention_curves(probs: Tensor, targets: Tensor) -> AbstentionCurves:
    """Accuracy and AUC against the degree of abstention (paper A, section 5.3).

    Args:
        probs: probability of class 1 at T test points ``(T,)``.
        targets: labels 0/1 or -1/+1 ``(T,)``.

    Raises:
        ValueError: shapes that differ, probabilities outside [0, 1], other labels.

    Example:
        >>> import torch
        >>> curves = abstention_curves(torch.tensor([0.9, 0.6, 0.2]), torch.tensor([1, 0, 0]))
        >>> curves.abstention[[0, 20, 35]]
        tensor([0.0000, 0.3333, 0.6667])
    """
    p, y = _checked(probs, targets)
    thresholds = np.arange(51) / 100
    rows = [_answered(p, y, threshold) for threshold in thresholds]
    columns = (torch.tensor(column) for column in zip(*rows, strict=True))
    return AbstentionCurves(torch.tensor(thresholds, dtype=torch.get_default_dtype()), *columns)


def _answered(p: np.ndarray, y: np.ndarray, threshold: float) -> tuple[float, float, float]:
    given = ~((0.5 - threshold < p) & (p < 0.5 + threshold))
    if not given.any():
        return 1.0, float("nan"), float("nan")
    answers, truth = p[given], y[given]
    both = 0 < truth.sum() < len(truth)
    auc = float(roc_auc_score(truth, answers)) if both else float("nan")
    return 1 - float(given.mean()), float(((answers > 0.5) == truth).mean()), auc


def _area(abstention: Tensor, score: Tensor) -> float:
    """Area under a curve over its range of abstention, as a mean score."""
    usable = torch.isfinite(score)
    x, height = abstention[usable].double(), score[usable].double()
    if len(x) == 0:
        return float("nan")
    width = float(x[-1] - x[0])
    return float(height.mean()) if width == 0 else float(torch.trapezoid(height, x)) / width


def capacity_accuracy(probs: Tensor, targets: Tensor) -> float:
    """Area under accuracy against abstention, divided by the largest abstention (paper A, section 5.3); 1 is perfect.

    Args:
        probs: probability of class 1 at T test points ``(T,)``.
        targets: labels 0/1 or -1/+1 ``(T,)``.

    Raises:
        ValueError: shapes that differ, probabilities outside [0, 1], other labels.

    Example:
        >>> import torch
        >>> capacity_accuracy(torch.tensor([0.1, 0.9, 0.8]), torch.tensor([0, 1, 1]))
        1.0
    """
    curves = abstention_curves(probs, targets)
    return _area(curves.abstention, curves.accuracy)


def capacity_auc(probs: Tensor, targets: Tensor) -> float:
    """Area under AUC against abstention, divided by the largest abstention (paper A, section 5.3); 1 is perfect.

    Args:
        probs: probability of class 1 at T test points ``(T,)``.
        targets: labels 0/1 or -1/+1 ``(T,)``.

    Raises:
        ValueError: shapes that differ, probabilities outside [0, 1], other labels.

    Example:
        >>> import torch
        >>> capacity_auc(torch.tensor([0.1, 0.9, 0.8]), torch.tensor([0, 1, 1]))
        1.0
    """
    curves = abstention_curves(probs, targets)
    return _area(curves.abstention, curves.auc)


def brier(probs: Tensor, targets: Tensor) -> float:
    r"""Mean squared error of the probabilities, :math:`\frac{1}{T} \sum_t (p_t - y_t)^2`; smaller is better (Brier 1950).

    Args:
        probs: probability of class 1 at T test points ``(T,)``.
        targets: labels 0/1 or -1/+1 ``(T,)``.

    Raises:
        ValueError: shapes that differ, probabilities outside [0, 1], other labels.

    Example:
        >>> import torch
        >>> round(brier(torch.tensor([0.0, 1.0, 0.5]), torch.tensor([0, 1, 1])), 4)
        0.0833
    """
    p, y = _checked(probs, targets)
    return float(brier_score_loss(y, p))


def log_predictive_density(probs: Tensor, targets: Tensor) -> float:
    """Mean log probability of the labels, not floored; larger is better, and -inf where a label had probability 0.

    Args:
        probs: probability of class 1 at T test points ``(T,)``.
        targets: labels 0/1 or -1/+1 ``(T,)``.

    Raises:
        ValueError: shapes that differ, probabilities outside [0, 1], other labels.

    Example:
        >>> import torch
        >>> round(log_predictive_density(torch.tensor([0.5, 0.5]), torch.tensor([0, 1])), 4)
        -0.6931
    """
    p, y = _checked(probs, targets)
    with np.errstate(divide="ignore"):
        return float(np.log(np.where(y == 1, p, 1 - p)).mean())


def expected_calibration_error(probs: Tensor, targets: Tensor, num_bins: int = 10) -> float:
    """Mean distance between the probability of class 1 and its frequency, over equal bins weighted by their counts.

    Args:
        probs: probability of class 1 at T test points ``(T,)``.
        targets: labels 0/1 or -1/+1 ``(T,)``.
        num_bins: of equal width.

    Raises:
        ValueError: shapes that differ, probabilities outside [0, 1], other labels, ``num_bins`` below 1.

    Example:
        >>> import torch
        >>> round(expected_calibration_error(torch.tensor([0.25, 0.25, 0.25, 0.25]), torch.tensor([0, 0, 0, 1])), 6)
        0.0
    """
    check_count("num_bins", num_bins)
    p, y = _checked(probs, targets)
    index = np.minimum((p * num_bins).astype(int), num_bins - 1)
    gaps = [abs(p[index == bin].mean() - y[index == bin].mean()) * (index == bin).mean() for bin in np.unique(index)]
    return float(np.sum(gaps))
