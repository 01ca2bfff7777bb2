"""Regression with Gaussian noise of known variances."""

from __future__ import annotations

import copy
from typing import Any

from gpytorch.likelihoods import FixedNoiseGaussianLikelihood
from gpytorch.likelihoods.noise_models import FixedGaussianNoise
from torch import Tensor

from torchgpmc.likelihoods.gaussian import GaussianFormulas


class FixedNoiseGaussian(GaussianFormulas, FixedNoiseGaussianLikelihood):
    """y_n = f_n + noise_n, noise_n ~ N(0, ``noise[n]``); gpytorch's ``FixedNoiseGaussianLikelihood`` at C settings.

    Takes gpytorch's arguments: ``noise`` ``(N,)``, variances, and ``learn_additional_noise`` with a ``noise_prior``. The noise at
    test points is not known: predictions have ``latent_mean`` and ``latent_variance``, and no response.

    Example:
        >>> import torch
        >>> likelihood = FixedNoiseGaussian(torch.tensor([1.0, 4.0]))
        >>> likelihood.log_prob(torch.zeros(1, 2), torch.zeros(2)).exp()
        tensor([0.0796])
    """

    needs_exposure = True  # test points have a noise of their own, and nobody to give it

    def validate_targets(self, targets: Tensor) -> Tensor:
        known = self.noise_covar.noise.shape
        if known != targets.shape[-1:]:
            raise ValueError(
                f"noise has shape {tuple(known)} and there are {targets.shape[-1]} targets. Expected a variance a target."
            )
        return targets

    def for_data(self, rows: slice | Tensor) -> FixedNoiseGaussian:
        part = copy.copy(self)
        part._modules = {**self._modules, "noise_covar": FixedGaussianNoise(self.noise_covar.noise[rows])}
        return part

    def at_test_points(self, exposure: Tensor | None = None) -> Any:
        raise ValueError(
            "the noise of every datum is given, and that at test points is not known. Expected prediction.latent_mean and "
            "prediction.latent_variance, to which you add the noise that applies there."
        )
