"""Other modes of p(f | y, theta) that an anchor has found: followed at thetas nearby, and no others looked for."""

import math

import pytest
import torch

import torchgpmc as tg
from tests.evidence.test_mixtures import two_modes
from torchgpmc.approximations.other_modes import is_same_mode
from torchgpmc.evidence import mixtures


def smooth():
    """Of one mode."""
    x, model = torch.linspace(0, 1, 20, dtype=torch.float64), two_modes("six", fixed=False)
    return tg.GP(x, x.sin() + 0.1 * (20 * x).cos(), model.kernel, model.likelihood)


def estimator_of(model):
    return tg.evidence.importance(model, tg.Laplace(), num_importance=64)


def nearby(model, count=6):
    """Of the outputscale and the lengthscale."""
    noise = torch.randn(count, model.layout.size, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    return torch.tensor([math.log(9.0), 0.0], dtype=torch.float64) + 0.1 * noise


def distinct(estimator, theta, start):
    """Components that have a share at each theta ``(C, J)``."""
    with torch.no_grad():
        return estimator.components(estimator.model.prior(theta), start)[2] > 0


@pytest.mark.parametrize("make", [lambda: two_modes("six", fixed=False), smooth])
def test_modes_that_are_followed_are_those_that_a_search_finds(make):
    model = make()
    estimator, theta = estimator_of(model), nearby(model)
    start = estimator.start_at(theta[:1]).expand(len(theta), -1)
    with torch.no_grad():
        prior = model.prior(theta)
        _, searched, by_search, _ = estimator.components(prior, None)
        _, followed, by_start, _ = estimator.components(prior, start)
    assert torch.equal((by_search > 0).sum(-1), (by_start > 0).sum(-1))
    for row in range(len(theta)):
        for place in (by_search[row, :4] > 0).nonzero().squeeze(-1).tolist():
            row_of = [is_same_mode(searched[place], other)[row] for other in followed[:4]]
            assert bool(torch.stack(row_of).any())


def test_where_an_anchor_has_one_mode_nothing_is_looked_for(monkeypatch):
    model = smooth()
    estimator, theta = estimator_of(model), nearby(model)
    start = estimator.start_at(theta[:1]).expand(len(theta), -1)

    def refused(*_):
        raise AssertionError("a search was made")

    monkeypatch.setattr(mixtures, "other_modes", refused)
    assert bool((distinct(estimator, theta, start).sum(-1) == 3).all())  # the mode, wider, and the prior
    with pytest.raises(AssertionError, match="a search was made"):
        distinct(estimator, theta, None)


def test_a_start_without_other_modes_is_refused():
    model = smooth()
    theta = nearby(model)
    start = estimator_of(model).start_at(theta)[:, : 2 * len(model.train_x)]
    with pytest.raises(ValueError, match=r"start has 40 numbers a theta. Expected .* 120 of other modes; take what start_at"):
        distinct(estimator_of(model), theta, start)


def test_estimates_are_the_same_on_average_whatever_an_anchor_knows(monkeypatch):
    """From an anchor of one mode where there are two: the wider component and the prior find the other, by rare large weights."""
    model = two_modes("six")
    estimator = tg.evidence.importance(model, tg.Laplace(), num_importance=4096)
    theta = torch.zeros(64, model.layout.size, dtype=torch.float64)
    start = estimator.start_at(theta[:1])
    without = start.clone()
    without[:, 2 * len(model.train_x) :] = 0
    assert not torch.equal(start, without)
    values = []
    for begin in (None, start, without):
        generator = torch.Generator().manual_seed(5)
        found = estimator.draw(theta, generator, None if begin is None else begin.expand(64, -1)).value
        values.append((torch.logsumexp(found, 0) - torch.tensor(64.0).log(), found.std() / 8))
    for value, error in values[1:]:
        assert abs(float(value - values[0][0])) < 4 * float((error.square() + values[0][1].square()).sqrt())
    assert float(values[1][1]) < float(values[2][1])
