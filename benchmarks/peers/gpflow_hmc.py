"""GPflow's SGPMC by TensorFlow Probability's HMC with step-size adaptation, on the data of a file, on one thread.

    python peers/gpflow_hmc.py FILE WARM-UP DRAWS LEAPFROGS

``FILE`` is an npz of x, y and inducing points z. One chain, the transition compiled by ``tf.function`` before the clock starts;
priors Gamma(1.1, 1). One line of JSON, the draws of lengthscale and variance in it, and processor seconds.
"""

import json
import sys
import time

import gpflow
import numpy as np
import tensorflow as tf
import tensorflow_probability as tfp

tf.config.threading.set_intra_op_parallelism_threads(1)
tf.config.threading.set_inter_op_parallelism_threads(1)

path, *numbers = sys.argv[1:]
warmup_steps, num_samples, num_leapfrogs = map(int, numbers)
data, number = np.load(path), np.float64
kernel = gpflow.kernels.SquaredExponential()
kernel.lengthscales.prior = tfp.distributions.Gamma(number(1.1), number(1.0))
kernel.variance.prior = tfp.distributions.Gamma(number(1.1), number(1.0))
model = gpflow.models.SGPMC((data["x"], data["y"]), kernel, gpflow.likelihoods.Bernoulli(), inducing_variable=data["z"])
gpflow.set_trainable(model.inducing_variable, False)
helper = gpflow.optimizers.SamplingHelper(model.log_posterior_density, model.trainable_parameters)
kernel_of_chain = tfp.mcmc.SimpleStepSizeAdaptation(
    tfp.mcmc.HamiltonianMonteCarlo(helper.target_log_prob_fn, num_leapfrog_steps=num_leapfrogs, step_size=number(0.01)),
    num_adaptation_steps=int(0.8 * warmup_steps),
    target_accept_prob=number(0.75),
    adaptation_rate=number(0.1),
)


@tf.function
def sample(warmup, draws):
    return tfp.mcmc.sample_chain(
        draws, helper.current_state, kernel=kernel_of_chain, num_burnin_steps=warmup, trace_fn=None, seed=[0, 0]
    )


sample(tf.constant(1), tf.constant(1))
began = time.process_time()
states = sample(tf.constant(warmup_steps), tf.constant(num_samples))
seconds = time.process_time() - began
named = dict(zip(model.trainable_parameters, helper.convert_to_constrained_values(states), strict=True))
draws = [np.asarray(named[parameter]).flatten().tolist() for parameter in (kernel.lengthscales, kernel.variance)]
print(json.dumps({"seconds": seconds, "draws": draws}))
