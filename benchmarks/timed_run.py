"""What benchmarks of our samplers share: one call of ``tg.sample``, timed, and judged by its worst hyperparameter."""

import time
import warnings

import torchgpmc as tg


def timed_run(model, method, **options):
    """Seconds of a run and effective draws of its worst hyperparameter.

    Args:
        model: a model.
        method: a method, or the expression that a benchmark's table prints for it.
        options: of :func:`torchgpmc.sample`.

    Returns:
        The posterior, and a row of numbers that ``json`` can write. The row's effective draws are the bulk's; of weighted draws,
        the smaller of Kish's size and that of each quantity's mean.
    """
    if isinstance(method, str):
        method = eval(method, {"tg": tg})  # so that the table shows what was run
    warnings.simplefilter("ignore")
    began, cpu_began = time.perf_counter(), time.process_time()
    posterior = tg.sample(model, method, **options, progress=False)
    seconds, cpu_seconds = time.perf_counter() - began, time.process_time() - cpu_began
    quantities = [quantity for quantity in posterior.summary().rows if quantity.name != "lp"]
    weighted = posterior.log_weights is not None
    worst = min(min(quantity.ess_bulk, quantity.ess_tail) if weighted else quantity.ess_bulk for quantity in quantities)
    return posterior, {
        "ess": worst,
        "seconds": seconds,
        "ess_a_second": worst / seconds,
        "compile": 0.0,
        "cpu_seconds": cpu_seconds,
        "khat": tg.diagnostics.weights.pareto_khat(posterior.log_weights) if weighted else float("nan"),
        "rhat": max(quantity.rhat for quantity in quantities),
        "means": [quantity.mean for quantity in quantities],
        "sds": [quantity.sd for quantity in quantities],
    }
