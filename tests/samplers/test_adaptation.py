import itertools

import numpy as np
import pytest
import torch

from tests.calibration import worst_excess
from torchgpmc.density import AutogradDensity
from torchgpmc.methods import NUTS
from torchgpmc.samplers import adaptation
from torchgpmc.samplers.hmc import hmc, init_hmc, leapfrog, reasonable_step_size
from torchgpmc.samplers.nuts import _checkpoint_range, nuts
from torchgpmc.samplers.preconditioner import MassMatrix, Preconditioner, identity_preconditioner

F64 = torch.float64


def test_pooled_moments_equal_numpy():
    generator = torch.Generator().manual_seed(0)
    batches = [torch.randn(4, 5, generator=generator, dtype=F64) for _ in range(6)]
    moments = adaptation.start_moments(2, 5, batches[0])
    for batch in batches:
        moments = adaptation.update_moments(moments, batch)
    covariance = np.cov(torch.cat(batches).numpy().T)
    count = 24
    shrink, ridge = count / (count + 5), 5e-3 / (count + 5)
    found = adaptation.preconditioner_from(moments)
    np.testing.assert_allclose((found.factor @ found.factor.T).numpy(), shrink * covariance[:2, :2] + ridge * np.eye(2), rtol=1e-10)
    np.testing.assert_allclose(found.deviation.numpy() ** 2, shrink * np.diag(covariance)[2:] + ridge, rtol=1e-10)


@pytest.mark.parametrize("steps", [20, 100, 150, 500, 1000])
def test_windows_double_and_end_before_the_last_buffer(steps):
    ends = adaptation.window_ends(steps)
    assert ends == sorted(ends) and ends[0] > 0 and ends[-1] < steps
    lengths = np.diff(ends)
    assert all(b >= a for a, b in itertools.pairwise(lengths))


def test_dual_averaging_finds_the_step_with_the_target_acceptance():
    state = adaptation.start_dual_averaging(torch.tensor(1.0, dtype=F64))
    for _ in range(2000):
        state = adaptation.update_dual_averaging(state, torch.exp(-state.log_step.exp()), 0.8)
    assert float(torch.exp(-state.log_average.exp())) == pytest.approx(0.8, abs=0.01)


def test_preconditioner_is_a_square_root_of_its_covariance():
    factor = torch.tensor([[1.0, 0.0], [0.5, 2.0]], dtype=F64)
    tuning = Preconditioner(factor, torch.tensor([3.0], dtype=F64))
    eye = torch.eye(3, dtype=F64)
    matrix = tuning.apply(eye).T
    torch.testing.assert_close(matrix, torch.block_diag(factor, torch.tensor([[3.0]], dtype=F64)))
    torch.testing.assert_close(tuning.apply_transpose(eye).T, matrix.T)
    torch.testing.assert_close(tuning.standard_deviation(), (matrix @ matrix.T).diagonal().sqrt())


def test_mass_matrices_have_the_blocks_they_say():
    assert [choice.dense_size(3, 10) for choice in MassMatrix] == [0, 0, 3, 10]


DENSITY = AutogradDensity(lambda x: x[:, 0] * 2 - x[:, 0].exp() - 0.5 * ((x[:, 1] - x[:, 0]) / 0.5).square())


def test_leapfrog_is_reversible_and_of_second_order():
    position = torch.tensor([[0.3, 0.1], [-0.5, 0.2]], dtype=F64)
    rho = torch.tensor([[0.7, -1.0], [0.2, 0.4]], dtype=F64)
    tuning = Preconditioner(torch.tensor([[0.8]], dtype=F64), torch.tensor([0.6], dtype=F64))
    errors = []
    for count in (20, 40):
        step = torch.tensor(1.0 / count, dtype=F64)
        state, momentum = init_hmc(DENSITY, position), rho
        for _ in range(count):
            state, momentum = leapfrog(DENSITY, tuning, step, state, momentum)
        energy = 0.5 * momentum.square().sum(-1) - state.log_density
        errors.append((energy - (0.5 * rho.square().sum(-1) - DENSITY(position))).abs().max())
        for _ in range(count):
            state, momentum = leapfrog(DENSITY, tuning, -step, state, momentum)
        torch.testing.assert_close(state.position, position)
        torch.testing.assert_close(momentum, rho)
    assert float(errors[0] / errors[1]) == pytest.approx(4.0, rel=0.1)


def test_the_step_size_search_brackets_the_target(generator):
    state = init_hmc(DENSITY, torch.zeros(50, 2, dtype=F64))
    unit = identity_preconditioner(0, 2, state.position)
    for start in (1e-4, 1e3):
        step = reasonable_step_size(DENSITY, unit, state, torch.tensor(start, dtype=F64), generator)
        assert 0.05 < float(step) < 2.0


def test_checkpoint_slots_name_the_first_leaf_of_every_subtree_that_ends():
    """Against the definition: leaf n ends the subtrees [n - 2^k + 1, n] for each k up to its number of trailing ones."""
    for depth in range(1, 8):
        slots = {}
        for leaf in range(2**depth):
            first, last = _checkpoint_range(leaf)
            if leaf % 2 == 0:
                slots[last] = leaf
                continue
            found = [slots[slot] for slot in range(last, first - 1, -1)]
            trailing = len(f"{leaf:b}") - len(f"{leaf:b}".rstrip("1"))
            assert found == [leaf - 2**k + 1 for k in range(1, trailing + 1)]


@pytest.mark.slow
@pytest.mark.statistical
def test_finished_chains_do_not_change_the_others():
    assert excess_of_unequal_chains(lambda scale, rows: scale[rows]) < 1


@pytest.mark.slow
def test_chains_that_change_places_as_others_finish_are_caught():
    assert excess_of_unequal_chains(lambda scale, rows: scale[: len(rows)]) > 1


def excess_of_unequal_chains(take):
    """Rows of very different scale end their trees at different times; each must still sample its own normal distribution."""
    scales = torch.tensor([0.05, 1.0, 7.0], dtype=F64).repeat(300)

    class Scaled(AutogradDensity):
        def __init__(self, scale):
            super().__init__(lambda x: -0.5 * (x / scale[:, None]).square().sum(-1))
            self.scale = scale

        def select(self, rows):
            return Scaled(take(self.scale, rows))

    density = Scaled(scales)
    unit = identity_preconditioner(0, 2, scales)
    sampler = nuts(density, step_size=torch.tensor(0.07, dtype=F64), preconditioner=unit, max_tree_depth=7)
    generator = torch.Generator().manual_seed(0)
    state = sampler.init(scales[:, None] * torch.randn(900, 2, generator=generator, dtype=F64), generator)
    for _ in range(15):
        state, info = sampler.step(state, generator)
    assert len(set(info.tree_depth.tolist())) > 2
    standard = (state.position / scales[:, None]).view(300, 3, 2)
    moments = torch.cat([standard.flatten(1), standard.square().flatten(1)], -1)
    return worst_excess(moments, torch.cat([torch.zeros(6), torch.ones(6)]))


def test_divergences_are_flagged():
    cliff = AutogradDensity(lambda x: -1e6 * x.square().sum(-1))
    unit = identity_preconditioner(0, 2, torch.zeros(1, dtype=F64))
    for sampler in (
        nuts(cliff, step_size=torch.tensor(0.5, dtype=F64), preconditioner=unit),
        hmc(cliff, step_size=torch.tensor(0.5, dtype=F64), preconditioner=unit, num_steps=3),
    ):
        generator = torch.Generator().manual_seed(0)
        state = sampler.init(torch.full((3, 2), 1e-3, dtype=F64), generator)
        new, info = sampler.step(state, generator)
        assert bool(info.diverging.all()) and torch.equal(new.position, state.position)


@pytest.mark.slow
def test_trees_are_short_until_the_step_size_is_known(generator):
    normal = AutogradDensity(lambda x: -0.5 * x.square().sum(-1))
    position = torch.zeros(3, 2, dtype=F64)
    warm_up = adaptation.WindowedAdaptation(60, MassMatrix.DIAGONAL, 0, 1e-3, 0.8)
    tuning = warm_up.start(position, None, generator)
    method = NUTS(max_tree_depth=8)

    def longest(tuning):
        tiny = method._kernel(normal, tuning._replace(step_size=torch.tensor(1e-3, dtype=F64)))
        state, info = tiny.step(tiny.init(position, generator), generator)
        return float(info.n_steps.max()), state, info

    for iteration in range(1, 16):
        assert tuning.is_rough
        gradients, state, info = longest(tuning)
        assert gradients == 63
        tuning = warm_up.update(tuning, iteration, state, info, generator)
    assert not tuning.is_rough and longest(tuning)[0] == 255
    assert not warm_up._replace(steps=0).start(position, None, generator).is_rough
    assert not warm_up._replace(target_acceptance=None).start(position, None, generator).is_rough


def test_a_chain_that_needs_smaller_steps_than_all_others_moves_in(generator):
    steep = AutogradDensity(lambda x: -0.25 * x.pow(4).sum(-1))
    position = torch.randn(12, 1, generator=generator, dtype=F64)
    position[7] = 40.0
    warm_up = adaptation.WindowedAdaptation(100, MassMatrix.DIAGONAL, 0, 1.0, 0.8, search_on=steep)
    tuning, method = warm_up.start(position, None, generator), NUTS()
    state = method._kernel(steep, tuning).init(position, generator)
    for iteration in range(1, 16):
        state, info = method._kernel(steep, tuning).step(state, generator)
        tuning = warm_up.update(tuning, iteration, state, info, generator)
    assert float(state.position.abs().max()) < 4.0
