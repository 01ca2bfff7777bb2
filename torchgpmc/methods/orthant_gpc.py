"""Probit GP classification by orthant integrals: exact latents at fixed hyperparameters, weighted draws over sampled ones."""

from __future__ import annotations

from dataclasses import dataclass, replace

from torchgpmc.checks import check_count
from torchgpmc.evidence import Orthant
from torchgpmc.evidence.orthants import check_probit
from torchgpmc.methods.amis import AMIS
from torchgpmc.methods.mamis import MAMIS
from torchgpmc.models.gp_model import GPModel
from torchgpmc.runs.independent import IndependentRun
from torchgpmc.runs.run import MethodOptions, Run, Settings, refuse_chain_options


@dataclass(frozen=True)
class OrthantGPC(MethodOptions):
    """Probit GP classification through the ratio of orthant integrals (paper B).

    With every hyperparameter fixed: independent, exact draws of the latents, by truncated normals (weighted where acceptance falls
    below 1e-4). With hyperparameters to sample: weighted draws by :class:`AMIS`, the orthant integral being the evidence.

    Args:
        num_points: points an integral; at fixed hyperparameters of ``posterior.info["log_evidence"]`` alone.
        proposals: how hyperparameters are proposed.

    Example:
        >>> import torch, torchgpmc as tg
        >>> from gpytorch.kernels import RBFKernel
        >>> from gpytorch.priors import GammaPrior
        >>> x, kernel = torch.linspace(0, 1, 8), RBFKernel(lengthscale_prior=GammaPrior(2.0, 4.0))
        >>> model = tg.GP(x, (x > 0.5).int(), kernel, tg.likelihoods.Bernoulli())
        >>> posterior = tg.sample(model, tg.OrthantGPC(num_points=16), num_samples=3000, progress=False)
        >>> posterior.predict(torch.tensor([0.1, 0.9])).probs > 0.5
        tensor([False,  True])
    """

    num_points: int = 256
    proposals: AMIS | MAMIS = AMIS()  # noqa: RUF009  (frozen, so it may be shared)

    def prepare(self, model: GPModel, settings: Settings) -> Run:
        """A run on the latents, or on theta.

        Raises:
            ValueError: not a probit GP, options out of range, or ``warmup_steps`` or ``num_chains`` given.
        """
        check_probit(model, "OrthantGPC")
        if not isinstance(self.proposals, AMIS | MAMIS):
            raise TypeError(f"proposals is {self.proposals!r}. Expected torchgpmc.AMIS() or torchgpmc.MAMIS().")
        check_count("num_points", self.num_points, 8)
        if model.layout.size:
            return replace(self.proposals, evidence=Orthant(self.num_points)).prepare(model, settings)
        refuse_chain_options("OrthantGPC", settings)
        if model.targets.one_a_chain:
            raise ValueError(
                "the model has several data sets and OrthantGPC samples one posterior. Expected train_y of shape (N,)."
            )
        return IndependentRun(model, settings.num_samples, Orthant(self.num_points))
