"""What `explain` foretells of each engine that a default call tries, and what it took, in CPU seconds.

    python benchmarks/forecasts.py [straight_noise sparse_student softmax_irises ...]

Quoted by docs/results/other_data.md, "Forecasts". Models are those of unseen.py, and softmax_irises.
"""

import argparse
import time
import warnings
from unittest import mock

import torch
from gpytorch.kernels import RBFKernel, ScaleKernel
from gpytorch.priors import GammaPrior
from sklearn.datasets import load_iris
from unseen import CASES

import torchgpmc as tg
from torchgpmc.calls.candidate import described
from torchgpmc.calls.engines import candidates


def softmax_irises():
    """150 x 4, three classes by softmax, ten inducing points."""
    x, y = load_iris(return_X_y=True)
    x, prior = (x - x.mean(0)) / x.std(0), GammaPrior(2.0, 0.5)
    kernel = ScaleKernel(RBFKernel(lengthscale_prior=GammaPrior(2.0, 1.0)), outputscale_prior=prior)
    likelihood = tg.likelihoods.Softmax(num_classes=3)
    return tg.SparseGP(x, y, kernel, likelihood, inducing_points=tg.kmeans_inducing_points(x, 10))


def report(name):
    """A row an engine."""
    model = softmax_irises() if name == "softmax_irises" else CASES[name]()
    foretold = {}
    for engine in reversed(candidates(model)):  # of two of one name the first is tried first
        began = time.process_time()
        foretold[described(engine)] = engine.seconds(), time.process_time() - began
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", tg.SamplingWarning)
        posterior = tg.sample(model, seed=0, progress=False)
    for trial in posterior.info["tried"]:
        seconds = " | ".join(f"{number:.1f}" for number in (*foretold[trial["engine"]], trial["seconds"]))
        print(f"| {name} | {trial['engine']} | {seconds} | {trial['verdict']} |", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", default=["straight_noise", "sparse_student", "softmax_irises", "student_eight_columns"])
    torch.set_num_threads(1)
    with mock.patch("time.perf_counter", time.process_time):  # of this process alone, however busy the machine
        for name in parser.parse_args().names:
            report(name)
