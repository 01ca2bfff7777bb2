"""MNIST (Hensman et al. 2015, section 5.4): a Gaussian fit by minibatches against MCMC, in pieces that go on where they stopped.

    python benchmarks/mnist.py --data DATA --work FOLDER --minutes 60

M = 500 inducing points, an ARD kernel, robust-max with epsilon 1e-3, pixels scaled to [-1, 1], lengthscales Gamma(1, 1), variance
Gamma(4, 1.3). FOLDER keeps the fit and the chains' checkpoint: call again, with the same options, and chains go on for as many
minutes more. ``--more-passes 80`` lets the fit in FOLDER go on; its chains then begin anew. ``--images 10000`` takes the first ten
thousand of a permutation.
"""

import argparse
import pathlib
import resource
import signal
import time
from typing import NamedTuple

import numpy as np
import torch
from gpytorch.kernels import RBFKernel, ScaleKernel
from gpytorch.priors import GammaPrior
from held_out import quiet

import torchgpmc as tg

ALL = 60_000
FOR_KMEANS = 10_000  # images that k-means sees
DRAWS = 1000  # the paper's


def digits(data, images):
    """Training images with pixels in [-1, 1], and their labels."""
    found = np.load(data / "mnist.npz")
    order = torch.randperm(ALL, generator=torch.Generator().manual_seed(0))[:images]
    return scaled(found["x_train"][order]), torch.as_tensor(found["y_train"][order]).double()


def test_digits(data, tests):
    """The same of the first test images."""
    found = np.load(data / "mnist.npz")
    return scaled(found["x_test"][:tests]), torch.as_tensor(found["y_test"][:tests]).double()


def scaled(images):
    """Pixels of 0 to 255 in [-1, 1], a row an image."""
    return torch.as_tensor(images).flatten(1).double() / 127.5 - 1


def classifier(data, images, points):
    """The model of the paper, priors by shape and rate; products with the data in single precision."""
    x, y = digits(data, images)
    base = RBFKernel(ard_num_dims=x.shape[1], lengthscale_prior=GammaPrior(1.0, 1.0))
    base.lengthscale = x.shape[1] ** 0.5 / 2  # where distances between images are of the order of one
    kernel = ScaleKernel(base, outputscale_prior=GammaPrior(4.0, 1.3))
    z = tg.kmeans_inducing_points(x[:FOR_KMEANS], points)
    likelihood = tg.likelihoods.RobustMax(num_classes=10, epsilon=1e-3)
    return tg.SparseGP(x, y, kernel, likelihood, inducing_points=z, data_dtype=torch.float32)


def fit(make_model, path, passes, more_passes, batch_size):
    """The Gaussian fit, from its file if there is one, the CPU seconds that it took, and its passes over the data."""
    start, seconds, made = None, 0.0, 0
    if path.exists():
        start, seconds, made = torch.load(path, weights_only=False)
        if not more_passes:
            return start, seconds, made
        passes = more_passes
    model = make_model() if start is None else start.model
    began = time.process_time()
    start = tg.initialize(model, batch_size=batch_size, max_iterations=passes, start=start, seed=made)
    found = start, seconds + time.process_time() - began, made + passes
    torch.save(found, path)
    return found


def method_of(arguments):
    """HMC on all data, or minibatches, which are biased."""
    if arguments.biased:
        return tg.StochasticGradientHMC(batch_size=arguments.batch_size, step_size=arguments.step_size)
    # A search for a step size begins with long steps, to lengthscales so short that a gradient takes minutes. The fit has a width
    # for each hyperparameter, which a warm-up of less than twenty transitions keeps; a longer one learns 5785 from few positions.
    mass = tg.MassMatrix.DIAGONAL
    return tg.HMC(num_steps=arguments.steps, step_size=arguments.step_size, adapt_step_size=False, mass_matrix=mass)


def sample_for(minutes, *arguments, **options):
    """``tg.sample``, interrupted after some minutes as by Ctrl-C, when the checkpoint is saved; ``None`` while still in warm-up."""
    signal.signal(signal.SIGALRM, signal.default_int_handler)
    signal.setitimer(signal.ITIMER_REAL, 60 * minutes)
    try:
        return tg.sample(*arguments, **options)
    except KeyboardInterrupt as stopped:
        print(stopped)
        return None
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


class Scores(NamedTuple):
    """Of a prediction of the test digits."""

    right: torch.Tensor  # (T,), 1 or 0
    log_density: torch.Tensor  # (T,)

    @classmethod
    def of(cls, prediction, y):
        return cls((prediction.probs.argmax(-1) == y).double(), prediction.log_prob(y))

    def __str__(self):
        return f"{100 * float(self.right.mean()):.2f}, {float(self.log_density.mean()):.4f}"


def above(one, other):
    """The mean of a paired difference, and its standard error."""
    difference = one - other
    return f"{float(difference.mean()):.5f} ({float(difference.std() / len(difference) ** 0.5):.5f})"


def mixing(posterior):
    """How far chains have met, in lp and in the lengthscales."""
    summary = posterior.summary()
    scales = [row for row in summary.rows if "lengthscale" in row.name]
    rhat, effective = (torch.tensor([getattr(row, name) for row in scales]) for name in ("rhat", "ess_bulk"))
    shown = f"{summary['lp'].rhat:.2f}, {summary['lp'].ess_bulk:.0f} | {float(rhat.median()):.2f}, {float(rhat.max()):.2f} |"
    return f"{shown} {float(effective.median()):.0f}, {float(effective.min()):.0f}"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=pathlib.Path, required=True, help="folder of mnist.npz")
    parser.add_argument("--work", type=pathlib.Path, required=True, help="folder for the fit and the checkpoint")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--images", type=int, default=ALL)
    parser.add_argument("--tests", type=int, default=10_000)
    parser.add_argument("--points", type=int, default=500)
    parser.add_argument("--passes", type=int, default=60, help="of the fit over the data")
    parser.add_argument("--more-passes", type=int, default=0, help="of a fit that FOLDER holds already")
    parser.add_argument("--batch-size", type=int, default=1000)
    parser.add_argument("--minutes", type=float, default=60.0, help="of sampling, in this call")
    parser.add_argument("--chains", type=int, default=2)
    parser.add_argument("--draws", type=int, default=DRAWS // 2, help="a chain")
    parser.add_argument("--warmup", type=int, default=15)
    parser.add_argument("--predictive-draws", type=int, default=100, help="that predictions average over")
    parser.add_argument("--step-size", type=float, default=0.15)
    parser.add_argument("--steps", type=int, default=20, help="leapfrog steps of a transition, at most; the paper's Lmax is 30")
    parser.add_argument("--biased", action="store_true", help="stochastic gradients")
    arguments = parser.parse_args()
    quiet()
    arguments.work.mkdir(parents=True, exist_ok=True)
    test_x, test_y = (part.to(arguments.device) for part in test_digits(arguments.data, arguments.tests))

    def model():
        return classifier(arguments.data, arguments.images, arguments.points).to(arguments.device)

    start, fitting, passes = fit(model, arguments.work / "fit.pt", arguments.passes, arguments.more_passes, arguments.batch_size)
    fitted = Scores.of(start.predict(test_x), test_y)
    print(f"fit of {passes} passes, {fitting:.0f} s, bound {start.elbo:.1f}, converged {start.converged}: {fitted}", flush=True)
    method = method_of(arguments)
    posterior = sample_for(
        arguments.minutes,
        start.model,
        method,
        start=start,
        num_samples=arguments.draws,
        warmup_steps=arguments.warmup,
        num_chains=arguments.chains,
        seed=0,
        checkpoint=tg.Checkpoint(arguments.work / f"{type(method).__name__}.ckpt", every=1),
    )
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    if posterior is None:
        print(f"peak memory {memory:.2f} GiB")
        return
    kept = posterior.num_chains * posterior.num_draws
    sampled = Scores.of(posterior.predict(test_x, num_draws=arguments.predictive_draws), test_y)
    gradients = posterior.stats["n_steps"].mean() if "n_steps" in posterior.stats else float("nan")
    print(f"{method}; {arguments.warmup} transitions of warm-up; {float(gradients):.1f} gradients a draw")
    print(f"accepted: {float(posterior.stats['acceptance_rate'].mean()):.2f}")
    print(f"MCMC above Gaussian, paired: accuracy {above(sampled.right, fitted.right)}, ", end="")
    print(f"log density {above(sampled.log_density, fitted.log_density)}")
    print("| images | M | passes | chains, draws (of the paper's) | Gaussian: %, log density | MCMC: %, log density |", end="")
    print(" R-hat, effective of lp | R-hat of lengthscales: median, worst | effective: median, least | fit, s |", end="")
    print(" sampling, s | memory, GiB |")
    print(f"| {arguments.images} | {arguments.points} | {passes} | {posterior.num_chains}, {kept} ({kept / DRAWS:.1%}) |", end="")
    print(f" {fitted} | {sampled} | {mixing(posterior)} |", end="")
    print(f" {fitting:.0f} | {posterior.info['seconds']:.0f} | {memory:.2f} |")


if __name__ == "__main__":
    main()
