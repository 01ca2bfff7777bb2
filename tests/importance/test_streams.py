"""Streams of weighted draws: what each proposal learned from, what each draw is weighed against, and the order of both."""

import math

import pytest
import torch
from torch.testing import assert_close

import torchgpmc as tg
from tests.problems import gp_regression
from torchgpmc.importance import (
    Adaptation,
    adapt,
    add_draws,
    add_to_each,
    draw_from,
    draw_from_each,
    from_modes,
    hold_their_part,
    log_density_of,
    log_evidence,
    log_weights,
    own_log_weights,
    start,
    streamed_log_weights,
    teach_each,
    with_defence,
)
from torchgpmc.numerics.random import make_generator

ZERO, UNIT = torch.zeros(1, 2, dtype=torch.float64), torch.eye(2, dtype=torch.float64)
FIRST = with_defence(from_modes(ZERO, UNIT[None], ZERO[:, 0], 5.0), ZERO[0], UNIT, 0.2)
PLANS = [Adaptation(modified, False, 4.0, 0.2) for modified in (False, True)]


def target(x):
    return -0.5 * ((x - 1) / 0.5).square().sum(-1)


def run(num_streams, sizes, plan=PLANS[0], seed=0):
    """Streams after batches of the given sizes, each drawn from what was learned before; and all draws as they came."""
    generator, streams, drawn = make_generator(seed), (start(FIRST),) * num_streams, []
    for size in sizes:
        streams = teach_each(streams, plan) if drawn else streams
        x = draw_from_each(streams, size, generator)
        streams, drawn = add_to_each(streams, x, target(x)), [*drawn, x]
    return streams, torch.cat(drawn)


@pytest.mark.parametrize("plan", PLANS)
def test_a_single_stream_is_adaptive_multiple_importance_sampling(plan):
    (stream,), _ = run(1, [20, 30, 50], plan)
    generator, state = make_generator(0), start(FIRST)
    for size in (20, 30, 50):
        state = adapt(state, plan) if len(state.position) else state
        x = draw_from(state.current, size, generator)
        state = add_draws(state, x, target(x))
    for found, expected in zip(stream[:4], state[:4], strict=True):
        assert torch.equal(found, expected)
    assert torch.equal(streamed_log_weights((stream,)), log_weights(state))


@pytest.mark.parametrize("num_streams", [2, 3])
@pytest.mark.parametrize("plan", PLANS)
def test_a_proposal_learns_from_all_draws_but_its_stream_s_own(plan, num_streams):
    streams, _ = run(num_streams, [40, 60], plan)
    taught = teach_each(streams, plan)
    for changed in range(num_streams):
        other = streams[changed]._replace(log_target=streams[changed].log_target + streams[changed].position[:, 0])
        again = teach_each((*streams[:changed], other, *streams[changed + 1 :]), plan)
        same = [torch.equal(a.current.mean, b.current.mean) for a, b in zip(taught, again, strict=True)]
        assert same == [number == changed for number in range(num_streams)]


def test_a_proposal_learns_from_others_as_from_draws_of_its_own():
    (first, second), _ = run(2, [40, 60])
    learned = adapt(second._replace(current=first.current), PLANS[0]).current
    for found, expected in zip(teach_each((first, second), PLANS[0])[0].current, learned, strict=True):
        assert_close(found, expected)


@pytest.mark.parametrize(("num_streams", "sizes"), [(2, [7, 4, 1]), (3, [7, 1, 5])])
def test_draws_are_weighed_in_the_order_they_were_made_against_their_stream_s_proposals(num_streams, sizes):
    """Worked out draw by draw; a batch smaller than the number of streams leaves some of them none."""
    streams, drawn = run(num_streams, sizes)
    assert all(len(stream.position) == int(stream.counts.sum()) for stream in streams)
    stream_of = torch.cat([torch.arange(num_streams).repeat_interleave(torch.tensor(dealt(size, num_streams))) for size in sizes])
    batch_of = torch.arange(len(sizes)).repeat_interleave(torch.tensor(sizes))
    expected, own = torch.empty(len(drawn), dtype=torch.float64), torch.empty(len(drawn), dtype=torch.float64)
    for index, (x, number) in enumerate(zip(drawn, stream_of.tolist(), strict=True)):
        stream = streams[number]
        proposals = [type(FIRST)(*(part[batch] for part in stream.past)) for batch in range(len(sizes))]
        densities = torch.stack([log_density_of(proposal, x[None])[0] for proposal in proposals])
        expected[index] = target(x) - torch.logsumexp(densities + (stream.counts / stream.counts.sum()).log(), 0)
        own[index] = target(x) - densities[batch_of[index]]
    assert_close(streamed_log_weights(streams), expected)
    assert_close(own_log_weights(streams), own)
    assert float(log_evidence(streams)[0]) == pytest.approx(float(torch.logsumexp(own, 0)) - math.log(len(own)))
    assert math.isfinite(float(log_evidence(streams)[1]))


def dealt(size, num_streams):
    """The first streams have one more."""
    return [len(range(number, size, num_streams)) for number in range(num_streams)]


def test_modes_hold_their_part_by_all_streams_draws_together():
    """One stream alone would say otherwise."""
    both = from_modes(torch.tensor([[-3.0], [3.0]]), torch.ones(2, 1, 1), torch.zeros(2), math.inf)
    at_first = add_draws(start(both), torch.full((10, 1), -3.0), torch.full((10,), 1.0))
    elsewhere = add_draws(start(both), torch.full((10, 1), 3.0), torch.zeros(10))
    assert hold_their_part((at_first, elsewhere), 1) and hold_their_part((elsewhere, at_first), 1)
    assert not hold_their_part((at_first._replace(log_target=at_first.log_target - 2), elsewhere), 1)


@pytest.mark.parametrize("num_samples", [1, 2, 21])
@pytest.mark.parametrize("method", [tg.AMIS, tg.MAMIS])
@pytest.mark.filterwarnings("ignore::torchgpmc.SamplingWarning")
def test_fewer_draws_than_streams_are_drawn_all_the_same(method, num_samples):
    posterior = tg.sample(gp_regression(), method(batch_size=1, num_streams=2), num_samples=num_samples, progress=False)
    assert posterior.num_draws == num_samples and math.isfinite(posterior.info["log_evidence"])


def test_streams_are_at_least_one():
    with pytest.raises(ValueError, match="num_streams is 0"):
        tg.sample(gp_regression(), tg.AMIS(num_streams=0), num_samples=100, progress=False)
