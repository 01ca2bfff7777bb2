"""Elliptical slices that map two vectors a step are those that map every point of the ellipse."""

import pytest
import torch

from tests.problems import Halved, conditioned_gp, fitc, gp, inputs, kernel, make, sparse_gp, targets
from torchgpmc.models import JointLogDensity
from torchgpmc.models.whitening import GaussianSites
from torchgpmc.runs.blocks import JointWithPrior, LatentsGivenTheta
from torchgpmc.runs.white_moves import in_white_coordinates
from torchgpmc.samplers import elliptical_slice

CHAINS = 3
MODELS = {
    "one latent": lambda: gp("poisson"),
    "several latents": lambda: gp("softmax"),
    "a mean": lambda: conditioned_gp("student_t"),
    "a low rank": lambda: fitc("poisson"),
    "inducing points": lambda: sparse_gp("poisson"),
    "a likelihood of its own": lambda: Halved(inputs(6), targets("poisson", 6), kernel(), make("poisson")),
}


def given_theta(model, generator):
    theta = model.layout.sample_prior(CHAINS, generator)
    v = torch.randn(CHAINS, model.latent_size, generator=generator, dtype=torch.float64)
    kept = JointWithPrior(JointLogDensity(model)).draw(torch.cat([theta, v], -1), generator)[1]
    return LatentsGivenTheta(JointLogDensity(model), kept, with_prior=False), v


class MapsEveryPoint:
    """The same density, without its linear map."""

    def __init__(self, density):
        self.draw = lambda position, generator: density.draw(position, generator)


class CountsImages:
    def __init__(self, density):
        self.draw, self.draw_at, self.density, self.images = density.draw, density.draw_at, density, 0

    def image(self, vectors):
        self.images += 1
        return self.density.image(vectors)


def trace(kernel_of, v, steps=4):
    generator = torch.Generator().manual_seed(1)
    sampler = kernel_of()
    state, path = sampler.init(v, generator), []
    for _ in range(steps):
        state, info = sampler.step(state, generator)
        path.append(torch.cat([state.position, torch.stack([state.log_density, *info[:3]], -1)], -1))
    return torch.stack(path)


@pytest.mark.parametrize("name", MODELS)
def test_chains_are_those_of_the_density_without_its_map(name, generator):
    density, v = given_theta(MODELS[name](), generator)
    counted = CountsImages(density)
    plain = trace(lambda: elliptical_slice(MapsEveryPoint(density)), v)
    torch.testing.assert_close(trace(lambda: elliptical_slice(counted), v), plain, rtol=1e-7, atol=1e-9)
    assert counted.images == 4


def test_chains_in_white_coordinates_are_those_of_the_density_without_its_map(generator):
    density, v = given_theta(conditioned_gp("poisson"), generator)
    sites = GaussianSites(torch.linspace(0.2, 3.0, 6).double(), torch.linspace(-1.0, 2.0, 6).double())
    plain, mapped = (
        trace(lambda kernel=kernel: in_white_coordinates(density, sites, kernel), v)
        for kernel in (elliptical_slice, lambda of_white: elliptical_slice(MapsEveryPoint(of_white)))
    )
    torch.testing.assert_close(plain, mapped, rtol=1e-7, atol=1e-9)


def test_latents_whose_covariance_failed_have_no_likelihood(generator):
    density, v = given_theta(gp("poisson"), generator)
    prior = density.kept.at.prior
    failed = prior._replace(ok=torch.tensor([True, False, True]))
    density.kept = density.kept._replace(at=density.kept.at._replace(prior=failed))
    image = density.image(v.unsqueeze(1)).squeeze(1)
    value, _ = density.draw_at(image, generator)
    assert torch.isinf(value).tolist() == [False, True, False]
    torch.testing.assert_close(value, density(v))
