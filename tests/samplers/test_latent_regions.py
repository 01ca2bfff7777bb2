"""Region by region and through control variables: proposals are the conditional priors of the formulas, and the limits hold."""

import sys
from typing import NamedTuple

import pytest
import torch

from tests.calibration import worst_excess
from tests.problems import inputs
from torchgpmc.numerics.linalg import solve_lower
from torchgpmc.samplers import control_variables, local_regions
from torchgpmc.samplers.control_variables import control_prior
from torchgpmc.samplers.gibbs_like import by_normals, gibbs_like
from torchgpmc.samplers.metropolis import accept
from torchgpmc.samplers.regions import region_bases

F64 = torch.float64
SIZE, CHAINS = 6, 20_000


def covariance_of(x, z, jitter):
    plain = torch.exp(-0.5 * (torch.cdist(x, z) / 0.5).square())
    return plain + jitter * torch.eye(len(x), dtype=F64) if x is z else plain


X = inputs(SIZE)
K = covariance_of(X, X, 1e-4)
L = torch.linalg.cholesky(K)[None]


def anything(v):
    """A likelihood that accepts every proposal."""
    return v.new_zeros(len(v))


def conditional(covariance, given, wanted, values):
    """Mean ``(C, W)`` and covariance of some of normal variables given others."""
    gain = torch.linalg.solve(covariance[given][:, given], covariance[given][:, wanted]).T
    return values @ gain.T, covariance[wanted][:, wanted] - gain @ covariance[given][:, wanted]


def moments_excess(draws, mean, covariance):
    white = solve_lower(torch.linalg.cholesky(covariance), (draws - mean).T).T
    row, column = torch.tril_indices(white.shape[1], white.shape[1])
    products = white[:, row] * white[:, column]
    return worst_excess(torch.cat([white, products], -1), torch.cat([torch.zeros(white.shape[1]), (row == column).double()]))


@pytest.fixture
def drawn():
    return torch.Generator().manual_seed(0)


def one_proposal(labels, drawn, likelihood=anything):
    """f after a sweep that ends with the last region, from one place."""
    v = torch.randn(1, SIZE, generator=drawn, dtype=F64).expand(CHAINS, -1)
    sampler = local_regions(likelihood, factor=L, labels=labels)
    state, info = sampler.step(sampler.init(v, drawn), drawn)
    return state.position @ L[0].T, info


@pytest.mark.parametrize("labels", [[0, 1, 0, 2, 1, 2], [2, 1, 0, 0, 0, 0], [0, 1, 2, 3, 4, 5]])
def test_a_region_moves_alone(labels):
    """What is fixed while one region moves are the values of all others."""
    labels = torch.tensor(labels)
    bases = region_bases(L, labels)
    for region, basis in enumerate(bases.split(labels.bincount().tolist(), -1)):
        torch.testing.assert_close(basis.mT @ basis, torch.eye(basis.shape[-1], dtype=F64)[None])
        moves = L @ basis
        torch.testing.assert_close(moves[0, labels != region], torch.zeros_like(moves[0, labels != region]), atol=1e-9, rtol=0)


@pytest.mark.statistical
def test_regions_are_proposed_from_their_prior_given_the_rest(drawn):
    """The last region's, given where the sweep has left the others; single values are the Gibbs-like sampler's proposals."""
    excess = []
    for labels in ([0, 0, 0, 1, 1, 1], [0, 1, 2, 3, 4, 5]):
        after, info = one_proposal(torch.tensor(labels), drawn)
        last = torch.tensor(labels) == max(labels)
        excess.append(moments_excess(after[:, last], *conditional(K, ~last, last, after[:, ~last])))
        assert bool((info.n_steps == max(labels) + 1).all())
    after, _ = one_proposal(torch.zeros(SIZE, dtype=torch.long), drawn)
    excess.append(moments_excess(after, torch.zeros(SIZE, dtype=F64), K))  # one region: a draw from the prior
    assert max(excess) < 1


def test_one_region_is_independence_metropolis(drawn):
    """Accepted with the likelihood ratio alone."""
    v = torch.randn(50, SIZE, generator=drawn, dtype=F64)
    likelihood = lambda v: -3.0 * v.square().sum(-1)  # noqa: E731
    sampler = local_regions(likelihood, factor=L, labels=torch.zeros(SIZE, dtype=torch.long))
    state, info = sampler.step(sampler.init(v, drawn), drawn)
    moved = (state.position != v).any(-1)
    assert 0 < int(moved.sum()) < 50
    ratio = (likelihood(state.position) - likelihood(v)).clamp_max(0).exp()
    torch.testing.assert_close(info.acceptance_rate[moved], ratio[moved])


@pytest.mark.statistical
def test_gibbs_sampling_of_normal_sites_draws_from_the_conditionals(drawn):
    """The last value's: p(f_n | f_rest, y_n) where the sweep has left the others."""
    mean, noise = torch.linspace(-1, 1, SIZE, dtype=F64), 0.3
    y = torch.linspace(1, 0, SIZE, dtype=F64)
    precision = torch.full((SIZE,), 1 / noise, dtype=F64)
    sampler = gibbs_like(anything, factor=L, mean=mean[None], updates=by_normals(precision, y / noise))
    v = torch.randn(1, SIZE, generator=drawn, dtype=F64).expand(CHAINS, -1)
    state, _ = sampler.step(sampler.init(v, drawn), drawn)
    f = state.position @ L[0].T
    last = torch.arange(SIZE) == SIZE - 1
    prior_mean, prior_variance = conditional(K, ~last, last, f[:, ~last])
    variance = 1 / (1 / prior_variance + 1 / noise)
    expected = variance[0, 0] * ((prior_mean + mean[-1]) / prior_variance[0, 0] + y[-1] / noise) - mean[-1]
    assert moments_excess(f[:, last], expected, variance) < 1


# --- control variables ------------------------------------------------------------------------------------------------

CONTROLS = inputs(3, seed=5)
CC = covariance_of(CONTROLS, CONTROLS, 1e-3)
FC = covariance_of(X, CONTROLS, 0)
JOINT = torch.cat([torch.cat([K, FC], 1), torch.cat([FC.T, CC], 1)])  # of f and c


def controls_prior():
    return control_prior(L, FC[None], CC[None])


class OfImage(NamedTuple):
    """A likelihood that sees two numbers of each of two latents."""

    map: torch.Tensor

    def image(self, vectors):
        return vectors @ self.map

    def draw_at(self, image, generator):
        return -0.5 * (image - 1).square().sum(-1), (image,)

    def draw(self, position, generator):
        return self.draw_at(self.image(position), generator)


def test_what_the_likelihood_sees_follows_through_a_sweep(drawn, monkeypatch):
    """In two rounds of random numbers, the second of one proposal, whether chains have moved or not."""
    monkeypatch.setattr(sys.modules["torchgpmc.samplers.control_variables"], "_AT_ONCE", 2)
    density = OfImage(torch.randn(2 * SIZE, 4, generator=drawn, dtype=F64))
    sampler = control_variables(density, prior=controls_prior(), underrelaxation=0.6)
    v = torch.randn(50, 2 * SIZE, generator=drawn, dtype=F64)
    state, _ = sampler.step(sampler.init(v, drawn), drawn)
    moved = (state.position != v).any(-1)
    assert 0 < int(moved.sum()) < 50
    value, payload = density.draw(state.position, drawn)
    torch.testing.assert_close(state.log_density, value)
    torch.testing.assert_close(state.payload, payload)


@pytest.mark.slow
@pytest.mark.statistical
def test_proposals_leave_the_joint_prior_as_it_is(drawn, monkeypatch):
    monkeypatch.setattr(sys.modules["torchgpmc.samplers.control_variables"], "_AT_ONCE", 2)
    excess = [walk_excess(drawn)]
    for underrelaxation, num_latents in ((0.0, 1), (0.6, 2)):
        sampler = control_variables(anything, prior=controls_prior(), underrelaxation=underrelaxation)
        state = sampler.init(torch.randn(CHAINS, num_latents * SIZE, generator=drawn, dtype=F64), drawn)
        for _ in range(2):
            state, info = sampler.step(state, drawn)
        assert bool((info.n_steps == 3).all())
        for latent in range(num_latents):
            f = state.position.view(CHAINS, num_latents, SIZE)[:, latent] @ L[0].T
            both = torch.cat([f, state.controls[:, :, latent].T], -1)
            excess.append(moments_excess(both, torch.zeros(SIZE + 3, dtype=F64), JOINT))
    assert max(excess) < 1


@pytest.mark.statistical
def test_draws_of_algorithm_1_are_from_the_conditional_priors(drawn):
    """A start's control variables given f; after a sweep c_3 and f given c_1 and c_2, wherever they were before."""
    sampler = control_variables(anything, prior=controls_prior())
    v = torch.randn(CHAINS, SIZE, generator=drawn, dtype=F64)
    given = torch.arange(SIZE + 3) < SIZE
    started = sampler.init(v, drawn).controls[:, :, 0].T
    excess = moments_excess(started, *conditional(JOINT, given, ~given, v @ L[0].T))
    state, _ = sampler.step(sampler.init(v[:1].expand(CHAINS, -1), drawn), drawn)
    both = torch.cat([state.position @ L[0].T, state.controls[:, :, 0].T], -1)
    given = torch.tensor([False] * SIZE + [True, True, False])
    assert max(excess, moments_excess(both[:, ~given], *conditional(JOINT, given, ~given, both[:, given]))) < 1


def test_a_walk_without_the_prior_ratio_is_caught(drawn, monkeypatch):
    module = sys.modules["torchgpmc.samplers.control_variables"]  # the package's name is the function's
    monkeypatch.setattr(module, "accept", lambda move, *ends: accept(move._replace(correction=None), *ends))
    assert walk_excess(drawn) > 1


def walk_excess(drawn):
    """Under a flat likelihood a walk must leave p(f, c) as it is."""
    sampler = control_variables(anything, prior=controls_prior(), walk=torch.tensor(1.5, dtype=F64))
    state = sampler.init(torch.randn(CHAINS, SIZE, generator=drawn, dtype=F64), drawn)
    for _ in range(3):
        state, _ = sampler.step(state, drawn)
    both = torch.cat([state.position @ L[0].T, state.controls[:, :, 0].T], -1)
    return moments_excess(both, torch.zeros(SIZE + 3, dtype=F64), JOINT)


def test_a_control_prior_that_is_no_covariance_refuses_every_proposal(drawn):
    impossible = control_prior(L, FC[None], 0.1 * CC[None])
    sampler = control_variables(lambda v: -0.5 * v.square().sum(-1), prior=impossible)
    v = torch.randn(5, SIZE, generator=drawn, dtype=F64)
    state, info = sampler.step(sampler.init(v, drawn), drawn)
    torch.testing.assert_close(state.position, v)
    assert bool((info.acceptance_rate == 0).all())
