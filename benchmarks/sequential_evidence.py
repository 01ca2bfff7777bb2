"""Evidence of logit (or probit) labels with many columns: spread of the log estimates against time, data in turn and all at once.

    python benchmarks/sequential_evidence.py [--link probit | --fixed | --classes]

The models are heart_like and german_like of newcomer_models.py, 270 x 13 and 500 x 24 labels with a lengthscale a column. Thetas:
the best of 150 draws from the prior, by EP's evidence, moved by random-walk Metropolis steps under it; not converged chains, and no
more is needed. All estimates of a theta should agree in their mean; their spread over repeats is printed for the median of thetas
and for the worst.

With --classes: wine_ard of newcomer_models.py, at thetas found in the same way by importance estimates, and irises (150 x 4),
labels of three classes that are noise (250 x 3), and, given --data, six kinds of glass (183 x 9), each at a lengthscale and an
outputscale.

With --fixed: one theta each of 100 x 2 logit labels under a smooth kernel, of 100 x 5 under a rough one, and of 150 x 3 counts.
"""

import argparse
import pathlib
import time

import newcomer_models
import torch
from default_call_cases import case
from gpytorch.kernels import RBFKernel, ScaleKernel
from sklearn.datasets import load_iris

import torchgpmc as tg


def settings(model, count, num_steps, generator):
    """Thetas ``(count, P)`` about where the posterior lies."""
    drawn = tg.evidence.importance(model, tg.approximations.ClassEP(), num_importance=64) if model.num_latents > 1 else None

    def log_density(theta):
        if drawn is not None:
            return drawn.draw(theta, generator).value + model.layout.log_prior(theta)
        found = tg.EP().rough_evidence(model, model.prior(theta))
        return found.log_evidence + model.layout.log_prior(theta)

    theta = model.layout.sample_prior(150, generator)
    value = torch.cat([log_density(part) for part in theta.split(25)])
    best = value.argsort(descending=True)[:count]
    theta, value = theta[best], value[best]
    for _ in range(num_steps):
        trial = theta + 0.25 * torch.randn(theta.shape, generator=generator, dtype=theta.dtype)
        found = log_density(trial)
        accepted = torch.rand(count, generator=generator, dtype=theta.dtype).log() < found - value
        theta, value = torch.where(accepted.unsqueeze(-1), trial, theta), torch.where(accepted, found, value)
    return theta


def fixed(num_data, num_columns, lengthscale, counts=False):
    """Labels, one in nine of them flipped, or counts, under an outputscale of 20 or 4."""
    generator = torch.Generator().manual_seed(0)
    kernel = ScaleKernel(RBFKernel()).requires_grad_(False)
    kernel.outputscale, kernel.base_kernel.lengthscale = 4.0 if counts else 20.0, lengthscale
    x = torch.rand(num_data, num_columns, generator=generator, dtype=torch.float64)
    level = torch.sin(5 * x[:, 0]) + x[:, 1]
    if counts:
        y = torch.poisson((2 * level - 1).exp(), generator=generator)
        return tg.GP(x, y, kernel, tg.likelihoods.Poisson())
    y = (level > 0.9) ^ (torch.arange(num_data) % 9 == 0)
    return tg.GP(x, y, kernel, tg.likelihoods.Bernoulli(link="logit"))


def classes(x, y, lengthscale, outputscale):
    """One lengthscale and an outputscale that are given."""
    kernel = ScaleKernel(RBFKernel()).requires_grad_(False)
    kernel.outputscale, kernel.base_kernel.lengthscale = outputscale, lengthscale
    return tg.GP(x, y, kernel, tg.likelihoods.Softmax(num_classes=int(max(y)) + 1))


def estimators_of_classes(model):
    """By name."""
    near = tg.approximations.ClassEP()
    found = {f"importance, ClassEP, {n}": tg.evidence.importance(model, near, num_importance=n) for n in (64, 256, 1024)}
    turns = (16, 32), (64, 16), (64, 32)
    return found | {f"SequentialCandidates{turn}": tg.evidence.SequentialCandidates(*turn).estimator(model) for turn in turns}


def tables_of_classes(options):
    """With --classes."""
    model = newcomer_models.wine_ard()
    with torch.no_grad():
        theta = settings(model, options.settings, options.steps, torch.Generator().manual_seed(0))
    table("wine_ard", model, theta, options.repeats)
    theta = torch.zeros(options.settings, 0, dtype=torch.float64)
    x, y = load_iris(return_X_y=True)
    x = (x - x.mean(0)) / x.std(0)
    table("irises, 2, 100", classes(x, y, 2.0, 100.0), theta, options.repeats)
    table("irises, 0.5, 100", classes(x, y, 0.5, 100.0), theta, options.repeats)
    noise = newcomer_models.noise_of_three()
    for lengthscale, outputscale in ((0.15, 30.0), (0.3, 300.0)):
        name = f"noise, {lengthscale}, {outputscale:.0f}"
        table(name, classes(noise.train_x, noise.train_y, lengthscale, outputscale), theta, options.repeats)
    if options.data is not None:
        glass = case(options.data, "glass_type", 500)[0]
        table("glass, 1, 13", classes(glass.train_x, glass.train_y, 1.0, 13.0), theta[:6], options.repeats)


def estimators(model):
    """By name."""
    if model.num_latents > 1:
        return estimators_of_classes(model)
    found = {f"importance, EP, {n}": tg.evidence.importance(model, tg.EP(), num_importance=n) for n in (64, 256, 1024)}
    found |= {f"SequentialImportance({n})": tg.evidence.SequentialImportance(n).estimator(model) for n in (16, 64, 256)}
    if tg.evidence.is_probit(model):
        found["Orthant(64)"] = tg.evidence.Orthant(64).estimator(model)
    return found


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--link", default="logit")
    parser.add_argument("--fixed", action="store_true")
    parser.add_argument("--classes", action="store_true")
    parser.add_argument("--data", type=pathlib.Path)
    parser.add_argument("--settings", type=int, default=12)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--repeats", type=int, default=20)
    options = parser.parse_args()
    print("| model | estimate | sd of the log, median theta | worst | mean of all | CPU ms an estimate |")
    print("|---|---|---|---|---|---|")
    if options.classes:
        tables_of_classes(options)
        return
    if options.fixed:
        theta = torch.zeros(options.settings, 0, dtype=torch.float64)
        table("smooth labels", fixed(100, 2, 0.3), theta, options.repeats)
        table("rough labels", fixed(100, 5, 0.2), theta, options.repeats)
        table("counts", fixed(150, 3, 0.15, counts=True), theta, options.repeats)
        return
    for name in ("heart_like", "german_like"):
        labels = getattr(newcomer_models, name)()
        with torch.no_grad():
            theta = settings(labels, options.settings, options.steps, torch.Generator().manual_seed(0))
        likelihood = tg.likelihoods.Bernoulli(link=options.link)
        table(name, tg.GP(labels.train_x, labels.train_y, labels.kernel, likelihood), theta, options.repeats)


def table(name, model, theta, repeats):
    """Rows of one model."""
    for estimate, estimator in estimators(model).items():
        generator = torch.Generator().manual_seed(1)
        began = time.process_time()
        found = torch.stack([estimator.draw(theta, generator).value for _ in range(repeats)])
        milliseconds = 1e3 * (time.process_time() - began) / found.numel()
        spread = found.std(0).sort().values
        # Log of the mean estimate of each theta, which noise does not bias.
        middle = float((found.logsumexp(0) - torch.tensor(float(len(found))).log()).mean())
        row = f"{float(spread.median()):.3f} | {float(spread[-1]):.3f} | {middle:.2f} | {milliseconds:.1f}"
        print(f"| {name} | {estimate} | {row} |", flush=True)


if __name__ == "__main__":
    main()
