"""What the likelihoods of counts share: an exposure, and whole numbers for targets."""

from __future__ import annotations

import copy
import math
from typing import Any

from gpytorch.likelihoods import Likelihood
from torch import Tensor

from torchgpmc.arrays import as_tensor
from torchgpmc.likelihoods.likelihood import Factorised
from torchgpmc.likelihoods.log_likelihood import require_targets


class Counts(Factorised, Likelihood):
    """Counts whose mean is ``exposure * exp(f)``: exp(f) is the rate, or intensity, per unit of exposure.

    Args:
        exposure: what each count was taken over (the area of a cell, years at risk): a number for all data alike, which test points
            then share, or a tensor ``(N,)``, when :meth:`torchgpmc.Posterior.predict` has to be told that of the test points.

    Raises:
        ValueError: an exposure that is not positive, or neither a number nor ``(N,)``.
    """

    has_intensity = True
    exposure: Tensor

    def __init__(self, exposure: float | Tensor = 1.0):
        super().__init__()
        self.register_buffer("exposure", checked_exposure(exposure))

    @property
    def needs_exposure(self) -> bool:  # type: ignore[override]  # as the data's exposures are, or are not, all one
        """Whether every datum has an exposure of its own."""
        return self.exposure.dim() > 0

    def log_mean(self, f: Tensor) -> Tensor:
        """f + log(exposure), the log of the mean count."""
        return f + self.exposure.log()

    def validate_targets(self, targets: Tensor) -> Tensor:
        ok = (targets >= 0) & (targets == targets.round())
        remedy = f"{type(self).__name__} models whole numbers; for real data use Gaussian or StudentT."
        require_targets(ok, targets, "counts 0, 1, 2, ...", remedy)
        if self.needs_exposure and self.exposure.shape != targets.shape[-1:]:
            raise ValueError(
                f"exposure has shape {tuple(self.exposure.shape)} and there are {targets.shape[-1]} counts. Expected one exposure "
                f"a count, or a single number."
            )
        return targets

    def for_data(self, rows: slice | Tensor) -> Counts:
        return self.with_exposure(self.exposure[rows]) if self.needs_exposure else self

    def at_test_points(self, exposure: Tensor | None = None) -> Counts:
        if exposure is not None:
            return self.with_exposure(exposure)
        if self.needs_exposure:
            raise ValueError(
                "every datum has an exposure of its own, so counts at test points need theirs. Expected "
                "posterior.predict(x, exposure=...), a number or one a test point; prediction.intensity needs none."
            )
        return self

    def with_exposure(self, exposure: Tensor) -> Counts:
        """The same likelihood of counts with another exposure; parameters are shared."""
        other: Counts = copy.copy(self)
        other._buffers = {**self._buffers, "exposure": exposure}
        return other


def checked_exposure(exposure: Any) -> Tensor:
    """A number or ``(N,)``, as a tensor; plain numbers keep all their digits.

    Raises:
        TypeError: not numbers.
        ValueError: not positive and finite, or of another shape.
    """
    found = as_tensor("exposure", exposure).detach().clone()
    found = found if found.is_floating_point() else found.double()
    if found.dim() > 1:
        raise ValueError(f"exposure has shape {tuple(found.shape)}. Expected a number, or a tensor of shape (N,), one a count.")
    if not bool(((found > 0) & (found < math.inf)).all()):
        wrong = found[~((found > 0) & (found < math.inf))].unique()[:5].tolist()
        raise ValueError(
            f"exposure holds {wrong}. Expected positive, finite numbers; leave out counts that were taken over nothing."
        )
    return found
