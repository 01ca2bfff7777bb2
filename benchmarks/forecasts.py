"""What `explain` foretells of the engines that a default call tries, and what they took; writes docs/results/forecasts.md.

    python benchmarks/forecasts.py --data ../shared/data [--again] [--cases thyroid mcycle+ard straight_noise ...]

Cases are those of default_call_cases.py, models those of unseen.py, and softmax_irises. What was found is kept in
docs/results/forecasts.json: no call is made twice, and with ``--again`` forecasts are. The page is written anew from all that is
there. Seconds are of this process, however busy the machine.
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
_USUAL = """mcycle pyrimidines yacht auto_mpg wine_red housing machine_cpu+ard auto_mpg+ard yacht+ard energy+ard pyrimidines+ard
    wine_quality coal redwood airline thyroid glass crabs thyroid+ard ripley+ard ida_breast_cancer+ard glass+noise+ard pima+ard
    ionosphere+ard thyroid_type glass_type wine iris noise_type kin8nm+all wine_red+all abalone+all"""

_HEAD = """# Forecasts

`python benchmarks/forecasts.py --data ../shared/data`, and the same with `--again`: what `explain` foretells of every engine that
`sample(model, seed=0)` tries, and what that took, in CPU seconds of one thread (`OMP_NUM_THREADS=1`) on a core that other jobs
shared. Calls and forecasts were up to an hour apart, and calls took about twice what the page of their own has. That script writes
this page. Cases are those of [default_call.md](default_call.md), and from friedman on models of
[other_data.md](other_data.md).

Within a factor of {within}: {good} of {all} engines that came first and served. `explain` itself took two seconds at most, or a
twentieth of the call, in {quick} of {cases} cases. What it had no time to time has no forecast. How many gradients, draws and
sweeps are usual was read off the others before auto_mpg, crabs, ripley+ard, ionosphere+ard, abalone+all, wine_quality and those
models were called. Before, by the same calls: AMIS() foretold 0.7 for mcycle, 3.1 for yacht+ard, 11.3 for energy+ard (searches and
most batches left out); 47.4 for iris; 7 to 10 seconds went to `explain` of pima+ard, iris and thyroid_type.

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


def forecast(model):
    """Of every engine, by its name, and the seconds that `explain` takes."""
    engines = candidates(model)
    began = time.process_time()
    seconds = [forecast.seconds for forecast in foretold(engines)]
    explained = time.process_time() - began
    named = reversed(list(zip(map(described, engines), seconds, strict=True)))  # of two of one name the first is tried first
    return {"explained": explained, "foretold": dict(named)}


def call(model):
    """Seconds of a call, and of every engine that was tried."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        began = time.process_time()
        posterior = tg.sample(model, seed=0, progress=False)
        took = time.process_time() - began
    return {"took": took, "tried": [(trial["engine"], trial["seconds"]) for trial in posterior.info["tried"]]}


def written(runs):
    """The page."""
    rows = {name: [(engine, run["foretold"].get(engine), took) for engine, took in run["tried"]] for name, run in runs.items()}
    first = [row[0] for row in rows.values() if len(row) == 1]
    good = sum(1 / _WITHIN <= forecast / took <= _WITHIN for _, forecast, took in first)
    quick = sum(run["explained"] <= max(2.0, 0.05 * run["took"]) for run in runs.values())
    page = _HEAD.format(within=_WITHIN, good=good, all=len(first), quick=quick, cases=len(runs))
    for name, row in rows.items():
        for engine, forecast, took in row:
            numbers = "- | {1:.1f} | -" if forecast is None else "{0:.1f} | {1:.1f} | {2:.2f}"
            numbers = numbers.format(forecast, took, (forecast or 0.0) / took)
            page += f"| {name} | {runs[name]['explained']:.1f} | `{engine}` | {numbers} |\n"
    return page


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=pathlib.Path, required=True, help="folder of the data sets")
    parser.add_argument("--runs", type=pathlib.Path, default=OUTPUT / "forecasts.json", help="file of what was found")
    parser.add_argument("--cases", nargs="*", default=_USUAL.split())
    parser.add_argument("--again", action="store_true", help="forecasts are made once more")
    parser.add_argument("--output", type=pathlib.Path, default=OUTPUT / "forecasts.md")
    options = parser.parse_args()
    torch.set_num_threads(1)
    runs = json.loads(options.runs.read_text()) if options.runs.exists() else {}
    with mock.patch("time.perf_counter", time.process_time):
        # The first of anything is slow.
        first = model_of(options.data, "ord_diabetes")
        forecast(first), call(first)
        for name in options.cases:
            model = model_of(options.data, name)
            if options.again or name not in runs:
                told = forecast(model)  # before a call has made anything ready
                runs[name] = {**(runs[name] if name in runs else call(model)), **told}
            options.runs.write_text(json.dumps(runs, indent=1))
            options.output.write_text(written(runs))
            print(name, runs[name], flush=True)


if __name__ == "__main__":
    main()
