"""Draws that say nothing of a posterior whatever R-hat and effective sizes are: all the same, no numbers, weights that are none."""

import math

import pytest
import torch

from torchgpmc.diagnostics import complaints, least_effective, verdict
from torchgpmc.diagnostics.summaries import summarise


def judged(values, log_weights=None):
    summary = summarise({"a": values, "lp": torch.zeros_like(values)}, log_weights)
    found = complaints(summary, {}, len(values), log_weights)
    return verdict(summary, least_effective(summary, torch.zeros(*values.shape, 0), log_weights), found), found


@pytest.mark.parametrize("value", [0.1, 0.0, -3e8])
def test_draws_that_are_all_the_same(value):
    line, _ = judged(torch.full((4, 500), value, dtype=torch.float64))
    assert line.startswith("Do not trust: 'a' never moved")
    summary = summarise({"a": torch.full((4, 500), value)})
    assert least_effective(summary, torch.zeros(4, 500, 0), None) == ("a", 1.0)
    assert judged(torch.full((1, 500), value), torch.zeros(1, 500))[0].startswith("Do not trust: 'a' never moved")


def test_too_few_draws_are_no_standstill_and_neither_is_a_narrow_posterior():
    assert judged(torch.ones(1, 1))[0] == "Do not trust: the draws are too few to judge them."
    narrow = 1 + 1e-9 * torch.randn(4, 500, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    assert judged(narrow)[1] == []


@pytest.mark.parametrize("value", [math.inf, math.nan])
def test_draws_that_are_no_numbers_are_named(value):
    values = torch.randn(4, 500, generator=torch.Generator().manual_seed(0))
    values[1, 7] = value
    assert "'a' is infinite, or no number, in some draws" in judged(values)[1][0]


@pytest.mark.parametrize("value", [-math.inf, math.nan])
def test_weights_that_are_none(value):
    values = torch.randn(1, 500, generator=torch.Generator().manual_seed(0))
    assert "the importance weights are no numbers, or all zero" in " ".join(judged(values, torch.full((1, 500), value))[1])
