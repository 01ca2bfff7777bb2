"""Which modes are looked for, and that a search which leads back is not carried on."""

import torch

import torchgpmc as tg
from tests.evidence.test_mixtures import two_modes
from torchgpmc.approximations import other_modes as other_modes_module
from torchgpmc.approximations.gaussian_form import problem_of, without_graph
from torchgpmc.approximations.other_modes import is_same_mode, other_modes


def found_at(model, thetas=2):
    with torch.no_grad():
        prior = model.prior(torch.zeros(thetas, model.layout.size, dtype=torch.float64))
        problem = without_graph(problem_of(model, prior, None))
        own = tg.Laplace().importance_density(model, prior)
        return problem, own, other_modes(problem, own)


def test_the_other_of_two_modes_is_found():
    problem, own, others = found_at(two_modes("six"))
    new = [mode for mode in others if not bool(is_same_mode(own, mode).any())]
    assert new
    for mode in new:
        # A mode: the slope of log p(y | f) there is alpha, K^-1 (f - m).
        slope = problem.derivatives(mode.mean - problem.mean).first
        torch.testing.assert_close(slope, mode.alpha, rtol=0.1, atol=0.1)
        assert bool((mode.mean.mean(-1).sign() == -own.mean.mean(-1).sign()).all())


def test_no_search_goes_on_where_steps_lead_back(monkeypatch):
    x = torch.linspace(0, 1, 20, dtype=torch.float64)
    model = two_modes("six")
    smooth = tg.GP(x, x.sin() + 0.1 * (20 * x).cos(), model.kernel, model.likelihood)

    def refused(*_):
        raise AssertionError("a search was carried on")

    monkeypatch.setattr(other_modes_module, "mode_near", refused)
    _, own, others = found_at(smooth)
    for mode in others:
        torch.testing.assert_close(mode.mean, own.mean)
        assert int(mode.num_iterations.max()) == 0
