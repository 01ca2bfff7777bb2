"""``initialize``: the best Gaussian approximation, in theta, inducing points and q(v)."""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from tqdm.auto import tqdm

from torchgpmc.approximations.nearest_normal import sites_of
from torchgpmc.checks import check_count, check_flag, warn
from torchgpmc.models.gp_model import GPModel
from torchgpmc.models.rough import with_rough_expectations
from torchgpmc.numerics.threads import threads_for
from torchgpmc.variational.bound import inducing_positions
from torchgpmc.variational.joint_mode import start_at_joint_mode
from torchgpmc.variational.minibatches import ascend_by_minibatches
from torchgpmc.variational.optima import fitted_at, with_others
from torchgpmc.variational.searches import SMALL_GAIN, Beginning, best_beginning, search
from torchgpmc.variational.start import Start, fitted, variational_bound

_NUM_STARTS = 3  # of all data at once, where a round costs a sixth of a fit


def initialize(
    model: GPModel,
    *,
    optimize_inducing_points: bool | None = None,
    max_iterations: int = 200,
    batch_size: int | None = None,
    num_starts: int | None = None,
    start: Start | None = None,
    rough_expectations: bool = False,
    seed: int = 0,
    progress: bool = True,
) -> Start:
    r"""The best Gaussian approximation of a model's posterior, to start chains from and to compare them with.

    .. math:: \max_{\theta, Z, q} E_q \log p(y | f) - KL(q(v) | N(0, I)) + \log p(\theta) + \log |dx / d\theta|

    so theta is the mode of its approximate posterior on the unconstrained scale on which it is sampled. q(v) is a normal density
    with a full lower-triangular scale for every latent function. In rounds, natural-gradient steps bring q towards its optimum, and
    L-BFGS (scipy) moves theta at the inducing points given, then theta and the inducing points, while q is the posterior under the
    Gaussian sites that those steps found (Adam, Chang, Khan & Solin 2021): it follows what moves, and the bound never falls. With
    ``batch_size`` all take steps together, on minibatches: natural gradients for q, Adam for the rest (Hensman et al. 2015,
    section 3, step 1; Salimbeni, Eleftheriadis & Hensman 2018).

    With a lengthscale a column the bound has several optima, tens of nats apart. So short searches, of one round, begin at the one
    of the present values and eight draws from the prior where the bound is highest, at the present values and at draws as they
    come, and the best of them goes on; of more than 4000 data they see so many, of four latent functions and more 2400 to 500.
    ``Start.tried`` has the bounds that they ended at.

    Chains that begin at one optimum see its surroundings alone. So the other searches are carried on from there, inducing points
    where the best has moved them, until they meet it, end elsewhere, or are 12 nats below it and hardly rise; where not all meet,
    two more begin (not with ``num_starts``, nor where they saw some). The highest becomes the fit, unless inducing points have
    moved for another, and ``Start.others`` has the rest. They are found by few searches: that there are no more is not known.

    Where the likelihood does not factorise over data, as that of gene expression, there are no sites to make q of: then it is the
    normal approximation at the mode of [theta, v] together, with the whole curvature there.

    Args:
        model: a :class:`SparseGP`, or a :class:`GP`; not changed.
        optimize_inducing_points: whether inducing points move too. By default those of a :class:`SparseGP` do, which makes it a
            closer approximation, and those of a :class:`ProjectedProcess` do not: its prior depends on them, and nothing holds
            them. Moved, they raised the bound by 19 to 33 nats on two data sets of labels, and held-out log densities fell by
            0.05 to 0.1 a label (``docs/results/sparse_mcmc.md``).
        max_iterations: rounds of each of the two searches, at most; with ``batch_size`` passes over the data, over which steps
            shrink.
        batch_size: data a step, where N is too large for all at once.
        num_starts: searches that begin. Three by default, which takes half as long again as one, or twice as long where they do not
            all meet (more where a fit takes tenths of a second, next to nothing where inducing points move); one on minibatches,
            which begins at the model's present values, and with ``start``. With one there is one optimum. Where the likelihood
            does not factorise, two, each to its end, of which the best counts; of more than 64 hyperparameters the best of three.
        start: an earlier fit to go on from, ``tg.initialize(start.model, start=start, ...)``: of the same model, at its theta,
            inducing points and q(v).
        rough_expectations: where those of the likelihood are long integrals (``Softmax`` of three classes and more), search by
            means over 16 points, in a third of the time: theta and q are near the best, as is enough to begin chains around. The
            bound is by the integrals all the same. Elsewhere it changes nothing.
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
        >>> [round(value, 1) for value in start.tried]  # what short searches reached, before inducing points moved: here they agree
        [-15.2, -15.2, -15.2]
    """
    _check(model)
    check_count("max_iterations", max_iterations)
    check_count("seed", seed, 0)
    check_flag("rough_expectations", rough_expectations)
    if batch_size is not None:
        check_count("batch_size", batch_size, example=", or None for all data at once")
        if model.has_latents_at_data:
            raise ValueError(
                f"batch_size is {batch_size} and {type(model).__name__} has a latent for every datum. Expected None, or a SparseGP."
            )
    if start is not None:
        if not isinstance(start, Start):
            raise TypeError(f"start is {type(start).__name__}. Expected what initialize or Start.from_gpytorch returned, or None.")
        start.check(model)
    by_minibatches = batch_size is not None and batch_size < len(model.train_x)
    if num_starts is not None:
        check_count("num_starts", num_starts)
        if num_starts > 1 and model.factorises and (by_minibatches or start is not None):
            raise ValueError(
                f"num_starts is {num_starts}, and with {'batch_size' if by_minibatches else 'start'} there is one beginning. "
                f"Expected None or 1."
            )
    # Where f at the data is a function of v alone no conditional variance in the bound holds them.
    wanted = not model.settles_f_at_data if optimize_inducing_points is None else optimize_inducing_points
    moves = wanted and not model.has_latents_at_data
    bar = tqdm(disable=not progress, desc="variational fit", unit="step", dynamic_ncols=True)
    share = 1.0 if batch_size is None else min(1.0, batch_size / len(model.train_x))
    with bar, threads_for(share * model.operations), torch.inference_mode(False):
        model.refresh()
        if not model.factorises:
            return start_at_joint_mode(model, max_iterations, num_starts, start, seed, bar)
        searched = with_rough_expectations(model) if rough_expectations else model
        if batch_size is not None and by_minibatches:
            fit = _by_minibatches(searched, moves, batch_size, max_iterations, start, seed, bar)
        else:
            fit = _by_searches(searched, moves, max_iterations, num_starts, start, seed, bar)
        return fit if searched is model else _of_exact(model, fit)


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


def _by_searches(
    model: GPModel, moves: bool, max_iterations: int, num_starts: int | None, start: Start | None, seed: int, bar: tqdm
) -> Start:
    begun = Beginning(model.layout.present(model)[0], None, ())
    if start is None:
        begun = best_beginning(model, num_starts or _NUM_STARTS, seed, bar)
        found = search(model, inducing_positions(model, False), begun.theta, begun.sites, max_iterations, bar)
        theta, sites = found.position, found.sites
    else:
        theta = start.theta.to(model.train_x)
        sites = sites_of(model, model.at_data(model.layout.raw_values(theta[None])), start.latents())
    if moves or start is not None:
        positions = inducing_positions(model, moves)
        position = torch.cat([theta, theta.new_zeros(positions.moving_size)])
        found = search(model, positions, position, sites, max_iterations, bar)
        with torch.no_grad():
            model = positions.model_at(model, found.position[model.layout.size :])
    ended = fitted_at(model, found)
    if begun.ends:
        ended = with_others(ended, begun.ends, begun.further if num_starts is None else (), moves, max_iterations, bar)
    if ended.found.rise > SMALL_GAIN:
        warn(
            f"the variational fit did not converge: the bound still rose by {ended.found.rise:.2g} nats in its last round. It can "
            f"be used; raise max_iterations (now {max_iterations}) for a better one.",
        )
    return replace(ended.fit, tried=begun.tried)


def _of_exact(model: GPModel, fit: Start) -> Start:
    """A fit that was made by rough expectations, as one of the model: optima, and bounds."""
    places = {} if model.has_latents_at_data else {"inducing_points": fit.model.latent_inputs}
    exact = model.with_buffers(**places).with_theta(fit.theta)
    bound = variational_bound(exact, fit.theta, fit.latents())
    return replace(fit, model=exact, elbo=bound, others=tuple(_of_exact(model, other) for other in fit.others))


def _by_minibatches(
    model: GPModel, moves: bool, batch_size: int, max_iterations: int, start: Start | None, seed: int, bar: tqdm
) -> Start:
    begin = None if start is None else start.latents()
    found = ascend_by_minibatches(model, inducing_positions(model, moves), batch_size, max_iterations, seed, bar, begin)
    if not found.converged:
        rise = f"by {found.rise:.2g} nats a pass over the data" if math.isfinite(found.rise) else "as far as one pass tells"
        warn(
            f"the variational fit did not converge: the bound still rose, {rise}, when steps had to shrink. It can be used; raise "
            f"max_iterations (now {max_iterations} passes) for a better one.",
        )
    return fitted(found.model, found.latents, converged=found.converged)
