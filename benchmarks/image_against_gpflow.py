"""Image segmentation, N = 1000, M = 50, isotropic: effective draws a second of the slowest hyperparameter, ours and GPflow's HMC.

    python benchmarks/image_against_gpflow.py --data DATA [--gpflow PYTHON]

Split 0 of ``image.py``, inducing points by k-means, the same for all. GPflow's is ``SGPMC`` with TensorFlow Probability's HMC and
step-size adaptation, as its documentation has it, one chain. Ours are the default call, and NUTS around the Gaussian fit, the
fit's time counted. Every row is a process of its own on one thread; processor seconds, warm-up counted,
imports and compilation not.
"""

import argparse
import json
import pathlib
import sys
import tempfile
import time

import numpy as np
from processes import measure, peer_python

CHAINS, POINTS = 4, 50


def data_and_model(folder):
    import torch
    from image import sparse, split_of
    from real_data import table

    x, y, _, _ = split_of(torch.as_tensor(table(pathlib.Path(folder), "image")), 0)
    return x, y, sparse(x, y, POINTS, ard=False)


def worker(folder, name, warmup_steps, num_samples):
    from held_out import quiet

    import torchgpmc as tg

    quiet()
    _, _, model = data_and_model(folder)
    began = time.process_time()
    if name == "default":
        posterior = tg.sample(model, seed=0, progress=False)
    else:
        start = tg.initialize(model, optimize_inducing_points=False, progress=False)
        settings = {"num_samples": num_samples, "warmup_steps": warmup_steps, "num_chains": CHAINS, "seed": 0, "progress": False}
        posterior = tg.sample(start.model, tg.NUTS(max_tree_depth=8), start=start, **settings)
    seconds = time.process_time() - began
    rows = {row.name: row for row in posterior.summary().rows}
    found = [rows[name] for name in ("kernel.base_kernel.lengthscale", "kernel.outputscale")]
    moments = {"means": [row.mean for row in found], "deviations": [row.sd for row in found]}
    print(json.dumps({"seconds": seconds, "effective": min(row.ess_bulk for row in found), **moments}))


def of_gpflow(run):
    """What :func:`worker` says, from GPflow's draws."""
    from torchgpmc.diagnostics.chain_statistics import ess

    draws = np.array(run["draws"])
    effective = min(ess(trace[None], "bulk") for trace in draws)
    moments = {"means": draws.mean(1).tolist(), "deviations": draws.std(1).tolist()}
    return {"seconds": run["seconds"], "effective": float(effective), **moments}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--worker", nargs=4, help=argparse.SUPPRESS)
    parser.add_argument("--data", type=pathlib.Path, help="folder of the data sets")
    parser.add_argument("--gpflow", help="the Python of an environment with GPflow; by default one is made")
    parser.add_argument("--draws", type=int, nargs=2, default=(200, 300), help="warm-up and draws of each of our chains")
    parser.add_argument("--peer-draws", type=int, nargs=3, default=(500, 2000, 10), help="of GPflow's, and leapfrogs")
    options = parser.parse_args()
    if options.worker:
        data, name, *numbers = options.worker
        worker(data, name, *map(int, numbers))
        return
    gpflow = options.gpflow or peer_python("gpflow", ["gpflow==2.11.*", "tensorflow", "tensorflow-probability", "tf-keras"])
    x, y, model = data_and_model(options.data)
    with tempfile.TemporaryDirectory() as folder:
        path, script = f"{folder}/data.npz", "image_against_gpflow.py"
        np.savez(path, x=x, y=y[:, None], z=model.inducing_points)
        found = {
            "default call": measure(sys.executable, script, "--worker", options.data, "default", *options.draws),
            "NUTS around the fit": measure(sys.executable, script, "--worker", options.data, "chains", *options.draws),
            "GPflow's HMC": of_gpflow(measure(gpflow, "peers/gpflow_hmc.py", path, *options.peer_draws)),
        }
    print("| | effective draws | CPU s | effective a second | lengthscale (sd) | variance (sd) |")
    print("|---|---|---|---|---|---|")
    for name, run in found.items():
        moments = " | ".join(f"{m:.2f} ({d:.2f})" for m, d in zip(run["means"], run["deviations"], strict=True))
        rate = run["effective"] / run["seconds"]
        print(f"| {name} | {run['effective']:.0f} | {run['seconds']:.0f} | {rate:.2f} | {moments} |")


if __name__ == "__main__":
    main()
