"""About how many seconds runs take on this machine, from their first steps."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

from torchgpmc.methods import NUTS
from torchgpmc.models import GPModel
from torchgpmc.numerics.random import make_generator
from torchgpmc.numerics.threads import one_torch_thread
from torchgpmc.runs.run import Settings
from torchgpmc.trees import mapped
from torchgpmc.variational import Start

TIMING, _MAX_TIMED = 0.1, 20  # seconds, evaluations
_ROUNDS = 1  # of a search for a fit, after which theta is near enough to see what gradients take there
_WATCHED = 3.0  # seconds, of chains
_LEAST, _MOST = 5, 25  # of their first transitions: with fewer in that time, they are not watched
_GRADIENTS_A_TRANSITION = 20  # in white coordinates, of the chain that needs most: trees of 15 and 31
_DRAWS_A_CHAIN = 200  # of four chains that go well


def seconds_of_evaluations(rehearse: Callable[[], Callable[[], Any]], number: float) -> float:
    """Of as many as ``rehearse()``, which is not timed, gives one of."""
    return number * seconds_of(rehearse())


def seconds_of_chains(
    model: GPModel,
    method: NUTS,
    num_chains: int,
    warmup_steps: int,
    start: Callable[..., Start | None],
) -> float:
    """Of chains of [theta, v] in white coordinates: their first transitions tell what one takes.

    Quadrature has other rules and sites take more steps to find at draws from the prior than where the posterior is, maps to white
    coordinates cost as much as gradients or nothing, and trees have 7 gradients or 63. So chains begin as they will, but for a fit
    that is soon ended, and are watched for three seconds. Where a gradient takes too long for that, as many as is usual count.
    """
    with one_torch_thread(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of a fit that has not converged
        fit = start(max_iterations=_ROUNDS, num_starts=1)
        generator = make_generator(0, model.train_x.device)
        run = method.prepare(model, Settings(1, warmup_steps, num_chains, None, fit))
        state = run.init(generator)
        transition = _GRADIENTS_A_TRANSITION * seconds_of(partial(run.target.density.value_and_grad, state.chain.position))
        if _LEAST * transition < _WATCHED:
            spent: list[float] = []
            while len(spent) < _MOST and sum(spent) < _WATCHED:
                began = time.perf_counter()
                state, *_ = run.advance(state, generator)
                spent.append(time.perf_counter() - began)
            late = spent[len(spent) // 2 :]  # when a step size has been found
            transition = sum(late) / len(late)
    return transition * (warmup_steps + _DRAWS_A_CHAIN)


def seconds_of(evaluate: Callable[[], Any]) -> float:
    """Of one call, on average after the first, which is slow; of that alone where it takes long."""
    with one_torch_thread():
        began = time.perf_counter()
        caught_up(evaluate())
        first = time.perf_counter() - began
        if first > 2 * TIMING:
            return first
        spent, count = 0.0, 0
        while spent < TIMING and count < _MAX_TIMED:
            began = time.perf_counter()
            caught_up(evaluate())
            spent, count = spent + time.perf_counter() - began, count + 1
    return spent / count


def caught_up(found: Any) -> None:
    """Waits until the tensors are there: a GPU is only asked for them when a call returns."""
    mapped(lambda leaf: leaf if leaf.device.type == "cpu" else leaf.flatten()[:1].cpu(), found)
