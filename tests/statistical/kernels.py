"""Every sampler with frozen tuning, and deliberate errors to catch."""

import torch

from torchgpmc.models import JointLogDensity
from torchgpmc.samplers import Block, Preconditioner, elliptical_slice, hmc, metropolis, nuts, slice_sampler
from torchgpmc.types import Sampler


def preconditioner(model, like):
    """A dense block for theta that is not the identity, and unequal scales for v, so that an error in either shows."""
    size = model.layout.size
    factor = (0.6 * torch.eye(size) + 0.2 * torch.ones(size, size).tril(-1)).to(like)
    return Preconditioner(factor, torch.linspace(0.7, 1.1, model.latent_size).to(like))


def _nuts(model, density, like):
    return nuts(density, step_size=torch.tensor(0.55).to(like), preconditioner=preconditioner(model, like), max_tree_depth=5)


def _hmc(model, density, like):
    tuning = preconditioner(model, like)
    return hmc(density, step_size=torch.tensor(0.5).to(like), preconditioner=tuning, num_steps=4, random_length=True)


def _metropolis(model, density, like):
    return metropolis(density, step_size=torch.tensor(0.7).to(like), preconditioner=preconditioner(model, like))


def _slice(model, density, like):
    size, total = model.layout.size, model.layout.size + model.latent_size
    blocks = [Block(range(size), lambda _: density), Block(range(size, total), lambda _: density)]
    return slice_sampler(density, width=torch.full((total,), 1.5).to(like), max_steps_out=4, blocks=blocks)


def _elliptical_slice(model, density, like):
    """On v alone; theta stays where it is, in the position as in the prior."""
    size = model.layout.size

    def likelihood_given(theta):
        prior = model.prior(theta)

        def log_likelihood(v):
            targets = getattr(density, "targets", None)
            scale = getattr(density, "scale", 1.0)
            return scale * model.log_likelihood(prior, v, targets).detach()

        return elliptical_slice(log_likelihood)

    def init(position, generator):
        return likelihood_given(position[:, :size]).init(position[:, size:], generator), position[:, :size]

    def step(state, generator):
        inner, theta = state
        inner, info = likelihood_given(theta).step(inner, generator)
        return (inner, theta), info

    return Sampler(init, step)


SAMPLERS = {
    "nuts": _nuts,
    "hmc": _hmc,
    "metropolis": _metropolis,
    "slice": _slice,
    "elliptical slice": _elliptical_slice,
}


def position_of(state):
    return torch.cat([state[1], state[0].position], -1) if isinstance(state[0], tuple) else state.position


class HalvedLogDensity(JointLogDensity):
    """Planted error: log density ratios come out halved."""

    scale = 0.5

    def _evaluate(self, position):
        return 0.5 * super()._evaluate(position)

    def select(self, rows):
        return self if self.targets.dim() == 1 else HalvedLogDensity(self.model, self.targets[rows])
