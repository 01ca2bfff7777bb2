"""Checks of what users pass, and words to them: expected, got, remedy."""

from __future__ import annotations

import sys
import warnings
from numbers import Integral, Real
from pathlib import Path
from typing import Any

_PACKAGE = str(Path(__file__).parent)


class SamplingWarning(UserWarning):
    """The draws may not represent the posterior; the message says why and what to do.

    Example:
        >>> import warnings, torch, torchgpmc as tg
        >>> from gpytorch.kernels import RBFKernel
        >>> from gpytorch.priors import GammaPrior
        >>> x, kernel = torch.linspace(0, 1, 8), RBFKernel(lengthscale_prior=GammaPrior(2.0, 4.0))
        >>> model = tg.GP(x, (x > 0.5).int(), kernel, tg.likelihoods.Bernoulli())
        >>> with warnings.catch_warnings():
        ...     warnings.simplefilter("error", tg.SamplingWarning)  # for a script that is to stop there
        ...     tg.sample(model, tg.AMIS(), num_samples=20, progress=False)
        Traceback (most recent call last):
            ...
        torchgpmc.checks.SamplingWarning: 20 weighted draws are too few to judge their weights: draw at least 25.
    """


class NotOfferedError(AttributeError, ValueError):
    """An attribute that others of the kind have, for instance probabilities of a regression; ``hasattr`` says ``False``.

    Example:
        >>> import torch, torchgpmc as tg
        >>> from gpytorch.kernels import RBFKernel
        >>> model = tg.GP([0.0, 1.0], [0.0, 3.0], RBFKernel().requires_grad_(False), tg.likelihoods.Poisson())
        >>> prediction = tg.approximations.predict(model, torch.zeros(1, 0).double(), tg.Laplace(), [0.5])
        >>> hasattr(prediction, "probs"), hasattr(prediction, "intensity")
        (False, True)
    """


def warn(message: str, category: type[Warning] = SamplingWarning) -> None:
    """Warns whoever called the package, at their line, however deep inside it this was found out."""
    level, frame = 2, sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_PACKAGE):
        frame, level = frame.f_back, level + 1
    warnings.warn(message, category, stacklevel=level)


def described(value: Any) -> str:
    """``value`` as it prints, or its kind where that would fill the screen.

    Example:
        >>> described("nuts"), described([0.5] * 100)
        ("'nuts'", 'a list')
    """
    shown = repr(value)
    return shown if isinstance(value, type) or (len(shown) <= 80 and "\n" not in shown) else f"a {type(value).__name__}"


def is_count(value: Any, least: int = 1) -> bool:
    """Whether ``value`` is a whole number of at least ``least``; ``True`` is no number."""
    return isinstance(value, Integral) and not isinstance(value, bool) and int(value) >= least


def check_count(name: str, value: Any, least: int = 1, example: str = "") -> None:
    """Raises a ``ValueError`` unless ``value`` is a whole number of at least ``least``.

    Example:
        >>> check_count("num_samples", True)
        Traceback (most recent call last):
            ...
        ValueError: num_samples is True. Expected a whole number of at least 1.
    """
    if not is_count(value, least):
        raise ValueError(f"{name} is {value!r}. Expected a whole number of at least {least}{example}.")


def check_flag(name: str, value: Any) -> None:
    """Raises a ``ValueError`` unless ``value`` is ``True`` or ``False``.

    Example:
        >>> check_flag("diagonal", 1)
        Traceback (most recent call last):
            ...
        ValueError: diagonal is 1. Expected True or False.
    """
    if not isinstance(value, bool):
        raise ValueError(f"{name} is {value!r}. Expected True or False.")


def check_object(name: str, value: Any, method: str, expected: str) -> None:
    """Raises a ``TypeError`` unless ``value`` has the ``method`` that makes it fit, and is an object: a class lacks its brackets.

    Example:
        >>> check_object("path", Path, "exists", "a path, for instance Path('run.pt')")
        Traceback (most recent call last):
            ...
        TypeError: path is <class 'pathlib.Path'>. Expected a path, for instance Path('run.pt').
    """
    if isinstance(value, type) or not hasattr(value, method):
        raise TypeError(f"{name} is {value!r}. Expected {expected}.")


def is_number(value: Any) -> bool:
    """Whether ``value`` is a whole or real number; ``True`` is none."""
    return isinstance(value, Real) and not isinstance(value, bool)


def check_positive(name: str, value: Any, low: float = 0.0, high: float = float("inf")) -> None:
    """Raises a ``ValueError`` unless ``value`` is a number strictly between ``low`` and ``high``."""
    if not is_number(value) or not low < value < high:
        limit = f" and below {high:g}" if high < float("inf") else ""
        raise ValueError(f"{name} is {value!r}. Expected a number above {low:g}{limit}.")
