"""Where adaptive importance sampling begins: at modes, or with the prior."""

from __future__ import annotations

from dataclasses import dataclass

from torchgpmc.approximations import Approximation, Laplace
from torchgpmc.approximations.gaussian_form import check_approximation
from torchgpmc.checks import check_count, check_flag

ARM = (2.3, 0.5)  # where an arm's middle is, and its deviation, in those of the prior: its outer percentiles


@dataclass(frozen=True)
class AtPrior:
    """Begin with the prior, where a search for modes would mislead or take longer than the draws: ``tg.AMIS(begin=tg.AtPrior())``.

    Args:
        arms: begin also with a component to either side along each hyperparameter, the prior but that this one is in its outer
            percentiles. Of a dozen hyperparameters that data leave open, the posterior's lobes are where one or two are extreme,
            which few draws from the prior are. So many components learn slowly, a round a batch.

    Example:
        >>> import torch, torchgpmc as tg
        >>> from gpytorch.kernels import RBFKernel
        >>> from gpytorch.priors import GammaPrior
        >>> x, kernel = torch.linspace(0, 1, 8), RBFKernel(lengthscale_prior=GammaPrior(2.0, 4.0))
        >>> model = tg.GP(x, (x > 0.5).int(), kernel, tg.likelihoods.Bernoulli())
        >>> method = tg.AMIS(begin=tg.AtPrior(arms=True))
        >>> tg.sample(model, method, num_samples=500, progress=False).num_draws
        500
    """

    arms: bool = False

    @property
    def at_prior(self) -> AtPrior:
        """How a run of it begins with the prior."""
        return self

    def check(self) -> None:
        """Raises a ``ValueError`` unless ``arms`` is ``True`` or ``False``."""
        check_flag("arms", self.arms)


@dataclass(frozen=True)
class AtModes:
    """Begin at the modes of an approximate posterior of theta, with their curvature: ``tg.AMIS(begin=tg.AtModes(count=1))``.

    Args:
        count: of the searches, from the best of eight times as many draws from the prior. Others follow: from other maxima along
            each of up to eight hyperparameters and, where the kernel has a period, from its multiples and parts.
        search_tails: look along each hyperparameter too, 4, 8 and 16 of its deviations up and down from the best mode, for mass
            that the curvature there does not tell of (a long arm, another lobe), and begin with components on it as well, which
            keep a share of the draws: weights look even where they miss such a part. About 20 gradients a hyperparameter, and for
            each part found as many as hyperparameters. With ``leave_for``, after the first batch, where modes are not left.
        leave_for: begin again there where the first batch says that the modes hold little of the mass: less than their components
            made of the draws, which keep their weights. Where data leave a dozen hyperparameters open, the posterior lies
            elsewhere, and a learning proposal hardly gets away from modes. ``None``: stay.
        approximation: whose posterior of theta has the modes: :class:`Laplace`, or :class:`EP`, whose sites are held where they can
            be, and found to its ``tolerance``, 0.1 by default. A search with held sites takes half as long as Laplace's at 500
            labels, and tails want some hundreds of gradients. Where f is rough Laplace's evidence may be a hundred nats too
            high, and its modes nowhere near the posterior; elsewhere draws around modes of either are worth about as much.

    Example:
        >>> import torchgpmc as tg
        >>> labels_that_say_little = tg.AMIS(begin=tg.AtModes(leave_for=tg.AtPrior(arms=True)), degrees_of_freedom=30)
        >>> many_hyperparameters_of_a_regression = tg.AMIS(begin=tg.AtModes(search_tails=True), degrees_of_freedom=30)
        >>> many_hyperparameters_of_a_regression.begin
        AtModes(count=4, search_tails=True, leave_for=None, approximation=Laplace(...))
    """

    count: int = 4
    search_tails: bool = False
    leave_for: AtPrior | None = None
    approximation: Approximation = Laplace()  # noqa: RUF009  (frozen, so it may be shared)

    @property
    def at_prior(self) -> AtPrior:
        """How a run of it begins with the prior, should it leave the modes, or find none."""
        return self.leave_for or AtPrior()

    def check(self) -> None:
        """Whether its options can be used.

        Raises:
            TypeError: ``leave_for`` is no :class:`AtPrior`, or ``approximation`` none.
            ValueError: another option is out of range.
        """
        check_count("count", self.count)
        check_approximation("approximation", self.approximation)
        check_flag("search_tails", self.search_tails)
        if self.leave_for is not None:
            if not isinstance(self.leave_for, AtPrior):
                raise TypeError(f"leave_for is {self.leave_for!r}. Expected torchgpmc.AtPrior(), or None to stay at the modes.")
            self.leave_for.check()
