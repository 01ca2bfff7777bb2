"""``sample``: what was asked for is checked, then a method runs, or engines in turn; warnings."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial

import torch

from torchgpmc.calls.beginning import begun_at, draws_for_engines
from torchgpmc.calls.candidate import WANTED, Candidate
from torchgpmc.calls.default_call import Rule, sample_by_default
from torchgpmc.calls.engines import candidates
from torchgpmc.calls.forecast import warn_of_time
from torchgpmc.calls.interruption import before_draws
from torchgpmc.calls.isolation import warn_of_isolated_data
from torchgpmc.calls.loop import Found, Order
from torchgpmc.calls.settings import check_settings, checked_seed
from torchgpmc.calls.stand_ins import in_terms_of_model, returned, stand_ins
from torchgpmc.calls.units import warn_of_unit
from torchgpmc.checks import check_object, warn
from torchgpmc.methods import NUTS
from torchgpmc.models.gp_model import GPModel
from torchgpmc.models.remedies import checked_model
from torchgpmc.numerics.threads import one_torch_thread
from torchgpmc.posterior import Posterior
from torchgpmc.runs.drawn_start import drawn_start
from torchgpmc.runs.run import Method, Settings, chain_settings
from torchgpmc.storage.checkpoint import Checkpoint, as_checkpoint
from torchgpmc.variational import Start

_DRAWS = 1000  # kept a chain


def sample(
    model: GPModel,
    method: Method | None = None,
    *,
    num_samples: int | None = None,
    warmup_steps: int | None = None,
    num_chains: int | None = None,
    seed: int | None = None,
    progress: bool = True,
    checkpoint: str | os.PathLike[str] | Checkpoint | None = None,
    chain_chunk: int | None = None,
    start: Start | Posterior | None = None,
) -> Posterior:
    """Draws hyperparameters and latent function from the exact posterior of a GP model.

    The same seed, device, versions and number of threads give the same draws; progress and checkpoints never change them, and no
    global random generator is touched. Ctrl-C keeps the draws made so far. On CPU, torch's operations run on one thread each while
    this runs, and what is large enough is shared by as many threads as torch had (``posterior.info["threads"]``).

    Args:
        model: a :class:`GP`, :class:`SparseGP` or :class:`GPRegression`.
        method: for instance ``NUTS()``. Without one, engines that suit the model are tried in turn (:func:`torchgpmc.explain` names
            them), each until its draws are good: no complaints, and ``num_samples`` effective draws of every hyperparameter, ``lp``
            and latent, or until what it may spend is spent; ``posterior.info["tried"]`` lists them. Engines with chains alone, if
            ``num_chains``, ``warmup_steps`` or ``chain_chunk`` is given.
        num_samples: with a method, kept draws a chain, 1000 by default; without one, effective draws wanted, 400 by default.
        warmup_steps: steps before the first kept draw, in which the method tunes itself; ``num_samples`` by default.
        num_chains: chains run together as one batch; 4 by default.
        seed: of all randomness; ``None`` takes that of the checkpoint, or draws one; ``posterior.info["seed"]`` records it.
        progress: whether to show a bar with acceptance, step size, tree depth, gradients a second and divergences.
        checkpoint: a path (or :class:`Checkpoint`): a run killed half-way resumes from it to the same bits; a finished one is
            returned, or, of chains with ``warmup_steps``, goes on to a larger ``num_samples``; other settings are an error.
            Without a method, the second engine's file has ".2" after it, and so on.
        chain_chunk: evaluate at most this many chains at once, to bound memory. The random numbers stay the same; other batches
            round differently, which warm-up amplifies, so that after many steps draws may differ.
        start: a fit from :func:`torchgpmc.initialize` of this very model (``start.model``): chains of ``NUTS()``, the default then,
            or ``HMC()`` begin around it, in coordinates that are white under it, some around each other optimum that it has found
            to matter (``posterior.info["begun"]``). What is sampled is the same, sooner.
            Or, of methods on theta alone and without a method, a posterior of this very model, weighted or not: chains begin around
            its draws, their covariance is the mass matrix, and the first proposals of ``AMIS()`` are fitted to them.

    Returns:
        The posterior draws. Warns (:class:`SamplingWarning`) in plain words if they are not to be trusted.

    Raises:
        TypeError: ``model`` or ``method`` is of the wrong kind.
        ValueError: a number out of range, or a model the method cannot sample; before any sampling.

    Example:
        >>> import torch, torchgpmc as tg
        >>> from gpytorch.kernels import RBFKernel
        >>> from gpytorch.priors import GammaPrior
        >>> x = torch.linspace(0, 1, 10)
        >>> model = tg.GP(x, (x > 0.5).int(), RBFKernel(lengthscale_prior=GammaPrior(2.0, 4.0)), tg.likelihoods.Bernoulli())
        >>> posterior = tg.sample(model, tg.AMIS(), num_samples=1000, seed=0, progress=False)
        >>> posterior.samples["kernel.lengthscale"].shape
        torch.Size([1, 1000, 1, 1])
    """
    checked_model(model)
    if method is not None:
        check_object("method", method, "prepare", "a method object, for instance torchgpmc.NUTS() or torchgpmc.HMC(num_steps=20)")
    earlier = start if method is None and isinstance(start, Posterior) else None
    if method is None and (start is not earlier or model.targets.one_a_chain):
        method = NUTS()  # where every chain has a posterior of its own, there is nothing to judge draws by
    if num_samples is None:
        num_samples = WANTED if method is None else _DRAWS
    with one_torch_thread(), torch.inference_mode(False):
        model.refresh()
        settings = check_settings(num_samples, warmup_steps, num_chains, chain_chunk)
        file = as_checkpoint(checkpoint)
        order = Order(method, settings, checked_seed(seed, file), model.train_x.device, file, progress)
        warn_of_unit(model)
        if method is None:
            posterior = _sample_by_default(model, order, earlier)
            warn_of_isolated_data(posterior)
            return posterior
        _check_one_data_set_a_chain(model, settings)
        if start is not None:
            with before_draws(file):
                order = order._replace(settings=begun_at(start, model, method, settings))
        posterior = Posterior(model, *order.on_model(model))
        found = posterior.complaints()
        warn_of_isolated_data(posterior)
    for complaint in found:
        warn(complaint)
    return posterior


def _sample_by_default(model: GPModel, order: Order, start: Posterior | None) -> Posterior:
    """Engines in turn; ``order.settings`` are the user's, of whom ``num_samples`` are effective draws.

    With ``start`` those that can begin at its draws.
    """
    wanted, warmup_steps, num_chains, chain_chunk, *_ = order.settings
    with before_draws(order.checkpoint):
        others = [] if start is not None else stand_ins(model)
        model = others[-1].model if others else model
        engines = candidates(model, wanted)
        if not (warmup_steps is num_chains is chain_chunk is None):
            engines = [engine.with_chains(num_chains, warmup_steps) for engine in engines if engine.num_chains is not None]
        draws = None if start is None else draws_for_engines(start, model, [engine.method for engine in engines])
        warn_of_time(model, engines[0])

    def run(number: int, engine: Candidate, rule: Rule, before: Posterior | None) -> Posterior:
        begin_at = drawn_start(before, model) if draws is None and before is not None else draws
        method = None if begin_at is None else engine.method.at_draws(model)
        with before_draws(order.checkpoint):
            begin = (engine.start(), None) if method is None else (None, begin_at)
        settings = Settings(engine.limits.most, engine.warmup_steps, engine.num_chains, chain_chunk, *begin)
        trial = order._replace(method=method or engine.method, settings=settings, wanted=wanted, number=number)
        if order.checkpoint is not None and number:
            path = f"{os.fspath(order.checkpoint.path)}.{number + 1}"
            trial = trial._replace(checkpoint=order.checkpoint._replace(path=path))

        rule = rule._replace(as_returned=partial(in_terms_of_model, others, seed=order.seed)) if others else rule

        def enough(num_kept: int, num_evaluations: float, so_far: Callable[[], Found]) -> bool:
            return rule(num_kept, num_evaluations, lambda: Posterior(model, *so_far()))

        return Posterior(model, *trial.on_model(model, enough))

    return returned(others, sample_by_default(engines, wanted, run), order.seed)


def _check_one_data_set_a_chain(model: GPModel, settings: Settings) -> None:
    if model.targets.one_a_chain and model.targets.num_data_sets != chain_settings(settings)[1]:
        raise ValueError(
            f"the model has targets for {model.targets.num_data_sets} chains and num_chains is {settings.num_chains}. "
            f"Expected num_chains={model.targets.num_data_sets}, one data set a chain; or train_y of shape "
            f"{tuple(model.targets.values.shape[1:])}, one data set for all chains."
        )
