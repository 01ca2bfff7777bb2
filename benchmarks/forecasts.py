"""What `explain` foretells of the engines that a default call tries, and what they took; writes docs/results/forecasts.md.

    python benchmarks/forecasts.py --data ../shared/data --runs FILE [--cases thyroid mcycle+ard straight_noise ...]

Cases are those of default_call_cases.py, models those of unseen.py, and softmax_irises. A line a case is added to the file of runs,
where nothing is run twice; the page is written anew from all of them. Seconds are of this process, however busy the machine.
"""

import argparse
import json
import pathlib
import time
import warnings
from unittest import mock

import torch
from default_call_cases import case
from gpytorch.kernels import RBFKernel, ScaleKernel
from gpytorch.priors import GammaPrior
from real_data import OUTPUT
from sklearn.datasets import load_iris
from unseen import CASES

import torchgpmc as tg
from torchgpmc.calls.candidate import described
from torchgpmc.calls.engines import candidates
from torchgpmc.calls.forecast import foretold

_WITHIN = 2.5
_FEW = "mcycle coal airline thyroid glass thyroid+ard crabs+ard banana+ard haberman+twice wine_quality ida_breast_cancer+ard pima+ard glass+ard "
_FEW += "wbc+ard ionosphere+ard housing power wine_red yacht+ard machine_cpu+ard stocks+ard thyroid_type glass_type wine iris noise_type "
_FEW += "kin8nm+all power+all wine_red+all kin8nm+ard+all splice+all wine_quality+all"

_HEAD = """# Forecasts

`python benchmarks/forecasts.py --data ../shared/data --runs FILE`: what `explain` foretells of every engine that
`sample(model, seed=0)` then tries, and what it took, in CPU seconds of one thread (`OMP_NUM_THREADS=1`) on one of two cores that other
jobs shared. That script writes this page. Cases are those of [default_call.md](default_call.md).

Within a factor of {within}: {good} of {all} first engines that served. Time for `explain`, all engines, in the column after the
case; the bound is two seconds or a twentieth of the call: {quick} of {cases}. An engine that `explain` had no time for has no forecast.

| case | `explain` took | engine | foretold | took | ratio |
|---|---|---|---|---|---|
"""


def softmax_irises():
    """150 x 4, three classes by softmax, ten inducing points."""
    x, y = load_iris(return_X_y=True)
    x, prior = (x - x.mean(0)) / x.std(0), GammaPrior(2.0, 0.5)
    kernel = ScaleKernel(RBFKernel(lengthscale_prior=GammaPrior(2.0, 1.0)), outputscale_prior=prior)
    likelihood = tg.likelihoods.Softmax(num_classes=3)
    return tg.SparseGP(x, y, kernel, likelihood, inducing_points=tg.kmeans_inducing_points(x, 10))


def model_of(folder, name):
    """Of a case's name, or a model's."""
    models = {"softmax_irises": softmax_irises, **CASES}
    return models[name]() if name in models else case(folder, name, 500)[0]


def found(model):
    """Seconds that `explain` takes, and of every engine that was tried its name, its forecast and what it took."""
    engines = candidates(model)
    began = time.process_time()
    seconds = [forecast.seconds for forecast in foretold(engines)]
    explained = time.process_time() - began
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        began = time.process_time()
        posterior = tg.sample(model, seed=0, progress=False)
        took = time.process_time() - began
    # Of two engines of one name both have the same forecast.
    known = dict(zip(map(described, engines), seconds, strict=True))
    tried = [(trial["engine"], known[trial["engine"]], trial["seconds"]) for trial in posterior.info["tried"]]
    return {"explained": explained, "took": took, "tried": tried}


def written(runs):
    """The page."""
    first = [run["tried"][0] for run in runs.values() if len(run["tried"]) == 1]
    good = sum(1 / _WITHIN <= forecast / took <= _WITHIN for _, forecast, took in first)
    quick = sum(run["explained"] <= max(2.0, 0.05 * run["took"]) for run in runs.values())
    page = _HEAD.format(within=_WITHIN, good=good, all=len(first), quick=quick, cases=len(runs))
    for name, run in runs.items():
        for engine, forecast, took in run["tried"]:
            numbers = "- | {1:.1f} | -" if forecast is None else "{0:.1f} | {1:.1f} | {2:.2f}"
            page += f"| {name} | {run['explained']:.1f} | `{engine}` | {numbers.format(forecast, took, (forecast or 0) / took)} |\n"
    return page


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=pathlib.Path, required=True, help="folder of the data sets")
    parser.add_argument("--runs", type=pathlib.Path, required=True, help="file of what was found")
    parser.add_argument("--cases", nargs="*", default=_FEW.split())
    parser.add_argument("--output", type=pathlib.Path, default=OUTPUT / "forecasts.md")
    options = parser.parse_args()
    torch.set_num_threads(1)
    options.runs.touch()
    runs = dict(json.loads(line) for line in options.runs.read_text().splitlines())
    with mock.patch("time.perf_counter", time.process_time):
        found(case(options.data, "ord_diabetes", 500)[0])  # the first of anything is slow
        for name in options.cases:
            if name not in runs:
                runs[name] = found(model_of(options.data, name))
                with options.runs.open("a") as file:
                    file.write(json.dumps([name, runs[name]]) + "\n")
            options.output.write_text(written(runs))
            print(name, *(f"{number:.1f}" for number in (runs[name]["explained"], runs[name]["took"])), runs[name]["tried"], flush=True)


if __name__ == "__main__":
    main()
