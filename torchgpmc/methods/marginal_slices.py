"""Pseudo-marginal slice sampling."""

from __future__ import annotations

from dataclasses import dataclass

from torchgpmc.approximations import Approximation, Laplace
from torchgpmc.checks import check_count
from torchgpmc.evidence import Evidence
from torchgpmc.methods.estimates import Kernels, estimated_run
from torchgpmc.models.gp_model import GPModel
from torchgpmc.runs.anchors import MarginalDensity
from torchgpmc.runs.chain import ChainRun
from torchgpmc.runs.run import MethodOptions, Settings
from torchgpmc.samplers.adaptation import Tuning
from torchgpmc.samplers.preconditioner import MassMatrix
from torchgpmc.samplers.pseudo_marginal import pseudo_marginal_slice
from torchgpmc.types import LogDensity, Sampler


@dataclass(frozen=True)
class PseudoMarginalSlice(MethodOptions):
    """Pseudo-marginal slice sampling of theta (Murray & Graham 2015): never sticks, at several estimates a transition.

    Args:
        approximation: :class:`Laplace` or :class:`EP`: what importance samples are drawn from. Of a :class:`SparseGP` it is
            ``approximations.Variational()``, whatever is given.
        num_importance: latent vectors an estimate.
        antithetic: draw them in mirrored pairs; by default where ``num_importance`` is even.
        max_steps_out: limit on the number of initial widths in a bracket.
        thinning: keep one draw in this many.
        evidence: another unbiased estimate in place of importance sampling.

    Example:
        >>> import torch, torchgpmc as tg
        >>> from gpytorch.kernels import RBFKernel
        >>> from gpytorch.priors import GammaPrior
        >>> x, kernel = torch.linspace(0, 1, 8), RBFKernel(lengthscale_prior=GammaPrior(2.0, 4.0))
        >>> model = tg.GP(x, (x > 0.5).int(), kernel, tg.likelihoods.Bernoulli())
        >>> method = tg.PseudoMarginalSlice(num_importance=4)
        >>> posterior = tg.sample(model, method, num_samples=400, warmup_steps=30, num_chains=8, progress=False)
        >>> posterior.samples["kernel.lengthscale"].shape, posterior.info["target"]
        (torch.Size([8, 400, 1, 1]), 'the exact posterior')
    """

    approximation: Approximation = Laplace()  # noqa: RUF009  (frozen, so it may be shared)
    num_importance: int = 16
    antithetic: bool | None = None
    max_steps_out: int = 8
    thinning: int = 1
    evidence: Evidence | None = None

    def prepare(self, model: GPModel, settings: Settings) -> ChainRun:
        """A run on theta.

        Raises:
            ValueError: options out of range, or a model that cannot be approximated so.
        """
        check_count("max_steps_out", self.max_steps_out)

        def kernel(density: MarginalDensity, _: LogDensity, tuning: Tuning) -> Sampler:
            width = 4 * tuning.preconditioner.standard_deviation()
            return pseudo_marginal_slice(density, width=width, max_steps_out=self.max_steps_out)

        return estimated_run(self, model, settings, Kernels(kernel, 0.25, MassMatrix.DIAGONAL))
