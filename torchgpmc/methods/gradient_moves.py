"""The auxiliary gradient sampler of the latents."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from torchgpmc.checks import check_positive
from torchgpmc.kept_rows import KeptRows
from torchgpmc.methods.latent_options import LatentOptions, step_size_alone
from torchgpmc.models.gp_model import GPModel
from torchgpmc.runs.chain_targets import check_smooth
from torchgpmc.runs.latent_moves import Move
from torchgpmc.samplers.adaptation import Tuning
from torchgpmc.samplers.auxiliary_gradient import Axes, auxiliary_gradient, axes_of
from torchgpmc.types import Sampler


@dataclass(frozen=True)
class AuxiliaryGradient(LatentOptions):
    """The marginal auxiliary gradient sampler of the latents, "mGrad" (Titsias & Papaspiliopoulos 2018), step size tuned.

    Metropolis with a gradient, whose proposals know the prior: steps are small along the directions in which f at the data
    varies and free along those that only the prior knows. A new theta takes one eigendecomposition beside the factorisation of
    K; in sweeps a chain whose theta stays keeps it, though ``stats["n_factorizations"]`` counts one each time. Any likelihood
    with a gradient will do, of several latents too; of a SparseGP it moves the inducing values, along the directions in which
    the mean of f at the data varies with them.

    Alone it needs every hyperparameter fixed with ``requires_grad_(False)``.

    Args:
        target_accept_prob: mean acceptance that warm-up steers the step size to.
        thinning: keep one draw in this many.

    Example:
        >>> import torch, torchgpmc as tg
        >>> from gpytorch.kernels import RBFKernel
        >>> from gpytorch.priors import GammaPrior
        >>> x, kernel = torch.linspace(0, 1, 4), RBFKernel(lengthscale_prior=GammaPrior(2.0, 4.0))
        >>> model = tg.GP(x, (x > 0.5).int(), kernel, tg.likelihoods.Bernoulli())
        >>> model.kernel.requires_grad_(False).lengthscale = 0.3
        >>> posterior = tg.sample(model, tg.AuxiliaryGradient(), num_samples=500, warmup_steps=100, num_chains=8, progress=False)
        >>> posterior.latents.shape
        torch.Size([8, 500, 4])
    """

    target_accept_prob: float = 0.55
    thinning: int = 1

    def check(self, model: GPModel) -> None:
        """Refuses a likelihood that is a step in f."""
        check_smooth(model, "AuxiliaryGradient")
        check_positive("target_accept_prob", self.target_accept_prob, 0.0, 1.0)

    def move(self, model: GPModel, warmup_steps: int) -> Move:
        """The step size is tuned; chains whose theta stays keep their axes."""
        kept = KeptRows()

        def kernel(density: Any, tuning: Tuning) -> Sampler:
            def axes() -> Axes:
                projection = density.kept.at.projection

                def worked_out(rows: Tensor) -> Axes:
                    # One by one: a batched product's last bits depend on what else is in the batch.
                    return axes_of(torch.stack([own @ own.mT for own in projection[rows]]))

                found: Axes = kept(projection, worked_out)
                return found

            return auxiliary_gradient(density, step_size=tuning.step_size, axes=axes)

        return Move(kernel, step_size_alone(warmup_steps, self.target_accept_prob), num_factorizations=1)
