"""Proposals, mixture weights and modes: densities integrate, weights equal their definition, draws follow their density."""

import math

import pytest
import torch

from tests.calibration import worst_excess
from torchgpmc.density import AutogradDensity
from torchgpmc.importance import (
    Adaptation,
    Proposal,
    adapt,
    add_draws,
    along_axes,
    begun_again,
    draw_from,
    find_modes,
    from_modes,
    hold_their_part,
    log_density_of,
    log_evidence,
    log_weights,
    own_log_weights,
    start,
    with_defence,
)
from torchgpmc.importance.adaptive import follow
from torchgpmc.types import Resolution

MEAN = torch.tensor([[0.5, -1.0], [2.0, 1.0]], dtype=torch.float64)
COVARIANCE = torch.tensor([[[1.0, 0.6], [0.6, 2.0]], [[0.5, -0.1], [-0.1, 0.3]]], dtype=torch.float64)
DEGREES = [math.inf, 5, 3]


def proposal(degrees):
    return from_modes(MEAN, COVARIANCE, torch.tensor([0.2, -0.4], dtype=torch.float64), float(degrees))


@pytest.mark.parametrize("degrees", DEGREES)
def test_density_equals_torch_distributions(degrees):
    made = proposal(degrees)
    x = torch.randn(7, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64) * 2
    expected = []
    for share, mean, covariance in zip(made.log_share, MEAN, COVARIANCE, strict=True):
        if math.isinf(degrees):
            logs = torch.distributions.MultivariateNormal(mean, covariance).log_prob(x)
        else:
            import scipy.stats

            shape = covariance.numpy() * (degrees - 2) / degrees
            logs = torch.as_tensor(scipy.stats.multivariate_t.logpdf(x.numpy(), mean.numpy(), shape, degrees))
        expected.append(share + logs)
    torch.testing.assert_close(log_density_of(made, x), torch.logsumexp(torch.stack(expected), 0))


def excess_of_draws(degrees, drawn_from):
    """Importance sampling one proposal from another: bounded functions of the draws have the means that the densities say."""
    made, other = proposal(degrees), proposal(7)
    generator = torch.Generator().manual_seed(1)
    x = draw_from(drawn_from, 100_000, generator)
    y = draw_from(other, 100_000, generator)
    weight = (log_density_of(made, y) - log_density_of(other, y)).exp().unsqueeze(-1)

    def functions(z):
        return torch.cat([torch.tanh(z), torch.tanh(z).square(), torch.tanh(z[:, :1] * z[:, 1:])], -1)

    return worst_excess(functions(x) - weight * functions(y))


@pytest.mark.statistical
@pytest.mark.parametrize("degrees", DEGREES)
def test_draws_follow_the_density(degrees):
    assert excess_of_draws(degrees, proposal(degrees)) < 1


@pytest.mark.parametrize("degrees", DEGREES)
def test_draws_of_another_density_are_caught(degrees):
    assert excess_of_draws(degrees, proposal(3 if degrees != 3 else math.inf)) > 1


@pytest.mark.parametrize("degrees", DEGREES)
def test_draws_fill_space_more_evenly_than_independent_ones(degrees):
    """The variance of a mean over a net, of 64 nets, against that of as many independent draws; and no bias."""
    made, generator = proposal(degrees), torch.Generator().manual_seed(2)
    values = torch.stack([torch.tanh(draw_from(made, 512, generator)) for _ in range(64)])  # (nets, draws, 2)
    independent = values.flatten(0, 1).var(0) / 512
    assert bool((values.mean(1).var(0) < 0.2 * independent).all())


def _target(x):
    """Skewed and unnormalised: a Gumbel in x0 times a normal in x1 given x0; its integral is e^2 sqrt(2 pi)."""
    return 2.0 - x[:, 0] - (-x[:, 0]).exp() - 0.5 * (x[:, 1] - 0.5 * x[:, 0]).square()


TRUE_LOG_EVIDENCE = 2.0 + 0.5 * math.log(2 * math.pi)
FIRST = (torch.zeros(1, 2, dtype=torch.float64), 3 * torch.eye(2, dtype=torch.float64)[None], torch.zeros(1, dtype=torch.float64))


def run(plan, counts, seed, degrees=5.0, target=_target):
    generator = torch.Generator().manual_seed(seed)
    first = from_modes(*FIRST, degrees)
    state = start(with_defence(first, *BROAD, plan.defensive_share) if plan.defensive_share else first)
    for count in counts:
        x = draw_from(state.current, count, generator)
        state = adapt(add_draws(state, x, target(x)), plan)
    return state


PLANS = {
    "amis": Adaptation(False, False, 4.0),
    "mamis": Adaptation(True, False, 4.0),
    "diagonal": Adaptation(False, True, 4.0),
    "defended": Adaptation(False, False, 4.0, 0.2),
}
BROAD = (torch.tensor([1.0, 1.0], dtype=torch.float64), 4 * torch.eye(2, dtype=torch.float64))


@pytest.mark.parametrize("name", PLANS)
def test_weights_are_the_target_over_the_mixture_of_all_proposals(name):
    state = run(PLANS[name], [20, 30, 50], seed=0)
    total = sum(
        count * log_density_of(Proposal(*(part[index] for part in state.past)), state.position).exp()
        for index, count in enumerate(state.counts)
    )
    torch.testing.assert_close(log_weights(state), _target(state.position) - (total / 100).log())


def _two_lobes(x):
    """Equal normals about the first proposal's centre and far outside it; the integral is 2 pi."""
    near, far = -0.5 * x.square().sum(-1), -0.5 * (x - 7).square().sum(-1)
    return torch.logaddexp(near, far) - math.log(2.0)


@pytest.mark.parametrize("share", [0.0, 0.2])
def test_a_lobe_that_the_first_proposal_misses_is_found_by_defence_alone(share):
    state = run(Adaptation(False, False, 4.0, share), [2000] * 6, seed=2, degrees=math.inf, target=_two_lobes)
    value, stated = log_evidence((state,))
    error = float(value) - math.log(2 * math.pi)
    assert abs(error) < 4 * float(stated) < 0.6 if share else error < -0.6
    if share:
        torch.testing.assert_close(state.current.mean[-1], BROAD[0])
        torch.testing.assert_close(state.current.factor[-1], BROAD[1])
        assert float(state.current.log_share[-1].exp()) == pytest.approx(share)
        assert float(state.current.log_share.exp().sum()) == pytest.approx(1.0)


def _with_a_ridge(x):
    """Half of the mass about the first proposal's centre, half on a narrow ridge aside, where few broad draws come."""
    near, ridge = -0.5 * x.square().sum(-1), -0.5 * ((x[:, 0] - 4) / 0.15).square() - 0.5 * x[:, 1].square()
    return torch.logaddexp(near, ridge - math.log(0.15))


@pytest.mark.parametrize("num_broad", [1, 2])
def test_a_ridge_aside_takes_a_component_that_is_free_to_go_there(num_broad):
    """As in the labels of haberman with rows twice, whose short lengthscales one component could not cover with the rest."""
    generator = torch.Generator().manual_seed(0)
    proposal = from_modes(FIRST[0], FIRST[1] / 3, FIRST[2], 5.0)
    for _ in range(num_broad):  # the last of them stays
        proposal = with_defence(proposal, *BROAD, 0.2)
    state = start(proposal)
    for count in (400, 480, 576, 691, 829, 995):
        x = draw_from(state.current, count, generator)
        state = adapt(add_draws(state, x, _with_a_ridge(x)), PLANS["defended"])
    found = state.current
    gap = min(
        abs(float(mean[0]) - 4) + float(factor[0, 0]) for mean, factor in zip(found.mean[:-1], found.factor[:-1], strict=True)
    )
    assert gap < 1 if num_broad == 2 else gap > 3


def test_the_error_of_even_weights_is_the_usual_one():
    """One proposal, whose mirrored draws have weights of two values: no skewness, and nothing to learn from other batches."""
    position = torch.tensor([[0.5, 0.0], [-0.5, 0.0]], dtype=torch.float64).repeat(50, 1)
    first = from_modes(*FIRST, math.inf)
    weight = 1 + 0.1 * position[:, 0].sign()
    state = add_draws(start(first), position, log_density_of(first, position) + weight.log())
    value, stated = log_evidence((state,))
    torch.testing.assert_close(value.exp(), weight.mean())
    torch.testing.assert_close(stated, weight.std() / 10)


def test_a_region_that_later_proposals_have_lost_shows_in_the_error():
    """Batches with no draw in a tenth of the mass look even by themselves: that it is lost is known from the first batch alone."""
    centres = torch.tensor([[0.0, 0.0], [30.0, 0.0]], dtype=torch.float64)
    covariance, share = torch.eye(2, dtype=torch.float64).expand(2, 2, 2), torch.tensor([0.9, 0.1], dtype=torch.float64)
    target = from_modes(centres, covariance, share.log(), 5.0)
    even, lost = (target._replace(log_share=torch.tensor(share).double().log()) for share in ([0.5, 0.5], [1.0, 1e-300]))
    generator, state = torch.Generator().manual_seed(5), start(even)
    for _ in range(4):
        x = draw_from(state.current, 250, generator)
        state = add_draws(state, x, log_density_of(target, x))._replace(current=lost)
    value, stated = log_evidence((state,))
    assert float(value) == pytest.approx(math.log(1 - 0.1 * 3 / 4), abs=0.01)
    by_own_draws = float((own_log_weights((state,)) - value).exp().std()) / 1000**0.5
    assert 5 * by_own_draws < abs(float(value)) < 3 * float(stated)


@pytest.mark.parametrize("name", [name for name in PLANS if name != "defended"])  # whose components share the target
def test_the_proposal_finds_the_moments(name):
    state = run(PLANS[name], [4000] * 5, seed=1)
    mean = torch.tensor([0.5772, 0.5 * 0.5772], dtype=torch.float64)
    variance = torch.tensor([math.pi**2 / 6, 1 + 0.25 * math.pi**2 / 6], dtype=torch.float64)
    found = state.current.factor[0] @ state.current.factor[0].T
    torch.testing.assert_close(state.current.mean[0], mean, atol=0.15, rtol=0)
    torch.testing.assert_close(found.diagonal(), variance, atol=0.3, rtol=0)
    correlation = float(found[0, 1] / (found[0, 0] * found[1, 1]).sqrt())
    assert correlation == 0 if name == "diagonal" else correlation > 0.4


def evidence_excess(weighed_by):
    drawn_from = from_modes(*FIRST, 5.0)
    generator = torch.Generator().manual_seed(3)
    ratios = []
    for _ in range(4000):
        x = draw_from(drawn_from, 50, generator)
        ratios.append((_target(x) - log_density_of(weighed_by, x)).exp().mean() / math.exp(TRUE_LOG_EVIDENCE))
    return worst_excess(torch.stack(ratios).unsqueeze(-1), 1.0)


@pytest.mark.slow
@pytest.mark.statistical
def test_evidence_is_unbiased_for_a_fixed_proposal():
    assert evidence_excess(from_modes(*FIRST, 5.0)) < 1


@pytest.mark.slow
def test_weights_by_a_density_that_was_not_drawn_from_are_caught():
    assert evidence_excess(from_modes(*FIRST, 8.0)) > 1


@pytest.mark.slow
def test_evidence_is_only_consistent_once_the_proposal_adapts():
    """The bias that comes from learning from the draws that are weighed shrinks as they grow in number."""
    errors = []
    for count in (10, 200):
        values = torch.stack([log_weights(run(PLANS["amis"], [count] * 4, seed=seed)).logsumexp(0) for seed in range(600)])
        errors.append(float(((values - math.log(4 * count) - TRUE_LOG_EVIDENCE).exp() - 1).abs().mean()))
    assert errors[1] < 0.35 * errors[0]


def test_modes_of_a_mixture_with_their_curvature():
    made = from_modes(MEAN * 4, COVARIANCE, torch.tensor([0.0, -1.0], dtype=torch.float64), math.inf)
    density = AutogradDensity(lambda x: log_density_of(made, x))
    modes = find_modes(density, torch.tensor([[0.0, -3.0], [7.0, 5.0], [9.0, 3.0]], dtype=torch.float64))
    assert len(modes) == 2
    torch.testing.assert_close(
        torch.stack([mode.position for mode in modes]).sort(0).values, (MEAN * 4).sort(0).values, atol=1e-3, rtol=0
    )
    for mode in modes:
        nearest = (MEAN * 4 - mode.position).square().sum(-1).argmin()
        torch.testing.assert_close(mode.covariance, COVARIANCE[nearest], rtol=1e-3, atol=1e-3)


def test_a_mode_of_values_that_are_found_to_a_tolerance():
    """Differences of gradients that are off by some thousandths tell of curvature where points are apart."""

    class Rough(AutogradDensity):
        def value_and_grad(self, position):
            value, gradient = super().value_and_grad(position)
            return value + 2e-3 * torch.sin(1e5 * position.sum(-1)), gradient + 5e-3 * torch.sin(1e4 * position)

    scale = torch.tensor([0.5, 0.8], dtype=torch.float64)
    density = Rough(lambda x: -0.5 * ((x - 1) / scale).square().sum(-1))
    starts = torch.zeros(1, 2, dtype=torch.float64)
    (mode,) = find_modes(density, starts, resolution=Resolution(slope=0.05, step=0.2))
    torch.testing.assert_close(mode.position, torch.ones(2, dtype=torch.float64), atol=0.05, rtol=0)
    torch.testing.assert_close(mode.covariance, scale.square().diag(), atol=0.01, rtol=0.1)
    usual = find_modes(density, starts)
    assert not usual or float((usual[0].covariance - scale.square().diag()).abs().max()) > 0.05


def test_no_mode_where_there_is_none():
    assert find_modes(AutogradDensity(lambda x: x.sum(-1)), torch.zeros(2, 2, dtype=torch.float64)) == []


def test_a_mode_is_found_from_where_the_first_step_could_leave_the_support():
    """A line search that meets a value beyond all measure gives up on the spot."""
    centre, scale = torch.tensor([1.0, -2.0], dtype=torch.float64), torch.tensor([0.1, 0.5], dtype=torch.float64)

    def log_density(x):
        return torch.where((x.abs() < 6).all(-1), -0.5 * ((x - centre) / scale).square().sum(-1), -torch.inf)

    (mode,) = find_modes(AutogradDensity(log_density), torch.zeros(1, 2, dtype=torch.float64))
    torch.testing.assert_close(mode.position, centre, atol=1e-3, rtol=0)
    torch.testing.assert_close(mode.covariance, scale.square().diag(), atol=1e-5, rtol=1e-3)


def test_impossible_starts_are_passed_over():
    density = AutogradDensity(lambda x: torch.where(x[:, 0] > 0, -0.5 * (x - 1).square().sum(-1), -torch.inf))
    (mode,) = find_modes(density, torch.tensor([[-1.0, 0.0], [0.5, 0.0]], dtype=torch.float64))
    torch.testing.assert_close(mode.position, torch.ones(2, dtype=torch.float64), atol=1e-3, rtol=0)


def test_where_a_search_was_cut_short_there_is_no_mode():
    density = AutogradDensity(lambda x: -0.5 * (x - 9).square().sum(-1))
    assert find_modes(density, torch.zeros(1, 2, dtype=torch.float64), max_iterations=1) == []


def test_a_covariance_that_is_none_is_named():
    with pytest.raises(ValueError, match="positive definite"):
        from_modes(MEAN, -COVARIANCE, torch.zeros(2, dtype=torch.float64), 5.0)


def first_batch(width, log_target, arms=False, degrees=30.0):
    """Of a narrow component at 1, a wide one that learns and a defensive one; and what to begin with again, of fewer or more."""
    zero, unit = torch.zeros(1, 3, dtype=torch.float64), torch.eye(3, dtype=torch.float64)
    mean, covariance = along_axes(3, 2.0, 0.5, zero) if arms else (zero, unit[None])
    narrow = from_modes(zero + 1, width**2 * unit[None], zero[:, 0], degrees)
    mixture = with_defence(with_defence(narrow, zero[0], unit, 0.2), zero[0], unit, 0.2)
    state = start(mixture)
    position = draw_from(mixture, 400, torch.Generator().manual_seed(0))
    return add_draws(state, position, log_target(position)), with_defence(
        from_modes(mean, covariance, torch.zeros_like(mean[:, 0]), degrees), zero[0], unit, 0.2
    )


def wide_target(x):
    return -0.5 * x.square().sum(-1)


def narrow_target(x):
    return -0.5 * ((x - 1) / 0.1).square().sum(-1)


@pytest.mark.parametrize(("target", "hold"), [(wide_target, False), (narrow_target, True)])
def test_components_hold_their_part_where_the_mass_is_at_them(target, hold):
    assert hold_their_part((first_batch(0.1, target)[0],), 1) is hold


@pytest.mark.parametrize("arms", [False, True])
@pytest.mark.parametrize("modified", [False, True])
def test_what_is_begun_again_learns_as_if_it_had_begun_so(modified, arms):
    plan = Adaptation(modified, False, 6.0, 0.2)
    state, beginning = first_batch(0.3, wide_target, arms)
    again = begun_again(state, beginning)
    x = 2 * torch.randn(50, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    torch.testing.assert_close(log_density_of(again.current, x), log_density_of(beginning, x))
    torch.testing.assert_close(log_weights(again), log_weights(state))
    torch.testing.assert_close(own_log_weights((again,)), own_log_weights((state,)))
    plain = adapt(state._replace(current=beginning, first=beginning), plan).current
    torch.testing.assert_close(log_density_of(adapt(again, plan).current, x), log_density_of(plain, x))
    # The next batch is weighed against what it came from.
    more = add_draws(adapt(again, plan), x, wide_target(x))
    own = more.log_target[400:] - log_density_of(plain, x)
    torch.testing.assert_close(own_log_weights((more,))[400:], own)


def far_apart(counts):
    """Draws around -50 and 50 in two dimensions, weights all alike, and a proposal of a component for each."""
    generator = torch.Generator().manual_seed(4)
    near = zip(counts, (-50.5, 51.0), strict=True)
    parts = [torch.randn(count, 2, generator=generator).double() * 0.5 + at for count, at in near]
    covariance = torch.tensor([[2.0, 0.5], [0.5, 1.0]]).double()
    mean = torch.tensor([[-50.0, -50.0], [50.0, 50.0]]).double()
    both = from_modes(mean, covariance.expand(2, -1, -1), torch.zeros(2).double(), math.inf)
    return parts, covariance, both


def test_each_component_has_the_moments_of_its_own_draws_and_of_as_many_as_it_began_as():
    parts, covariance, both = far_apart((30, 60))
    strength, position = 8.0, torch.cat(parts)
    moved = follow(start(both), position, torch.zeros(90).double(), Adaptation(False, False, strength)).current
    for number, own in enumerate(parts):
        kept, shift = len(own) / (len(own) + strength), own.mean(0) - both.mean[number]
        # Conjugate updating, one component at a time.
        expected = kept * own.T.cov(correction=0) + (1 - kept) * (covariance + kept * torch.outer(shift, shift))
        torch.testing.assert_close(moved.mean[number], both.mean[number] + kept * shift)
        torch.testing.assert_close(moved.factor[number] @ moved.factor[number].T, expected)
    torch.testing.assert_close(moved.log_share.exp(), torch.tensor([1 / 3, 2 / 3]).double())


def test_a_component_whose_draws_have_no_covariance_stays_as_it_began_and_others_move():
    parts, _, both = far_apart((1, 60))
    moved = follow(start(both), torch.cat(parts), torch.zeros(61).double(), Adaptation(False, False, 0.0)).current
    torch.testing.assert_close((moved.mean[0], moved.factor[0]), (both.mean[0], both.factor[0]))
    torch.testing.assert_close(moved.mean[1], parts[1].mean(0))
