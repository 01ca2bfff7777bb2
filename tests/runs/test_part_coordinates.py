"""Coordinates of parts: exact whatever they are, and each part's learned from its own states."""

from types import SimpleNamespace

import torch

import torchgpmc as tg
from tests.runs.test_invariance import GENES, model_of
from torchgpmc.likelihoods import Repression, Transcription
from torchgpmc.models import JointLogDensity
from torchgpmc.runs.likelihood_parts import PartsGivenF, PartsInCoordinates, parts_of
from torchgpmc.runs.part_coordinates import PartCoordinates, PartsWarmUp, ridges_of_parts
from torchgpmc.samplers.adaptation import WindowedAdaptation
from torchgpmc.samplers.preconditioner import MassMatrix

CHAINS = 4


def given_and_coordinates(generator):
    model = model_of(Repression())
    joint, parts = JointLogDensity(model), parts_of(model)
    theta = model.layout.sample_prior(CHAINS, generator)
    v = torch.randn(CHAINS, model.latent_size, generator=generator, dtype=torch.float64)
    given = PartsGivenF(joint, parts, theta, model.latents(model.prior(theta), v))
    random = torch.randn(GENES, parts.size, parts.size + 1, generator=generator, dtype=torch.float64)
    factor = 0.1 * random[..., 1:].tril() + torch.eye(parts.size)
    return given, PartsInCoordinates(given, PartCoordinates(random[..., 0], factor), ridges_of_parts(model, parts))


def test_it_is_the_density_of_parts_in_other_coordinates(generator):
    given, density = given_and_coordinates(generator)
    here = given.parts.of(given.theta)
    white = density.white(here)
    torch.testing.assert_close(density.original(white), here)
    there = white + 0.3 * torch.randn(white.shape, generator=generator, dtype=torch.float64)
    torch.testing.assert_close(density(there), given(density.original(there)))
    torch.testing.assert_close(density.draw(there, generator)[0], density(there))
    rows = torch.tensor([1, 4, 9])
    some = density.select(rows)
    torch.testing.assert_close(some(there[rows]), density(there)[rows])
    torch.testing.assert_close(some.value_and_grad(there[rows])[1], density.value_and_grad(there)[1][rows])
    torch.testing.assert_close(some.draw(there[rows], generator)[0], density(there)[rows])
    torch.testing.assert_close(some.select(torch.tensor([2]))(there[[9]]), density(there)[[9]])


def test_volume_is_constant(generator):
    given, density = given_and_coordinates(generator)
    volumes = []
    for white in torch.randn(2, CHAINS * GENES, given.parts.size, generator=generator, dtype=torch.float64):
        slope = torch.autograd.functional.jacobian(lambda x: density.original(x)[0], white)[:, 0]
        volumes.append(torch.linalg.slogdet(slope).logabsdet)
    torch.testing.assert_close(*volumes)


class Mixed(Transcription):
    def ridges(self):
        return {"decay": self.basal.flip(-1).log()}


def test_ridges_across_parts_are_left():
    model = model_of(Repression())
    parts = parts_of(model)
    assert ridges_of_parts(model, parts) is not None
    likelihood = model.likelihood
    likelihood.__class__ = Mixed
    assert ridges_of_parts(tg.GP(model.train_x, model.train_y, model.kernel, likelihood), parts) is None


def test_each_part_has_the_covariance_of_its_own_states(generator):
    given, density = given_and_coordinates(generator)
    parts, truth = given.parts, density.coordinates
    warm_up = PartsWarmUp(WindowedAdaptation(100, MassMatrix.DENSE, parts.size, 0.1, 0.8), parts)
    tuning = warm_up.start(torch.zeros(50, parts.size * GENES).double(), None, generator)
    info = SimpleNamespace(acceptance_rate=torch.full((50 * GENES,), 0.8))
    for iteration in range(1, 101):
        noise = torch.randn(50 * GENES, parts.size, generator=generator, dtype=torch.float64)
        state = SimpleNamespace(position=tuning.coordinates.white(truth.straight(noise)))
        tuning = warm_up.update(tuning, iteration, state, info, generator)
    torch.testing.assert_close(tuning.coordinates.centre, truth.centre, atol=0.2, rtol=0)
    found, wanted = (factor @ factor.mT for factor in (tuning.coordinates.factor, truth.factor))
    torch.testing.assert_close(found, wanted, atol=0.2, rtol=0)
    assert torch.equal(tuning.inner.preconditioner.factor, torch.eye(parts.size).double())
    identity = PartsWarmUp(WindowedAdaptation(100, MassMatrix.IDENTITY, 0, 0.1, 0.8), parts)
    tuning = identity.start(torch.zeros(50, parts.size * GENES).double(), None, generator)
    tuning = identity.update(tuning, 90, state, info, generator)
    assert torch.equal(tuning.coordinates.factor[1], torch.eye(parts.size).double())
