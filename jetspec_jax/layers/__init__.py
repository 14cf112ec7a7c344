"""The parts that a layer is made of; jax alone."""
