"""Test set-up: CPU, quick compilation, and hypothesis without randomness where results must repeat."""

import os
import pathlib
import tempfile

os.environ.setdefault("JAX_PLATFORMS", "cpu")
# Most of the suite's time is XLA compiling. Unoptimised programs compute the same mathematics; set
# JETSPEC_TEST_OPTIMISED=1 for one run with what users get.
if os.environ["JAX_PLATFORMS"] == "cpu" and not os.environ.get("JETSPEC_TEST_OPTIMISED"):
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_backend_optimization_level=0".strip()
# One cold cache a run, shared by workers and subprocesses; the first process of the run makes it.
if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
    os.environ["JAX_COMPILATION_CACHE_DIR"] = tempfile.mkdtemp(prefix="jetspec-tests-")
    os.environ["JETSPEC_TEST_CACHE_OWNER"] = str(os.getpid())
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.2")

import pytest
from hypothesis import settings

settings.register_profile("ci", derandomize=True, deadline=None, max_examples=25)
settings.register_profile("dev", deadline=None, max_examples=25)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "dev"))


def pytest_unconfigure(config):
    """Removes the run's cache, in the process that made it."""
    if os.environ.get("JETSPEC_TEST_CACHE_OWNER") == str(os.getpid()):
        import shutil

        shutil.rmtree(pathlib.Path(os.environ["JAX_COMPILATION_CACHE_DIR"]), ignore_errors=True)


@pytest.fixture
def loaded(monkeypatch):
    """Runs of training get the tiny target of `small` instead of reading one."""
    import small

    from jetspec_jax.files import load

    monkeypatch.setattr(load, "load_target", lambda source, dtype: small.target())


ANSWERS = {"batch": 2, "max_prompt": 9, "max_new": 15, "save_batches": 1}


@pytest.fixture(scope="session")
def answered(tmp_path_factory):
    """A folder with greedy answers of the tiny target, the prompts, and the arguments that they were made with."""
    import small

    from jetspec_jax.training import regenerate

    folder = tmp_path_factory.mktemp("answers")
    prompts = [[5, 6, 7], [9] * 9, [8, 2], [11, 12, 13, 14], [4, 4]]
    assert regenerate.regenerate(small.target(), prompts, folder, **ANSWERS)
    return folder, prompts, ANSWERS
