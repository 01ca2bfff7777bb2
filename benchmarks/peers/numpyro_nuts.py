"""NumPyro's NUTS on the probit GP of ``problems.probit_data``; compile time, as JAX reports it, is left out.

    python peers/numpyro_nuts.py DATA CHAINS WARM-UP DRAWS SEED sequential|vectorized [COLUMNS [BLOCKS [determined]]]

Two columns: isotropic; more: a lengthscale each. With the last word labels are those of ``problems.determined_data``. One line of
JSON after every block of draws, of all draws so far, so that a run of hours can be read before its end. Threads are the caller's to
set, by XLA_FLAGS (docs/results/theta_engines.md has what they do).
"""

import json
import pathlib
import sys
import time

sys.path.insert(0, str(pathlib.Path(__file__).parent.parent))

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from arviz_stats.base import array_stats
from numpyro.infer import MCMC, NUTS
from problems import determined_data, probit_data

from peers.compilation import compile_seconds, watch_compilation

jax.config.update("jax_enable_x64", True)
num_data, num_chains, warmup_steps, num_samples, seed = map(int, sys.argv[1:6])
way = sys.argv[6]
columns = int(sys.argv[7]) if len(sys.argv) > 7 else 2
blocks = int(sys.argv[8]) if len(sys.argv) > 8 else 1
data = determined_data if sys.argv[9:] == ["determined"] else probit_data
x, y = (jnp.asarray(array) for array in data(num_data, columns))
isotropic = ((x[:, None] - x[None]) ** 2).sum(-1)
lengthscale_shape = () if columns == 2 else (columns,)


def model():
    outputscale = numpyro.sample("outputscale", dist.Gamma(1.2, 0.2))
    lengthscale = numpyro.sample("lengthscale", dist.Gamma(1.0, 1 / jnp.sqrt(columns)).expand(lengthscale_shape))
    v = numpyro.sample("v", dist.Normal(0, 1).expand([num_data]).to_event(1))
    if columns == 2:
        distance = isotropic / lengthscale**2
    else:
        scaled = x / lengthscale
        square = (scaled**2).sum(-1)
        distance = square[:, None] + square[None] - 2 * scaled @ scaled.T
    covariance = outputscale * jnp.exp(-0.5 * distance) + 1e-6 * jnp.eye(num_data)
    numpyro.factor("likelihood", jax.scipy.special.log_ndtr(y * (jnp.linalg.cholesky(covariance) @ v)).sum())


def report(kept, seconds, cpu_seconds, steps):
    chains = [np.concatenate([block[name] for block in kept], 1) for name in ("outputscale", "lengthscale")]
    columns_of = np.concatenate([values.reshape(*values.shape[:2], -1) for values in chains], -1)
    sizes = [float(array_stats.ess(columns_of[..., index])) for index in range(columns_of.shape[-1])]
    seconds -= compile_seconds()
    row = {"ess": min(sizes), "seconds": seconds, "ess_a_second": min(sizes) / seconds, "gradients": float(steps)}
    rest = {"gradients_a_second": float(steps) / seconds, "compile": compile_seconds(), "draws": columns_of.shape[1]}
    rest["cpu_seconds"] = cpu_seconds
    print(json.dumps(row | rest | {"means": columns_of.mean((0, 1)).tolist()}), flush=True)


watch_compilation()
sampler = MCMC(
    NUTS(model),
    num_warmup=warmup_steps,
    num_samples=num_samples // blocks,
    num_chains=num_chains,
    chain_method=way,
    progress_bar=False,
    jit_model_args=True,
)
began, cpu_began = time.perf_counter(), time.process_time()
sampler.warmup(jax.random.PRNGKey(seed), extra_fields=("num_steps",), collect_warmup=True)
steps = np.asarray(sampler.get_extra_fields()["num_steps"]).sum()
kept = []
for block in range(blocks):
    sampler.run(jax.random.PRNGKey(seed + 1 + block), extra_fields=("num_steps",))
    sampler.post_warmup_state = sampler.last_state
    kept.append({name: np.asarray(value) for name, value in sampler.get_samples(group_by_chain=True).items()})
    steps += np.asarray(sampler.get_extra_fields()["num_steps"]).sum()
    report(kept, time.perf_counter() - began, time.process_time() - cpu_began, steps)  # arrays of numpy have been waited for
