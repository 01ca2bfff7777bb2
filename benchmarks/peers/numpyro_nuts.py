"""NumPyro's NUTS on the probit GP of ``problems.probit_data``; compile time, as JAX reports it, is left out."""

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
from problems import probit_data

from peers.compilation import compile_seconds, watch_compilation

jax.config.update("jax_enable_x64", True)
num_data, num_chains, warmup_steps, num_samples, seed = map(int, sys.argv[1:6])
way = sys.argv[6]
x, y = (jnp.asarray(array) for array in probit_data(num_data, 2))
square = ((x[:, None] - x[None]) ** 2).sum(-1)


def model():
    outputscale = numpyro.sample("outputscale", dist.Gamma(1.2, 0.2))
    lengthscale = numpyro.sample("lengthscale", dist.Gamma(1.0, 1 / jnp.sqrt(2.0)))
    v = numpyro.sample("v", dist.Normal(0, 1).expand([num_data]).to_event(1))
    covariance = outputscale * jnp.exp(-0.5 * square / lengthscale**2) + 1e-6 * jnp.eye(num_data)
    numpyro.factor("likelihood", jax.scipy.special.log_ndtr(y * (jnp.linalg.cholesky(covariance) @ v)).sum())


def run(warmup, draws, key):
    sampler = MCMC(
        NUTS(model),
        num_warmup=warmup,
        num_samples=draws,
        num_chains=num_chains,
        chain_method=way,
        progress_bar=False,
        jit_model_args=True,
    )
    began = time.perf_counter()
    sampler.warmup(jax.random.PRNGKey(key), extra_fields=("num_steps",), collect_warmup=True)
    steps = np.asarray(sampler.get_extra_fields()["num_steps"]).sum()
    sampler.run(jax.random.PRNGKey(key + 1), extra_fields=("num_steps",))
    jax.block_until_ready(sampler.get_samples())
    return sampler, time.perf_counter() - began, steps + np.asarray(sampler.get_extra_fields()["num_steps"]).sum()


watch_compilation()
sampler, seconds, steps = run(warmup_steps, num_samples, seed)
seconds -= compile_seconds()
samples = sampler.get_samples(group_by_chain=True)
sizes = [float(array_stats.ess(np.asarray(samples[name]))) for name in ("outputscale", "lengthscale")]
means = [float(samples[name].mean()) for name in ("outputscale", "lengthscale")]
print(
    json.dumps(
        {
            "ess": min(sizes),
            "seconds": seconds,
            "ess_a_second": min(sizes) / seconds,
            "gradients_a_second": float(steps) / seconds,
            "compile": compile_seconds(),
            "means": means,
        }
    )
)
