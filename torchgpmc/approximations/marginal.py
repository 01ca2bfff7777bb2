"""The approximate marginal posterior density of theta, latents integrated out under a Gaussian approximation."""

from __future__ import annotations

import torch
from torch import Tensor

from torchgpmc.approximations.gaussian_form import Approximation, check_model, matrix_size
from torchgpmc.density import AutogradDensity, keep_freed_memory, mask_failures, mask_value
from torchgpmc.models.gp_model import GPModel
from torchgpmc.models.targets import Targets

_CHUNK_ELEMENTS = 16_000_000  # of covariance matrices, of which an evaluation with its gradient holds about ten


class ApproximateMarginal(AutogradDensity):
    r"""The density :math:`p(\theta) |dx / d\theta| \, q(y | \theta)` of theta up to a constant, q being an approximate evidence.

    Its draws are "MCMC EP" of paper A: close to p(theta | y), not it. A theta whose approximation does not converge has density 0.

    Args:
        model: a :class:`GP` with a factorised likelihood, or a :class:`SparseGP`.
        approximation: :class:`Laplace`, or :class:`EP` for one latent function; of a sparse model :class:`Variational`.
        targets: ``(N,)``, or ``(C, N)`` for one data set a chain; the model's own by default.
        loose: evaluate no closer than importance sampling needs, which is cheaper and leaves small jumps; without gradient.

    Raises:
        ValueError: a model that cannot be approximated so.

    Example:
        >>> import torch, torchgpmc as tg
        >>> from gpytorch.kernels import RBFKernel
        >>> from gpytorch.priors import GammaPrior
        >>> x, kernel = torch.linspace(0, 1, 8), RBFKernel(lengthscale_prior=GammaPrior(2.0, 4.0))
        >>> model = tg.GP(x, (x > 0.5).int(), kernel, tg.likelihoods.Bernoulli())
        >>> density = ApproximateMarginal(model, tg.EP())
        >>> value, gradient = density.value_and_grad(torch.zeros(3, 1).double())  # three chains, the log of one lengthscale
        >>> value.shape, gradient.shape
        (torch.Size([3]), torch.Size([3, 1]))
        >>> loose = ApproximateMarginal(model, tg.EP(), loose=True)(torch.zeros(1, 1).double())  # in fewer factorisations
        >>> (loose - value[0]).abs() < 0.01
        tensor([True])
    """

    def __init__(
        self, model: GPModel, approximation: Approximation, targets: Tensor | Targets | None = None, *, loose: bool = False
    ):
        check_model(model, f"the marginal density by {type(approximation).__name__}", approximation)
        self.model = model
        self.approximation = approximation
        self.targets = model.as_targets(targets)
        self.loose = loose
        self._matrix_size = matrix_size(model)
        super().__init__(self._evaluate)
        keep_freed_memory()

    def draw(self, position: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """The density ``(C,)``, and the matrices that were factorised for it ``(C,)``; nothing is random."""
        with torch.no_grad():
            value, num_factorizations = self._value_and_work(self.model.layout.checked(position))
        return mask_value(value), num_factorizations

    def work(self, payload: Tensor) -> Tensor:
        """Factorisations that a value took ``(C,)``."""
        return payload

    def __call__(self, position: Tensor) -> Tensor:
        return super().__call__(self.model.layout.checked(position))

    def _evaluate(self, theta: Tensor) -> Tensor:
        return self._value_and_work(theta)[0]

    def _value_and_work(self, theta: Tensor) -> tuple[Tensor, Tensor]:
        hyperparameters, log_prior = self.model.layout.raw_values_and_log_prior(theta)
        prior = self.model.prior_at(hyperparameters)
        if self.loose:
            found = self.approximation.rough_evidence(self.model, prior, self.targets)
        else:
            found = self.approximation.evidence(self.model, prior, self.targets)
        value = torch.where(prior.ok & found.converged, log_prior + found.log_evidence, torch.nan)
        return value, found.num_iterations.to(value) + 1

    def value_and_grad(self, position: Tensor) -> tuple[Tensor, Tensor]:
        """The density ``(C,)`` and its gradient ``(C, P)``, a few thetas at once where matrices of all would fill the memory.

        Raises:
            NotImplementedError: a ``loose`` density, whose small jumps a gradient would not show.
        """
        if self.loose:
            raise NotImplementedError(
                "an ApproximateMarginal with loose=True has no gradient. Expected loose=False where one is needed."
            )
        position = self.model.layout.checked(position)
        at_once = max(1, _CHUNK_ELEMENTS // self._matrix_size)
        if len(position) <= at_once:
            written_out = self.approximation.value_and_grad(self.model, position.detach(), self.targets)
            return super().value_and_grad(position) if written_out is None else mask_failures(*written_out)
        parts = torch.arange(len(position), device=position.device).split(at_once)
        found = [self.select(rows).value_and_grad(position[rows]) for rows in parts]
        values, gradients = zip(*found, strict=True)
        return torch.cat(values), torch.cat(gradients)

    def roughly(self) -> ApproximateMarginal:
        """The same, ``loose``."""
        return ApproximateMarginal(self.model, self.approximation, self.targets, loose=True)

    def select(self, rows: Tensor) -> ApproximateMarginal:
        if not self.targets.one_a_chain:
            return self
        return ApproximateMarginal(self.model, self.approximation, self.targets.select(rows), loose=self.loose)
