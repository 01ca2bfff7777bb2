"""The layout: gpytorch parameters with priors <-> one flat unconstrained vector theta, with its log prior density."""

from __future__ import annotations

import copy
import functools
import itertools
import math
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch
from gpytorch.priors import Prior
from torch import Tensor, nn

from torchgpmc.adapter.functional import constraint_of, parameters_with_owners, public_name
from torchgpmc.arrays import as_tensor
from torchgpmc.parameters.bijections import Interval
from torchgpmc.parameters.entries import Entry, EntryBlock, blocks_of
from torchgpmc.parameters.missing_priors import Missing, missing_priors_message
from torchgpmc.parameters.restricted_priors import RestrictedPrior, support_of


class Hyperparameters(NamedTuple):
    """All parameters of a model at C settings: module -> raw name within it -> constrained value ``(C, *shape)``."""

    by_module: dict[str, dict[str, Tensor]]
    num_settings: int


class Evaluated(NamedTuple):
    """All parameters at C settings with what the chain rule needs; P sampled numbers."""

    hyperparameters: Hyperparameters
    log_prior: Tensor  # (C,), of theta, Jacobian included
    log_prior_slope: Tensor  # (C, P)
    derivative: Tensor  # (C, P), of the constrained values in theta


class FixedEntry(NamedTuple):
    """One parameter that is not sampled: read from its module whenever it is needed."""

    name: str
    raw_name: str
    owner: nn.Module
    leaf: str

    def value(self) -> Tensor:
        """The constrained value, ``shape``."""
        raw = getattr(self.owner, self.leaf).detach()
        constraint = constraint_of(self.owner, self.leaf)
        return raw if constraint is None else constraint.transform(raw)


class Layout:
    r"""How a model's hyperparameters make up theta, and the prior density of theta.

    .. math:: \log p(\theta) = \sum_j \log p_j(x_j(\theta)) + \log |dx_j / d\theta_j|

    Priors act on constrained values x; theta is log(x - lower) on a half line and a logit on a bounded interval, the interval
    being the intersection of the gpytorch constraint and the prior's support.

    Args:
        prefixes: names of the modules on the model.
        entries: the sampled parameters, in the order of theta.
        fixed: the others.
        dtype: floating type of theta.
        device: where theta lives.
    """

    def __init__(
        self, prefixes: list[str], entries: list[Entry], fixed: list[FixedEntry], dtype: torch.dtype, device: torch.device
    ):
        self.prefixes = prefixes
        self.entries = entries
        self.fixed = fixed
        self.dtype = dtype
        self.device = device

    @property
    def size(self) -> int:
        """P, the number of sampled hyperparameters."""
        return sum(self._sizes)

    @property
    def names(self) -> list[str]:
        """Names of the sampled parameters, in the order of theta."""
        return [entry.name for entry in self.entries]

    def columns(self, prefix: str) -> range:
        """Columns of theta that hold the sampled parameters of the module or parameter ``prefix``, say ``"kernel"``.

        Raises:
            ValueError: none is sampled there.
        """
        ends = [0, *itertools.accumulate(self._sizes)]
        found = [index for index, name in enumerate(self.names) if f"{name}.".startswith(f"{prefix}.")]
        if not found:
            raise ValueError(f"no sampled parameter lies under '{prefix}'. Expected one of {self.names}, or a module of theirs.")
        return range(ends[found[0]], ends[found[-1] + 1])

    def checked(self, theta: Any) -> Tensor:
        """Theta ``(C, P)`` as a tensor of the layout's precision, from what users have.

        Raises:
            TypeError: no numbers.
            ValueError: another shape.
        """
        theta = as_tensor("theta", theta, self.device)
        if theta.dim() != 2 or theta.shape[1] != self.size:
            raise ValueError(
                f"theta has shape {tuple(theta.shape)}. Expected (C, {self.size}): in each row the unconstrained values of "
                f"{self.names}; of one setting theta[None]. layout.unconstrain makes it from constrained values."
            )
        return theta.to(self.dtype)

    def constrain(self, theta: Tensor) -> dict[str, Tensor]:
        """Sampled parameters at C settings: public name -> constrained value ``(C, *shape)``; theta is ``(C, P)``."""
        return {entry.name: _constrain(entry, part) for entry, part in self._parts(theta)}

    def raw_values(self, theta: Tensor) -> Hyperparameters:
        """Every parameter, sampled or fixed, at C settings ``(C, P)``."""
        return self._by_module(theta, [_constrain(entry, part) for entry, part in self._parts(theta)])

    def module_values(self, model: nn.Module) -> Hyperparameters:
        """What the model's own modules hold now, constrained, as one setting; with a graph to their raw parameters."""
        by_module: dict[str, dict[str, Tensor]] = {prefix: {} for prefix in self.prefixes}
        for prefix in self.prefixes:
            for raw, owner, leaf in parameters_with_owners(getattr(model, prefix)):
                constraint = constraint_of(owner, leaf)
                value = getattr(owner, leaf)
                by_module[prefix][raw] = (value if constraint is None else constraint.transform(value)).unsqueeze(0)
        return Hyperparameters(by_module, 1)

    def raw_values_and_log_prior(self, theta: Tensor) -> tuple[Hyperparameters, Tensor]:
        """:meth:`raw_values` and :meth:`log_prior` in one pass: what a log density needs at every step."""
        values, log_densities = [], [theta.new_zeros(len(theta))]
        for block, unconstrained in self._in_blocks(theta):
            value = block.interval.constrain(unconstrained)
            values += block.parts(value)
            log_densities.append(block.log_density(unconstrained, value))
        return self._by_module(theta, values), functools.reduce(torch.add, log_densities)

    def evaluate(self, theta: Tensor) -> Evaluated:
        """:meth:`raw_values_and_log_prior` with derivatives and without a graph."""
        total, values, slopes, derivatives = [], [], [], []
        for block, unconstrained in self._in_blocks(theta):
            value = block.interval.constrain(unconstrained)
            derivative = block.interval.derivative(unconstrained, value)
            log_density, slope = block.log_density_and_slope(unconstrained, value, derivative)
            values += block.parts(value)
            total.append(log_density)
            slopes.append(slope)
            derivatives.append(derivative)
        log_prior = functools.reduce(torch.add, total) if total else theta.new_zeros(len(theta))
        return Evaluated(self._by_module(theta, values), log_prior, _joined(slopes, theta), _joined(derivatives, theta))

    def _in_blocks(self, theta: Tensor) -> list[tuple[EntryBlock, Tensor]]:
        return list(zip(self._blocks, theta.split([block.size for block in self._blocks], -1), strict=True))

    @cached_property
    def _blocks(self) -> list[EntryBlock]:
        return blocks_of(self.entries, torch.zeros(0, dtype=self.dtype, device=self.device))

    def gather(self, by_module: dict[str, dict[str, Tensor]], theta: Tensor) -> Tensor:
        """Per-parameter tensors ``(C, *shape)`` of the sampled parameters as columns of theta; zeros where one is missing."""
        columns = []
        for (prefix, raw), size in zip(self._raw_names, self._sizes, strict=True):
            found = by_module.get(prefix, {}).get(raw)
            columns.append(theta.new_zeros(theta.shape[0], size) if found is None else found.reshape(-1, size))
        return _joined(columns, theta)

    def sampled_names(self, prefix: str) -> list[str]:
        """Raw names, within module ``prefix``, of its sampled parameters."""
        return [raw for module, raw in self._raw_names if module == prefix]

    @cached_property
    def _raw_names(self) -> list[tuple[str, str]]:
        """Module and raw name within it, of each entry."""
        return [(module, raw) for module, _, raw in (entry.raw_name.partition(".") for entry in self.entries)]

    @cached_property
    def _sizes(self) -> list[int]:
        """Columns of theta that each entry has."""
        return [entry.size for entry in self.entries]

    def _parts(self, theta: Tensor) -> list[tuple[Entry, Tensor]]:
        return list(zip(self.entries, theta.split(self._sizes, -1), strict=True))

    def _by_module(self, theta: Tensor, values: list[Tensor]) -> Hyperparameters:
        result: dict[str, dict[str, Tensor]] = {prefix: {} for prefix in self.prefixes}
        for (prefix, raw), value in zip(self._raw_names, values, strict=True):
            result[prefix][raw] = value
        for fixed in self.fixed:
            prefix, _, raw = fixed.raw_name.partition(".")
            value = fixed.value()
            result[prefix][raw] = value.expand(theta.shape[0], *value.shape)
        return Hyperparameters(result, theta.shape[0])

    def unconstrain(self, values: dict[str, Tensor]) -> Tensor:
        """theta ``(C, P)`` from constrained values ``{name: (C, *shape)}``; the inverse of :meth:`constrain`."""
        columns = [entry.interval.unconstrain(values[entry.name]).reshape(-1, entry.size) for entry in self.entries]
        return torch.cat(columns, -1)

    def log_prior(self, theta: Tensor) -> Tensor:
        """Log prior density of theta ``(C, P)``, Jacobian included: ``(C,)``."""
        return self.raw_values_and_log_prior(theta)[1]

    def log_prior_of_values(self, theta: Tensor) -> Tensor:
        """Log prior density of the constrained values at theta ``(C, P)``, without Jacobian: ``(C,)``."""
        total = theta.new_zeros(len(theta))
        for entry, unconstrained in self._parts(theta):
            total = total + entry.prior.log_prob(_constrain(entry, unconstrained))
        return total

    def present(self, model: nn.Module) -> Tensor:
        """theta ``(1, P)`` at the values that the model's own modules hold now."""
        values = self.module_values(model).by_module
        columns = [torch.zeros(1, 0, dtype=self.dtype, device=self.device)]
        for entry in self.entries:
            prefix, _, raw = entry.raw_name.partition(".")
            columns.append(entry.interval.unconstrain(values[prefix][raw].detach()).reshape(1, -1))
        return torch.cat(columns, -1)

    def sample_prior(self, num_draws: int, generator: torch.Generator) -> Tensor:
        """Draws theta ``(num_draws, P)`` from the prior, determined by ``generator``.

        Raises:
            NotImplementedError: a prior has ``log_prob`` alone; the message names it.
        """
        values = {}
        for entry in self.entries:
            try:
                values[entry.name] = entry.prior.sample(num_draws, generator)
            except NotImplementedError as error:
                raise NotImplementedError(f"the prior of '{entry.name}' cannot draw: it has log_prob alone") from error
        return self.unconstrain(values) if values else torch.zeros(num_draws, 0, dtype=self.dtype, device=self.device)

    def starting_points(self, num_chains: int, generator: torch.Generator) -> Tensor:
        """Dispersed starts ``(num_chains, P)``: prior draws, or uniform on (-2, 2) where a prior cannot draw."""
        columns = [torch.zeros(num_chains, 0, dtype=self.dtype, device=self.device)]
        for entry in self.entries:
            shape = (num_chains, entry.size)
            try:
                start = entry.interval.unconstrain(entry.prior.sample(num_chains, generator)).reshape(shape)
            except NotImplementedError:  # a prior with ``log_prob`` alone
                start = 4 * torch.rand(shape, dtype=self.dtype, device=self.device, generator=generator) - 2
            columns.append(start)
        return torch.cat(columns, -1)


def _joined(columns: list[Tensor], theta: Tensor) -> Tensor:
    return torch.cat(columns, -1) if len(columns) > 1 else columns[0] if columns else theta.new_zeros(len(theta), 0)


def _constrain(entry: Entry, unconstrained: Tensor) -> Tensor:
    return entry.interval.constrain(unconstrained).view(-1, *entry.shape)


def build_layout(modules: dict[str, nn.Module], dtype: torch.dtype, device: torch.device) -> Layout:
    """The layout of the parameters of a model's kernel, mean and likelihood.

    Args:
        modules: attribute name on the model -> gpytorch module, in the order theta is to have.
        dtype: floating type of theta.
        device: device of theta.

    Raises:
        ValueError: parameters have neither a prior nor ``requires_grad=False`` (all are listed); a prior matches no parameter; the
            prior's support and the constraint do not meet; a parameter is NaN; a prior is of vectors of another size, or of more
            numbers than the parameter has.
    """
    entries: list[Entry] = []
    fixed: list[FixedEntry] = []
    missing: list[Missing] = []
    for prefix, module in modules.items():
        priors = _priors_by_parameter(prefix, module)
        for raw, owner, leaf in parameters_with_owners(module):
            raw_name, name = f"{prefix}.{raw}", public_name(f"{prefix}.{raw}")
            parameter = getattr(owner, leaf)
            if bool(torch.isnan(parameter).any()):
                raise ValueError(f"parameter '{name}' is NaN. Expected a number; set it, as after a fit that went wrong.")
            if not parameter.requires_grad:
                fixed.append(FixedEntry(name, raw_name, owner, leaf))
                continue
            if id(parameter) not in priors:
                missing.append(Missing(name, raw_name, owner, leaf))
                continue
            prior = priors[id(parameter)]
            _check_prior_shape(name, parameter.shape, prior)
            interval = _interval(name, owner, leaf, prior)
            restricted = RestrictedPrior(prior, parameter.shape, interval, dtype, device)
            entries.append(Entry(name, raw_name, parameter.shape, interval, restricted))
    if missing:
        raise ValueError(missing_priors_message(missing))
    return Layout(list(modules), entries, fixed, dtype, device)


def _check_prior_shape(name: str, shape: torch.Size, prior: Prior) -> None:
    """Whatever broadcasts is evaluated without a word: a prior of vectors of two at one number twice, say."""
    shape = shape or torch.Size([1])  # a number serves priors that sum over a last dimension
    if not hasattr(prior, "event_shape"):
        raise ValueError(
            f"parameter '{name}': its {type(prior).__name__} has no batch_shape and event_shape, as its constructor does not call "
            f"that of torch's distributions. Expected super().__init__() in it, before anything else."
        )
    event, whole = prior.event_shape, prior.batch_shape + prior.event_shape
    if math.prod(event) > 1 and shape[-len(event) :] != event:
        raise ValueError(
            f"parameter '{name}' has shape {tuple(shape)} and its {type(prior).__name__} is of values of shape {tuple(event)} "
            f"together. Expected the parameter's last dimensions to be those; change the size of the prior, or give each element a "
            f"prior of its own, for instance NormalPrior."
        )
    if len(whole) > len(shape) or any(wanted not in (1, size) for wanted, size in zip(whole[::-1], shape[::-1], strict=False)):
        raise ValueError(
            f"parameter '{name}' has shape {tuple(shape)} and its {type(prior).__name__} has numbers for shape {tuple(whole)}. "
            f"Expected numbers that fit the parameter's shape, or one for all its elements; change the prior's."
        )


def _interval(name: str, owner: nn.Module, leaf: str, prior: Prior) -> Interval:
    constraint = constraint_of(owner, leaf)
    interval = support_of(prior)
    if constraint is not None:
        lower, upper = torch.as_tensor(constraint.lower_bound), torch.as_tensor(constraint.upper_bound)
        if bool((lower != lower.flatten()[0]).any()) or bool((upper != upper.flatten()[0]).any()):
            raise ValueError(
                f"parameter '{name}' has a constraint whose bounds differ between elements. Expected one lower and one upper "
                f"bound; split it into several parameters, or use the widest bounds."
            )
        interval = interval.intersect(Interval(float(lower.flatten()[0]), float(upper.flatten()[0])))
    if interval.lower >= interval.upper:
        raise ValueError(
            f"parameter '{name}': its {type(prior).__name__} and its constraint have no value in common. "
            f"Expected overlapping intervals; change the prior or the constraint."
        )
    return interval


def _priors_by_parameter(prefix: str, module: nn.Module) -> dict[int, Prior]:
    """Priors of all parameters below ``module``, keyed by parameter; matches those set through a closure."""
    result: dict[int, Prior] = {}
    for path, owner in module.named_modules():
        for prior_name, (prior, closure, _) in getattr(owner, "_priors", {}).items():
            full_name = ".".join(part for part in (prefix, path, prior_name) if part)
            matched, leaf = _match(full_name, owner, closure)
            key = id(getattr(matched, leaf))
            if result.setdefault(key, prior) is not prior:
                raise ValueError(f"prior '{full_name}': its parameter '{leaf}' has a second prior. Expected one; remove one.")
    return result


def _match(full_name: str, owner: nn.Module, closure: Any) -> tuple[nn.Module, str]:
    """The parameter whose constrained value ``closure`` returns, found by perturbing a copy twice."""
    twin = copy.deepcopy(owner)
    owners = dict(owner.named_modules())
    candidates = {raw for raw, _, _ in parameters_with_owners(owner)}
    generator = np.random.default_rng(0)  # vmap, under which a Pyro model may build a layout, refuses torch's random numbers
    for _ in range(2):
        values = {}
        for raw, part, leaf in parameters_with_owners(twin):
            parameter = getattr(part, leaf)
            noise = torch.as_tensor(generator.standard_normal(parameter.shape)).to(parameter)
            parameter.data = noise
            constraint = constraint_of(part, leaf)
            values[raw] = noise if constraint is None else constraint.transform(noise)
        answer = closure(twin)
        candidates &= {raw for raw, value in values.items() if answer.shape == value.shape and torch.equal(answer, value)}
    if len(candidates) != 1:
        raise ValueError(
            f"prior '{full_name}' is set through a closure that returns no parameter's own value. Expected a closure such as "
            f"`lambda module: module.lengthscale`; put the prior on the parameter itself, with the prior transformed to match."
        )
    path, _, leaf = candidates.pop().rpartition(".")
    return owners[path], leaf
