"""Fast, lossless LLM decoding on JAX: causal parallel tree drafting (JetSpec) for Qwen3 targets.

    from jetspec_jax import load_target, load_head, speculate

    target = load_target("Qwen/Qwen3-8B")
    head = load_head("JetSpec/jetspec-qwen3-8b", target)
    print(speculate.generate(target, head, "What is 2 + 2?").text)

Dimension legend, used in signatures, einsum letters and comments of the whole package:

    B batch          T tree nodes or fresh rows   S cache slots      P prompt rows
    D draft depth    W width                      L layers           N query heads
    K kv heads       G query heads of a kv head   M query rows of a kv head, T * G
    H head dim       E embed                      F feed-forward (of a head: tapped features)
    X experts        V vocabulary                 C context rows     R rows, as said beside
    A anchors of a sequence (training)
"""

import importlib

__version__ = "0.1.0"

_PUBLIC = {
    "load_target": "jetspec_jax.files.load",
    "load_head": "jetspec_jax.files.load",
    "load_drafter": "jetspec_jax.files.load",
    "TreeConfig": "jetspec_jax.config",
    "SamplingConfig": "jetspec_jax.config",
    "ConfigError": "jetspec_jax.config",
}
_MODULES = {"speculate": "speculate", "baseline": "baseline", "demo": "files.demo"}
__all__ = [*_PUBLIC, *_MODULES, "__version__"]


def __getattr__(name: str):
    """Loads a public name when it is first used: `import jetspec_jax` alone imports no jax."""
    if name in _MODULES:
        return importlib.import_module(f"jetspec_jax.{_MODULES[name]}")
    if name not in _PUBLIC:
        raise AttributeError(f"module 'jetspec_jax' has no attribute {name!r}")
    return getattr(importlib.import_module(_PUBLIC[name]), name)


def __dir__():
    return __all__
