"""GPflow's GPMC with TensorFlow Probability's NUTS on the probit GP of ``problems.probit_data``, d=2 isotropic.

    python peers/gpflow_nuts.py DATA WARM-UP DRAWS SEED

One chain, the transition compiled by ``tf.function`` before the clock starts. GPflow bounds its probit link away from 0 and 1 by
1e-3, so its posterior is a slightly different one. One line of JSON, the draws of outputscale and lengthscale in it.
"""

import json
import pathlib
import sys
import time

sys.path.insert(0, str(pathlib.Path(__file__).parent.parent))

import gpflow
import numpy as np
import tensorflow as tf
import tensorflow_probability as tfp
from problems import probit_data

num_data, warmup_steps, num_samples, seed = map(int, sys.argv[1:5])
x, y = probit_data(num_data, 2)
kernel = gpflow.kernels.SquaredExponential()
model = gpflow.models.GPMC((x, (y[:, None] + 1) / 2), kernel, gpflow.likelihoods.Bernoulli())
number = np.float64
kernel.variance.prior = tfp.distributions.Gamma(number(1.2), number(0.2))
kernel.lengthscales.prior = tfp.distributions.Gamma(number(1.0), number(2**-0.5))
helper = gpflow.optimizers.SamplingHelper(model.log_posterior_density, model.trainable_parameters)
nuts = tfp.mcmc.NoUTurnSampler(helper.target_log_prob_fn, step_size=number(0.1))
kernel_of_chain = tfp.mcmc.DualAveragingStepSizeAdaptation(
    nuts,
    num_adaptation_steps=int(0.8 * warmup_steps),
    target_accept_prob=number(0.8),
    step_size_setter_fn=lambda results, step_size: results._replace(step_size=step_size),
    step_size_getter_fn=lambda results: results.step_size,
    log_accept_prob_getter_fn=lambda results: results.log_accept_ratio,
)


@tf.function
def sample(warmup, draws):
    return tfp.mcmc.sample_chain(
        draws, helper.current_state, kernel=kernel_of_chain, num_burnin_steps=warmup, trace_fn=None, seed=[seed, 0]
    )


began = time.perf_counter()
sample(tf.constant(1), tf.constant(1))
compiling = time.perf_counter() - began
began = time.perf_counter()
states = sample(tf.constant(warmup_steps), tf.constant(num_samples))
seconds = time.perf_counter() - began
named = dict(zip(model.trainable_parameters, helper.convert_to_constrained_values(states), strict=True))
draws = [np.asarray(named[parameter]).flatten().tolist() for parameter in (kernel.variance, kernel.lengthscales)]
print(json.dumps({"seconds": seconds, "compile": compiling, "draws": draws}))
