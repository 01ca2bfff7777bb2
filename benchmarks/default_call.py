"""``tg.sample(model)`` with no options on real data, beside a run of another engine: docs/results/default_call.md.

    python benchmarks/default_call.py --data ../shared/data --cases thyroid mcycle [--size 100] [--reference-draws 500]

A case is a data set with a model; ``+noise`` after its name flips a tenth of its labels, ``+twice`` gives a fifth of its rows
twice, ``+ard`` takes a lengthscale a column. Half as many rows again as are trained on are test data.
"""

import argparse
import pathlib
import time
import warnings

import numpy as np
import torch
from gpytorch.kernels import RBFKernel, ScaleKernel
from gpytorch.likelihoods import GaussianLikelihood
from gpytorch.priors import GammaPrior, HalfNormalPrior
from real_data import OUTPUT, classification_set, standardised, table

import torchgpmc as tg

BINARY = ["thyroid", "haberman", "crabs", "ripley", "ionosphere", "pima", "glass", "ida_breast_cancer", "banana"]
REGRESSION = ["mcycle", "yacht", "housing", "concrete", "energy"]


def kernel(num_columns, ard):
    prior = GammaPrior(2.0, 2.0 / num_columns**0.5)
    base = RBFKernel(ard_num_dims=num_columns if ard else None, lengthscale_prior=prior)
    return ScaleKernel(base, outputscale_prior=GammaPrior(2.0, 0.5))


def case(folder, name, size):
    """The model on ``size`` rows, test inputs and test targets."""
    name, *changes = name.split("+")
    random = np.random.default_rng(0)
    if name in BINARY:
        x, y = classification_set(folder, name)
    else:
        columns = table(folder, name)
        x, y = standardised(columns[:, :-1]), standardised(columns[:, -1])
    order = random.permutation(len(x))
    train, test = order[:size], order[size : size + size // 2]
    if "twice" in changes:
        train = np.concatenate([train[: size - size // 5], train[: size // 5]])
    labels = y[train]
    if "noise" in changes:
        labels = np.where(random.random(len(labels)) < 0.1, 1 - labels, labels)
    made = kernel(x.shape[1], "ard" in changes)
    if name in BINARY:
        model = tg.GP(x[train], labels, made, tg.likelihoods.Bernoulli())
    else:
        model = tg.GPRegression(x[train], labels, made, GaussianLikelihood(noise_prior=HalfNormalPrior(0.5)))
    return model, x[test], torch.as_tensor(y[test])


def means(posterior):
    """Of every hyperparameter on its unconstrained scale, and its standard deviation."""
    weights = torch.softmax(posterior._log_weights(), 0)[:, None]
    theta = posterior.theta.flatten(0, 1)
    mean = (weights * theta).sum(0)
    return mean, (weights * (theta - mean).square()).sum(0).sqrt()


def reference(model, engine, draws):
    """A run of an engine of another kind than the one that served."""
    if model.is_conjugate:
        method = tg.NUTS() if engine.startswith("AMIS") else tg.PseudoMarginal()
        return tg.sample(model, method, num_samples=draws, num_chains=4, progress=False, seed=9)
    method = tg.PseudoMarginal(approximation=tg.EP(), num_importance=64)
    return tg.sample(model, method, num_samples=draws, num_chains=16, progress=False, seed=9)


def row(folder, name, size, reference_draws):
    model, test_x, test_y = case(folder, name, size)
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always", tg.SamplingWarning)
        warnings.simplefilter("ignore", RuntimeWarning)
        began, worked = time.perf_counter(), time.process_time()
        posterior = tg.sample(model, seed=0, progress=False)
        seconds, work = time.perf_counter() - began, time.process_time() - worked
    said = sum(issubclass(message.category, tg.SamplingWarning) for message in heard)
    served = posterior.info["tried"][-1]["engine"]
    prediction = posterior.predict(test_x)
    score = float(prediction.log_prob(test_y).mean())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        longer = reference(model, served, reference_draws)
    (mean, _), (target, sd) = means(posterior), means(longer)
    gap = float(((mean - target) / sd).abs().max())
    other = longer.predict(test_x)
    off = (prediction.mean - other.mean).abs() / (1.0 if name.split("+")[0] in BINARY else other.variance.sqrt())
    engines = " -> ".join(trial["engine"] for trial in posterior.info["tried"])
    numbers = (
        f"{seconds:.0f} | {work:.1f} | {posterior.effective_size():.0f} | {said} | {score:.3f} | {gap:.2f} | {float(off.max()):.3f}"
    )
    check = f"{longer.info['method'].split('(')[0]}, {longer.effective_size():.0f}"
    shape = f"{len(model.train_x)} x {model.train_x.shape[1]}"
    return f"| {name} | {shape} | {engines} | {numbers} | {check} |"


HEADER = """# The default call

`python benchmarks/default_call.py`: `tg.sample(model, seed=0)` without options. CPU seconds are of all threads; wall
seconds are those of this machine, busy or not. ESS is that of the worst hyperparameter, `lp` or latent. The last columns hold the
answer against a run of another engine (with its own worst effective size): the largest distance of a mean of theta, in posterior
standard deviations, and of a test probability (of regressions, of a test mean in predictive standard deviations).

| case | size | tried | s | CPU s | ESS | warnings | test log density | theta off | test off | beside |
|---|---|---|---|---|---|---|---|---|---|---|
"""


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=pathlib.Path, required=True, help="folder of the data sets")
    parser.add_argument("--cases", nargs="*", default=[*BINARY, *(f"{name}+noise+ard" for name in BINARY), *REGRESSION])
    parser.add_argument("--size", type=int, default=100, help="rows to train on")
    parser.add_argument("--reference-draws", type=int, default=500)
    parser.add_argument("--output", type=pathlib.Path, default=OUTPUT / "default_call.md")
    options = parser.parse_args()
    if not options.output.exists():
        options.output.write_text(HEADER)
    for name in options.cases:
        line = row(options.data, name, options.size, options.reference_draws)
        print(line, flush=True)
        with options.output.open("a") as file:
            file.write(f"{line}\n")


if __name__ == "__main__":
    main()
