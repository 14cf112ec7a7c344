"""Hand-written kernels, each proved against plain jnp code. `hopper.py` and `tpu.py` say which is used where."""
