"""A likelihood that is a step in f: methods that climb refuse it, others sample it, and a sparse model serves all."""

import pytest
import torch

import torchgpmc as tg
from tests.calibration import worst_excess
from tests.problems import fixed_kernel, gp, inputs, sparse_gp
from torchgpmc.approximations import ApproximateMarginal

CLIMBERS = {
    "NUTS": lambda model: tg.sample(model, tg.NUTS(), progress=False),
    "HMC": lambda model: tg.sample(model, tg.HMC(), progress=False),
    "NUTS, marginal": lambda model: tg.sample(model, tg.NUTS(marginal=tg.Laplace()), progress=False),
    "AMIS": lambda model: tg.sample(model, tg.AMIS(), progress=False),
    "PseudoMarginal": lambda model: tg.sample(model, tg.PseudoMarginal(), progress=False),
    "fit": tg.fit,
    "marginal density": lambda model: ApproximateMarginal(model, tg.Laplace()),
    "evidence": lambda model: tg.evidence.importance(model, tg.Laplace()),
}


@pytest.mark.parametrize("name", CLIMBERS)
def test_what_follows_slopes_refuses_and_names_what_can(name):
    with pytest.raises(ValueError, match=r"RobustMax is a step in f.*SparseGP.*Slice\(\) or.* AdaptiveMH\(\)"):
        CLIMBERS[name](gp("robust_max"))


@pytest.mark.filterwarnings("ignore::torchgpmc.checks.SamplingWarning")
@pytest.mark.parametrize("method", [tg.AdaptiveMH(), pytest.param(tg.Slice(), marks=pytest.mark.slow), tg.EllipticalSlice()])
def test_what_does_not_samples_it(method):
    model = gp("robust_max")
    if isinstance(method, tg.EllipticalSlice):
        model.kernel.requires_grad_(False)
    posterior = tg.sample(model, method, num_samples=6, warmup_steps=5, num_chains=2, progress=False)
    probabilities = posterior.predict(inputs(3, seed=5)).probs
    torch.testing.assert_close(probabilities.sum(-1), torch.ones(3).double())


def test_recommended_methods_can():
    assert isinstance(tg.recommend(gp("robust_max")), tg.Gibbs)
    assert isinstance(getattr(tg.recommend(sparse_gp("robust_max")), "evidence", None), tg.evidence.InducingMixture)
    assert not gp("robust_max").is_smooth and sparse_gp("robust_max").is_smooth and gp("softmax").is_smooth


@pytest.mark.slow
@pytest.mark.statistical
def test_one_label_tilts_two_classes_by_its_doubt():
    """P(f_0 > f_1 | y = 0) is 1 - epsilon at one datum, f_0 and f_1 being exchangeable a priori."""
    epsilon = 0.2
    likelihood = tg.likelihoods.RobustMax(num_classes=2, epsilon=epsilon)
    model = tg.GP(inputs(1), torch.zeros(1), fixed_kernel(), likelihood)
    posterior = tg.sample(model, tg.EllipticalSlice(), num_samples=1, warmup_steps=20, num_chains=4000, progress=False)
    right = (posterior.latents[..., 0] > posterior.latents[..., 1]).double().view(-1, 1)
    assert worst_excess(right, 1 - epsilon) < 1 < worst_excess(right, 0.7)
