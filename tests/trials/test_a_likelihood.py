"""A trial of the contract for likelihoods: no product over data, parameters of its own, targets not shaped as the inputs."""

import gpytorch
import pytest
import torch
from gpytorch.constraints import Positive
from gpytorch.kernels import RBFKernel
from gpytorch.priors import GammaPrior

import torchgpmc as tg
from tests.speed import quick
from tests.test_conformance import METHODS, OF_LATENTS, quiet_sample
from torchgpmc.likelihoods.log_likelihood import LogLikelihood

REPLICAS, TIMES, GRID = 2, 3, 7


class Integrals(LogLikelihood, gpytorch.likelihoods.Likelihood):
    """y_rt = gain * int_0^t exp(f(s)) ds + 0.1 e, R replicas of T times from f on a grid of N inputs."""

    def __init__(self):
        super().__init__()
        self.register_parameter("raw_gain", torch.nn.Parameter(torch.zeros(1)))
        self.register_constraint("raw_gain", Positive())
        self.register_prior("gain_prior", GammaPrior(3.0, 3.0), lambda module: module.gain)

    @property
    def gain(self):
        return self.raw_gain_constraint.transform(self.raw_gain)

    def target_shape(self, num_inputs):
        return REPLICAS, TIMES

    def forward(self, *arguments):
        raise RuntimeError("this likelihood does not factorise")

    def log_prob(self, f, targets):
        """f ``(C, N)``, targets ``(R, T)`` or ``(C, R, T)``, to ``(C,)``."""
        steps = f.shape[-1] // TIMES
        integral = f.exp()[..., : steps * TIMES].cumsum(-1)[..., steps - 1 :: steps] / f.shape[-1]
        residual = targets - (self.gain * integral).unsqueeze(-2)
        return -0.5 * (residual / 0.1).square().sum((-2, -1))


def model_of(targets=None, **options):
    y = torch.tensor([[0.3, 0.5, 0.9], [0.2, 0.6, 1.0]]) if targets is None else targets
    kernel = RBFKernel(lengthscale_prior=GammaPrior(2.0, 4.0))
    return tg.GP(torch.linspace(0, 1, GRID), y, kernel, Integrals(), **options)


TAKEN = {
    name: METHODS[name] for name in ("NUTS", "HMC", "ChEES", "AdaptiveMH", "Slice", "Gibbs", *OF_LATENTS) if name != "GibbsLike"
}


@pytest.mark.parametrize("method", quick(["HMC", "AdaptiveMH", "EllipticalSlice", "PCN", "LocalRegions"], TAKEN))
def test_methods_that_need_a_density_alone_take_it(method):
    model = model_of()
    if method in OF_LATENTS:
        model.requires_grad_(False)
    posterior = quiet_sample(model, TAKEN[method])
    assert posterior.latents.shape == (2, 6, GRID)
    assert method in OF_LATENTS or posterior.samples["likelihood.gain"].shape == (2, 6, 1)
    assert posterior.predict(torch.rand(4)).latent_mean.shape == (4,)


REFUSED = {name: METHODS[name] for name in METHODS if name not in TAKEN and name not in OF_LATENTS}
REFUSED |= {"whitening": tg.NUTS(whitening=tg.Laplace()), "marginal": tg.NUTS(marginal=tg.Laplace())}


@pytest.mark.parametrize("method", REFUSED)
def test_methods_that_need_a_product_over_data_say_so(method):
    with pytest.raises(ValueError, match=r"factorises? over data"):
        tg.sample(model_of(), REFUSED[method], num_samples=10, progress=False)


def test_draws_of_one_latent_after_another_need_one_too():
    with pytest.raises(ValueError, match=r"Integrals of GP is not a product over its latents"):
        tg.sample(model_of().requires_grad_(False), METHODS["GibbsLike"], num_samples=10, progress=False)


def test_the_density_is_its_formula_and_every_chain_may_have_its_own_targets():
    shared = model_of()
    several = shared.with_targets(torch.stack([shared.train_y, shared.train_y + 0.2, shared.train_y]))
    assert not shared.targets.one_a_chain and several.targets.num_data_sets == 3
    position = 0.3 * torch.randn(3, 2 + GRID, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    one, other = (tg.joint_log_density(model) for model in (shared, several))
    torch.testing.assert_close(one(position)[[0, 2]], other(position)[[0, 2]])
    assert one(position)[1] != other(position)[1]
    rows = torch.tensor([1, 2])
    torch.testing.assert_close(other.select(rows)(position[rows]), other(position)[rows])
    posterior = quiet_sample(several, tg.NUTS(max_tree_depth=3), num_chains=3)
    assert posterior.theta.shape == (3, 6, 2)


@pytest.mark.slow
@pytest.mark.parametrize("chunk", [2, 2048])
def test_predictions_are_of_latents_alone_and_say_so(chunk):
    posterior = quiet_sample(model_of(), TAKEN["Slice"])
    prediction = posterior.predict(torch.rand(4), test_chunk=chunk)
    assert prediction.latent_mean.shape == prediction.latent_variance.shape == (4,)
    asked = {
        "mean": lambda: prediction.mean,
        "variance": lambda: prediction.variance,
        "probs": lambda: prediction.probs,
        "log_prob": lambda: prediction.log_prob(torch.zeros(4)),
        "sample": lambda: prediction.sample(2),
    }
    for name, ask in asked.items():
        with pytest.raises(ValueError, match=rf"Integrals does not factorise.*prediction\.{name} no meaning.*latent_variance can"):
            ask()


def test_targets_of_a_wrong_shape_are_refused():
    with pytest.raises(ValueError, match=r"train_y has shape \(2, 4\).*Expected \(2, 3\)"):
        model_of(torch.zeros(2, 4))
