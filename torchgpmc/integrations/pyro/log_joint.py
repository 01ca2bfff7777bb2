"""The posterior density of a Pyro model, or of a potential, as a function of C flat positions."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import pyro
import torch
from pyro import poutine
from pyro.infer.autoguide import init_to_uniform
from pyro.infer.mcmc.util import initialize_model
from pyro.ops.integrator import potential_grad
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from torchgpmc.density import AutogradDensity, mask_failures
from torchgpmc.types import LogDensity

Potential = Callable[[dict[str, Tensor]], Tensor]
_PROBE_STEP = 0.1  # between a chain's start and a second position to compare routes at
_FAR = 10.0  # log density a dimension below the best chain's
_MOST_CLIMBS = 200
_FEWER = 4  # rows in a recording, over those in the next smaller one


class SiteShapes(NamedTuple):
    """The continuous sites of a model, and how they make up a position: one after another, by name, as in Pyro's own MCMC."""

    shapes: dict[str, torch.Size]  # unconstrained, in the order of their names
    dtypes: dict[str, torch.dtype]

    def position(self, values: Mapping[str, Tensor]) -> Tensor:
        """Flat positions ``(C, D)`` of unconstrained values ``{name: (C, *shape)}``."""
        return torch.cat([values[name].reshape(len(values[name]), shape.numel()) for name, shape in self.shapes.items()], -1)

    def values(self, position: Tensor) -> dict[str, Tensor]:
        """Unconstrained values ``{name: (..., *shape)}`` of flat positions ``(..., D)``; the inverse of :meth:`position`."""
        parts = position.split([shape.numel() for shape in self.shapes.values()], -1)
        named = zip(self.shapes.items(), parts, strict=True)
        return {name: part.reshape(position.shape[:-1] + shape).to(self.dtypes[name]) for (name, shape), part in named}


def site_shapes(values: Mapping[str, Tensor]) -> SiteShapes:
    """The sites of unconstrained values ``{name: (C, *shape)}``.

    Raises:
        ValueError: there are none.
    """
    names = sorted(values)
    if not sum(values[name].numel() for name in names):
        raise ValueError(
            "the model has no continuous latent site, so there is nothing to sample. Expected a pyro.sample without obs; for "
            "discrete latents alone use pyro.infer.infer_discrete."
        )
    return SiteShapes({name: values[name].shape[1:] for name in names}, {name: values[name].dtype for name in names})


class ByRows:
    """A Pyro potential, one chain after another: the route that always works, and the reference for the other.

    Args:
        potential: minus the log density of unconstrained values ``{name: shape}``.
        sites: of the position.
    """

    route = "one chain after another"

    def __init__(self, potential: Potential, sites: SiteShapes):
        self.potential = potential
        self.sites = sites

    def __call__(self, position: Tensor) -> Tensor:
        return self.value_and_grad(position)[0]

    def value_and_grad(self, position: Tensor) -> tuple[Tensor, Tensor]:
        """Log density ``(C,)`` and gradient ``(C, D)``; where Pyro would reject a proposal, -inf."""
        values, gradients = [], []
        for row in position.detach():
            slopes, energy = potential_grad(self.potential, self.sites.values(row))
            values.append(-energy.detach().reshape(()).to(position))
            gradients.append(-self.sites.position({name: slope.unsqueeze(0) for name, slope in slopes.items()}).to(position))
        return mask_failures(torch.stack(values), torch.cat(gradients))

    def select(self, rows: Tensor) -> LogDensity:
        return self


class Vectorised:
    """All chains at once by ``vmap``.

    Args:
        log_density: of one position ``(D,)``: ``()``.
        by_rows: the same density; takes over where algebra fails, since an exception in one chain ends the evaluation of all.
    """

    route = "all chains at once"

    def __init__(self, log_density: Callable[[Tensor], Tensor], by_rows: ByRows):
        self.together = AutogradDensity(torch.func.vmap(log_density))
        self.by_rows = by_rows

    def __call__(self, position: Tensor) -> Tensor:
        try:
            return self.together(position)
        except torch.linalg.LinAlgError:
            return self.by_rows(position)

    def value_and_grad(self, position: Tensor) -> tuple[Tensor, Tensor]:
        try:
            return self.together.value_and_grad(position)
        except torch.linalg.LinAlgError:
            return self.by_rows.value_and_grad(position)

    def select(self, rows: Tensor) -> LogDensity:
        return self


class Recorded:
    """All chains at once, by the tensor operations that :class:`Vectorised` was seen to carry out, recorded once.

    Of a model of few data nearly all of a gradient's time goes into Python: Pyro's handlers, vmap's and autograd's. What is left
    without them is a third to a half. A recording is of so many rows; one is made when it is first needed, of all chains, of a
    quarter, and so on, and the rows asked for are filled up with the first.

    Args:
        vectorised: the same density; a model whose operations depend on values is none.
        num_chains: rows at most.
    """

    route = "all chains at once"

    def __init__(self, vectorised: Vectorised, num_chains: int):
        self.vectorised = vectorised
        self.num_chains = num_chains
        self._recordings: dict[int, Callable[[Tensor], tuple[Tensor, Tensor]]] = {}

    def __call__(self, position: Tensor) -> Tensor:
        return self.vectorised(position)

    def value_and_grad(self, position: Tensor) -> tuple[Tensor, Tensor]:
        count, size = len(position), self.num_chains
        if count > size:
            return self.vectorised.value_and_grad(position)
        while -(-size // _FEWER) >= count and size > 1:
            size = -(-size // _FEWER)
        filled = torch.cat([position, position[:1].expand(size - count, -1)]) if count < size else position
        if size not in self._recordings:  # a lambda, as a method's own argument list would be recorded too
            self._recordings[size] = make_fx(lambda rows: self.vectorised.together.value_and_grad(rows))(filled)
        try:
            with torch.no_grad():
                value, gradient = self._recordings[size](filled)
        except torch.linalg.LinAlgError:
            return self.vectorised.by_rows.value_and_grad(position)
        return value[:count], gradient[:count]

    def select(self, rows: Tensor) -> LogDensity:
        return self


class Unconstrained(NamedTuple):
    """What chains sample, and where they start."""

    density: ByRows | Vectorised | Recorded
    sites: SiteShapes
    start: Tensor  # (C, D)
    transforms: dict[str, Any]  # name -> from constrained to unconstrained values, as Pyro has them

    def constrained(self, position: Tensor, transforms: Mapping[str, Any]) -> dict[str, Tensor]:
        """Values ``{name: (C, S, *shape)}`` of positions ``(C, S, D)``."""
        values = self.sites.values(position)
        return {name: transforms[name].inv(value) if name in transforms else value for name, value in values.items()}


def fastest_route(log_density: Callable[[Tensor], Tensor], by_rows: ByRows, start: Tensor) -> ByRows | Vectorised | Recorded:
    """Operations recorded for all chains, or all chains at once, whichever first gives what one after another does, or that.

    Values and gradients are compared at two positions. Discrete latents, control flow that looks at values, and operations without
    a batching rule are refused by ``vmap`` itself.

    Args:
        log_density: of one position ``(D,)``, in operations that ``vmap`` may follow.
        by_rows: what it must reproduce.
        start: positions ``(C, D)``, the first of which is compared, with one nearby.
    """
    # Rows of different values, so that what one row takes from the other shows.
    shift = _PROBE_STEP * torch.linspace(-1.0, 1.0, start.shape[1]).to(start)
    two = torch.stack([start[0], start[-1] + shift])
    rows = torch.arange(max(2, len(start)), device=start.device) % 2
    value, gradient = by_rows.value_and_grad(two)
    probe, expected = two[rows], (value[rows], gradient[rows])
    vectorised = Vectorised(log_density, by_rows)
    if not _agrees(vectorised.together.value_and_grad, probe, expected):
        return by_rows
    recorded = Recorded(vectorised, len(probe))
    return recorded if _agrees(recorded.value_and_grad, probe, expected) else vectorised


def _agrees(value_and_grad: Callable[[Tensor], tuple[Tensor, Tensor]], probe: Tensor, expected: tuple[Tensor, Tensor]) -> bool:
    tolerance = torch.finfo(probe.dtype).eps ** 0.5
    try:
        found = value_and_grad(probe)
    except Exception:  # whatever a user's model may raise under vmap, or while it is recorded: there is a route that always works
        return False
    return all(
        torch.allclose(a, b, rtol=tolerance, atol=tolerance * (1 + float(torch.nan_to_num(b, posinf=0, neginf=0).abs().max())))
        for a, b in zip(found, expected, strict=True)
    )


def nearer_starts(density: LogDensity, start: Tensor) -> Tensor:
    """Starts ``(C, D)`` of which those far below the best one's log density have climbed until they are not.

    Chains share a step size, tuned to their mean acceptance: one chain so far out that it needs a tiny one would never move.
    """
    position, step = start, torch.full_like(start[:, :1], 0.1)
    value, gradient = density.value_and_grad(position)
    for _ in range(_MOST_CLIMBS):
        far = (value < value.max() - _FAR * start.shape[1]).unsqueeze(-1)
        if not bool(far.any()):
            break
        uphill = gradient / gradient.norm(dim=-1, keepdim=True).clamp_min(torch.finfo(start.dtype).tiny)
        proposal = torch.where(far, position + step * uphill, position)
        found = density.value_and_grad(proposal)
        better = far & (found[0] > value).unsqueeze(-1)
        position = torch.where(better, proposal, position)
        value, gradient = torch.where(better[:, 0], found[0], value), torch.where(better, found[1], gradient)
        step = torch.where(better, 1.5 * step, 0.5 * step)
    return position


def unconstrained_model(
    model: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    num_chains: int,
    *,
    init_strategy: Callable[..., Any] = init_to_uniform,
    initial_params: Mapping[str, Tensor] | None = None,
    transforms: dict[str, Any] | None = None,
    max_plate_nesting: int | None = None,
) -> Unconstrained:
    """The posterior of a Pyro model's continuous sites given its observed ones, discrete ones summed out as Pyro does it.

    Starts, transforms and the potential that is the reference are Pyro's own (``initialize_model``), drawn from the global
    generator. That potential cannot be vectorised; what ``vmap`` is given is log p(x, y) of one trace less the transforms' log
    Jacobians, which must reproduce it (:func:`fastest_route`).

    Args:
        model: with Pyro primitives.
        args: its positional arguments.
        kwargs: its keyword arguments.
        num_chains: C.
        init_strategy: for one site at a time, as in Pyro.
        initial_params: unconstrained starts ``{name: (C, *shape)}`` in its place.
        transforms: of sites, from constrained to unconstrained values; by default those of their supports.
        max_plate_nesting: of models with discrete sites; guessed by default.

    Raises:
        ValueError: no start of finite density was found, or the starts given are not the model's sites.
    """
    given = None if initial_params is None else {name: value[0] for name, value in initial_params.items()}
    found, potential, transforms, _ = initialize_model(
        model,
        tuple(args),
        dict(kwargs),
        transforms=transforms,
        max_plate_nesting=max_plate_nesting,
        num_chains=num_chains,
        init_strategy=init_strategy,
        initial_params=given,
    )
    assert transforms is not None
    if initial_params is None:
        initial_params = {name: value.unsqueeze(0) for name, value in found.items()} if num_chains == 1 else found
    elif set(initial_params) != set(transforms):
        raise ValueError(
            f"initial_params has the sites {sorted(initial_params)}, and the model has {sorted(transforms)}. Expected a tensor of "
            f"unconstrained values for each."
        )
    sites = site_shapes(initial_params)
    inverses = {name: transforms[name] for name in sites.shapes}

    def log_density(position: Tensor) -> Tensor:
        unconstrained = sites.values(position)
        values = {name: inverses[name].inv(value) for name, value in unconstrained.items()}
        with pyro.validation_enabled(False):
            trace = poutine.trace(poutine.condition(model, values)).get_trace(*args, **kwargs)
            total: Any = trace.log_prob_sum()
        for name, value in unconstrained.items():
            total = total - inverses[name].log_abs_det_jacobian(values[name], value).sum()
        return total.to(position)

    by_rows, start = ByRows(potential, sites), sites.position(initial_params).detach()
    density = fastest_route(log_density, by_rows, start)
    return Unconstrained(density, sites, start if given is not None else nearer_starts(density, start), transforms)


def unconstrained_potential(
    potential: Potential, initial_params: Mapping[str, Tensor] | None, transforms: dict[str, Any] | None
) -> Unconstrained:
    """The density exp(-potential) of unconstrained values, from given starts ``{name: (C, *shape)}``.

    Raises:
        ValueError: there are no starts.
    """
    if not initial_params:
        raise ValueError(
            "a potential_fn says nothing of where chains may start. Expected initial_params, a tensor of unconstrained values for "
            "each name, chains first."
        )
    sites = site_shapes(initial_params)
    by_rows, start = ByRows(potential, sites), sites.position(initial_params).detach()
    density = fastest_route(lambda position: -potential(sites.values(position)), by_rows, start)
    return Unconstrained(density, sites, start, transforms or {})
