"""Matched sites and the points they guide, against dense formulas written another way."""

import math

import numpy as np
import pytest
import scipy.stats
import torch

from tests.calibration import worst_excess
from tests.orthant.simple import closed_form, gp_covariance, one_factor
from tests.problems import generator
from tests.speed import quick
from torchgpmc.orthant import SeparationOfVariables, log_probability
from torchgpmc.orthant.matching import Sites, guided, hardest_first, matched_sites, mildest, shared
from torchgpmc.orthant.problem import prepare
from torchgpmc.orthant.separation import draw, log_weights_at, tilted

NORMAL = scipy.stats.norm


def problem_of(covariance, lower=0.0, upper=math.inf):
    return prepare(covariance, 0.0, lower, upper).problem


def box(size=6, seed=0):
    lower = torch.linspace(-1, 0.5, size, dtype=torch.float64)
    upper = torch.where(torch.arange(size) % 3 == 0, torch.inf, lower + 1.5)
    return problem_of(gp_covariance(size, seed=seed), lower, upper)


PROBLEMS = {
    "orthant": lambda: problem_of(gp_covariance(6, seed=1)),
    "box": box,
    "far": lambda: problem_of(gp_covariance(4, seed=2), torch.tensor([3.0, 25.0, 0.0, -torch.inf]).double()),
    "beyond a panel": lambda: problem_of(gp_covariance(40, seed=3)),
}


def dense(problem, sites):
    """Covariance, mean of the normal, sites as precision and linear term, all in numpy."""
    covariance = problem.covariance[0].numpy()
    mean = problem.factor[0].numpy() @ sites.whitened_mean[0].numpy()
    precision = sites.precision[0].numpy()
    slope = np.linalg.solve(covariance, mean)
    return covariance, precision, slope + precision * mean


def guided_by_hand(problem, sites, uniforms):
    """One point x and its log N(x) / q(x): x_i from its conditional under the normal times the sites of the variables after it."""
    covariance, precision, linear = dense(problem, sites)
    inverse = np.linalg.inv(covariance)
    size = len(covariance)
    x, log_q = np.zeros(size), 0.0
    for i in range(size):
        later = np.where(np.arange(size) > i, 1.0, 0.0)
        joint = inverse + np.diag(later * precision)
        # Given x_<i: the joint of the rest, then the marginal of its first variable.
        rest = np.linalg.inv(joint[i:, i:])
        mean = rest @ (later * linear - joint[:, :i] @ x[:i])[i:]
        sd = math.sqrt(rest[0, 0])
        below, above = ((float(limit[0, i]) - mean[0]) / sd for limit in (problem.lower, problem.upper))
        r = scipy.stats.truncnorm.ppf(uniforms[i], below, above)
        x[i] = mean[0] + sd * r
        log_q += scipy.stats.truncnorm.logpdf(r, below, above) - math.log(sd)
    return x, scipy.stats.multivariate_normal.logpdf(x, np.zeros(size), covariance) - log_q


@pytest.mark.parametrize("share", quick([0.4], [0.0, 0.4, 1.0]))
@pytest.mark.parametrize("name", PROBLEMS)
def test_points_and_weights_are_those_of_the_sequential_density(name, share):
    problem = PROBLEMS[name]()
    sites = shared(matched_sites(problem), share)
    size = problem.lower.shape[-1]
    uniforms = 0.05 + 0.9 * torch.rand(1, size, 5, generator=generator(), dtype=torch.float64)
    proposal = guided(problem, sites)
    expected = [guided_by_hand(problem, sites, uniforms[0, :, p].numpy()) for p in range(5)]
    for grad in (False, True):  # the fast sweep and the robust one
        with torch.set_grad_enabled(grad):
            log_weight, points = draw(proposal, uniforms)
        x = proposal.variables(points)
        np.testing.assert_allclose(x[0].numpy().T, np.stack([x for x, _ in expected]), rtol=1e-6, atol=1e-7)
        np.testing.assert_allclose(log_weight[0].numpy(), [weight for _, weight in expected], rtol=1e-7, atol=1e-6)
    torch.testing.assert_close(log_weights_at(proposal, x), log_weight, rtol=1e-9, atol=1e-8)


@pytest.mark.parametrize("name", PROBLEMS)
def test_sites_match_mean_and_variance_of_each_variable_within_its_limits(name):
    """The fixed point of expectation propagation, each marginal by scipy's truncated normal."""
    problem = PROBLEMS[name]()
    sites = matched_sites(problem, tolerance=1e-9)
    covariance, precision, linear = dense(problem, sites)
    product = np.linalg.inv(np.linalg.inv(covariance) + np.diag(precision))
    mean, variance = product @ linear, product.diagonal()
    cavity_variance = 1 / (1 / variance - precision)
    cavity_mean, sd = cavity_variance * (mean / variance - linear), np.sqrt(cavity_variance)
    below, above = ((limit[0].numpy() - cavity_mean) / sd for limit in (problem.lower, problem.upper))
    marginal = scipy.stats.truncnorm(below, above, cavity_mean, sd)
    np.testing.assert_allclose(mean, marginal.mean(), atol=1e-6 * np.sqrt(variance).max())
    np.testing.assert_allclose(variance, marginal.var(), rtol=1e-5)


def random_sites(problem, seed):
    random = generator(seed)
    return Sites(
        0.5 * torch.randn(problem.lower.shape, generator=random, dtype=torch.float64),
        0.5 * torch.rand(problem.lower.shape, generator=random, dtype=torch.float64),
    )


def weights_of_any_sites(problem, log_truth, change=None):
    """Relative weights of independent points of many random sites."""
    repeated = type(problem)(*(part.expand(200, *part.shape[1:]) for part in problem))
    proposal = guided(repeated, random_sites(repeated, 3))
    proposal = proposal if change is None else change(proposal)
    uniforms = torch.rand(200, problem.lower.shape[-1] - 1, 1000, generator=generator(), dtype=torch.float64)
    return (draw(proposal, uniforms)[0] - log_truth).exp().flatten().unsqueeze(-1)


THREE = torch.tensor([[2.0, 0.6, -0.4], [0.6, 1.0, 0.3], [-0.4, 0.3, 0.5]], dtype=torch.float64)


@pytest.mark.statistical
def test_any_sites_give_unbiased_weights():
    assert worst_excess(weights_of_any_sites(problem_of(THREE), math.log(closed_form(THREE))), 1.0) < 1


def test_a_forgotten_normaliser_is_caught():
    def forget(proposal):
        return proposal._replace(quadratic=torch.zeros_like(proposal.quadratic))

    assert worst_excess(weights_of_any_sites(problem_of(THREE), math.log(closed_form(THREE)), forget), 1.0) > 1


def test_sites_that_do_not_factorise_do_no_harm():
    """An infinite precision: the limits go without a site, and the weights are those of plain separation of variables."""
    problem = problem_of(THREE)
    zero = torch.zeros(1, 3, dtype=torch.float64)
    uniforms = torch.rand(1, 2, 50, generator=generator(), dtype=torch.float64)
    found = draw(guided(problem, Sites(zero, zero + torch.inf)), uniforms)[0]
    torch.testing.assert_close(found, draw(tilted(problem, zero), uniforms)[0])


def test_the_order_is_of_what_limits_say_and_keeps_the_sites():
    problem = problem_of(torch.diag(torch.tensor([1.0, 4.0, 9.0]).double()), torch.tensor([-3.0, 4.0, 0.0]).double())
    moved, sites, order = hardest_first(problem, matched_sites(problem))
    assert order.tolist() == [[1, 2, 0]]  # 2 sds up, at the mean, 3 sds down
    before = matched_sites(problem)
    assert torch.equal(sites.precision, before.precision[:, order[0]])
    centre = (problem.factor @ before.whitened_mean.unsqueeze(-1)).squeeze(-1)
    torch.testing.assert_close((moved.factor @ sites.whitened_mean.unsqueeze(-1)).squeeze(-1), centre[:, order[0]])


def test_heavy_tails_call_for_milder_sites():
    """Where all variables share one factor that the limits leave free upwards, matched sites are far too narrow."""
    pilot = torch.rand(49, 256, generator=generator(), dtype=torch.float64)
    weak = problem_of(one_factor(np.random.default_rng(1).uniform(-0.7, 0.7, 50)))
    strong = problem_of(one_factor(np.full(50, math.sqrt(0.9))))
    shares = []
    for problem in (weak, strong):
        sites = matched_sites(problem)
        shares.append(float((mildest(problem, sites, pilot).precision / sites.precision).mean()))
    assert shares[0] >= 0.75 and shares[1] <= 0.5


def test_a_given_narrowing_needs_no_pilot_and_is_checked():
    covariance = gp_covariance(10)
    values = [
        float(log_probability(covariance, lower=0.0, method=SeparationOfVariables(narrowing=n)).value) for n in (0.0, 0.5, 1.0)
    ]
    assert len(set(values)) == 3 and max(values) - min(values) < 1e-2
    with pytest.raises(ValueError, match=r"narrowing is 1\.5\. Expected a number from 0 to 1"):
        log_probability(covariance, lower=0.0, method=SeparationOfVariables(narrowing=1.5))


@pytest.mark.parametrize("width", [1e-6, 1e-3, 0.1])
def test_narrow_and_distant_intervals_have_sites(width):
    """Their moments cancel when worked out plainly."""
    lower = torch.tensor([0.0, 50.0, -40.0], dtype=torch.float64)
    covariance = torch.eye(3, dtype=torch.float64) + 0.2
    found = log_probability(covariance, lower=lower, upper=lower + width, num_points=2**12)
    middle = scipy.stats.multivariate_normal.logpdf(lower.numpy() + width / 2, np.zeros(3), covariance.numpy())
    slope = np.linalg.solve(covariance.numpy(), lower.numpy() + width / 2)
    assert float(found.value) == pytest.approx(
        middle + np.log(2 * np.sinh(np.abs(slope) * width / 2) / np.abs(slope)).sum(), rel=1e-4
    )
    assert float(found.spread) < 0.5
