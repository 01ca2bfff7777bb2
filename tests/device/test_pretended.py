"""The pretended device refuses what CUDA refuses, counts what CUDA waits for, and sees a package that mixes devices.

All of it is asked of a real one, too, if ``--device`` names one.
"""

import sys

import pytest
import torch

import torchgpmc as tg
from tests.device.other import DEVICE
from tests.problems import gp

THERE = torch.arange(3.0)


def there():
    return THERE.to(DEVICE)


@pytest.mark.parametrize(
    "mixing",
    [
        lambda: there() + THERE,
        lambda: there().add_(THERE),
        lambda: torch.stack([there()[0], THERE[0]]),
        lambda: torch.cat([there(), THERE]),
        lambda: THERE[there() > 0],
        lambda: there().index_add(0, torch.tensor([0]), there()[:1]),
        lambda: torch.randn(3, device=DEVICE, generator=torch.Generator()),
        lambda: torch.randn(3, generator=torch.Generator(device=DEVICE)),
        lambda: torch.eye(3) @ there(),
    ],
)
def test_what_lies_on_different_devices_does_not_meet(mixing):
    with pytest.raises(RuntimeError, match=r"device|a generator on"):
        mixing()


def test_numpy_sees_no_tensor_of_the_device():
    with pytest.raises(TypeError, match="numpy"):
        there().numpy()


def test_what_cuda_takes_from_the_cpu():
    """Single numbers, indices, and copies."""
    assert (there() + THERE[1]).device == DEVICE
    assert there()[torch.tensor([0, 2])].tolist() == [0.0, 2.0]
    assert torch.zeros(3, device=DEVICE).copy_(THERE).sum().item() == 3.0
    assert (there() @ torch.eye(3, device=DEVICE)).tolist() == THERE.tolist()


@pytest.mark.parametrize(
    ("waiting", "expected"),
    [
        (lambda x: x + x, 0),
        (lambda x: torch.where(x > 1, x, 0.0), 0),
        (lambda x: float(x[0]), 1),
        (lambda x: bool((x > 1).any()), 1),
        (lambda x: x.nonzero(), 1),
        (lambda x: x[x > 1], 1),
        (lambda x: x.cpu(), 1),
        (lambda x: x.tolist(), 1),
        (lambda x: torch.tensor([1.0], device=DEVICE), 1),
        (lambda x: torch.zeros(1, device=DEVICE), 0),
    ],
)
def test_waits_are_counted(waits, waiting, expected):
    x = there()
    waits.clear()
    waiting(x)
    assert waits.total() == expected


def test_gradients_live_where_their_tensors_do():
    x = there().requires_grad_(True)
    x.square().sum().backward()
    assert x.grad.device == DEVICE and x.grad.tolist() == [0.0, 2.0, 4.0]


def test_planted_momenta_on_the_cpu_are_refused(monkeypatch):
    def momenta(tensor, generator):
        return torch.randn(tensor.shape, dtype=tensor.dtype)

    monkeypatch.setattr(sys.modules["torchgpmc.samplers.hmc"], "normal_like", momenta)
    with pytest.raises(RuntimeError, match="device"):
        tg.sample(gp(num_data=4, device=DEVICE), tg.HMC(), num_samples=2, warmup_steps=2, num_chains=2, progress=False)
