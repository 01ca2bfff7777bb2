"""Modified adaptive multiple importance sampling."""

from __future__ import annotations

from dataclasses import dataclass

from torchgpmc.methods.importance_options import ImportanceOptions
from torchgpmc.models.gp_model import GPModel
from torchgpmc.runs.run import Settings
from torchgpmc.runs.weighted import ImportanceRun


@dataclass(frozen=True)
class MAMIS(ImportanceOptions):
    """Modified adaptive multiple importance sampling (Marin et al. 2014): each proposal is learned from the last batch alone.

    Consistent without AMIS's conditions, and slower to learn: batches grow faster. Arguments as for :class:`AMIS`.

    Example:
        >>> import torch, torchgpmc as tg
        >>> from gpytorch.kernels import RBFKernel
        >>> from gpytorch.priors import GammaPrior
        >>> x, kernel = torch.linspace(0, 1, 8), RBFKernel(lengthscale_prior=GammaPrior(2.0, 4.0))
        >>> model = tg.GP(x, (x > 0.5).int(), kernel, tg.likelihoods.Bernoulli())
        >>> posterior = tg.sample(model, tg.MAMIS(effective_size=1000), num_samples=10000, progress=False)
        >>> posterior.num_draws < 10000  # enough effective draws came sooner
        True
    """

    def prepare(self, model: GPModel, settings: Settings) -> ImportanceRun:
        """A run on theta.

        Raises:
            ValueError: options out of range, ``warmup_steps`` or ``num_chains`` given, or a model that cannot be served.
        """
        return self._prepared(model, settings, modified=True, switch_after=None)
