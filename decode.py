"""Decodes prompts, from a checkout: `jetspec-decode` without an installation. `python decode.py --help` says how."""

from jetspec_jax import outcome

if __name__ == "__main__":
    outcome.start("jetspec_jax.decode")

from jetspec_jax.decode import main

__all__ = ["main"]
