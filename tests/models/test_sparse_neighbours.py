"""What a datum adds to the sparse density, and a chain's density, do not depend on the data and chains beside them."""

import pytest
import torch

import torchgpmc as tg
from tests.problems import LIKELIHOODS, NOT_SMOOTH, inputs, kernel, make, targets

N, CHAINS = 130, 16
# gpytorch's own have adaptive integrals, which promise 1e-6.
NAMES = [name for name in [*LIKELIHOODS, *NOT_SMOOTH] if name != "laplace"]
# Of f given u: lengthscale and outputscale, and how many of ten inducing points are data.
WIDTHS = {"narrow": (1.0, 0.5, 0), "middle": (0.3, 1.5, 0), "wide": (0.15, 400.0, 0), "mixed": (0.15, 100.0, 5)}
WIDEST = 4.0  # where moments are exponentials of the variance: beyond, numbers overflow


def case(name, width):
    """A model of this name, data taken ``chunk`` at once, and positions of chains of unlike widths."""
    lengthscale, outputscale, num_shared = WIDTHS[width]
    x = inputs(N)
    z = torch.cat([x[:num_shared], inputs(10, seed=7)])[:10]
    if name == "heteroskedastic":
        outputscale = min(outputscale, WIDEST)

    def model(chunk):
        likelihood = make(name)
        return tg.SparseGP(x, targets(name, N), kernel(), likelihood, inducing_points=z, jitter=1e-6, data_chunk=chunk)

    whole = model(N)
    generator = torch.Generator().manual_seed(0)
    position = 0.3 * torch.randn(CHAINS, whole.layout.size + whole.latent_size, generator=generator, dtype=torch.float64)
    for part, scale in (("kernel.base_kernel.lengthscale", lengthscale), ("kernel.outputscale", outputscale)):
        position[:, whole.layout.columns(part)] += torch.tensor(scale).log()
    return model, position


def assert_same(found, expected):
    for ours, theirs in zip(found, expected, strict=True):
        assert bool(torch.isfinite(theirs).all())
        scale = theirs.abs().amax(-1, keepdim=True) if theirs.dim() > 1 else theirs.abs()
        assert float(((ours - theirs).abs() / scale).max()) < 1e-10, ((ours - theirs).abs() / scale).max()


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("name", NAMES)
def test_data_taken_at_once_do_not_matter(name, width):
    model, position = case(name, width)
    position = position[:3]
    whole = tg.joint_log_density(model(N))
    expected = whole.value_and_grad(position)
    for chunk in (1, 7, 64):
        density = tg.joint_log_density(model(chunk))
        assert_same(density.value_and_grad(position), expected)
        assert_same([density(position)], expected[:1])
    assert_same([whole(position)], expected[:1])


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("name", NAMES)
def test_chains_beside_a_chain_do_not_matter(name, width):
    model, position = case(name, width)
    density = tg.joint_log_density(model(64))
    every = density.value_and_grad(position)
    for chain in (0, 7, 15):
        alone = density.value_and_grad(position[chain : chain + 1])
        assert_same([part[chain : chain + 1] for part in every], alone)
