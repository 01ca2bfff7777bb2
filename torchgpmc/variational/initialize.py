"""``initialize``: the best Gaussian approximation, in theta, inducing points and q(v)."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from tqdm.auto import tqdm

from torchgpmc.ascent import ascend
from torchgpmc.checks import check_count, warn
from torchgpmc.models.gp_model import GPModel
from torchgpmc.random import make_generator
from torchgpmc.variational.bound import Positions, VariationalMarginal, inducing_positions
from torchgpmc.variational.joint_mode import start_at_joint_mode
from torchgpmc.variational.minibatches import ascend_by_minibatches
from torchgpmc.variational.start import Start, fitted

_BOUND = 12.0  # of theta, and of inducing points in deviations of the inputs
_NUM_CANDIDATES = 8
_SLOPE = 0.01  # of the bound, in nats for a unit of theta or a deviation of the inputs: where it is smaller all over, a search ends
_TOLERANCE = 1e-8  # of q while theta is far from where it will end
_CHUNK_ELEMENTS = 4_000_000  # of projections
_RECENT = 0.1  # share of a search by whose gain one sees how far it still was
_SMALL_GAIN = 0.01  # nats: by less a search that ends, however it ends, has converged


def initialize(
    model: GPModel,
    *,
    optimize_inducing_points: bool = True,
    max_iterations: int = 200,
    batch_size: int | None = None,
    seed: int = 0,
    progress: bool = True,
) -> Start:
    r"""The best Gaussian approximation of a model's posterior, to start chains from and to compare them with.

    .. math:: \max_{\theta, Z, q} E_q \log p(y | f) - KL(q(v) | N(0, I)) + \log p(\theta) + \log |dx / d\theta|

    so theta is the mode of its approximate posterior on the unconstrained scale on which it is sampled. q(v) is a normal density
    with a full lower-triangular scale for every latent function. Wherever theta and Z are, q is brought to its optimum by
    natural-gradient steps, and L-BFGS (scipy) moves theta at the inducing points given, then theta and the inducing points. With
    ``batch_size`` all take steps together, on minibatches: natural gradients for q, Adam for the rest (Hensman et al. 2015,
    section 3, step 1; Salimbeni, Eleftheriadis & Hensman 2018). The search begins at the model's present values or, where the
    bound is higher, at a draw from the prior.

    Where the likelihood does not factorise over data, as that of gene expression, there are no sites to make q of: then it is the
    normal approximation at the mode of [theta, v] together, with the whole curvature there.

    Args:
        model: a :class:`SparseGP`, or a :class:`GP`; not changed.
        optimize_inducing_points: whether a :class:`SparseGP`'s inducing points move too.
        max_iterations: of each of the two searches; with ``batch_size`` passes over the data.
        batch_size: data a step, where N is too large for all at once.
        seed: of the draws from the prior and of the minibatches.
        progress: whether to show a bar with the bound.

    Returns:
        The fit; a :class:`SamplingWarning` says if it has not converged, and how far it was, but it can be used all the same.

    Raises:
        TypeError: ``model`` is of the wrong kind.
        ValueError: a number out of range; a model whose q(v) is not normal, or with several data sets; a bound that is finite
            nowhere, or no mode where one is needed.

    Example:
        >>> import torch, torchgpmc as tg
        >>> from gpytorch.kernels import RBFKernel
        >>> from gpytorch.priors import GammaPrior
        >>> x, kernel = torch.linspace(0, 1, 30), RBFKernel(lengthscale_prior=GammaPrior(2.0, 4.0))
        >>> model = tg.SparseGP(x, (x > 0.5).int(), kernel, tg.likelihoods.Bernoulli(), inducing_points=x[:3])
        >>> start = tg.initialize(model, progress=False)
        >>> start.converged, bool(start.model.inducing_points.max() > 0.4)
        (True, True)
    """
    _check(model)
    check_count("max_iterations", max_iterations)
    check_count("seed", seed, 0)
    if batch_size is not None:
        check_count("batch_size", batch_size, example=", or None for all data at once")
        if model.has_latents_at_data:
            raise ValueError(
                f"batch_size is {batch_size} and {type(model).__name__} has a latent for every datum. Expected None, or a SparseGP."
            )
    model.refresh()
    moves = optimize_inducing_points and not model.has_latents_at_data
    bar = tqdm(disable=not progress, desc="variational fit", unit="step", dynamic_ncols=True)
    with bar:
        if not model.factorises:
            return start_at_joint_mode(model, max_iterations, seed, bar)
        if batch_size is not None and batch_size < len(model.train_x):
            return _by_minibatches(model, moves, batch_size, max_iterations, seed, bar)
        return _by_searches(model, moves, max_iterations, seed, bar)


def _check(model: GPModel) -> None:
    if not isinstance(model, GPModel):
        raise TypeError(f"model is {type(model).__name__}. Expected a torchgpmc.SparseGP or torchgpmc.GP.")
    if model.is_conjugate:
        raise ValueError(
            f"initialize fits q(v), and {type(model).__name__} integrates v out exactly. Expected a SparseGP or a GP; "
            f"tg.fit(model) finds the hyperparameters."
        )
    if not (model.factorises or model.is_smooth):
        raise ValueError(
            f"{type(model.likelihood).__name__} neither factorises over data nor has slopes in f. Expected one or the "
            f"other; sample this model without a start."
        )
    if model.targets.one_a_chain:
        raise ValueError("the model has several data sets, each with its own posterior. Expected one; fit them one by one.")


class _Watched(VariationalMarginal):
    """Shows the bound as a search goes on."""

    def __init__(self, model: GPModel, positions: Positions, bar: tqdm):
        super().__init__(model, positions, _TOLERANCE)
        self.bar = bar

    def value_and_grad(self, position: Tensor) -> tuple[Tensor, Tensor]:
        found = super().value_and_grad(position)
        self.bar.update()
        self.bar.set_postfix(bound=f"{max(self.values, default=math.nan):.4f}", refresh=False)
        return found


def _by_searches(model: GPModel, moves: bool, max_iterations: int, seed: int, bar: tqdm) -> Start:
    theta = _best_candidate(model, seed)
    still = inducing_positions(model, False)
    marginal = _Watched(model, still, bar)
    position, rise = _search(marginal, theta, max_iterations)
    if moves:
        moving = _Watched(model, inducing_positions(model, True), bar)
        moving.sites = marginal.sites
        start = torch.cat([position, position.new_zeros(moving.positions.moving_size)])
        position, rise = _search(moving, start, max_iterations)
        position, zeta = moving.split(position)
        with torch.no_grad():
            model = moving.positions.model_at(model, zeta)
    model = model.with_theta(position)
    final = VariationalMarginal(model)
    found = final.optimum(position[None])
    final.sites = found.sites
    converged = rise <= _SMALL_GAIN and bool(found.converged)
    if rise > _SMALL_GAIN:
        warn(
            f"the variational fit did not converge: the bound still rose by {rise:.2g} nats in the last tenth of its steps. It can "
            f"be used; raise max_iterations (now {max_iterations}) for a better one.",
        )
    elif not converged:
        warn("the variational fit of the latents did not converge at the hyperparameters found. It can be used as it is.")
    return fitted(model, found.latents, converged=converged, marginal=final)


def _best_candidate(model: GPModel, seed: int) -> Tensor:
    """The present theta or, where the bound is higher, a draw from the prior ``(P,)``."""
    generator = make_generator(seed, model.train_x.device)
    theta = torch.cat([model.layout.present(model), model.layout.starting_points(_NUM_CANDIDATES, generator)]).detach()
    if not model.layout.size:
        return theta[0]
    marginal = VariationalMarginal(model, tolerance=_TOLERANCE)
    chunk = max(1, _CHUNK_ELEMENTS // (model.latent_size * len(model.train_x)))
    value = torch.cat([marginal(part) for part in theta.split(chunk)])
    if not bool(torch.isfinite(value).any()):
        raise ValueError(
            f"the variational bound is not finite at the model's hyperparameters, nor at {_NUM_CANDIDATES} draws from their prior. "
            f"Expected it to be somewhere; check the scale of train_x and train_y, and raise jitter (now {model.jitter:g})."
        )
    return theta[value.argmax()]


def _search(marginal: VariationalMarginal, start: Tensor, max_iterations: int) -> tuple[Tensor, float]:
    """Where L-BFGS ends from ``start`` ``(D,)``, and what it still gained in its last tenth, if it was cut short."""
    if not len(start):
        return start, 0.0
    found = ascend(marginal, start, bound=_BOUND, max_iterations=max_iterations, slope=_SLOPE)
    if found is None:  # where it starts the bound was finite a moment ago
        return start, math.inf
    if found.converged:
        return found.position, 0.0
    recent = max(1, int(_RECENT * len(marginal.values)))
    return found.position, max(marginal.values) - max(marginal.values[:-recent], default=-math.inf)


def _by_minibatches(model: GPModel, moves: bool, batch_size: int, max_iterations: int, seed: int, bar: tqdm) -> Start:
    found = ascend_by_minibatches(model, inducing_positions(model, moves), batch_size, max_iterations, seed, bar)
    if not found.converged:
        warn(
            f"the variational fit did not converge: after {max_iterations} passes over the data the bound still rose, by "
            f"{found.rise:.2g} nats in the last of them. It can be used; raise max_iterations for a better one.",
        )
    return fitted(found.model, found.latents, converged=found.converged)
