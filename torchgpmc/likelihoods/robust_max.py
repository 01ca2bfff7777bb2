"""Multi-class classification by the largest latent function, a small share of labels being wrong."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from gpytorch.constraints import Interval
from gpytorch.likelihoods import Likelihood
from gpytorch.priors import Prior
from torch import Tensor
from torch.distributions import Categorical

from torchgpmc.checks import check_count, check_positive
from torchgpmc.likelihoods.largest import QUICK, probabilities_of_largest, probability_and_slopes, probability_of_largest
from torchgpmc.likelihoods.likelihood import Factorised, Moments
from torchgpmc.likelihoods.log_likelihood import require_classes
from torchgpmc.likelihoods.slopes import ExpectedSlopes
from torchgpmc.numerics.random import uniform
from torchgpmc.priors import register_prior_of


class RobustMax(Factorised, Likelihood):
    r"""Classes 0..K-1: the label is the largest of K latent functions with probability 1 - epsilon, else any other.

    .. math:: E \log p(y | f) = p \log(1 - \epsilon) + (1 - p) \log(\epsilon / (K - 1)), \quad p = P(f_y \text{ is the largest})

    For :class:`SparseGP`, whose density holds these expectations. log p(y | f) itself is a step in f, so of a full GP only methods
    without gradients take it. The expectation is as smooth as f given the inducing points is uncertain: where these leave a
    thousandth of f's deviation at the data, it is all but a step, and chains take short steps or diverge. Fewer inducing
    points leave more: of 750 points in the plane at lengthscale 1, ten leave a fifth, fifty 0.004. So does a nugget, added to the
    kernel: :class:`torchgpmc.kernels.White`.

    Args:
        num_classes: K, at least 2.
        epsilon: the share of labels that say nothing of f, fixed unless ``epsilon_prior`` is given.
        epsilon_prior: a gpytorch prior on (0, 1), to sample epsilon.

    Raises:
        ValueError: ``num_classes`` below 2, or an epsilon outside (0, 1).

    Source:
        Hensman, Matthews, Filippone & Ghahramani 2015, section 5.3.

    Example:
        >>> import torch
        >>> likelihood = RobustMax(num_classes=3, epsilon=0.1).float()
        >>> likelihood.log_prob(torch.tensor([[[2.0, 1.0, 0.0]] * 2]), torch.tensor([0.0, 1.0])).exp()  # 0.9 times 0.05
        tensor([0.0450])
    """

    is_classification = True
    is_ordered = False
    is_smooth = False

    def __init__(self, num_classes: int, epsilon: float = 1e-3, *, epsilon_prior: Prior | None = None):
        super().__init__()
        check_count("num_classes", num_classes, 2)
        check_positive("epsilon", epsilon, 0.0, 1.0)
        self.num_classes = num_classes
        self.register_parameter("raw_epsilon", torch.nn.Parameter(torch.zeros(1, dtype=torch.float64)))
        self.register_constraint("raw_epsilon", Interval(0.0, 1.0))
        self.epsilon = epsilon
        if epsilon_prior is None:
            self.raw_epsilon.requires_grad_(False)
        else:
            register_prior_of(self, "epsilon", epsilon_prior)

    @property
    def num_latents(self) -> int:  # type: ignore[override]  # K is a setting of this likelihood
        """K, one latent function a class."""
        return self.num_classes

    @property
    def epsilon(self) -> Tensor:
        """The share of labels that say nothing of f."""
        return self.raw_epsilon_constraint.transform(self.raw_epsilon)

    @epsilon.setter
    def epsilon(self, value: float | Tensor) -> None:
        value = torch.as_tensor(value, dtype=self.raw_epsilon.dtype, device=self.raw_epsilon.device).view(1)
        self.initialize(raw_epsilon=self.raw_epsilon_constraint.inverse_transform(value))

    def _log_others(self) -> Tensor:
        """log(epsilon / (K - 1))."""
        return self.epsilon.log() - math.log(self.num_classes - 1)

    def _probabilities(self, largest: Tensor) -> Tensor:
        """Of labels ``(..., K)``, from the probabilities that each function is the largest."""
        epsilon = self.epsilon.unsqueeze(-1)
        return largest * (1 - epsilon) + (1 - largest) * epsilon / (self.num_classes - 1)

    def forward(self, function_samples: Tensor) -> Categorical:
        largest = torch.nn.functional.one_hot(function_samples.argmax(-1), self.num_classes).to(function_samples.dtype)
        return Categorical(probs=self._probabilities(largest), validate_args=False)

    def validate_targets(self, targets: Tensor) -> Tensor:
        require_classes(targets, self.num_classes, "classes", "num_classes")
        return targets

    def pointwise_log_prob(self, f: Tensor, targets: Tensor) -> Tensor:
        return torch.where(f.argmax(-1) == targets.long(), torch.log1p(-self.epsilon), self._log_others())

    def log_prob_and_slope(self, f: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """The slope is zero wherever there is one."""
        return self.log_prob(f, targets), torch.zeros_like(f)

    def expected_log_likelihood(self, mean: Tensor, variance: Tensor, targets: Tensor) -> Tensor:
        """By :func:`largest.probability_of_largest`; mean and variance are ``(..., K)``, the latents independent.

        The probability errs by 1e-8, as in :meth:`expected_and_slopes`: a density is one function, with its gradient or without.
        """
        others = self._log_others()
        return others + probability_of_largest(mean, variance, targets, QUICK) * (torch.log1p(-self.epsilon) - others)

    def expected_and_slopes(
        self, mean: Tensor, variance: Tensor, targets: Tensor, parameters: Sequence[Tensor] = ()
    ) -> ExpectedSlopes:
        if parameters:
            return super().expected_and_slopes(mean, variance, targets, parameters)
        others = self._log_others()
        gap = torch.log1p(-self.epsilon) - others
        found, factor = probability_and_slopes(mean, variance, targets, QUICK), gap.unsqueeze(-1)
        return ExpectedSlopes((others + gap * found.value).sum(-1), factor * found.mean, factor * found.variance)

    def predictive_log_prob(self, mean: Tensor, variance: Tensor, targets: Tensor) -> Tensor:
        largest = probability_of_largest(mean, variance, targets)
        return (largest * (1 - self.epsilon) + (1 - largest) * self.epsilon / (self.num_classes - 1)).log()

    def response_moments(self, mean: Tensor, variance: Tensor) -> Moments:
        """Class probabilities ``(..., K)`` and their Bernoulli variances; mean and variance are ``(..., K)``."""
        probabilities = self._probabilities(probabilities_of_largest(mean, variance))
        return Moments(probabilities, probabilities * (1 - probabilities))

    def sample(self, f: Tensor, generator: torch.Generator) -> Tensor:
        largest = f.argmax(-1)
        # Another class: a step of 1 to K - 1 around the circle of classes.
        steps = 1 + (uniform(largest.shape, f, generator) * (self.num_classes - 1)).long()
        wrong = uniform(largest.shape, f, generator) < self.epsilon
        return torch.where(wrong, (largest + steps) % self.num_classes, largest).to(f.dtype)
