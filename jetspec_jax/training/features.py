"""Features of the target that are made once instead of in every step: on the device, or in files.

On the device they cost (taps + 1) * E * 2 bytes a position: 6.9 KB for the demo pair, so 10 M positions take 65 GiB. In
files they cost the same on the disk; a manifest says what they were made of, and files that exist are not made again.
Teacher logits are never stored: lm_head makes them of the final hidden states.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from jetspec_jax.config import ConfigError
from jetspec_jax.engine import spread
from jetspec_jax.training import files, manifest, teacher
from jetspec_jax.training.data.packing import Packed
from jetspec_jax.training.teacher import Features

MANIFEST = "manifest.json"
SHARD = 64  # sequences in one file

Log = Callable[[str], None]


def scale(target, packed: Packed, taps: tuple[int, ...], sequences: int, batch: int, attention: str) -> jax.Array:
    """Returns f32 [F], root mean square of every tapped channel over `sequences` sequences; padding excluded."""
    squares, count = jnp.zeros(()), 0
    packed = packed.sample(sequences)

    @functools.partial(jax.jit, static_argnums=0)
    def add(model, params, squares, tokens, document, position):
        found = teacher.run(model, params, tokens, document, position, taps, attention).taps.astype(jnp.float32)
        return squares + jnp.where(document[..., None] > 0, found**2, 0).sum((0, 1))

    total = len(packed.tokens)
    for first in range(0, total, batch):
        # One shape: the last batch is filled up with padding.
        parts = [_padded(x[first : min(first + batch, total)], batch) for x in packed[:3]]
        squares = add(target.model, target.params, squares, *parts)
        count += int((parts[1] > 0).sum())
    return jnp.maximum(jnp.sqrt(squares / max(count, 1)), 1e-6)


def resident(
    target, packed: Packed, taps: tuple[int, ...], batch: int, attention: str, place=jnp.zeros, put=jnp.asarray
) -> Features:
    """Features of all sequences on the device. place: makes the empty store, from shape and dtype; put: brings rows to
    the devices."""
    count, slots = packed.tokens.shape
    room = -(-count // batch) * batch
    embed = jax.eval_shape(target.model.embed, target.params, jax.ShapeDtypeStruct((1,), jnp.int32))
    store = Features(
        place((room, slots, len(taps) * embed.shape[-1]), embed.dtype),
        place((room, slots, embed.shape[-1]), embed.dtype),
    )

    @functools.partial(jax.jit, donate_argnums=1)
    def fill(params, store, first, tokens, document, position):
        found = teacher.run(target.model, params, tokens, document, position, taps, attention)
        put = lambda old, new: jax.lax.dynamic_update_slice(old, new, (first, 0, 0))
        return Features(*map(put, store, found))

    for first in range(0, count, batch):
        parts = [put(_padded(x[first : first + batch], batch)) for x in packed[:3]]
        store = fill(target.params, store, jnp.int32(first), *parts)
    return store


def gather(kept: Features, rows: Int[Array, "n B"]) -> Features:
    """Features [n, B, S, ...] of these sequences.

    To be a program of its own: inside the step, XLA may copy the whole store into a layout that suits a product.
    """
    return Features(kept.taps[rows], kept.final[rows])


def write(  # noqa: PLR0913  # keys of the configuration
    folder: Path,
    target,
    packed: Packed,
    taps: tuple[int, ...],
    batch: int,
    attention: str,
    on_time: Callable[[], bool] = lambda: True,
    log: Log = lambda line: None,
) -> bool:
    """Writes features of all sequences to files of `SHARD` sequences, and the manifest; True when all are there.

    Several processes make each file together. A file is renamed into place when it is whole, so a command that was cut
    off goes on where it stopped.

    Raises:
      ConfigError: the folder holds features of other data, taps or another target.
    """
    folder.mkdir(parents=True, exist_ok=True)
    plan = _plan(target, packed, taps)
    if jax.process_index() == 0 or _begun(folder):
        _sign(folder, plan)
    run = jax.jit(lambda params, *arrays: teacher.run(target.model, params, *arrays, taps, attention))  # type: ignore[call-arg]
    names = _names(plan)
    missing = [name for name in names if not (folder / name).exists()]
    spread.meet("features")  # before any process writes
    for name in missing:
        if not spread.agreed(int(on_time())):
            return False
        begin = SHARD * names.index(name)
        rows = np.arange(begin, min(begin + SHARD, len(packed.tokens)))
        pieces = []
        for first in range(0, rows.size, batch):
            part = rows[first : first + batch]
            found = run(target.params, *(_padded(x[part], batch) for x in packed[:3]))
            pieces.append(jax.tree.map(lambda x: x[: part.size], spread.fetch(found)))  # noqa: B023
        whole = {name: np.concatenate([getattr(p, name) for p in pieces]) for name in Features._fields}
        with files.whole(folder / name) as unfinished:
            save_file(whole, unfinished)
        log(f"features: file {names.index(name) + 1} of {len(names)}")
    spread.meet("features are there")
    return True


class Stored:
    """Features in a folder that `write` filled, read a few sequences at a time.

    Raises:
      ConfigError: a file is missing or cut short, or the folder belongs to other data.
    """

    def __init__(self, folder: Path, target, packed: Packed, taps: tuple[int, ...]):
        plan = _plan(target, packed, taps)
        _sign(folder, plan)
        self._files = []
        for name in _names(plan):
            try:
                self._files.append(safe_open(folder / name, framework="numpy"))
            except (OSError, SafetensorError) as error:
                raise ConfigError(f"{folder / name}: not a whole file of features ({error}); remove it") from None

    def __call__(self, rows: np.ndarray) -> Features:
        """[n, S, ...] of the named sequences."""
        read = lambda name, i: self._files[i // SHARD].get_slice(name)[i % SHARD : i % SHARD + 1]
        taps, final = (np.concatenate([read(name, int(i)) for i in rows]) for name in Features._fields)
        return Features(taps, final)


def _plan(target, packed: Packed, taps: tuple[int, ...]) -> dict[str, Any]:
    digest = hashlib.sha256(packed.tokens.tobytes() + packed.document.tobytes()).hexdigest()[:16]
    return {
        "target_fingerprint": target.fingerprint,
        "dtype": str(target.dtype),
        "tap_layers": list(taps),
        "sequences": len(packed.tokens),
        "sequence_length": packed.tokens.shape[1],
        "data": digest,
    }


def _names(plan: dict[str, Any]) -> list[str]:
    return [f"features-{i:05}.safetensors" for i in range(-(-plan["sequences"] // SHARD))]


def _begun(folder: Path) -> bool:
    return any(folder.glob("features-*.safetensors"))


def _sign(folder: Path, plan: dict[str, Any]) -> None:
    fix = f"remove the folder {folder}"
    if not manifest.sign(folder / MANIFEST, plan, fix, _begun(folder)):
        raise ConfigError(f"{folder / MANIFEST}: missing, so nothing says what the features are of; {fix}")


def _padded(x: np.ndarray, rows: int) -> np.ndarray:
    """`rows` rows; those after the given ones are padding."""
    return np.pad(x, ((0, rows - len(x)),) + ((0, 0),) * (x.ndim - 1))
