"""What a variational fit knows: a rival's predictions, and where chains start, how they scale and in which coordinates."""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass, fields
from typing import Any

import torch
from gpytorch.models import ApproximateGP
from torch import Tensor

from torchgpmc.approximations.normal_latents import GaussianLatents, expected_log_likelihood, joint_scale
from torchgpmc.checks import warn
from torchgpmc.models.affine import AffineMap, CoordinatesOfAFit
from torchgpmc.models.bent import bent_map
from torchgpmc.models.following import following_map
from torchgpmc.models.gp_model import GPModel, likelihood_values
from torchgpmc.models.sparse import SparseGP
from torchgpmc.models.validation import check_test_inputs
from torchgpmc.prediction import Prediction
from torchgpmc.storage.fingerprint import differences, model_fingerprint
from torchgpmc.variational.bound import VariationalMarginal
from torchgpmc.variational.curvature import joint_scale_by_chunks, near_mode
from torchgpmc.variational.gpytorch_parts import check_forward_is_the_prior, convert_variational

_DATA_CHUNK_ELEMENTS = 20_000_000  # of projections
_LITTLE = 0.005  # of the posterior, at an optimum where no chain begins: it moves means by no more than their errors
_WORTH_FOLLOWING = 2.0  # times a gradient's operations, what cubes of coordinates that follow theta may cost
_COORDINATES = b"2"  # which maps chains' positions in files are by: a new number wherever one changes
_MOST_BENT = 4_000_000  # numbers, that of all latents together and each hyperparameter a triangle may have


@dataclass(frozen=True, eq=False)
class Start:
    r"""A Gaussian fit of a model, from :func:`torchgpmc.initialize` or a trained gpytorch model.

    :math:`q(v) = \prod_k N(mean_k, scale_k scale_k^T)` at one theta. ``tg.sample(start.model, tg.NUTS(), start=start)`` begins its
    chains there and moves in coordinates that are white under q or, of several latent functions, a normal density in which they
    hang together; at every theta, with v following theta as function values do that data hold (:mod:`torchgpmc.models.following`).
    Where that would cost many gradients, or beyond 64 hyperparameters, v = mean + slope (theta' - theta) + scale w. The posterior
    that is sampled stays the exact one.

    Attributes:
        model: a copy with theta as its present values, and the inducing points of the fit.
        theta: unconstrained, ``(P,)``.
        mean: of q(v), ``(K, M)``.
        scale: lower triangular, ``(K, M, M)``.
        theta_covariance: of theta around ``theta``, ``(P, P)``: the inverse curvature of the bound; beyond 64 hyperparameters
            diagonal, the inverse curvatures of the joint density in each alone.
        slope: how the mean of q(v) moves with theta, ``(V, P)``.
        elbo: lower bound of log p(y | theta); the prior of theta is not in it.
        converged: whether the fit ended where a round of its steps gains less than 0.01 nats.
        joint_scale: a root of the covariance of all latents together, lower triangular, ``(V, V)``, to move in. Data of several
            classes see differences of functions, so what these share is as free as in the prior, and q, a product over
            functions, has it too narrow, a hundredfold and more. ``None``: of one function, and above V = 2000; then ``scale`` is
            moved in.
        tried: bound and log prior of theta where short searches ended, of which the highest went on, in the order of their
            beginnings, inducing points where they were; NaN of one that failed. Empty where there was one beginning, and where the
            likelihood does not factorise. Of more than 4000 data they saw so many.
        others: fits at the other optima of the bound that were found within 12 nats, the heaviest first, each at its own theta, at
            the same inducing points. Chains begin around each of ``optima``, which are this one and the others, that has a share of
            at least half a hundredth of the posterior, so that R-hat tells whether they meet; see :meth:`shares` and
            :meth:`chains_at`. All move in the coordinates of this one.

    Example:
        >>> import torch, torchgpmc as tg
        >>> from gpytorch.kernels import RBFKernel
        >>> from gpytorch.priors import GammaPrior
        >>> x, kernel = torch.linspace(0, 1, 12), RBFKernel(lengthscale_prior=GammaPrior(2.0, 4.0))
        >>> model = tg.SparseGP(x, (x > 0.5).int(), kernel, tg.likelihoods.Bernoulli(), inducing_points=x[::4])
        >>> start = tg.initialize(model, progress=False)
        >>> start.predict(torch.tensor([0.0, 1.0])).probs > 0.5
        tensor([False,  True])
        >>> len(start.optima), start.shares(), start.chains_at(4)
        (1, [1.0], [4])
        >>> run = {"num_samples": 600, "warmup_steps": 200, "num_chains": 8, "seed": 0, "progress": False}
        >>> posterior = tg.sample(start.model, tg.HMC(num_steps=4), start=start, **run)
        >>> posterior.samples["kernel.lengthscale"].shape
        torch.Size([8, 600, 1, 1])
    """

    model: GPModel
    theta: Tensor
    mean: Tensor
    scale: Tensor
    theta_covariance: Tensor
    slope: Tensor
    elbo: float
    converged: bool
    joint_scale: Tensor | None = None
    tried: tuple[float, ...] = ()
    others: tuple[Start, ...] = ()

    def __repr__(self) -> str:
        failed = sum(math.isnan(value) for value in self.tried)
        failures = f", of which {failed} failed" if failed else ""
        begun = f"the best of {len(self.tried)} beginnings{failures}, " if self.tried else ""
        apart = [f"{other.height - self.height:+.1f} nats" for other in self.others]
        shares = " and ".join(f"{share:.2g}" for share in self.shares())
        others = f"{len(self.optima)} optima, others at {', '.join(apart)}, with shares of {shares}, " if apart else ""
        return f"Start(elbo={self.elbo:.6g}, converged={self.converged}, {begun}{others}{self.digest()})"

    @property
    def optima(self) -> tuple[Start, ...]:
        """This fit, and the others that chains begin at."""
        return (self, *self.others)

    @property
    def height(self) -> float:
        """The bound with the log prior of theta, which fits are compared by."""
        return self.elbo + float(self.model.layout.log_prior(self._on_device(self.theta)[None]).detach())

    @property
    def log_mass(self) -> float:
        r"""Of the posterior around this optimum, by Laplace's integral over theta, but for a constant.

        .. math:: ELBO + \log p(\theta) |dx / d\theta| + \tfrac12 \log |\mathrm{Cov}(\theta)|
        """
        return self.height + 0.5 * float(torch.logdet(self.theta_covariance))

    def shares(self) -> list[float]:
        """Of the posterior around each of ``optima``, by their masses."""
        return torch.tensor([optimum.log_mass for optimum in self.optima], dtype=torch.float64).softmax(0).tolist()

    def chains_at(self, num_chains: int) -> list[int]:
        """How many chains begin at each of ``optima``.

        One at each that has at least half a hundredth of the posterior by :meth:`shares`, as far as there are chains, the heaviest
        first; the rest in proportion to the shares. A lighter one moves means by less than their errors, and a chain that stayed
        there would spoil R-hat.

        Args:
            num_chains: C.
        """
        shares = [share if share > _LITTLE else 0.0 for share in self.shares()]
        counts = [0] * len(shares)
        for _ in range(num_chains):
            quotients = [(share > 0 and not count, share / (count + 1)) for share, count in zip(shares, counts, strict=True)]
            counts[quotients.index(max(quotients))] += 1
        return counts

    def chains_began(self, num_chains: int) -> str | None:
        """At which optima C chains begin, in words; ``None`` where all begin at one."""
        counts = self.chains_at(num_chains)
        if sum(map(bool, counts)) == 1:
            return None
        places, first = [], 0
        for number, count in enumerate(counts, 1):
            if count:
                chains = f"chain {first}" if count == 1 else f"chains {first} to {first + count - 1}"
                places.append(f"{chains} at number {number}")
            first += count
        return f"{len(places)} optima of the fit ({', '.join(places)})"

    @classmethod
    def from_gpytorch(
        cls, svgp: ApproximateGP, likelihood: Any, train_x: Any, train_y: Any, *, jitter: float | None = None
    ) -> Start:
        """A trained gpytorch ``ApproximateGP`` as it is: kernel, mean, likelihood, inducing points and q(u), nothing fitted anew.

        The mean and kernel are ``svgp.mean_module`` and ``svgp.covar_module``, without batch dimensions, of which its ``forward``
        must be the plain prior; q(u) may be whitened or not, of one latent function or of several independent ones; any normal
        distribution of gpytorch's. Every parameter needs a prior, or ``requires_grad=False``: register priors before or after
        training.

        Args:
            svgp: the trained model; not changed.
            likelihood: its likelihood.
            train_x: all inputs ``(N, D)``.
            train_y: all targets ``(N,)``.
            jitter: of the new model; gpytorch's own by default, with which predictions are the same. gpytorch adds it to the
                variance of f too, :class:`SparseGP` does not.

        Raises:
            TypeError: not an ``ApproximateGP``.
            ValueError: a model that has no counterpart here, such as one whose ``forward`` scales its inputs; parameters without
                priors.

        Example:
            >>> import gpytorch, torch, torchgpmc as tg
            >>> class SVGP(gpytorch.models.ApproximateGP):
            ...     def __init__(self, z):
            ...         q = gpytorch.variational.CholeskyVariationalDistribution(len(z))
            ...         super().__init__(gpytorch.variational.VariationalStrategy(self, z, q))
            ...         self.mean_module = gpytorch.means.ZeroMean()
            ...         prior = gpytorch.priors.GammaPrior(2.0, 4.0)
            ...         self.covar_module = gpytorch.kernels.RBFKernel(lengthscale_prior=prior)
            ...     def forward(self, x):
            ...         return gpytorch.distributions.MultivariateNormal(self.mean_module(x), self.covar_module(x))
            >>> x = torch.linspace(0, 1, 12).unsqueeze(-1)
            >>> svgp = SVGP(x[::4])  # and training, as ever
            >>> start = tg.Start.from_gpytorch(svgp, tg.likelihoods.Bernoulli(), x, (x[:, 0] > 0.5).float())
            >>> start.model.latent_shape
            (1, 3)
        """
        parts = convert_variational(svgp)
        model = SparseGP(
            train_x,
            train_y,
            parts.kernel,
            likelihood,
            inducing_points=parts.inducing_points,
            mean=parts.mean,
            jitter=parts.jitter if jitter is None else jitter,
        )
        check_forward_is_the_prior(svgp, model)
        return fitted(model, parts.latents(model), converged=True)

    def predict(self, x: Tensor) -> Prediction:
        """The Gaussian rival's predictive distribution at test inputs ``(T, D)``: theta fixed, v integrated out under q.

        Raises:
            ValueError: inputs of the wrong shape, NaN or infinite values.

        Example:
            >>> import torch, torchgpmc as tg
            >>> from gpytorch.kernels import RBFKernel
            >>> from gpytorch.priors import GammaPrior
            >>> x, kernel = torch.linspace(0, 1, 12), RBFKernel(lengthscale_prior=GammaPrior(2.0, 4.0))
            >>> model = tg.SparseGP(x, (x > 0.5).int(), kernel, tg.likelihoods.Bernoulli(), inducing_points=x[::4])
            >>> tg.initialize(model, progress=False).predict([0.0, 1.0]).probs > 0.5
            tensor([False,  True])
        """
        model = self.model
        x = check_test_inputs(x, model.train_x, model.columns)
        latents = self.latents()
        with torch.no_grad():
            prior = model.prior(self._on_device(self.theta)[None])

        def moments(points: slice) -> tuple[Tensor, Tensor]:
            with torch.no_grad():
                return latents.marginals(model.at(prior, x[points]))

        chunk = max(1, _DATA_CHUNK_ELEMENTS // model.latent_size)
        return Prediction(model, lambda _: moments, len(x), min(chunk, len(x)), 1, likelihood_values(prior), x.new_zeros(1))

    def white_coordinates(self) -> CoordinatesOfAFit:
        """The map from w to v, on the model's device: white at every theta; where that is dear near the fit's; or at that alone."""
        mean, scale = self.mean, self.scale
        if self.joint_scale is not None:  # as if of one function
            mean, scale = mean.view(1, -1), self.joint_scale[None]
        theta, mean, slope, scale = map(self._on_device, (self.theta, mean, self.slope, scale))
        # Of many lengthscales, whose slope is not worked out, inducing points resolve too little for u to stay where theta moves.
        if bool(slope.any()):
            cheap = len(scale) * scale.shape[-1] ** 3 <= _WORTH_FOLLOWING * self.model.operations
            if cheap or (1 + len(theta)) * scale.numel() <= _MOST_BENT:
                following = following_map(self.model, theta, mean, scale, slope)
                found = following if cheap else bent_map(following, self._on_device(self.theta_covariance).diagonal().sqrt())
                if found is not None:
                    return found
        return AffineMap(theta, mean, slope, scale)

    def digest(self) -> str:
        """What tells this start from any other, for files."""
        tensors = [getattr(self, field.name) for field in fields(self) if isinstance(getattr(self, field.name), Tensor)]
        content = _COORDINATES + b"".join(tensor.detach().cpu().contiguous().numpy().tobytes() for tensor in tensors)
        content += "".join(other.digest() for other in self.others).encode()
        return hashlib.sha256(content).hexdigest()[:16]

    def check(self, model: GPModel) -> None:
        """Raises a ``ValueError`` unless this is a start for ``model``: the one it was fitted to, and finite."""
        changed = differences(model_fingerprint(self.model), model_fingerprint(model))
        if model.latent_shape != tuple(self.mean.shape) or model.layout.names != self.model.layout.names or changed:
            raise ValueError(
                f"start belongs to another model than the one to be sampled: {changed or 'its latents have another shape'}. "
                f"Expected tg.sample(start.model, ..., start=start), or a start fitted to this model."
            )
        sizes = [entry.shape.numel() for entry in model.layout.entries]
        for entry, part in zip(model.layout.entries, self.theta.split(sizes), strict=True):
            if not bool(torch.isfinite(part).all()):
                raise ValueError(
                    f"start has a non-finite value of parameter '{entry.name}'. Expected finite numbers; fit again, from other "
                    f"values of the model's parameters."
                )
        for name in ("mean", "scale", "theta_covariance", "slope", "joint_scale"):
            if (value := getattr(self, name)) is not None and not bool(torch.isfinite(value).all()):
                raise ValueError(f"start.{name} has NaN or infinite values. Expected finite numbers; fit again.")
        for other in self.others:
            other.check(model)

    def _on_device(self, tensor: Tensor) -> Tensor:
        return tensor.to(self.model.train_x)

    def latents(self) -> GaussianLatents:
        """q(v), of one theta, on the model's device."""
        return GaussianLatents(self._on_device(self.mean)[None], self._on_device(self.scale)[None])


def fitted(model: GPModel, latents: GaussianLatents, *, converged: bool, marginal: VariationalMarginal | None = None) -> Start:
    """The start of q(v) (one theta) at the present values of ``model``; curvature and bound are worked out here."""
    theta = model.layout.present(model)[0].detach()
    found = near_mode(VariationalMarginal(model) if marginal is None else marginal, theta, latents)
    elbo = variational_bound(model, theta, latents)
    if not math.isfinite(elbo):
        warn("the variational bound is not finite where the fit ended: its starts and coordinates may be of no use.")
    joint = None
    if math.isfinite(elbo):
        joint = joint_scale_by_chunks(model, theta, latents) if marginal is None else _joint_scale(marginal, theta)
    return Start(model, theta, latents.mean[0], latents.scale[0], found.covariance, found.slope, elbo, converged, joint)


def _joint_scale(marginal: VariationalMarginal, theta: Tensor) -> Tensor | None:
    """Of all latents under the sites that a fit ended with, if these know how functions hang together."""
    sites = marginal.sites
    if sites is None or not sites.coupling.shape[1]:
        return None
    with torch.no_grad():
        return joint_scale(marginal.model.at_data(marginal.model.layout.raw_values(theta[None])), sites)[0]


def variational_bound(model: GPModel, theta: Tensor, latents: GaussianLatents) -> float:
    """The ELBO of q(v) at theta ``(P,)``, over the data in pieces."""
    chunk = max(1, _DATA_CHUNK_ELEMENTS // model.latent_size)
    hyperparameters = model.layout.raw_values(theta[None])
    total = -float(latents.divergence())
    whole = model.has_latents_at_data or chunk >= len(model.train_x)
    with torch.no_grad():
        for rows in [torch.arange(len(model.train_x))] if whole else torch.arange(len(model.train_x)).split(chunk):
            part = model if whole else model.with_buffers(train_x=model.train_x[rows], train_y=model.train_y[rows])
            at = part.at_data(hyperparameters)
            total += float(expected_log_likelihood(part, at, *latents.marginals(at), part.targets, None if whole else rows).sum())
    return total
