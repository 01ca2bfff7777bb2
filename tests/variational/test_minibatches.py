"""Steps on minibatches: q's moments, how long steps are, and data in single precision."""

import pytest
import torch

import torchgpmc as tg
from tests.problems import inputs, sparse_gp
from torchgpmc.approximations.normal_latents import GaussianLatents
from torchgpmc.variational.bound import inducing_positions
from torchgpmc.variational.minibatches import _Natural, _Pace

QUIET = {"progress": False}


def test_moments_are_those_of_the_normal_density(generator):
    half = torch.randn(1, 3, 5, 5, dtype=torch.float64, generator=generator).tril()
    half.diagonal(dim1=-2, dim2=-1).exp_()
    q = GaussianLatents(torch.randn(1, 3, 5, dtype=torch.float64, generator=generator), half)
    found = _Natural.of(q).moments()
    torch.testing.assert_close(found.mean, q.mean)
    torch.testing.assert_close(found.covariance, q.scale @ q.scale.mT)
    assert found.divergence == pytest.approx(float(q.divergence()))


def test_the_natural_share_falls_to_a_pass_and_then_to_all_passes():
    pace = _Pace(60, 80, goes_on=False)
    assert pace.natural_share(0.0) == 0.1
    assert pace.natural_share(0.5) == pytest.approx(1 / 60)
    assert pace.natural_share(1.0) == pytest.approx(0.02 / 60)
    shares = [pace.natural_share(pace.progress(passes, 30)) for passes in range(80)]
    assert shares == sorted(shares, reverse=True)
    assert _Pace(60, 80, goes_on=True).natural_share(0.0) == pytest.approx(1 / 60)
    assert _Pace(4, 80, goes_on=False).natural_share(0.5) == 0.1


def test_data_in_single_precision_have_the_same_projection_and_slopes_in_theta_and_inducing_points():
    """To 1e-5 of their sizes, the variance to 1e-6 of the prior's; what is factorised stays as it is, to the last digit."""
    found = []
    for dtype in (None, torch.float32):
        model = sparse_gp("softmax", num_data=40, num_inducing=6, data_dtype=dtype)
        positions = inducing_positions(model, True)
        leaf = torch.full((1, model.layout.size + positions.moving_size), 0.1, dtype=torch.float64, requires_grad=True)
        theta, zeta = leaf.split([model.layout.size, positions.moving_size], -1)
        at = positions.model_at(model, zeta).at_data(model.layout.raw_values_and_log_prior(theta)[0])
        slope = torch.autograd.grad((at.projection.sin().sum() + at.variance.square().sum()), leaf)[0]
        found.append((at.projection.detach(), at.variance.detach(), slope, at.prior.factor))
    (projection, variance, slope, factor), single = found
    assert single[0].dtype == single[1].dtype == torch.float64
    assert 0 < float((single[0] - projection).norm() / projection.norm()) < 1e-5
    assert 0 < float((single[1] - variance).abs().max()) < 1e-6
    assert 0 < float((single[2] - slope).norm() / slope.norm()) < 1e-5
    assert torch.equal(single[3], factor)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:the variational fit did not converge")
def test_a_fit_that_goes_on_does_not_forget_what_it_knew():
    x = inputs(600, 2)
    model = sparse_gp("probit", num_data=600, num_inducing=8)
    first = tg.initialize(model, batch_size=10, max_iterations=12, **QUIET)
    second = tg.initialize(first.model, batch_size=10, max_iterations=4, start=first, **QUIET)
    objective = [start.elbo + float(start.model.layout.log_prior(start.theta[None])) for start in (first, second)]
    assert objective[1] > objective[0]
    assert bool(torch.isfinite(second.predict(x).probs).all())
