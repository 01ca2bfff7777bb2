"""What identifies a model in files: everything that its density depends on, in words and in numbers."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributions import Distribution, Transform
from torch.distributions.utils import lazy_property

from torchgpmc.models.gp_model import GPModel
from torchgpmc.models.joint_density import JointLogDensity
from torchgpmc.models.latents import likelihood_parameters
from torchgpmc.models.targets import Targets
from torchgpmc.types import LogDensity

Fingerprint = dict[str, str | Tensor]

# Relative to the largest of a setting's numbers; room for other devices, thread counts and distances from products of inputs.
_TOLERANCE = {torch.float64: 1e-7, torch.float32: 1e-3}
_SPREADS = 0.3, 1.0, 2.0, 4.0  # of the thetas, so that parameters take values from 1 / 50 to 50
_NUM_ROWS = 4
_NUM_HALVINGS = 8
_MOST_SHOWN = 160  # characters of a description, in place of which a digest stands when it is longer


def model_fingerprint(model: GPModel) -> Fingerprint:
    r"""What identifies a model in files, as strings to be equal and numbers to be equal but for rounding.

    In words: the class of every module, its buffers and plain attributes, names and shapes of the parameters. Code and what else
    words cannot hold are seen in numbers: the log prior, prior mean, covariance and log likelihood at a few hyperparameters, the
    values of fixed ones, and :math:`\log p(\theta, v, y)` itself at two points, all of them fixed points that depend on nothing
    but sizes and data. Present values of sampled parameters are no part of it.

    Example:
        >>> import torch, torchgpmc as tg
        >>> from gpytorch.kernels import RBFKernel
        >>> from gpytorch.priors import GammaPrior
        >>> x = torch.linspace(0, 1, 8)
        >>> def model(rate):
        ...     kernel = RBFKernel(lengthscale_prior=GammaPrior(2.0, rate))
        ...     return tg.GP(x, (x > 0.5).int(), kernel, tg.likelihoods.Bernoulli())
        >>> print(differences(model_fingerprint(model(4.0)), model_fingerprint(model(3.0))))  # doctest: +ELLIPSIS
        kernel.lengthscale_prior was 'rate=4.0', is 'rate=3.0'; ... log prior differs by up to ...
        >>> differences(model_fingerprint(model(4.0)), model_fingerprint(model(4.0)))
        ''
    """
    words = {name or "model": _describe_object(module) for name, module in model.named_modules()}
    parameters = [f"{entry.name} {tuple(entry.shape)} sampled" for entry in model.layout.entries]
    parameters += [f"{entry.name} {tuple(entry.value().shape)} fixed" for entry in model.layout.fixed]
    return {**words, "parameters": ", ".join(parameters), **_numbers(model)}


def density_fingerprint(density: LogDensity, start: Tensor) -> Fingerprint:
    """What identifies a density and where its chains start: its values there ``(C, D)`` and at fixed distances from there."""
    steps = _formula(*start.shape).to(start)
    values = torch.stack([density(start + scale * steps).detach() for scale in (0.0, *_SPREADS)])
    return {"start": start.cpu(), "log density": values.cpu()}


def differences(old: Fingerprint, new: Fingerprint) -> str:
    """What differs between two fingerprints, for a message; empty if nothing does."""
    found = (_difference(key, old.get(key), new.get(key)) for key in sorted({*old, *new}))
    return "; ".join(difference for difference in found if difference)


def _difference(key: str, old: str | Tensor | None, new: str | Tensor | None) -> str:
    if not (isinstance(old, Tensor) and isinstance(new, Tensor)):
        if isinstance(old, str) and isinstance(new, str):
            old, new = _parted(old, new)
        return "" if type(old) is type(new) and old == new else f"{key} was {old!r}, is {new!r}"
    if not (old.numel() and new.numel()):
        return ""  # not to be had when one of them was taken
    if old.shape != new.shape or old.dtype != new.dtype:
        return f"{key} was {tuple(old.shape)} {old.dtype}, is {tuple(new.shape)} {new.dtype}"
    before, after = (numbers.reshape(len(old) if old.dim() > 1 else 1, -1) for numbers in (old, new))
    largest = before.abs().nan_to_num(0.0, 0.0, 0.0).amax(-1, keepdim=True)
    gap = (before - after).abs()
    # Where a factorisation failed, by rounding perhaps, nothing is known.
    same = (before == after) | (gap <= _TOLERANCE.get(old.dtype, 0.1) * largest) | before.isnan() | after.isnan()
    return "" if bool(same.all()) else f"{key} differs by up to {float(gap[~same].max()):.2g}"


def _parted(old: str, new: str) -> tuple[str, str]:
    """Of descriptions with the same names ``word=value`` those that differ, by more than rounding to single precision.

    Example:
        >>> _parted("GP jitter=1e-06 train_x=a b train_y=c", "GP jitter=1e-06 train_x=a d train_y=c")
        ('train_x=a b', 'train_x=a d')
    """
    parts = [re.split(r" (?=\w+=)", text) for text in (old, new)]
    if [part.partition("=")[0] for part in parts[0]] != [part.partition("=")[0] for part in parts[1]]:
        return old, new
    different = [pair for pair in zip(*parts, strict=True) if not _same(*pair)]
    before, after = zip(*different, strict=True) if different else ((), ())
    return " ".join(before).rstrip(","), " ".join(after).rstrip(",")


def _same(old: str, new: str) -> bool:
    """Whether two of ``word=value`` are one but for rounding to single precision: priors hold numbers in torch's default dtype.

    Example:
        >>> _same("rate=0.3", "rate=0.30000001192092896"), _same("rate=0.3", "rate=0.300001"), _same("n=16777216", "n=16777217")
        (True, False, False)
    """
    before, after = (text.partition("=")[2].rstrip("),") for text in (old, new))
    if old == new or before.isdigit() or after.isdigit():
        return old == new
    try:
        return bool(np.float32(before) == np.float32(after))
    except ValueError:
        return False


# --- words ------------------------------------------------------------------------------------------------------------


def _describe_object(value: Any) -> str:
    """Class, buffers and public attributes of a module, a distribution or a transform; nothing that evaluation leaves behind."""
    kind = type(value)
    held = {name: part for name, part in vars(value).items() if not isinstance(getattr(kind, name, None), lazy_property)}
    described = {name: _describe(part) for name, part in held.items() if not name.startswith("_") and name != "training"}
    if isinstance(value, nn.Module):
        described |= {name: _describe(buffer) for name, buffer in value.named_buffers(recurse=False)}
    # A file that moves within its package makes no other class.
    label = f"{kind.__module__.partition('.')[0]}.{kind.__qualname__}"
    return " ".join([label, *(f"{name}={text}" for name, text in sorted(described.items()) if text)])


def _describe(value: Any) -> str:
    """Plain data and names of functions; empty for objects of other kinds, of which numbers tell."""
    if isinstance(value, Tensor):
        return _describe_tensor(value)
    if isinstance(value, bool | int | float | complex | str):
        return _shortened(repr(value))
    if isinstance(value, np.ndarray | np.generic):
        return _describe(value.tolist())
    if isinstance(value, Mapping):
        return _shortened(f"{{{', '.join(sorted(f'{key!r}: {_describe(part)}' for key, part in value.items()))}}}")
    if isinstance(value, set | frozenset):
        return _shortened(f"{{{', '.join(sorted(map(_describe, value)))}}}")
    if isinstance(value, list | tuple):
        return _shortened(f"[{', '.join(map(_describe, value))}]")
    if isinstance(value, Distribution | Transform) and not isinstance(value, nn.Module):
        return f"({_describe_object(value)})"
    return getattr(value, "__qualname__", "")


def _describe_tensor(tensor: Tensor) -> str:
    """A tensor's numbers to the last bit: themselves if they are few, else a digest with dtype and shape."""
    tensor = tensor.detach().cpu()
    if tensor.dim() == 0:
        return repr(tensor.item())
    digest = hashlib.sha256(tensor.numpy().tobytes()).hexdigest()[:16]
    few = f" {tensor.tolist()}" if tensor.numel() <= 4 else ""
    return f"{tensor.dtype}{list(tensor.shape)} {digest}{few}"


def _shortened(text: str) -> str:
    return text if len(text) <= _MOST_SHOWN else f"sha256 {hashlib.sha256(text.encode()).hexdigest()[:16]}"


# --- numbers ----------------------------------------------------------------------------------------------------------


def _numbers(model: GPModel) -> dict[str, Tensor]:
    layout, x = model.layout, model.train_x
    theta = _formula(len(_SPREADS), layout.size) * torch.tensor(_SPREADS, dtype=torch.float64)[:, None]
    theta = theta.to(x)
    values = layout.raw_values(theta).by_module
    points = _points(x)
    targets = Targets(model.targets.select(slice(0, 1)).values[0], False) if model.targets.one_a_chain else model.targets
    latent_shape = (len(x),) if model.num_latents == 1 else (len(x), model.num_latents)
    f = _formula(len(theta), *latent_shape).to(x)
    log_prior = _attempt(lambda: layout.log_prior(theta), x)
    return {
        # Each of its own scale.
        "fixed values": torch.cat([x.new_zeros(0), *(entry.value().flatten() for entry in layout.fixed)]).unsqueeze(-1).cpu(),
        "log prior": log_prior,
        "prior mean": _attempt(lambda: model.mean_function(values["mean"], points, len(theta)), x),
        "covariance": _attempt(lambda: model.covariance.bind(points, points)(values["kernel"]), x),
        "log likelihood": _attempt(
            lambda: model.likelihood_function(
                likelihood_parameters(values["likelihood"]), lambda likelihood: likelihood.log_prob(f, targets.values)
            ),
            x,
        ),
        "log density": _attempt(lambda: _log_density(model, theta[torch.isfinite(log_prior).to(x.device)][:2], targets), x),
    }


def _formula(*shape: int) -> Tensor:
    """Numbers from -1 to 1 that depend on nothing but the shape."""
    return torch.arange(1, 1 + int(np.prod(shape)), dtype=torch.float64).sin().view(shape)


def _points(x: Tensor) -> Tensor:
    """Some rows of the inputs, and points between the first and the last of them, at distances of all scales."""
    step = x[-1] - x[0]
    halvings = 0.5 ** torch.arange(1, 1 + _NUM_HALVINGS, dtype=x.dtype, device=x.device)
    return torch.cat([x[:_NUM_ROWS], x[0] + halvings[:, None] * torch.where(step == 0, 1.0, step)])


def _log_density(model: GPModel, theta: Tensor, targets: Targets) -> Tensor:
    """log p(theta, v, y), setting by setting, at a v that takes the first column of each factor: the one that rounds best."""
    density = JointLogDensity(model, targets)
    v = theta.new_zeros(model.latent_shape)
    v[:, 0] = 1 / (1 + torch.arange(len(v)).to(v))
    value = torch.cat([density(torch.cat([row, v.flatten()])[None]) for row in theta] or [theta.new_zeros(0)])
    return torch.where(torch.isfinite(value), value, torch.nan)


def _attempt(function: Callable[[], Tensor], like: Tensor) -> Tensor:
    """What ``function`` returns, off the device; nothing where a user's module cannot be evaluated so."""
    try:
        with torch.no_grad():
            return function().to("cpu", copy=True)
    except Exception:  # whatever a user's module may raise at points that are not its data; files must still be written
        return like.new_zeros(0, device="cpu")
