"""Maps to one-dimensional densities: they increase, their slopes are theirs, and log-concave densities are met."""

import torch

from torchgpmc.numerics.monotone_maps import _LEAST_SLOPE, MonotoneMaps, _interpolated, _nodes, at_place, fitted, places

F64 = torch.float64


def seen(maps, z, place):
    values, slopes = maps.parts(z)
    return at_place(values, place), at_place(slopes, place)


def logistic(e):
    """N(e; 0, 1) times a logistic function whose place depends on t, for three problems."""
    steepness = torch.tensor([0.5, 1.0, 3.0], dtype=F64)
    f = steepness * (e + 0.5 * places(e).view(-1, 1, 1))
    return torch.nn.functional.logsigmoid(f) - 0.5 * e.square(), steepness * torch.sigmoid(-f) - e


def test_normal_densities_are_met_but_for_what_a_fourth_step_would_move():
    centre, scale = torch.tensor([0.3, -0.5], dtype=F64), torch.tensor([0.7, 1.2], dtype=F64)

    def normal(e):
        r = (e - centre - 0.4 * places(e).view(-1, 1, 1)) / scale
        return -0.5 * r.square(), -r / scale

    z = torch.randn(1, 2, 50, dtype=F64, generator=torch.Generator().manual_seed(0))
    place = torch.linspace(-1, 1, 50, dtype=F64).expand(1, 2, 50)
    value, slope = seen(fitted(normal, torch.zeros(1, 2, dtype=F64)), z, place)
    torch.testing.assert_close(value, centre[:, None] + 0.4 * place + scale[:, None] * z, atol=1e-4, rtol=0)
    torch.testing.assert_close(slope, scale[:, None].expand_as(slope), atol=1e-4, rtol=0)


def test_slopes_are_those_of_the_maps():
    maps = fitted(logistic, torch.zeros(1, 3, dtype=F64))
    z = torch.linspace(-6, 6, 200, dtype=F64).expand(1, 3, 200).clone().requires_grad_(True)
    place = torch.linspace(-1, 1, 200, dtype=F64).expand(1, 3, 200).flip(-1)
    value, slope = seen(maps, z, place)
    torch.testing.assert_close(torch.autograd.grad(value.sum(), z)[0], slope)


def spread(maps):
    """Deviations of log density over the maps' at the three places, under the normal density."""
    z = torch.linspace(-4, 4, 400, dtype=F64).expand(1, 3, 400)
    mass = torch.softmax(-0.5 * z.square(), -1)
    found = []
    for number, place in enumerate(places(z)):
        value, slope = seen(maps, z, place.expand_as(z))
        density = logistic(value.transpose(1, 2).unsqueeze(1).expand(-1, 3, -1, -1))[0][:, number].mT
        ratio = density + slope.log() + 0.5 * z.square()
        found.append((mass * (ratio - (mass * ratio).sum(-1, keepdim=True)).square()).sum(-1).sqrt())
    return torch.stack(found).amax((0, 1))


def test_a_skewed_density_is_met_within_hundredths():
    identity = torch.zeros(3, 5, 1, 3, dtype=F64)
    identity[0, 1] = 1.0
    before, after = spread(MonotoneMaps(identity)), spread(fitted(logistic, torch.zeros(1, 3, dtype=F64)))
    assert bool((after < torch.tensor([0.002, 0.01, 0.1])).all()) and bool((before > 10 * after).all())


def test_maps_increase_whatever_they_were_fitted_to():
    """Maps whose slopes pass at the places alone, by far, and are interpolated between them."""
    random = torch.Generator().manual_seed(0)
    wild = 3 * torch.randn(200, 3, 5, 4, dtype=F64, generator=random)
    cubic = torch.tensor([[1, -1, 1, -1], [1, -1 / 3, -1 / 3, 1], [1, 1 / 3, -1 / 3, -1], [1, 1, 1, 1]], dtype=F64)
    lowest = (cubic @ wild[:, :, 1:]).amin(2)
    wild[:, :, 1] += (_LEAST_SLOPE + 0.01 - lowest).clamp_min(0.0)
    maps = MonotoneMaps(_interpolated(wild, cubic))
    z = torch.linspace(-50, 50, 401, dtype=F64).expand(200, 4, 401)
    slopes = torch.stack([seen(maps, z, torch.full_like(z, place))[1] for place in torch.linspace(-1, 1, 21)])
    assert float(slopes.min()) > 0.99 * _LEAST_SLOPE
    # Without the share that is kept of what slopes depend on t, some bend back.
    _, _, _, basis = _nodes(F64, torch.device("cpu"))
    t = places(wild)
    powers = torch.linalg.inv(t.unsqueeze(-1) ** torch.arange(3))
    plain = torch.einsum("jp,cpkn->jkcn", powers, wild)
    at_end = torch.einsum("kb,bcn->kcn", basis, plain.sum(0))
    assert float(at_end.min()) < 0


def test_densities_that_are_not_finite_leave_the_identity():
    maps = fitted(lambda e: (torch.full_like(e, torch.nan), torch.full_like(e, torch.nan)), torch.zeros(2, 3, dtype=F64))
    z = torch.randn(2, 3, 7, dtype=F64, generator=torch.Generator().manual_seed(0))
    value, slope = seen(maps, z, 0.3 * torch.ones_like(z))
    # But for rounding: products of three numbers, in an order that is the processor's.
    torch.testing.assert_close(value, z, rtol=0, atol=1e-14)
    torch.testing.assert_close(slope, torch.ones_like(slope), rtol=0, atol=1e-14)
