"""Hand-written kernels, each proved against plain jnp code. What is used where is decided in `ops.py`."""
