"""Multi-class classification with one latent function a class, or mixtures of several."""

from __future__ import annotations

import torch
from gpytorch.likelihoods import SoftmaxLikelihood
from torch import Tensor
from torch.distributions import Categorical

from torchgpmc.likelihoods.base import Curvature, Factorised, Moments, require_targets
from torchgpmc.quadrature import normal_points
from torchgpmc.random import log_uniform


class Softmax(Factorised, SoftmaxLikelihood):
    r"""Classes 0..K-1 with :math:`p(y = k | f) \propto \exp((W f)_k)`; gpytorch's ``SoftmaxLikelihood`` at C settings.

    Takes gpytorch's arguments; ``mixing_weights=False`` gives one latent function a class. Unlike gpytorch's it never guesses
    from the shape of f which dimension holds the data. Expectations are over 256 quasi-random points.

    Example:
        >>> import torch
        >>> Softmax(num_classes=3, mixing_weights=False).log_prob(torch.zeros(1, 2, 3), torch.tensor([0.0, 2.0]))
        tensor([-2.1972])
    """

    is_classification = True
    is_log_concave = True

    @property
    def num_latents(self) -> int:  # type: ignore[override]  # K is a setting of this likelihood
        """K, the number of latent functions."""
        return self.num_features

    def _log_probabilities(self, f: Tensor) -> Tensor:
        mixed = f if self.mixing_weights is None else f @ self.mixing_weights.mT
        return torch.log_softmax(mixed, -1)

    def forward(self, function_samples: Tensor) -> Categorical:  # type: ignore[override]  # unused extra arguments
        return Categorical(logits=self._log_probabilities(function_samples), validate_args=False)

    def validate_targets(self, targets: Tensor) -> Tensor:
        ok = (targets >= 0) & (targets < self.num_classes) & (targets == targets.round())
        remedy = "Encode the classes from 0, or set num_classes."
        require_targets(ok, targets, f"classes 0 to {self.num_classes - 1}", remedy)
        return targets

    def pointwise_log_prob(self, f: Tensor, targets: Tensor) -> Tensor:
        logs = self._log_probabilities(f)
        index = targets.long().expand(logs.shape[:-1]).unsqueeze(-1)
        return logs.gather(-1, index).squeeze(-1)

    def curvature(self, f: Tensor, targets: Tensor) -> Curvature:
        """In closed form (Rasmussen & Williams 2006, eqs 3.33-3.38)."""
        logs = self._log_probabilities(f)
        probabilities = logs.exp()
        index = targets.long().expand(logs.shape[:-1]).unsqueeze(-1)
        first = torch.zeros_like(logs).scatter(-1, index, 1.0) - probabilities
        second = probabilities.unsqueeze(-1) * probabilities.unsqueeze(-2) - torch.diag_embed(probabilities)
        if self.mixing_weights is not None:
            weights = self.mixing_weights
            first, second = first @ weights, weights.mT.unsqueeze(-3) @ second @ weights.unsqueeze(-3)
        return Curvature(logs.gather(-1, index).squeeze(-1), first, second)

    def _points(self, mean: Tensor, variance: Tensor) -> Tensor:
        points = normal_points(mean.shape[-1], mean.dtype, mean.device)
        return mean + variance.sqrt() * points.view(len(points), *[1] * (mean.dim() - 1), -1)

    def expected_log_likelihood(self, mean: Tensor, variance: Tensor, targets: Tensor) -> Tensor:
        return self.pointwise_log_prob(self._points(mean, variance), targets).mean(0)

    def predictive_log_prob(self, mean: Tensor, variance: Tensor, targets: Tensor) -> Tensor:
        logs = self.pointwise_log_prob(self._points(mean, variance), targets)
        return torch.logsumexp(logs, 0) - torch.log(torch.tensor(float(len(logs))))

    def response_moments(self, mean: Tensor, variance: Tensor) -> Moments:
        """Class probabilities ``(..., num_classes)`` and their Bernoulli variances; mean and variance are ``(..., K)``."""
        probabilities = self._log_probabilities(self._points(mean, variance)).exp().mean(0)
        return Moments(probabilities, probabilities * (1 - probabilities))

    def sample(self, f: Tensor, generator: torch.Generator) -> Tensor:
        logs = self._log_probabilities(f)
        gumbel = -torch.log(-log_uniform(logs.shape, logs, generator))
        return (logs + gumbel).argmax(-1).to(f.dtype)
