"""``tg.sample(model)`` with no options on real data, beside a run of another engine; writes docs/results/default_call.md.

    python benchmarks/default_call.py --data ../shared/data --runs FOLDER [--cases thyroid mcycle+ard] [--size 100]
    python benchmarks/default_call.py --data ../shared/data --runs FOLDER --reference-draws 100 [--cases ...]

A case is a data set with a model; ``+noise`` after its name flips a tenth of its labels, ``+twice`` gives a fifth of its rows
twice, ``+ard`` takes a lengthscale a column. Half as many rows again as are trained on are test data. A call is a process of its
own under a limit of CPU seconds, and so is the run that stands beside it; both leave what they found in the folder of runs, where
nothing is run twice. docs/results/default_call.json keeps what was found, a case until it is run again in another folder, and the
page is written anew from all of it.
"""

import argparse
import json
import pathlib
import resource
import subprocess
import sys
import time
import warnings

import torch
from default_call_beside import reference, what_was_missed
from default_call_cases import case, default_cases, has_probabilities
from default_call_page import written
from real_data import OUTPUT

import torchgpmc as tg


def means(posterior):
    """Of every hyperparameter on its unconstrained scale, and its standard deviation."""
    weights = torch.softmax(posterior._log_weights(), 0)[:, None]
    theta = posterior.theta.flatten(0, 1)
    mean = (weights * theta).sum(0)
    return mean, (weights * (theta - mean).square()).sum(0).sqrt()


def call(options, name, saved):
    """What the table says of the call; its draws are saved."""
    model, test_x, test_y = case(options.data, name, options.size)
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always", tg.SamplingWarning)
        warnings.simplefilter("ignore", RuntimeWarning)
        began, worked = time.perf_counter(), time.process_time()
        posterior = tg.sample(model, seed=0, progress=False)
        seconds, work = time.perf_counter() - began, time.process_time() - worked
    posterior.save(saved)
    return {
        "size": f"{len(model.train_x)} x {model.train_x.shape[1]}",
        "hyperparameters": model.layout.size,
        "engines": [trial["engine"] for trial in posterior.info["tried"]],
        "seconds": seconds,
        "cpu": work,
        "ess": posterior.effective_size(),
        "complaints": posterior.complaints(),
        "warnings": sum(issubclass(message.category, tg.SamplingWarning) for message in heard),
        "score": float(posterior.predict(test_x).log_prob(test_y).mean()),
    }


def beside(options, name, saved):
    """How far the answer is from that of another engine."""
    model, test_x, _ = case(options.data, name, options.size)
    posterior = tg.Posterior.load(saved, model)
    worked = time.process_time()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        longer = reference(posterior, options.reference_draws)
    work = time.process_time() - worked
    (mean, _), (target, sd) = means(posterior), means(longer)
    prediction, other = posterior.predict(test_x), longer.predict(test_x)
    scale = 1.0 if has_probabilities(name) else other.variance.sqrt()
    return {
        "gaps": ((mean - target) / sd).tolist(),
        "test": float(((prediction.mean - other.mean).abs() / scale).max()),
        "engine": longer.info["method"],
        "ess": longer.effective_size(),
        "complaints": [*longer.complaints(), *what_was_missed(longer, posterior)],
        "cpu": work,
    }


_PARTS = {"call": call, "beside": beside}


def found_in(runs, kept):
    """What is known of each case: what the folder ``runs`` has, else what the file ``kept`` had.

    Of two calls that gave the same draws the quicker stays: the machine was the less busy. What stood beside one stays, too.
    """
    known = json.loads(kept.read_text()) if kept.exists() else {}
    for name in default_cases():
        files = {part: runs / f"{name}.{part}.json" for part in _PARTS}
        if files["call"].exists():
            new = {part: json.loads(file.read_text()) for part, file in files.items() if file.exists()}
            old = known.get(name, {})
            if round(old.get("call", {}).get("ess", 0)) == round(new["call"].get("ess", -1)):
                new = {**old, **new, "call": min(old["call"], new["call"], key=lambda found: found["cpu"])}
            known[name] = new
    return {name: known[name] for name in default_cases() if name in known}


def keep(options, name, part):
    """Runs a part of a case in a process of its own, unless what it found is there."""
    found = options.runs / f"{name}.{part}.json"
    if found.exists() or (part == "beside" and not (options.runs / f"{name}.pt").exists()):
        return
    command = [sys.executable, __file__, "--one", name, part, "--data", str(options.data), "--size", str(options.size)]
    command += ["--reference-draws", str(options.reference_draws), "--runs", str(options.runs)]
    limit = (int(options.limit), int(options.limit) + 5)
    ran = subprocess.run(
        command, capture_output=True, text=True, preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_CPU, limit), check=False
    )
    line = ran.stdout.strip().splitlines()[-1] if ran.returncode == 0 else ""
    why = f"over {options.limit:.0f} CPU s" if ran.returncode < 0 else (ran.stderr.strip().splitlines() or ["nothing said"])[-1]
    found.write_text(line or json.dumps({"failed": why[:200]}))
    print(name, part, found.read_text(), flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=pathlib.Path, required=True, help="folder of the data sets")
    parser.add_argument("--runs", type=pathlib.Path, required=True, help="folder of what calls and references found")
    parser.add_argument("--cases", nargs="*", default=default_cases())
    parser.add_argument("--size", type=int, default=500, help="rows to train on")
    parser.add_argument("--reference-draws", type=int, default=0, help="on a lattice, or a chain; 0: none")
    parser.add_argument("--limit", type=float, default=300.0, help="CPU seconds of a call, or of a reference")
    parser.add_argument("--one", nargs=2, metavar=("CASE", "PART"), help=argparse.SUPPRESS)
    parser.add_argument("--output", type=pathlib.Path, default=OUTPUT / "default_call.md")
    parser.add_argument("--kept", type=pathlib.Path, default=OUTPUT / "default_call.json")
    options = parser.parse_args()
    if options.one:
        name, part = options.one
        print(json.dumps(_PARTS[part](options, name, options.runs / f"{name}.pt")), flush=True)
        return
    options.runs.mkdir(parents=True, exist_ok=True)
    for name in options.cases:
        keep(options, name, "call")
        if options.reference_draws:
            keep(options, name, "beside")
        found = found_in(options.runs, options.kept)
        lines = ",\n".join(f"{json.dumps(known)}: {json.dumps(parts)}" for known, parts in found.items())
        options.kept.write_text(f"{{\n{lines}\n}}\n")
        options.output.write_text(written(found, options.size))


if __name__ == "__main__":
    main()
