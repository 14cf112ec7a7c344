"""python -m jetspec_jax.serve"""

from jetspec_jax import outcome

outcome.start("jetspec_jax.serve.server")
