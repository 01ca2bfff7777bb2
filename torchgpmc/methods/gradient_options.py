"""What the methods on gradients share: a step size, and white coordinates under an approximate posterior."""

from __future__ import annotations

import inspect
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from torchgpmc.approximations import Approximation
from torchgpmc.approximations.gaussian_form import check_approximation
from torchgpmc.checks import check_flag, check_positive
from torchgpmc.methods.density_options import DensityOptions, Scope
from torchgpmc.models.gp_model import GPModel
from torchgpmc.models.variances_density import check_mixes_variances
from torchgpmc.runs.chain_targets import ChainTarget, check_smooth, joint_target
from torchgpmc.runs.latent_moves import Move
from torchgpmc.runs.run import Settings
from torchgpmc.runs.sites import posterior_sites
from torchgpmc.runs.variances_target import variances_target
from torchgpmc.samplers.adaptation import WindowedAdaptation
from torchgpmc.types import WarmUp


@dataclass(frozen=True, kw_only=True)
class GradientOptions(DensityOptions):
    """Options of every method that follows gradients; they are described here, once, and join each method's own in its docstring.

    Args:
        target_accept_prob: acceptance that warm-up steers the step size to, the mean of all chains (of :class:`ChEES` the harmonic
            mean); raise it if transitions diverge.
        step_size: where the search for a step size begins; kept if ``adapt_step_size`` is false.
        adapt_step_size: whether warm-up tunes the step size.
        mass_matrix: which covariances warm-up estimates.
        thinning: keep one draw in this many.
        marginal: :class:`Laplace` or :class:`EP` to integrate out the latents approximately; ``None`` samples them. Exact for a
            :class:`SparseGP` with Gaussian noise, whichever it is.
        importance_weights: with ``marginal``, importance samples a draw for the weights that make the draws exact; 0 for none. Or
            another unbiased estimate to take them from: ``torchgpmc.evidence.SmoothProbit(EP())`` or ``Orthant()``.
        from_mode: of methods on theta alone: start at draws from the normal approximation at the posterior mode, and keep its
            covariance for the mass matrix in place of learning one (paper E, section 4.3.1). With ``noise_variances``: start
            around a mode of theta and the variances, and learn the mass matrix from there.
        normal_scale: of methods on theta alone: begin at draws from the prior and move on the scale on which it is standard normal,
            as what data leave open is. Under :class:`EP` searches for sites then begin at those of a mode, and end at 0.1 unless
            it has a tolerance, for ``importance_weights`` to make up for: two to three times as many draws a second.
        whitening: :class:`Laplace` or :class:`EP` to sample [theta, w], w being white under the posterior of the latents that this
            approximation's sites give (see :mod:`torchgpmc.models.whitening`): the same posterior from far fewer gradients, each at
            one and a half to three times the cost (Murray & Adams 2010). For one latent function; of a SparseGP, Laplace alone.
            ``None`` samples [theta, v], v being white under the prior.
        noise_variances: of a GP with Student-t or Laplace noise: sample theta and a variance for each datum, given which noise is
            normal and the latents integrate out exactly. The same posterior; under Student-t noise p(f | y, theta) has a mode for
            every guess of which data are outliers, which chains of [theta, v] seldom leave. After each transition the likelihood's
            parameters are moved given f, the variances integrated out, and the variances drawn anew.
    """

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        # Cleaned of the indentation, which Python 3.13 leaves out itself.
        _, _, shared = inspect.cleandoc(GradientOptions.__doc__ or "").partition("Args:\n")
        if cls.__doc__ and shared:
            cls.__doc__ = inspect.cleandoc(cls.__doc__).replace("\n\nExample:", f"\n{shared}\n\nExample:", 1)

    takes_start: ClassVar[bool] = True
    takes_draws: ClassVar[bool] = True

    target_accept_prob: float = 0.8
    step_size: float = 0.1
    adapt_step_size: bool = True
    whitening: Approximation | None = None
    noise_variances: bool = False
    needs_gradients: ClassVar[bool] = True

    def at_draws(self, model: GPModel) -> GradientOptions | None:
        """Itself, in place of a mode, where it moves theta alone; draws of theta know no latents."""
        moves_theta_alone = model.is_conjugate or self.marginal is not None
        return replace(self, from_mode=False) if moves_theta_alone else None

    def check_options(self) -> None:
        super().check_options()
        check_positive("target_accept_prob", self.target_accept_prob, 0.0, 1.0)
        check_positive("step_size", self.step_size)
        check_flag("noise_variances", self.noise_variances)

    def check(self, model: GPModel) -> None:
        """Whether it can move this model's latents, as a block of :class:`Gibbs`.

        Raises:
            ValueError: options out of range, or that only a run of its own has; a likelihood without gradients.
            TypeError: an option of the wrong kind.
        """
        self._check_block("the latents alone, given theta")
        check_smooth(model, type(self).__name__)

    def move(self, model: GPModel, warmup_steps: int) -> Move:
        """This sampler as a block of v alone, given theta: gradients factorise nothing (Hensman et al. 2015, section 4)."""
        return Move(self._kernel, self._warm_up(Scope(0, model.latent_size), warmup_steps), needs_prior_density=True)

    def _warm_up(self, target: ChainTarget | Scope, steps: int) -> WarmUp:
        return self._windows_on_gradients(target, steps)

    def _windows_on_gradients(self, target: ChainTarget | Scope, steps: int) -> WindowedAdaptation:
        return self._windows(
            target,
            steps,
            step_size=self.step_size,
            target_acceptance=self.target_accept_prob if self.adapt_step_size else None,
            search_on=target.density,
        )

    def _target(self, model: GPModel, settings: Settings) -> ChainTarget:
        if self.whitening is not None:
            check_approximation("whitening", self.whitening)
            if self.marginal is not None or model.is_conjugate:
                raise ValueError(
                    f"whitening is {self.whitening!r}, and this samples theta alone, which has no latents to whiten. Expected "
                    f"whitening=None, or a GP without marginal."
                )
        if self.noise_variances:
            self._check_noise_variances(model, settings)
        if settings.start is not None:
            self._check_start(model)
        if settings.draws is not None and self.marginal is None and not model.is_conjugate:
            raise ValueError(
                "start= is a posterior, whose draws chains on theta alone begin at, and this samples [theta, v]. Expected a "
                "GPRegression, a marginal (of a SparseGP with Gaussian noise marginal=torchgpmc.Laplace(), which is exact), or "
                "start=torchgpmc.initialize(model)."
            )
        return super()._target(model, settings)

    def _check_noise_variances(self, model: GPModel, settings: Settings) -> None:
        check_mixes_variances(model)
        others = {"marginal": self.marginal, "whitening": self.whitening, "start": settings.start}
        for name, value in others.items():
            if value is not None:
                raise ValueError(
                    f"noise_variances=True samples [theta, w], w for variances of the noise, and {name}={value!r} is for chains of "
                    f"other variables. Expected one of them."
                )

    def _check_start(self, model: GPModel) -> None:
        if self.marginal is not None or model.is_conjugate:
            raise ValueError(
                "start= begins chains of [theta, v], and this samples theta alone. Expected a GP or SparseGP without marginal, an "
                "earlier run's posterior, or start=None."
            )
        if self.whitening is not None:
            raise ValueError(
                f"whitening is {self.whitening!r} and a start is given, which brings white coordinates of its own. Expected one of "
                f"them."
            )

    def _joint_target(self, model: GPModel, settings: Settings) -> ChainTarget:
        check_smooth(model, type(self).__name__)
        if self.noise_variances:
            return self._variances_target(model, settings)
        sites = None if self.whitening is None else posterior_sites(model, self.whitening)
        return joint_target(model, settings, sites, along_ridges=True)

    def _variances_target(self, model: GPModel, settings: Settings) -> ChainTarget:
        return variances_target(model, settings, from_mode=self.from_mode)
