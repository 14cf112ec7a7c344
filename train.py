"""Trains a draft head, from a checkout: `jetspec-train` without an installation. `python train.py --help` says how."""

from jetspec_jax import outcome

if __name__ == "__main__":
    outcome.start("jetspec_jax.train")

from jetspec_jax.train import main

__all__ = ["main"]
