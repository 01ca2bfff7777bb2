import torch
from torch.distributions import Gamma

from torchgpmc.numerics.random import draw, log_uniform, make_generator


def test_drawing_leaves_the_global_generator_alone_and_repeats():
    before = torch.random.get_rng_state()
    first = draw(Gamma(torch.ones(5), torch.ones(5)), make_generator(3))
    second = draw(Gamma(torch.ones(5), torch.ones(5)), make_generator(3))
    assert torch.equal(first, second)
    assert torch.equal(before, torch.random.get_rng_state())


def test_successive_draws_differ():
    generator = make_generator(3)
    distribution = Gamma(torch.ones(5), torch.ones(5))
    assert not torch.equal(draw(distribution, generator), draw(distribution, generator))


def test_log_uniform_is_finite_and_negative():
    values = log_uniform((100_000,), torch.zeros((), dtype=torch.float32), make_generator(0))
    assert bool(torch.isfinite(values).all()) and float(values.max()) <= 0.0
