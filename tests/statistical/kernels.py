"""Every sampler of a known density: one row each for the conformance, Geweke and calibration tests; and deliberate errors to catch.

Those of estimated densities have their rows in ``pseudo_marginal.py``.
"""

import copy
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

import torchgpmc as tg
from tests.problems import some_fit
from torchgpmc.approximations import Laplace
from torchgpmc.evidence import importance
from torchgpmc.models import JointLogDensity
from torchgpmc.models.affine import AffineJointLogDensity
from torchgpmc.models.bent import bent_map
from torchgpmc.models.following import following_map
from torchgpmc.models.latents import likelihood_values
from torchgpmc.models.whitening import GaussianSites
from torchgpmc.runs.blocks import JointWithPrior, LatentsGivenTheta
from torchgpmc.runs.class_chains import ClassChains
from torchgpmc.runs.class_tuning import ClassTuning, FollowingSites
from torchgpmc.runs.control_inputs import prior_of_controls
from torchgpmc.runs.integrated_latents import ThroughEstimates
from torchgpmc.runs.parameterizations import ThetaBlock
from torchgpmc.runs.white_moves import in_white_coordinates
from torchgpmc.samplers import (
    Block,
    Preconditioner,
    auxiliary_gradient,
    chees,
    control_variables,
    elliptical_slice,
    gibbs_like,
    given_the_rest,
    hmc,
    local_regions,
    metropolis,
    nuts,
    pcn,
    pseudo_marginal,
    slice_sampler,
    stochastic_gradient_hmc,
    sweep,
)
from torchgpmc.samplers.adaptation import start_moments
from torchgpmc.samplers.auxiliary_gradient import axes_of
from torchgpmc.samplers.gibbs_like import by_slices
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


class _Askew(NamedTuple):
    """What trajectories may follow in a density's place: a fifth flatter, and leaning."""

    density: Any

    def __call__(self, position):
        return 0.8 * self.density(position)

    def value_and_grad(self, position):
        value, gradient = self.density.value_and_grad(position)
        return 0.8 * value, 0.8 * gradient + 0.2 * position.cos()


def _hmc_following(model, density, like):
    tuning = preconditioner(model, like)
    return hmc(density, step_size=torch.tensor(0.5).to(like), preconditioner=tuning, num_steps=4, followed=_Askew(density))


def _chees(model, density, like):
    """One to four steps, as of :func:`_hmc`."""
    tuning = preconditioner(model, like)
    step_size, length = (torch.tensor(number).to(like) for number in (0.5, 2.0))
    return chees(density, step_size=step_size, preconditioner=tuning, trajectory_length=length)


class _Noisy(NamedTuple):
    """A density whose slopes come with normal noise, as those of minibatches do."""

    density: Any
    centre: torch.Tensor
    noise: float

    def __call__(self, position):
        return self.density(position)

    def estimate(self, position, generator):
        value, gradient = self.density.value_and_grad(position)
        return value, gradient + self.noise * torch.randn(gradient.shape, generator=generator, dtype=gradient.dtype)


def _stochastic_gradient_hmc(model, density, like):
    return stochastic_gradient_hmc(
        _Noisy(density, torch.zeros_like(like[0]), noise=1.0),
        step_size=torch.tensor(0.5).to(like),
        preconditioner=preconditioner(model, like),
        friction=1.0,
        num_steps=3,
    )


def _metropolis(model, density, like):
    return metropolis(density, step_size=torch.tensor(0.7).to(like), preconditioner=preconditioner(model, like))


def _slice(model, density, like):
    width = torch.full((model.layout.size + model.latent_size,), 1.5).to(like)
    return slice_sampler(density, width=width, max_steps_out=4)


def _latents_alone(kernel, *, with_prior=False):
    """A kernel on v alone; theta stays where it is, in the position as in the prior."""

    def make(model, density, like):
        size = model.layout.size
        joint = JointWithPrior(JointLogDensity(_scaled(model, getattr(density, "scale", 1.0)), density.targets))

        def given(position, generator):
            kept = joint.draw(position, generator)[1]
            return kernel(LatentsGivenTheta(joint.joint, kept, with_prior=with_prior))

        def init(position, generator):
            return given(position, generator).init(position[:, size:], generator), position[:, :size]

        def step(state, generator):
            inner, theta = state
            inner, info = given(torch.cat([theta, inner.position], -1), generator).step(inner, generator)
            return (inner, theta), info

        return Sampler(init, step)

    return make


def _pcn(density):
    return pcn(density, step_size=torch.tensor(0.8).double())


def _pcn_white(density):
    """Under sites that are no likelihood's: any will do."""
    sites = GaussianSites(torch.tensor([0.5, 2.0, 1.0, 0.25]).double(), torch.tensor([0.5, -1.0, 0.0, 0.5]).double())
    count = density.kept.at.mean.shape[-1]
    return in_white_coordinates(density, GaussianSites(*(part[torch.arange(count) % 4] for part in sites)), _pcn)


def _auxiliary_gradient(density):
    projection = density.kept.at.projection
    return auxiliary_gradient(density, step_size=torch.tensor(1.5).to(projection), axes=lambda: axes_of(projection @ projection.mT))


def _gibbs_like(density):
    model, prior = density.joint.model, density.kept.at.prior
    # A scaled model has its factor in log_likelihood alone, which this sampler does not ask.
    scale = getattr(model, "scale", 1.0)

    def pointwise(f):
        y = density.joint.targets.values
        call = lambda likelihood: likelihood.pointwise_log_prob(f.squeeze(1), y)  # noqa: E731
        return scale * model.likelihood_function(likelihood_values(prior), call).detach()

    return gibbs_like(density, factor=prior.factor, mean=prior.mean, updates=by_slices(pointwise))


def _local_regions(density):
    factor = density.kept.at.prior.factor
    return local_regions(density, factor=factor, labels=torch.arange(factor.shape[-1]) % 2)


def _control_variables(**options):
    def kernel(density):
        inputs = torch.tensor([[0.2, 0.4], [0.8, 0.5]]).double()
        prior = prior_of_controls(density.joint.model, density.kept.at.prior, inputs)
        return control_variables(density, prior=prior, **options)

    return kernel


class _WhiteState(NamedTuple):
    position: torch.Tensor  # [theta, v]
    inner: object


def _white_under_sites(model, density, like):
    """NUTS on [theta, w]; the sites are Laplace's at theta = 0, a function of the targets alone."""
    size = model.layout.size
    with torch.no_grad():
        targets = density.targets
        prior = model.prior(like.new_zeros(targets.num_data_sets, size))
        found = Laplace().evidence(model, prior, targets)
        sites = GaussianSites(found.precision, found.alpha + found.precision * found.mean)
    white = type(density)(model, targets, sites=sites)
    inner = _nuts(model, white, like)

    def init(position, generator):
        """w = R' v - R^-1 L' W (g - m), P = R R'."""
        theta, v = position[:, :size], position[:, size:]
        prior = model.prior(theta)
        factor, row = prior.factor.detach(), (sites.shift - sites.precision * prior.mean.detach())[:, None]
        precision = factor.mT @ (sites.precision[..., None] * factor) + torch.eye(factor.shape[-1]).to(like)
        root = torch.linalg.cholesky(precision)
        w = v[:, None] @ root - torch.linalg.solve_triangular(root, (row @ factor).mT, upper=False).mT
        return _WhiteState(position, inner.init(torch.cat([theta, w[:, 0]], -1), generator))

    def step(state, generator):
        moved, info = inner.step(state.inner, generator)
        v = white.whitened(moved.position)[0]
        return _WhiteState(torch.cat([moved.position[:, :size], v], -1), moved), info

    return Sampler(init, step)


def white_at_every_theta(model, density, like, bent=False):
    """HMC on [theta, w], w white under a normal density of all functions together which no data made; ``bent``: near one theta."""
    size = model.layout.size
    generator = torch.Generator().manual_seed(5)
    root, slope = (torch.randn(model.latent_size, n, generator=generator).to(like) for n in (model.latent_size, size))
    mean, scale = 0.5 * root[:1], (0.2 * root.tril(-1) + 0.6 * torch.eye(len(root)).to(like))[None]
    coordinates = following_map(model, like.new_zeros(size), mean, scale, slope)
    if bent:
        coordinates = bent_map(coordinates, torch.full_like(coordinates.origin, 0.5))
    joint = AffineJointLogDensity(density, coordinates)
    inner = _hmc(model, joint, like)

    def init(position, generator):
        theta, v = position.tensor_split([size], -1)
        jacobian = torch.autograd.functional.jacobian(lambda w: coordinates.latents(theta, w).sum(0), torch.zeros_like(v))
        matrix = jacobian.movedim(1, 0)  # (C, V, V), of each chain its own
        w = torch.linalg.solve(matrix, (v - coordinates.latents(theta, torch.zeros_like(v))).unsqueeze(-1)).squeeze(-1)
        return _WhiteState(position, inner.init(torch.cat([theta, w], -1), generator))

    def step(state, generator):
        moved, info = inner.step(state.inner, generator)
        return _WhiteState(torch.cat([moved.position[:, :size], joint.whitened(moved.position)[0]], -1), moved), info

    return Sampler(init, step)


def classes_in_turn(model, density, like, by_trajectories=False):
    """Theta and the latents of several classes in turn, white under sites that follow theta, in a basis, which no data made."""
    size, num_data, generator = model.layout.size, len(model.train_x), torch.Generator().manual_seed(6)
    less = torch.cat([torch.ones(1), (3.0 ** -torch.arange(4)).repeat_interleave(size)])  # of higher powers
    log_precision = 0.4 * (less[:, None] * torch.randn(4 * size + 1, num_data, generator=generator)).to(like)
    shift = 0.4 * (less[:, None, None] * torch.randn(4 * size + 1, *model.latent_shape, generator=generator)).to(like)
    sites = FollowingSites(log_precision, shift - shift.mean(1, keepdim=True))
    root = (0.7 * torch.eye(size) + 0.2 * torch.ones(size, size).tril(-1)).to(like)
    deviation = (0.6 + 0.8 * torch.rand(model.latent_size, generator=generator)).to(like)
    moments = start_moments(size, size + len(deviation), like)
    centre, steps = like.new_full((size,), -0.3), (torch.tensor(0.6).to(like), torch.tensor(1.4).to(like))
    scale = (0.8 * torch.eye(size) + 0.1 * torch.ones(size, size).tril(-1)).to(like)
    basis = torch.linalg.qr(torch.randn(num_data, num_data, generator=generator).to(like)).Q
    own = basis[:0] if by_trajectories else basis
    tuning = ClassTuning(*steps, centre, root, scale, sites, own, deviation, moments, like.new_zeros(()), torch.zeros_like(root))
    chains = ClassChains(density, 3, None)
    chains.by_trajectories = by_trajectories
    return chains.kernel(tuning)


def _sweep(model, density, like):
    """Metropolis on theta given v, then elliptical slice sampling of v given theta: K is factorised once a proposed theta."""
    size, total = model.layout.size, model.layout.size + model.latent_size
    tuning = preconditioner(model, like)._replace(deviation=like.new_zeros(0))
    joint = JointWithPrior(JointLogDensity(_scaled(model, getattr(density, "scale", 1.0)), density.targets))
    theta = Block(
        range(size),
        given_the_rest(joint, range(size)),
        lambda part: metropolis(part, step_size=torch.tensor(0.9).to(like), preconditioner=tuning),
    )
    return sweep(joint, [theta, Block(range(size, total), joint.latents_likelihood, elliptical_slice)])


def gibbs(parameterization, hyper=None):
    """Metropolis (or ``hyper``) on theta in a parameterisation, then elliptical slice sampling of v given theta."""

    def make(model, density, like):
        size, total = model.layout.size, model.layout.size + model.latent_size
        tuning = preconditioner(model, like)._replace(deviation=like.new_zeros(0))
        joint = JointLogDensity(_scaled(model, getattr(density, "scale", 1.0)), density.targets)

        def of_theta(part):
            if hyper is not None:
                return hyper(part, step_size=torch.tensor(0.4).to(like), preconditioner=tuning)
            return metropolis(part, step_size=torch.tensor(0.9).to(like), preconditioner=tuning)

        block = ThetaBlock(joint, of_theta, 1, len(like), None)
        latents = Block(range(size, total), JointWithPrior(joint).latents_likelihood, elliptical_slice)
        return sweep(JointWithPrior(joint), [*(part.update(block) for part in parameterization.parts(model)), latents])

    return make


def regressed(model, density, like, parameterization=tg.Regressed):
    """Theta moved along the slope of a fit, the latents following it by about as much as they vary."""
    return gibbs(parameterization(some_fit(model, steepness=1.0)))(model, density, like)


class _Failing(tg.Laplace):
    """Comes out unusable, so that the prior stands in: estimates are poor, and what is done with their draws shows."""

    def importance_density(self, *arguments):
        found = super().importance_density(*arguments)
        return found._replace(alpha=torch.full_like(found.alpha, torch.nan))


def latents_out(model, density, like, *, part=ThroughEstimates):
    """Pseudo-marginal steps on theta by estimates from two draws, then elliptical slice sampling of v given theta."""
    size, total = model.layout.size, model.layout.size + model.latent_size
    tuning = preconditioner(model, like)._replace(deviation=like.new_zeros(0))
    joint = JointLogDensity(_scaled(model, getattr(density, "scale", 1.0)), density.targets)
    estimator = importance(model, _Failing(max_iterations=1), num_importance=2, antithetic=False, targets=density.targets)

    def of_theta(estimated):
        return pseudo_marginal(estimated, step_size=torch.tensor(0.9).to(like), preconditioner=tuning)

    theta = part(estimator).update(ThetaBlock(joint, of_theta, 1, len(like), None))
    with_prior = JointWithPrior(joint)
    return sweep(with_prior, [theta, Block(range(size, total), with_prior.latents_likelihood, elliptical_slice)])


def _scaled(model, scale):
    """The model with its log likelihood multiplied by ``scale``."""
    if scale == 1:
        return model
    scaled = copy.copy(model)
    scaled.log_likelihood = lambda *arguments: scale * model.log_likelihood(*arguments)
    scaled.scale = scale
    return scaled


class Row(NamedTuple):
    """A sampler with frozen tuning, for tests."""

    public: str  # its name in torchgpmc.samplers
    make: Callable[..., Sampler]  # from the model, the density of [theta, v] and a position
    calibrated: tuple[Any, int] | None = None  # the method on [theta, v] that runs it, with well separated draws, and warm-up steps
    is_biased: bool = (
        False  # whether it is exact for no step size: tests of exactness leave it out, and one shows that they would see it
    )


SAMPLERS = {
    "nuts": Row("nuts", _nuts, (tg.NUTS(thinning=6), 150)),
    "nuts, white under sites": Row("nuts", _white_under_sites, (tg.NUTS(thinning=4, whitening=tg.Laplace()), 75)),
    "hmc": Row("hmc", _hmc, (tg.HMC(num_steps=12, thinning=10), 150)),
    "hmc, following another density": Row("hmc", _hmc_following),
    "chees": Row("chees", _chees, (tg.ChEES(max_steps=12, thinning=10), 150)),
    "stochastic gradient hmc": Row("stochastic_gradient_hmc", _stochastic_gradient_hmc, is_biased=True),
    "metropolis": Row("metropolis", _metropolis, (tg.AdaptiveMH(thinning=300), 1000)),
    "slice": Row("slice_sampler", _slice, (tg.Slice(thinning=10), 50)),
    "elliptical slice": Row("elliptical_slice", _latents_alone(elliptical_slice)),
    "auxiliary gradient": Row("auxiliary_gradient", _latents_alone(_auxiliary_gradient)),
    "pcn": Row("pcn", _latents_alone(_pcn)),
    "pcn, white under sites": Row("pcn", _latents_alone(_pcn_white)),
    "gibbs like": Row("gibbs_like", _latents_alone(_gibbs_like)),
    "local regions": Row("local_regions", _latents_alone(_local_regions)),
    "control variables": Row("control_variables", _latents_alone(_control_variables())),
    "control variables, underrelaxed": Row("control_variables", _latents_alone(_control_variables(underrelaxation=0.5))),
    "control variables, walking": Row("control_variables", _latents_alone(_control_variables(walk=torch.tensor(0.8).double()))),
    "sweep": Row("sweep", _sweep),
    "interwoven": Row("sweep", gibbs(tg.Interwoven())),
    "surrogate": Row("sweep", gibbs(tg.Surrogate())),
    "surrogate of given noise": Row("sweep", gibbs(tg.Surrogate(precision=3.0))),
    "regressed": Row("sweep", regressed),
    "latents integrated out": Row("sweep", latents_out),
}
EXACT = [name for name, row in SAMPLERS.items() if not row.is_biased]
BIASED = [name for name, row in SAMPLERS.items() if row.is_biased]


def position_of(state):
    return state.position if hasattr(state, "position") else torch.cat([state[1], state[0].position], -1)


class HalvedLogDensity(JointLogDensity):
    """Planted error: log density ratios come out halved."""

    scale = 0.5

    def _evaluate(self, position):
        return 0.5 * super()._evaluate(position)

    def select(self, rows):
        if not self.targets.one_a_chain:
            return self
        sites = None if self.sites is None else self.sites.select(rows)
        return type(self)(self.model, self.targets.select(rows), sites=sites)


class NoVolume(HalvedLogDensity):
    """Planted error: the density of [theta, w] without log |dv / dw|."""

    def _evaluate(self, position):
        theta, white = position.split([self.model.layout.size, self.model.latent_size], -1)
        return 2 * super()._evaluate(position) - self._v_and_volume(self._at(theta)[0], white)[1]


class NoLikelihood(HalvedLogDensity):
    """Planted error: the prior, whatever the data."""

    scale = 0.0

    def _evaluate(self, position):
        theta, white = position.split([self.model.layout.size, self.model.latent_size], -1)
        at, log_prior = self._at(theta)
        v, log_volume = self._v_and_volume(at, white)
        return log_prior - 0.5 * v.square().sum(-1) + log_volume
