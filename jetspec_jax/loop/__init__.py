"""The decode loop; jax alone."""
