"""Default calls on real data on a GPU beside the same on the CPU: whether they agree, and how long they take.

    python benchmarks/gpu_real_data.py --data ../shared/data [--cases pima wine_quality+ard] [--device cuda] [--output FILE]

Every call is a process of its own: one at a time on the GPU while others have a core of the CPU each (``--processes``). Draws of
the two devices are from different random numbers, so means are held against the error that the effective sizes give.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import threading
import time
import warnings
from pathlib import Path
from queue import Empty, Queue

import torch
from default_call import means
from default_call_cases import case, default_cases

import torchgpmc as tg

CASES = ["coal", "pima", "wbc+twice", "mcycle", "iris", "glass_type", "abalone", "image", "housing+ard", "wine_quality+ard"]
CASES += ["iris+ard", "splice+ard", "image+ard", "digits", "segment"]
CASES += ["banana+all", "twonorm+all", "kin8nm+all", "kin8nm+ard+all", "image+all"]


def call(folder, name, device):
    """A default call's engines, seconds, effective size, complaints and means."""
    model = case(folder, name, 500)[0].to(device)
    if model.train_x.is_cuda:
        torch.linalg.cholesky(torch.eye(8, device=device, dtype=torch.float64))  # starts the device
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        began = time.perf_counter()
        posterior = tg.sample(model, seed=0, progress=False)
        seconds = time.perf_counter() - began
    mean, sd = means(posterior)
    return {
        "seconds": seconds,
        "engines": [trial["engine"] for trial in posterior.info["tried"]],
        "ess": posterior.effective_size(),
        "complaints": posterior.complaints(),
        "mean": mean.tolist(),
        "sd": sd.tolist(),
    }


def work_off(waiting, device, options, found):
    """Takes cases from a queue until there is none, each in a process of its own."""
    while True:
        try:
            name = waiting.get_nowait()
        except Empty:
            return
        command = [sys.executable, __file__, "--one", name, device, "--data", str(options.data)]
        try:
            ran = subprocess.run(
                command,
                capture_output=True,
                text=True,
                timeout=options.limit,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
                check=False,
            )
            said = ran.stdout.strip().splitlines()[-1] if ran.returncode == 0 else json.dumps({"failed": ran.stderr[-300:]})
        except subprocess.TimeoutExpired:
            said = json.dumps({"failed": f"over {options.limit:.0f} s"})
        found[name, device] = json.loads(said)
        print(device, name, json.dumps(found[name, device]), flush=True)


def line(name, here, there):
    """Of the table: seconds on both, and the worst mean's difference in standard deviations over its error."""
    cells = [name]
    for run in (here, there):
        cells.append(run.get("failed", "").strip().splitlines()[-1] if "failed" in run else f"{run['seconds']:.1f}")
    if "failed" in here or "failed" in there:
        return f"| {' | '.join([*cells, '', '', ''])} |"
    error = (1 / max(here["ess"], 1.0) + 1 / max(there["ess"], 1.0)) ** 0.5
    gap = max(abs(a - b) / sd for a, b, sd in zip(here["mean"], there["mean"], here["sd"], strict=True))
    trusted = ["trust" if not run["complaints"] else "not trusted" for run in (here, there)]
    cells.append(f"{here['seconds'] / there['seconds']:.1f}")
    engines = [" -> ".join(engine.split("(")[0] for engine in run["engines"]) for run in (here, there)]
    cells.append(engines[1] + ("" if here["engines"] == there["engines"] else f" (CPU: {engines[0]})"))
    cells.append(f"{here['ess']:.0f}, {there['ess']:.0f}" + ("" if trusted == ["trust"] * 2 else f" ({', '.join(trusted)})"))
    cells.append(f"{gap:.2f} ({error:.2f})")
    return f"| {' | '.join(cells)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--cases", nargs="*", default=CASES, choices=default_cases(), metavar="CASE")
    parser.add_argument("--processes", type=int, default=6, help="on the CPU, at once")
    parser.add_argument("--limit", type=float, default=300.0, help="seconds of a call")
    parser.add_argument("--output", type=Path)
    parser.add_argument("--one", nargs=2, metavar=("CASE", "DEVICE"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        print(json.dumps(call(options.data, *options.one)), flush=True)
        return
    found: dict[tuple[str, str], dict] = {}
    workers = []
    for device, count in ((options.device, 1), ("cpu", options.processes)):
        waiting: Queue[str] = Queue()
        for name in options.cases:
            waiting.put(name)
        workers += [threading.Thread(target=work_off, args=(waiting, device, options, found)) for _ in range(count)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    lines = ["| case | CPU s | GPU s | ratio | engines | ESS | means off, in sd (error) |", "|---|---|---|---|---|---|---|"]
    lines += [line(name, found[name, "cpu"], found[name, options.device]) for name in options.cases]
    print("\n".join(lines))
    if options.output:
        options.output.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
