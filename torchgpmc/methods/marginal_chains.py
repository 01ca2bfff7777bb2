"""Pseudo-marginal Metropolis-Hastings."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torchgpmc.approximations import Approximation, CollapsedMarginal, Laplace
from torchgpmc.approximations.gaussian_form import check_approximation
from torchgpmc.checks import check_positive, is_number
from torchgpmc.evidence import CollapsedEstimator, Evidence, importance
from torchgpmc.methods.density_options import refuse_in_a_sweep
from torchgpmc.methods.estimates import Kernels, estimated_run, walk_adaptation
from torchgpmc.models.gp_model import GPModel
from torchgpmc.runs.anchors import MarginalDensity
from torchgpmc.runs.chain import ChainRun
from torchgpmc.runs.chain_targets import suited_approximation
from torchgpmc.runs.integrated_latents import ThroughEstimates
from torchgpmc.runs.latent_moves import Move
from torchgpmc.runs.parameterizations import Interwoven, Parameterization
from torchgpmc.runs.run import MethodOptions, Settings, check_mass_matrix
from torchgpmc.samplers.adaptation import Tuning
from torchgpmc.samplers.preconditioner import MassMatrix
from torchgpmc.samplers.pseudo_marginal import IndependentProposal, correlated_pseudo_marginal, delayed_acceptance, pseudo_marginal
from torchgpmc.types import LogDensity, Sampler

_OF_A_RUN = {
    "correlation": 0.0,
    "delayed_acceptance": False,
    "latent_steps": 0,
    "evidence": None,
    "from_mode": False,
    "thinning": 1,
}


def _check_options(method: PseudoMarginal) -> None:
    check_positive("target_accept_prob", method.target_accept_prob, 0.0, 1.0)
    if not 0 <= method.correlation < 1:
        raise ValueError(f"correlation is {method.correlation!r}. Expected a number of at least 0 and below 1, for instance 0.99.")
    if method.correlation and (method.delayed_acceptance or method.latent_steps):
        raise ValueError(
            "correlation cannot be combined with delayed_acceptance or latent_steps. Expected one of them; "
            "the correlated estimate keeps its random numbers, which the others replace."
        )
    share = method.independent_share
    if not is_number(share) or not 0 <= share <= 1:
        raise ValueError(f"independent_share is {share!r}. Expected a number from 0 to 1, for instance 0.9.")
    if share and (method.correlation or method.delayed_acceptance):
        raise ValueError(
            "independent_share cannot be combined with correlation or delayed_acceptance, which are for small steps. "
            "Expected one of them."
        )
    if method.delayed_acceptance and method.latent_steps:
        raise ValueError("delayed_acceptance cannot be combined with latent_steps. Expected one of them.")
    if method.evidence is not None and method.latent_steps:
        raise ValueError("evidence cannot be combined with latent_steps, which move importance samples. Expected latent_steps=0.")


@dataclass(frozen=True)
class PseudoMarginal(MethodOptions):
    """Pseudo-marginal Metropolis-Hastings on theta, latents integrated out by importance sampling (paper A, algorithm 1).

    Exact for any ``num_importance``; more samples only make it stick less. Every kept theta comes with a latent draw chosen by its
    importance weight, so that (theta, f) are joint posterior draws.

    Args:
        approximation: :class:`Laplace` or :class:`EP`: what importance samples are drawn from. Of a :class:`SparseGP` it is
            ``approximations.Variational()``, whatever is given.
        num_importance: latent vectors an estimate, N_imp.
        antithetic: draw them in mirrored pairs; by default where ``num_importance`` is even.
        correlation: of the random numbers of successive estimates; above 0 this is the correlated pseudo-marginal method
            (Deligiannidis, Doucet & Pitt 2018), which needs far fewer importance samples where estimates are noisy.
        delayed_acceptance: screen proposals by the approximate evidence, and estimate only those that pass.
        latent_steps: elliptical slice steps on the kept latents after each transition.
        independent_share: of transitions, from 0 to 1, whose proposal is drawn from a Student t density with the mean and scale
            that tuning found, in place of a random walk's: with a few hyperparameters several times as many effective draws (0.9
            serves well), with many of them hardly ever accepted.
        target_accept_prob: that tuning on the approximate evidence steers to.
        mass_matrix: which covariances of the proposal tuning estimates.
        thinning: keep one draw in this many.
        evidence: another unbiased estimate, ``torchgpmc.evidence.Orthant()`` or ``SmoothProbit()``, in place of this sampling; the
            approximation then serves tuning alone.
        from_mode: start at draws from the normal approximation at the mode of the approximate posterior, and keep its covariance
            for the proposal in place of learning one (PM-MH of paper E).

    Example:
        >>> import torch, torchgpmc as tg
        >>> from gpytorch.kernels import RBFKernel
        >>> from gpytorch.priors import GammaPrior
        >>> x, kernel = torch.linspace(0, 1, 8), RBFKernel(lengthscale_prior=GammaPrior(2.0, 4.0))
        >>> model = tg.GP(x, (x > 0.5).int(), kernel, tg.likelihoods.Bernoulli())
        >>> method = tg.PseudoMarginal(independent_share=0.9)
        >>> posterior = tg.sample(model, method, num_samples=500, warmup_steps=200, num_chains=16, progress=False)
        >>> posterior.samples["kernel.lengthscale"].shape, posterior.latents.shape
        (torch.Size([16, 500, 1, 1]), torch.Size([16, 500, 8]))
    """

    approximation: Approximation = Laplace()  # noqa: RUF009  (frozen, so it may be shared)
    num_importance: int = 16
    antithetic: bool | None = None
    correlation: float = 0.0
    delayed_acceptance: bool = False
    latent_steps: int = 0
    independent_share: float = 0.0
    target_accept_prob: float = 0.25
    mass_matrix: MassMatrix = MassMatrix.DENSE
    thinning: int = 1
    evidence: Evidence | None = None
    from_mode: bool = False

    def prepare(self, model: GPModel, settings: Settings) -> ChainRun:
        """A run on theta.

        Raises:
            ValueError: options out of range or at odds with one another, or a model that cannot be approximated so.
        """
        _check_options(self)

        def kernel(density: MarginalDensity, surrogate: LogDensity, tuning: Tuning) -> Sampler:
            tuned: Any = {"step_size": tuning.step_size, "preconditioner": tuning.preconditioner}
            if self.correlation:
                return correlated_pseudo_marginal(density, correlation=self.correlation, **tuned)
            if self.delayed_acceptance:
                return delayed_acceptance(density, surrogate, **tuned)
            return pseudo_marginal(density, moves_latents=self.latent_steps > 0, independent=self._independent(tuning), **tuned)

        kernels = Kernels(kernel, self.target_accept_prob, self.mass_matrix)
        return estimated_run(self, model, settings, kernels, latent_steps=self.latent_steps, from_mode=self.from_mode)

    def _independent(self, tuning: Tuning) -> IndependentProposal | None:
        return IndependentProposal(self.independent_share, tuning.mean) if self.independent_share else None

    def hyper_move(self, num_hyperparameters: int, warmup_steps: int) -> Move:
        """This sampler as a block of theta, tuned on its estimates.

        Raises:
            ValueError: options out of range, or that only a run of its own has.
            TypeError: an option of the wrong kind.
        """
        _check_options(self)
        check_mass_matrix(self.mass_matrix)
        refuse_in_a_sweep(self, "theta alone, in a sweep", _OF_A_RUN)

        def kernel(density: MarginalDensity, tuning: Tuning) -> Sampler:
            return pseudo_marginal(
                density, step_size=tuning.step_size, preconditioner=tuning.preconditioner, independent=self._independent(tuning)
            )

        return Move(kernel, walk_adaptation(num_hyperparameters, warmup_steps, self.mass_matrix, self.target_accept_prob))

    def hyper_parts(self, parameterization: Parameterization, model: GPModel) -> tuple[ThroughEstimates, ...]:
        """One, in which the latents are integrated out.

        Raises:
            ValueError: a parameterisation, or a model that cannot be approximated so.
        """
        if parameterization != Interwoven():
            raise ValueError(
                f"parameterization is {parameterization!r} with hyper={type(self).__name__}(), which moves theta given nothing. "
                f"Expected no parameterization; or theta moved given the latents, say by hyper=AdaptiveMH()."
            )
        check_approximation("approximation", self.approximation)
        approximation = suited_approximation(model, self.approximation)
        if model.collapses:
            return (ThroughEstimates(CollapsedEstimator(CollapsedMarginal(model))),)
        estimator = importance(model, approximation, num_importance=self.num_importance, antithetic=self.antithetic)
        return (ThroughEstimates(estimator),)
