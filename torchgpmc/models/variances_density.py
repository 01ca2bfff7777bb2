"""The posterior density of hyperparameters and of a noise variance for each datum, the latents integrated out."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from torchgpmc.adapter.conversion import as_likelihood
from torchgpmc.density import AutogradDensity, keep_freed_memory, mask_failures
from torchgpmc.models.exact_evidence import evidence_given_noise, has_the_kernels_prior
from torchgpmc.models.gp_model import GPModel
from torchgpmc.models.latents import LatentPrior, likelihood_parameters
from torchgpmc.models.reverse import Part, by_autograd
from torchgpmc.models.targets import Targets
from torchgpmc.numerics.linalg import cholesky, times_matrix
from torchgpmc.numerics.random import normal_like
from torchgpmc.overriding import is_newest

_DENSITIES = ("log_prob", "pointwise_log_prob", "forward")
_WHITE = "white"  # beside the likelihood's own parameters


class VariancesLogDensity(AutogradDensity):
    r"""The posterior density of position = [theta, w] where noise is a mixture of normals, s_n(w_n, theta) the variance of one.

    .. math:: \log p(\theta) + \log |dx / d\theta| + \log p(w | \theta) + \log N(y | m, K + \mathrm{diag}(s(w, \theta)))

    Given the variances noise is normal, and the latents integrate out exactly. Unlike p(f | y, theta) under such noise, which has a
    mode for every guess of which data are outliers, w is nearly what it is under its prior: of mean zero and deviation one.

    Args:
        model: a :class:`GP` whose likelihood ``mixes_variances``.
        targets: ``(N,)``, or ``(C, N)`` for one data set a chain; the model's own by default.
    """

    def __init__(self, model: GPModel, targets: Tensor | Targets | None = None):
        self.model = model
        self.targets = model.as_targets(targets)
        super().__init__(lambda position: self.value_and_grad(position)[0])
        keep_freed_memory()

    def value_and_grad(self, position: Tensor) -> tuple[Tensor, Tensor]:
        """Log densities ``(C,)`` and gradients ``(C, P + N)``."""
        theta, white = self.split(position.detach())
        log_density: Tensor = white  # replaced below

        def noise_at(values: dict[str, Tensor]) -> Part:
            nonlocal log_density
            both = by_autograd(
                lambda parameters: self._variances_and_log_density(dict(parameters)),
                {**values, _WHITE: white},
                [*self.model.layout.sampled_names("likelihood"), _WHITE],
            )
            variances, log_density = both.value[:, :-1], both.value[:, -1]
            return Part(variances, lambda slope: both.slopes(torch.cat([slope, torch.ones_like(slope[:, :1])], -1)))

        value, gradient, of_noise = evidence_given_noise(self.model, theta, self.targets, noise_at)
        return mask_failures(value + log_density, torch.cat([gradient, of_noise[_WHITE]], -1))

    def split(self, position: Tensor) -> tuple[Tensor, Tensor]:
        """theta ``(C, P)`` and w ``(C, N)``."""
        theta, white = position.tensor_split([self.model.layout.size], -1)
        return theta, white

    def _variances_and_log_density(self, parameters: dict[str, Tensor]) -> Tensor:
        white = parameters.pop(_WHITE)
        variances, log_density = self.model.likelihood_function(
            likelihood_parameters(parameters), lambda likelihood: likelihood.noise_variances(white)
        )
        return torch.cat([variances, log_density.unsqueeze(-1)], -1)

    def draw_latents(self, position: Tensor, generator: torch.Generator) -> Tensor:
        """v ``(C, N)`` given y, theta and the variances."""
        return self.draw_with_prior(position, generator)[1]

    def draw_with_prior(self, position: Tensor, generator: torch.Generator) -> tuple[LatentPrior, Tensor]:
        r"""The prior at theta, and v ``(C, N)`` given y, theta and the variances, by a draw of f and y from it (Matheron's rule).

        .. math:: v = v_0 + L^T (L L^T + S)^{-1} (y - m - L v_0 - S^{1/2} e), \quad v_0, e \sim N(0, I)
        """
        theta, white = self.split(position)
        with torch.no_grad():
            prior = self.model.prior(theta)
            variances = self._variances_and_log_density({**prior.values["likelihood"], _WHITE: white})[:, :-1]
            root = prior.factor
            v, noise = normal_like(white, generator), normal_like(white, generator)
            residual = self.targets.values - prior.mean - times_matrix(v, root.mT) - variances.sqrt() * noise
            factor, _ = cholesky(prior.covariance + torch.diag_embed(variances))
            return prior, v + times_matrix(torch.cholesky_solve(residual.unsqueeze(-1), factor).squeeze(-1), root)

    def select(self, rows: Tensor) -> VariancesLogDensity:
        return VariancesLogDensity(self.model, self.targets.select(rows)) if self.targets.one_a_chain else self


def mixes_variances(model: GPModel) -> bool:
    """Whether f at the data is normal given y, theta and a noise variance for each datum, under the kernel's own prior."""
    likelihood = as_likelihood(model.likelihood)
    kind: Any = type(likelihood)
    knows = likelihood.mixes_variances and is_newest(kind, "noise_variances", _DENSITIES)
    return knows and model.has_latents_at_data and has_the_kernels_prior(model)


def check_mixes_variances(model: GPModel) -> None:
    """Raises a ``ValueError`` where that is not so."""
    if not mixes_variances(model):
        raise ValueError(
            f"noise_variances=True integrates out the latents given a noise variance for each datum, and this is a "
            f"{type(model).__name__} with {type(model.likelihood).__name__}. Expected a GP with Student-t or Laplace noise "
            f"(torchgpmc.likelihoods.StudentT, LaplaceNoise), or noise_variances=False."
        )
