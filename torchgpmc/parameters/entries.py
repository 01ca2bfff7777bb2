"""Sampled parameters that enter theta alike, evaluated as one: most of the time that a few numbers take is that of the calls."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchgpmc.parameters.bijections import Interval
from torchgpmc.parameters.restricted_priors import JointPrior, RestrictedPrior, joint_prior


class Entry(NamedTuple):
    """One sampled parameter and how it enters theta; entries follow one another in theta's columns."""

    name: str  # as in Posterior.samples, e.g. "kernel.base_kernel.lengthscale"
    raw_name: str  # as in model.named_parameters()
    shape: torch.Size
    interval: Interval
    prior: RestrictedPrior

    @property
    def size(self) -> int:
        """Columns of theta that it has."""
        return math.prod(self.shape)


class EntryBlock(NamedTuple):
    """Entries that follow one another in the same interval and with the same form of prior: evaluated as one."""

    entries: list[Entry]
    interval: Interval
    prior: RestrictedPrior | JointPrior
    coordinate_prior: JointPrior | None  # the same, where theta is the coordinate that the prior's closed form is of
    size: int

    def parts(self, value: Tensor) -> list[Tensor]:
        """Each entry's values, from all ``(C, size)``."""
        parts = value.split([entry.size for entry in self.entries], -1)
        return [part.view(-1, *entry.shape) for entry, part in zip(self.entries, parts, strict=True)]

    def log_density(self, theta: Tensor, value: Tensor) -> Tensor:
        """Of theta, Jacobian included, whose values in the interval are given: ``(C,)``; differentiable."""
        if self.coordinate_prior is not None:
            return self.coordinate_prior.log_density_and_slope(theta, self.interval.derivative(theta, value))[0]
        log_priors = (entry.prior.log_prob(part) for entry, part in zip(self.entries, self.parts(value), strict=True))
        return functools.reduce(torch.add, log_priors, self.interval.log_jacobian(theta).sum(-1))

    def log_density_and_slope(self, theta: Tensor, value: Tensor, derivative: Tensor) -> tuple[Tensor, Tensor]:
        """Of theta, Jacobian included, whose values in the interval are given with their derivatives: ``(C,)``, ``(C, size)``."""
        if self.coordinate_prior is not None:
            return self.coordinate_prior.log_density_and_slope(theta, derivative)
        log_prob, slope = self.prior.log_prob_and_slope(value)
        log_density = log_prob + self.interval.log_jacobian(theta).sum(-1)
        return log_density, slope * derivative + self.interval.jacobian_slope(theta)


def blocks_of(entries: Sequence[Entry], like: Tensor) -> list[EntryBlock]:
    """All entries, in their order."""

    def kind(entry: Entry) -> tuple[Any, ...]:
        form = entry.prior.closed_form
        return entry.interval, *((entry.name,) if form is None else (form.function, form.support))

    return [_block(list(group), like) for _, group in itertools.groupby(entries, kind)]


def _block(entries: list[Entry], like: Tensor) -> EntryBlock:
    interval, prior, size = entries[0].interval, entries[0].prior, sum(entry.size for entry in entries)
    if prior.closed_form is None:
        return EntryBlock(entries, interval, prior, None, size)
    joint = joint_prior([entry.prior for entry in entries], like)
    return EntryBlock(entries, interval, joint, joint if prior.closed_form.support == interval else None, size)
