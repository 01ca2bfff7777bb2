"""Scores against hand-made cases and scikit-learn."""

import pytest
import torch

from torchgpmc import scores


def toy(count=400, seed=0):
    generator = torch.Generator().manual_seed(seed)
    p = torch.rand(count, generator=generator)
    return p, (torch.rand(count, generator=generator) < p).int()


@pytest.mark.slow
def test_capacity_of_a_perfect_and_of_a_useless_classifier():
    y = torch.tensor([0, 1] * 50)
    assert scores.capacity_accuracy(y.double(), y) == 1.0 and scores.capacity_auc(y.double(), y) == 1.0
    wrong = 1 - y.double()
    assert scores.capacity_accuracy(wrong, y) == 0.0 and scores.capacity_auc(wrong, y) == 0.0
    assert scores.capacity_accuracy(torch.full((100,), 0.5), y) == pytest.approx(0.5)


def test_curves_follow_their_definition():
    p, y = toy()
    curves = scores.abstention_curves(p, y)
    for index in (0, 7, 23, 44):
        threshold = index / 100
        given = [(float(a), int(b)) for a, b in zip(p, y, strict=True) if not 0.5 - threshold < a < 0.5 + threshold]
        assert float(curves.abstention[index]) == pytest.approx(1 - len(given) / len(p))
        assert float(curves.accuracy[index]) == pytest.approx(sum((a > 0.5) == bool(b) for a, b in given) / len(given))
        positive, negative = [a for a, b in given if b], [a for a, b in given if not b]
        pairs = sum((a > b) + 0.5 * (a == b) for a in positive for b in negative) / (len(positive) * len(negative))
        assert float(curves.auc[index]) == pytest.approx(pairs)


def test_abstaining_helps_a_calibrated_classifier():
    p, y = toy()
    assert scores.capacity_accuracy(p, y) > float(((p > 0.5) == y.bool()).double().mean())
    assert scores.expected_calibration_error(p, y) < 0.1 < scores.expected_calibration_error(p.square(), y)


def test_brier_and_log_density_by_hand():
    p, y = torch.tensor([0.8, 0.3]), torch.tensor([1, -1])
    assert scores.brier(p, y) == pytest.approx((0.2**2 + 0.3**2) / 2)
    assert scores.log_predictive_density(p, y) == pytest.approx(float((torch.tensor([0.8, 0.7])).log().mean()))
    assert scores.log_predictive_density(torch.tensor([0.0]), torch.tensor([1])) == -float("inf")


@pytest.mark.parametrize("score", [scores.capacity_accuracy, scores.capacity_auc, scores.brier, scores.expected_calibration_error])
def test_mistakes_are_named(score):
    with pytest.raises(ValueError, match="shape"):
        score(torch.rand(3), torch.ones(4))
    with pytest.raises(ValueError, match=r"\[0, 1\]"):
        score(torch.tensor([1.5]), torch.tensor([1]))
    with pytest.raises(ValueError, match="labels"):
        score(torch.tensor([0.5]), torch.tensor([3]))
