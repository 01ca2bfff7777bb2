"""Adaptive multiple importance sampling."""

from __future__ import annotations

import math
from dataclasses import dataclass

from torchgpmc.methods.importance_options import ImportanceOptions
from torchgpmc.models.gp_model import GPModel
from torchgpmc.runs.run import Settings
from torchgpmc.runs.weighted import ImportanceRun


@dataclass(frozen=True)
class AMIS(ImportanceOptions):
    """Adaptive multiple importance sampling of theta, exact or pseudo-marginal (paper E; Cornuet et al. 2012).

    Starts at the modes of Laplace's approximate posterior with their curvature, draws batches, weighs every draw against the
    mixture of all proposals used, and moves the proposal to the weighted moments. With an unbiased estimate in place of the
    evidence it stays exact (paper E, section 3.1). Every theta comes with a latent vector chosen by its importance weight.

    In the paper proposals learn from the draws that they weigh: of some thousand draws means are off for it, alike in every run, by
    some hundredths of a posterior deviation, and by more than a tenth where hyperparameters and components are many. Here draws
    are dealt to streams, each weighed against its own proposals, which the draws of the others have taught.

    Args:
        approximation: :class:`Laplace` or :class:`EP`, from which latents are drawn; exact for a :class:`GPRegression`. Of a
            :class:`SparseGP` it is ``approximations.Variational()``, whatever is given.
        num_importance: latent vectors an estimate of the evidence.
        antithetic: draw them in mirrored pairs; by default where ``num_importance`` is even.
        degrees_of_freedom: of Student t proposals, a whole number above 2; ``None`` for normal ones.
        normal_scale: propose on the scale on which each prior is standard normal, whose tails proposals can follow; ``False``:
            on that of theta, logarithms for positive parameters, as in paper E.
        diagonal: adapt variances alone, no correlations (AMIS-D of paper E).
        batch_size: draws of the first batch; by default a twentieth of ``num_samples``, of fewer than 4000 up to 200, and at
            least 10 a hyperparameter.
        growth: of batches.
        batch_sizes: all of them, in place of the two above, the last repeated as often as it takes.
        num_streams: that each batch is dealt to, evenly; 1 for proposals that learn from the draws they weigh, as in paper E. Of
            one or two hyperparameters, whose draws fill space evenly, means of some thousand draws by one are worth two to four
            times as many, and what they share of error is too small to see.
        prior_strength: draws that the first proposal counts for when the next is learned; by default two a hyperparameter.
        defensive_share: of the draws, from a component with the prior's moments that is kept throughout, so that no region of the
            prior is left to the tails of what was learned (on the normal scale it is the prior itself, all but its heavier tails,
            and bounds the weights). As large a share of the rest begins there too, and follows draws that the modes' components
            do not reach. 0 for neither, as in paper E.
        begin: :class:`AtModes`, at those of an approximate posterior, Laplace's by default, or :class:`AtPrior`. Of no use to a
            run that starts from draws.
        effective_size: stop once Kish's effective size reaches this; ``num_samples`` is then a limit.
        smooth: Pareto-smooth the weights (Vehtari et al. 2024): less variance, a little bias.
        evidence: another unbiased estimate in place of importance sampling: ``torchgpmc.evidence.SmoothProbit()`` or ``Orthant()``.
        screen: :class:`Screen`, for several candidates a draw, most of which an approximation refuses before an estimate is made;
            ``None``: all are estimated.
        switch_to_modified_after: batches after which to go on as :class:`MAMIS`; ``None``: never.

    Example:
        >>> import torch, torchgpmc as tg
        >>> from gpytorch.kernels import RBFKernel
        >>> from gpytorch.priors import GammaPrior
        >>> x, kernel = torch.linspace(0, 1, 8), RBFKernel(lengthscale_prior=GammaPrior(2.0, 4.0))
        >>> model = tg.GP(x, (x > 0.5).int(), kernel, tg.likelihoods.Bernoulli())
        >>> posterior = tg.sample(model, tg.AMIS(), num_samples=4000, progress=False)
        >>> posterior.info["log_evidence"] < 0, posterior.log_weights.shape
        (True, torch.Size([1, 4000]))
    """

    # Posteriors of three and five hyperparameters: batches of 200 come to an effective size of 440 after 980 to 2050 draws, of 400,
    # 480, 576 and so on after 1790 to 2700.
    growth: float = 1.0
    switch_to_modified_after: int | None = None

    def _usual_batch(self, num_samples: int) -> int:
        return max(min(200, math.ceil(num_samples / 10)), math.ceil(num_samples / 20))

    def prepare(self, model: GPModel, settings: Settings) -> ImportanceRun:
        """A run on theta.

        Raises:
            ValueError: options out of range, ``warmup_steps`` or ``num_chains`` given, or a model that cannot be served.
        """
        return self._prepared(model, settings, modified=False, switch_after=self.switch_to_modified_after)
