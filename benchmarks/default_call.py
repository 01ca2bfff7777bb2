"""``tg.sample(model)`` with no options on real data, beside a run of another engine: docs/results/default_call.md.

    python benchmarks/default_call.py --data ../shared/data [--cases thyroid mcycle+ard] [--size 100] [--reference-draws 100]

A case is a data set with a model; ``+noise`` after its name flips a tenth of its labels, ``+twice`` gives a fifth of its rows
twice, ``+ard`` takes a lengthscale a column. Half as many rows again as are trained on are test data. Each case is a process of
its own under a limit of CPU seconds; a row is appended when it is done, and a case that has its row is not run again.
"""

import argparse
import json
import pathlib
import resource
import subprocess
import sys
import time
import warnings

import lattice
import torch
from default_call_cases import COUNTS, REGRESSION, case, default_cases
from real_data import OUTPUT

import torchgpmc as tg
from torchgpmc.evidence import is_probit


def means(posterior):
    """Of every hyperparameter on its unconstrained scale, and its standard deviation."""
    weights = torch.softmax(posterior._log_weights(), 0)[:, None]
    theta = posterior.theta.flatten(0, 1)
    mean = (weights * theta).sum(0)
    return mean, (weights * (theta - mean).square()).sum(0).sqrt()


def reference(model, name, engine, draws):
    """A run of an engine of another kind than the one that served, of the kind that suits the model."""
    if lattice.serves(model):
        # Where the evidence is exact a draw takes no longer than a cell.
        return lattice.reference(model, (4 if model.is_conjugate else 1) * draws)
    if is_probit(model):
        estimates = tg.PseudoMarginal(evidence=tg.evidence.SmoothProbit(tg.EP(), 64), independent_share=0.9)
        return tg.sample(model, estimates, num_samples=draws, warmup_steps=draws, num_chains=64, progress=False, seed=9)
    if not engine.startswith("AMIS") and (model.is_conjugate or model.collapses):
        return tg.sample(model, tg.AMIS(), num_samples=10 * draws, progress=False, seed=9)
    white = name in COUNTS and model.has_latents_at_data
    chains = tg.NUTS(whitening=tg.Laplace() if white else None, max_tree_depth=8)
    return tg.sample(model, chains, num_samples=draws, warmup_steps=draws, num_chains=4, progress=False, seed=9)


def served_by_default(model, test_x, test_y):
    """The posterior, and what the table says of it."""
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always", tg.SamplingWarning)
        warnings.simplefilter("ignore", RuntimeWarning)
        began, worked = time.perf_counter(), time.process_time()
        posterior = tg.sample(model, seed=0, progress=False)
        seconds, work = time.perf_counter() - began, time.process_time() - worked
    known = {
        "size": f"{len(model.train_x)} x {model.train_x.shape[1]}",
        "tried": " -> ".join(trial["engine"] for trial in posterior.info["tried"]),
        "seconds": f"{seconds:.0f}",
        "cpu": f"{work:.1f}",
        "ess": f"{posterior.effective_size():.0f}",
        "verdict": "trust" if not posterior.complaints() else "do not trust",
        "warnings": sum(issubclass(message.category, tg.SamplingWarning) for message in heard),
        "score": f"{float(posterior.predict(test_x).log_prob(test_y).mean()):.3f}",
    }
    return posterior, known


def beside(posterior, name, longer, test_x):
    """How far the answer is from that of the longer run."""
    (mean, _), (target, sd) = means(posterior), means(longer)
    prediction, other = posterior.predict(test_x), longer.predict(test_x)
    scale = other.variance.sqrt() if name in REGRESSION + COUNTS else 1.0
    return {
        "theta": f"{float(((mean - target) / sd).abs().max()):.2f}",
        "test": f"{float(((prediction.mean - other.mean).abs() / scale).max()):.3f}",
        "beside": f"{longer.info['method'].split('(')[0]}, {longer.effective_size():.0f}",
    }


def one(options, name):
    """A case, its two parts printed as they are known."""
    model, test_x, test_y = case(options.data, name, options.size)
    posterior, known = served_by_default(model, test_x, test_y)
    print(json.dumps(known), flush=True)
    if not options.reference_draws:
        return
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        kind = name.split("+")[0]
        longer = reference(model, kind, posterior.info["method"], options.reference_draws)
        print(json.dumps(beside(posterior, kind, longer, test_x)), flush=True)


COLUMNS = ["case", "size", "tried", "seconds", "cpu", "ess", "verdict", "warnings", "score", "theta", "test", "beside"]
HEADER = """| case | size | tried | s | CPU s | ESS | verdict | warnings | test log density | theta off | test off | beside |
|---|---|---|---|---|---|---|---|---|---|---|---|
"""


def row(options, name):
    """The line of a case; what its process did not come to is a dash."""
    command = [sys.executable, __file__, "--one", name, "--data", str(options.data), "--size", str(options.size)]
    command += ["--reference-draws", str(options.reference_draws)]
    limit = (int(options.limit), int(options.limit) + 5)
    ran = subprocess.run(
        command, capture_output=True, text=True, preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_CPU, limit), check=False
    )
    known = {"case": name}
    for line in ran.stdout.splitlines():
        known |= json.loads(line) if line.startswith("{") else {}
    if "cpu" not in known:
        known["verdict"] = f"over {options.limit:.0f} CPU s" if ran.returncode < 0 else ran.stderr.strip().splitlines()[-1][:200]
    return "| " + " | ".join(str(known.get(column, "-")) for column in COLUMNS) + " |"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=pathlib.Path, required=True, help="folder of the data sets")
    parser.add_argument("--cases", nargs="*", default=default_cases())
    parser.add_argument("--size", type=int, default=100, help="rows to train on")
    parser.add_argument("--reference-draws", type=int, default=500, help="on a lattice, or a chain; 0: none")
    parser.add_argument("--limit", type=float, default=300.0, help="CPU seconds of a case, reference included")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    parser.add_argument("--output", type=pathlib.Path, default=OUTPUT / "default_call.md", help="ends with the table of cases")
    options = parser.parse_args()
    if options.one:
        return one(options, options.one)
    if not options.output.exists():
        options.output.write_text(HEADER)
    for name in options.cases:
        if f"| {name} |" in options.output.read_text():
            continue
        line = row(options, name)
        print(line, flush=True)
        with options.output.open("a") as file:
            file.write(f"{line}\n")
    return None


if __name__ == "__main__":
    main()
