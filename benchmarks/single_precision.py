"""What `data_dtype=torch.float32` costs a sparse model in precision, and gains in time.

    python benchmarks/single_precision.py [--data FOLDER]

Value and gradient beside those in double precision, at four positions a case: theta as named, v standard normal. Errors of the
value are in nats, those of the gradient relative to its length; the greatest of the four. Time is that of one gradient at one
position, over the same in double precision, the least of three calls on one thread. With the folder of `mnist.npz` there is a case
of 2000 images.
"""

import argparse
import pathlib
import time
from typing import NamedTuple

import numpy as np
import torch
from gpytorch.kernels import RBFKernel, ScaleKernel
from gpytorch.priors import GammaPrior

import torchgpmc as tg


class Case(NamedTuple):
    """Standard normal inputs."""

    data: int
    columns: int
    inducing: int
    log_lengthscale: float
    at_data: bool = False  # whether inducing points are among the data, else k-means
    shift: float = 0.0  # of all inputs


CASES = [
    Case(400, 2, 20, 0.0),
    Case(400, 2, 20, 0.7),
    Case(400, 2, 20, 1.4),
    Case(4000, 2, 20, 0.7),
    Case(400, 2, 20, 0.7, shift=1000.0),
    Case(400, 5, 40, 1.4, at_data=True),
    Case(400, 18, 50, 2.5, at_data=True),
    Case(4000, 18, 200, 1.0),
]
LIKELIHOODS = {
    "robust-max": lambda: tg.likelihoods.RobustMax(num_classes=3),
    "softmax": lambda: tg.likelihoods.Softmax(num_classes=3),
    "probit": tg.likelihoods.Bernoulli,
}


def models(x, y, z, likelihood):
    """In double and in single precision."""
    kernel = ScaleKernel(RBFKernel(lengthscale_prior=GammaPrior(2.0, 1.0)), outputscale_prior=GammaPrior(2.0, 1.0))
    return [tg.SparseGP(x, y, kernel, likelihood(), inducing_points=z, data_dtype=dtype) for dtype in (None, torch.float32)]


def of_case(case, name):
    generator = torch.Generator().manual_seed(case.columns)
    x = torch.randn(case.data, case.columns, generator=generator, dtype=torch.float64)
    y = x[:, :3].argmax(-1) if case.columns > 2 else (x > 0).sum(-1)
    y = (y > 0).long() if name == "probit" else y
    z = x[: case.inducing] if case.at_data else tg.kmeans_inducing_points(x, case.inducing)
    return models(x + case.shift, y, z + case.shift, LIKELIHOODS[name])


def milliseconds(density, position):
    times = []
    for _ in range(3):
        began = time.process_time()
        density.value_and_grad(position)
        times.append(time.process_time() - began)
    return 1e3 * min(times)


def row(label, name, pair, log_lengthscale):
    layout, generator = pair[0].layout, torch.Generator().manual_seed(0)
    theta = torch.tensor([log_lengthscale if "lengthscale" in entry else 0.7 for entry in layout.names], dtype=torch.float64)
    v = torch.randn(4, pair[0].latent_size, generator=generator, dtype=torch.float64)
    position = torch.cat([theta.expand(4, -1), v], -1)
    densities = [tg.joint_log_density(model) for model in pair]
    (value, gradient), (found, slope) = (density.value_and_grad(position) for density in densities)
    error = float(((slope - gradient).norm(dim=1) / gradient.norm(dim=1)).max())
    double, single = (milliseconds(density, position[:1]) for density in densities)
    print(f"| {label} | {name} | {float((found - value).abs().max()):.0e} | {error:.0e} | {single / double:.2f} |", flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=pathlib.Path, help="folder of mnist.npz")
    folder = parser.parse_args().data
    torch.set_num_threads(1)
    print("| N, D, M, log lengthscale | likelihood | value, nats | gradient | time |", "|---|---|---|---|---|", sep="\n")
    for case in CASES:
        where = ", Z among the data" * case.at_data + f", inputs + {case.shift:g}" * bool(case.shift)
        label = f"{case.data}, {case.columns}, {case.inducing}, {case.log_lengthscale}{where}"
        for name in LIKELIHOODS:
            row(label, name, of_case(case, name), case.log_lengthscale)
    if folder is not None:
        images = np.load(folder / "mnist.npz")
        pixels, y = (torch.as_tensor(images[name][:2000]).double() for name in ("x_train", "y_train"))
        x = pixels.view(2000, -1) / 127.5 - 1
        pair = models(x, y, tg.kmeans_inducing_points(x, 500), lambda: tg.likelihoods.RobustMax(num_classes=10))
        for log_lengthscale in (2.0, 3.0):
            row(f"2000 images, 784, 500, {log_lengthscale}", "robust-max", pair, log_lengthscale)


if __name__ == "__main__":
    main()
