"""Test set-up: CPU, quick compilation, and hypothesis without randomness where results must repeat."""

import os
import pathlib

os.environ.setdefault("JAX_PLATFORMS", "cpu")
# Most of the suite's time is XLA compiling. Unoptimised programs compute the same mathematics, and without XLA's newer
# emitters of fusions they are made three times as fast; JETSPEC_TEST_OPTIMISED=1 tests what users get.
if os.environ["JAX_PLATFORMS"] == "cpu" and not os.environ.get("JETSPEC_TEST_OPTIMISED"):
    os.environ["XLA_FLAGS"] = (
        os.environ.get("XLA_FLAGS", "") + " --xla_backend_optimization_level=0 "
        "--xla_cpu_parallel_codegen_split_count=1 --xla_backend_extra_options=xla_cpu_disable_new_fusion_emitters"
    ).strip()
# A test sees what it compiles. A file stays with one worker (--dist loadfile), so that its programs are compiled once.
os.environ.setdefault("JAX_ENABLE_COMPILATION_CACHE", "false")

import pytest
from hypothesis import settings

MOST_MAPS = 20_000  # of the 65,530 that Linux allows a process; one file adds up to half as many again

settings.register_profile("ci", derandomize=True, deadline=None, max_examples=15)
settings.register_profile("dev", deadline=None, max_examples=15)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "dev"))


# What takes longest begins first, so that the workers end together; `pytest --durations=0` tells.
LONGEST = (
    "decode_cli", "lossless", "auto", "dspark", "doctor", "audit", "eagle3", "sampling", "gpu_kernels", "scheduler",
    "options", "compare", "serve", "training_dspark", "training_step", "examples", "training_loop", "training_keys",
    "engine", "tree", "training_eagle3", "training_scorer",
    "calibrate", "mesh", "lowering", "training_mesh", "prefill", "wide",
)  # fmt: skip


def pytest_collection_modifyitems(items):
    """Sorts whole files; a file stays in its order."""
    place = {f"test_{name}": i for i, name in enumerate(LONGEST)}
    items.sort(key=lambda item: place.get(item.path.stem, len(place)))


@pytest.fixture(autouse=True, scope="module")
def forget_programs():
    """Frees compiled programs between files: each holds memory maps, and a process without any left ends in XLA."""
    yield
    maps = pathlib.Path("/proc/self/maps")
    if not maps.exists() or maps.read_bytes().count(b"\n") < MOST_MAPS:
        return
    import jax

    from jetspec_jax.engine import programs

    programs._PROGRAMS.clear()
    jax.clear_caches()


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


@pytest.fixture(scope="session")
def finished(tmp_path_factory):
    """A finished work folder of the tiny target and the settings that made it; tests go on in a copy."""
    import json

    import small

    from jetspec_jax.files import load
    from jetspec_jax.training import pipeline, settings

    folder = tmp_path_factory.mktemp("finished")
    asked = folder / "prompts.jsonl"
    asked.write_text(json.dumps({"messages": [{"role": "user", "content": "ab"}]}) + "\n")
    given = small.RUN | {"data": str(small.questions(folder)), "decode_prompts": str(asked), "decode_budget": 4}
    log = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(load, "load_target", lambda source, dtype: small.target())
        assert pipeline.run(settings.make(given, "c"), folder / "run", log.append)
    return folder / "run", given, log
