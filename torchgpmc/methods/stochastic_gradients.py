"""Stochastic-gradient Hamiltonian Monte Carlo around a variational fit."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch

from torchgpmc.checks import check_count, check_positive
from torchgpmc.models.gp_model import GPModel
from torchgpmc.models.remedies import what_samples
from torchgpmc.numerics.linalg import cholesky
from torchgpmc.runs.chain import ChainRun
from torchgpmc.runs.chain_targets import check_smooth
from torchgpmc.runs.minibatch_target import minibatch_target
from torchgpmc.runs.run import MethodOptions, Settings, chain_settings
from torchgpmc.samplers.adaptation import BurnIn
from torchgpmc.samplers.preconditioner import Preconditioner
from torchgpmc.samplers.stochastic_gradient_hmc import stochastic_gradient_hmc
from torchgpmc.types import Sampler


@dataclass(frozen=True)
class StochasticGradientHMC(MethodOptions):
    """Biased: HMC with gradients from minibatches (Chen, Fox & Guestrin 2014), for data of which one pass costs too much.

    Steps are not accepted or rejected, so draws are not exact: the error shrinks with ``step_size``, and with larger batches.
    ``posterior.info["biased"]`` and the summary say so; ``posterior.stats["temperature"]`` averages to 1 but for the bias, and a
    warning comes where it does not. Compare with ``NUTS()`` on some of the data before you rely on it.

    It needs a start, ``tg.sample(start.model, method, start=start)``: gradients have control variates at the fit's mean (Baker,
    Fearnhead, Fox & Nemeth 2019), so that minibatches say only by how much data speak otherwise than there, and positions are
    [theta, w], w being white under the fit and theta scaled by its covariance. All chains share each minibatch. The density of all
    data is worked out once a transition, for ``lp``. Nothing adapts: warm-up is burn-in. All chains begin at the fit itself,
    whatever other optima it knows.

    Args:
        batch_size: data a step, without replacement; all of them where there are fewer.
        step_size: in deviations of the fit.
        friction: share of the momentum lost per unit of time, to small steps: 1 forgets in about one deviation's way.
        num_steps: steps a transition.
        thinning: keep one draw in this many transitions.

    Source: Chen, Fox & Guestrin 2014, section 3.2; Baker et al. 2019, section 3; steps by Leimkuhler & Matthews 2013.

    Example:
        >>> import torch, torchgpmc as tg
        >>> from gpytorch.kernels import RBFKernel
        >>> from gpytorch.priors import GammaPrior
        >>> x, kernel = torch.linspace(0, 1, 40), RBFKernel(lengthscale_prior=GammaPrior(2.0, 4.0))
        >>> model = tg.SparseGP(x, (x > 0.5).int(), kernel, tg.likelihoods.Bernoulli(), inducing_points=x[::10])
        >>> start = tg.initialize(model, progress=False)
        >>> method = tg.StochasticGradientHMC(batch_size=20, step_size=0.4, num_steps=12)
        >>> posterior = tg.sample(start.model, method, start=start, num_samples=20, warmup_steps=4, num_chains=160, progress=False)
        >>> posterior.info["biased"]
        'stochastic gradients, 20 data a step, step size 0.4'
    """

    takes_start: ClassVar[bool] = True

    batch_size: int = 256
    step_size: float = 0.1
    friction: float = 1.0
    num_steps: int = 20
    thinning: int = 1

    def prepare(self, model: GPModel, settings: Settings) -> ChainRun:
        """A run on [theta, w].

        Raises:
            ValueError: an option out of range, no start, or a model whose likelihood is no sum over data given its latents, or a
                step in them.
        """
        for name in ("batch_size", "num_steps", "thinning"):
            check_count(name, getattr(self, name))
        for name in ("step_size", "friction"):
            check_positive(name, getattr(self, name))
        if model.has_latents_at_data or not model.factorises:
            raise ValueError(
                f"StochasticGradientHMC takes some of the data a step, and {type(model).__name__} with "
                f"{type(model.likelihood).__name__} has a latent for every datum, or a likelihood that does not factorise over "
                f"data. Expected a SparseGP; sample this model with {what_samples(model)}."
            )
        check_smooth(model, "StochasticGradientHMC")
        start = settings.start
        if start is None:
            raise ValueError(
                "StochasticGradientHMC needs a start, at which its gradients are exact. Expected start = "
                "torchgpmc.initialize(model), and torchgpmc.sample(start.model, method, start=start)."
            )
        # At another optimum gradients would be far noisier than around the fit's mean.
        start = replace(start, others=())
        settings = settings._replace(start=start)
        said = f"stochastic gradients, {self.batch_size} data a step, step size {self.step_size:g}"
        target = minibatch_target(model, settings, start, self.batch_size, said)
        like = model.train_x
        preconditioner = Preconditioner(cholesky(start.theta_covariance.to(like)).factor, like.new_ones(model.latent_size))
        step_size = torch.tensor(self.step_size, dtype=like.dtype, device=like.device)

        def kernel(tuning: Any) -> Sampler:
            return stochastic_gradient_hmc(
                target.density, step_size=step_size, preconditioner=preconditioner, friction=self.friction, num_steps=self.num_steps
            )

        return ChainRun(target, kernel, BurnIn(), chain_settings(settings)[0], settings.num_samples, self.thinning)
