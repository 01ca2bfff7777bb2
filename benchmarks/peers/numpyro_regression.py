"""NumPyro's NUTS on the marginal likelihood of ``problems.regression_data``; compile time, as JAX reports it, is left out."""

import json
import os
import pathlib
import sys
import time

os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=1"
sys.path.insert(0, str(pathlib.Path(__file__).parent.parent))

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from arviz_stats.base import array_stats
from numpyro.infer import MCMC, NUTS
from problems import regression_data

from peers.compilation import compile_seconds, watch_compilation

jax.config.update("jax_enable_x64", True)
num_data, num_columns, num_chains, warmup_steps, num_samples, seed = map(int, sys.argv[1:7])
x, y = (jnp.asarray(array) for array in regression_data(num_data, num_columns))


def model():
    outputscale = numpyro.sample("outputscale", dist.Gamma(1.2, 0.2))
    lengthscale = numpyro.sample("lengthscale", dist.Gamma(1.0, 1 / jnp.sqrt(1.0 * num_columns)).expand([num_columns]).to_event(1))
    noise = numpyro.sample("noise", dist.Gamma(1.2, 2.0))
    scaled = x / lengthscale
    square = (scaled**2).sum(-1)
    distance = jnp.maximum(square[:, None] + square[None] - 2 * scaled @ scaled.T, 0.0)
    covariance = outputscale * jnp.exp(-0.5 * distance) + (noise + 1e-6) * jnp.eye(num_data)
    numpyro.sample("y", dist.MultivariateNormal(jnp.zeros(num_data), covariance), obs=y)


watch_compilation()
sampler = MCMC(NUTS(model), num_warmup=warmup_steps, num_samples=num_samples, num_chains=num_chains,
               chain_method="sequential", progress_bar=False)  # fmt: skip
began = time.perf_counter()
sampler.run(jax.random.PRNGKey(seed))
jax.block_until_ready(sampler.get_samples())
seconds = time.perf_counter() - began - compile_seconds()
samples = sampler.get_samples(group_by_chain=True)
columns = [np.asarray(samples[name]).reshape(num_chains, num_samples, -1) for name in ("outputscale", "lengthscale", "noise")]
values = np.concatenate(columns, -1)
worst = min(float(array_stats.ess(values[..., j])) for j in range(values.shape[-1]))
print(
    json.dumps(
        {
            "ess": worst,
            "seconds": seconds,
            "ess_a_second": worst / seconds,
            "compile": compile_seconds(),
            "means": values.mean((0, 1)).tolist(),
        }
    )
)
