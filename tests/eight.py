"""What runs in a process with eight simulated devices: `python tests/eight.py NAME ...` runs the functions named."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import re
import sys
import tempfile

import jax
import jax.numpy as jnp
import numpy as np
import tiny
from jax.sharding import PartitionSpec

from jetspec_jax import SamplingConfig, TreeConfig, methods, speculate
from jetspec_jax.backends.hopper import Hopper
from jetspec_jax.backends.xla import PLAIN_XLA
from jetspec_jax.config import MoEConfig
from jetspec_jax.drafts import block, dspark, eagle3
from jetspec_jax.engine import programs, requests, spread
from jetspec_jax.engine.rows import Row
from jetspec_jax.engine.slots import Plan, Slots
from jetspec_jax.engine.spread import backend_of
from jetspec_jax.files import checkpoint, load, scorer_file
from jetspec_jax.files import mesh as on_mesh
from jetspec_jax.layers import vocabulary
from jetspec_jax.loop.plain import PLAIN
from jetspec_jax.models import qwen3, sharding

V = 640  # far more than any row exchanges
MESHES = ("model=8", "data=2,model=4", "data=4,model=2", "data=8")
NEW = 10
PROMPTS = [[3, 1, 4, 1, 5, 9], [2, 7, 1, 8], [31] * 9, [14, 15], [5, 35, 8, 97, 93], [601] * 3, [17], [77, 5, 5]]
SAMPLED = SamplingConfig(NEW, temperature=0.9, top_k=30, top_p=0.9, seed=7, repetition_penalty=1.2, eos=())
GREEDY = SamplingConfig(NEW, eos=())


@functools.cache
def target(kind: str):
    """Eight kv heads and, for `moe`, eight experts, so that every mesh splits them; `uneven` has what none splits."""
    moe = MoEConfig(8, 2, 16, True, (1,)) if kind == "moe" else None
    sizes = {"vocab_size": V, "num_heads": 16, "num_kv_heads": 8, "intermediate_size": 32, "moe": moe}
    if kind == "uneven":
        sizes |= {"vocab_size": V + 1, "num_heads": 6, "num_kv_heads": 3}
    config = tiny.model_config("moe" if moe else "dense", **sizes)
    model, shapes = qwen3.build(config, jnp.float32)
    params = tiny.random_like(shapes, 2)
    params["embedding"] = params["embedding"] * 4.0  # else the output is one token
    return tiny.Loaded(model, params, config)


@functools.cache
def head(family: str):
    """A random head of eight kv heads."""
    sizes = {"vocab_size": V, "num_heads": 16, "num_kv_heads": 8, "intermediate_size": 32, "mask_token_id": V - 1}
    if family in ("jetspec", "dflash", "scored"):
        config = tiny.head_config(family != "dflash", **sizes)
        if family == "scored":
            config = dataclasses.replace(config, scorer_rank=4, scorer_width=8)
        draft, shapes = block.build(config, jnp.float32)
    elif family == "dspark":
        config = dataclasses.replace(tiny.dspark().config, **sizes)
        draft, shapes = dspark.build(config, jnp.float32)
    else:
        del sizes["mask_token_id"]
        config = dataclasses.replace(tiny.eagle3().config, draft_vocab_size=V - 40, **sizes)
        draft, shapes = eagle3.build(config, jnp.float32)
    params = tiny.random_like(shapes, 1)
    if "d2t" in params:
        ids = np.sort(np.random.default_rng(1).permutation(V)[: V - 40])
        params["d2t"] = jnp.asarray(ids - np.arange(V - 40), jnp.int32)
    return dataclasses.replace(tiny.LoadedHead(draft, params, config), family=family)


class Told(tiny.CoachedDraft):
    """Knows the answer of each of several prompts, which it tells by its first token."""

    def propose(self, params, state, choice, budget, ends):
        row = jnp.argmax(params["plain"][:, 0] == choice.past.tokens[:, :1], axis=1)
        return super().propose({**params, "plain": params["plain"][row]}, state, choice, budget, ends)


@functools.cache
def told(kind: str, sampling: SamplingConfig):
    """A head whose right guesses are on the spine, then at a sibling, then missing, by turns."""
    lines = [[*prompt, *ids] for prompt, ids in zip(PROMPTS, one(kind, "autoregressive", 8, sampling)[0], strict=True)]
    plain = np.array([line + [0] * (24 - len(line)) for line in lines])
    inner = head("jetspec")
    rank = [[0, 0, 0, 0], [0, 1, 0, -1], [1, 0, 0, 0], [0, 0, 2, 0], [-1, 0, 0, 0]]
    draft = Told(4, V, inner.draft)
    return dataclasses.replace(inner, draft=draft, params=tiny.coached(plain, rank, inner.params))


def drafter(kind: str, method: str, sampling: SamplingConfig):
    """The head of a method, and its tree."""
    tree = TreeConfig(budget=8)
    if method == "autoregressive":
        return None, None
    if method == "ngram":
        return load.load_drafter("ngram", target(kind)), tree
    if method == "scored":
        return head("scored"), tree
    if method == "told":
        return told(kind, sampling), tree
    drafts = head(methods.METHODS[method].families[0])
    return drafts, methods.tree(method, tree, drafts)


def decoded(kind: str, method: str, batch: int, sampling: SamplingConfig, mesh=None):
    """Tokens of every prompt, and what each round verified and accepted."""
    loaded = target(kind)
    drafts, tree = drafter(kind, method, sampling)
    options = [dataclasses.replace(sampling, seed=sampling.seed + i) for i in range(batch)]
    found = speculate.generate(loaded, drafts, PROMPTS[:batch], tree, options, mesh=mesh)
    return [r.token_ids for r in found], [r.accept_lengths for r in found], [r.tree_sizes for r in found]


one = functools.cache(decoded)


def same(kind: str, method: str, batch: int, mesh, sampling=GREEDY, split: bool = True) -> None:
    """The tokens and the rounds of one device."""
    sharding.WORTH = 0 if split else 1 << 40
    wanted = one(kind, method, batch, sampling)
    got = decoded(kind, method, batch, sampling, mesh)
    assert got == wanted, (kind, method, batch, mesh, got, wanted)
    if method == "told" and batch == 8:
        assert max(map(max, wanted[1])) >= 4 and min(map(min, wanted[1])) == 1, wanted[1]


def tokens() -> None:
    """Every axis, both batches, both kinds of target and most drafters, each once."""
    same("dense", "told", 8, "data=2,model=4", SAMPLED)
    same("moe", "eagle3", 1, "model=2,expert=2")
    same("moe", "pctree", 8, "data=4,model=2", split=False)
    same("uneven", "ngram", 3, "data=2,model=2")
    exchanges()


WAYS = {  # of drafting, by family
    "none": ("autoregressive",),
    "ngram": ("ngram",),
    "jetspec": ("told", "scored", "jetspec"),
    "dflash": ("dflash", "ddtree"),
    "eagle3": ("eagle3",),
    "dspark": ("dspark", "pctree"),
}


def pairs() -> list[tuple[str, str, int, str, SamplingConfig, bool]]:
    """Arguments of `same`: every method, and any two values of two of them meet, a method counting as its family."""
    assert set(methods.METHODS) <= set(itertools.chain(*WAYS.values()))
    rows, columns = [], []
    for (i, family), (j, mesh) in itertools.product(enumerate(WAYS), enumerate(MESHES)):
        kind, batch = ("dense", "moe")[(i + j) % 2], (1, 8)[(i + j // 2) % 2]
        rest = batch, mesh, (GREEDY, SAMPLED)[(i // 2 + j + j // 2) % 2], (i // 4 + j) % 2 == 0
        rows.append((kind, WAYS[family][j % len(WAYS[family])], *rest))
        columns.append((kind, family, *rest))
    for a, b in itertools.combinations(zip(*columns, strict=True), 2):
        assert set(zip(a, b, strict=True)) == set(itertools.product(a, b)), "two that never meet"
    return rows


def product(kind: str) -> None:
    """Half of the pairs each; experts also on an axis of their own."""
    for row in pairs():
        if row[0] == kind:
            same(*row)
    for mesh in ("model=2,expert=4", "data=2,model=2,expert=2", "expert=8") if kind == "moe" else ():
        same(kind, "told", 8, mesh, SAMPLED)
    exchanges()


dense, moe = (functools.partial(product, kind) for kind in ("dense", "moe"))


def vocabularies() -> None:
    """What looks at a whole row says of parts what it says of the row, with ties, infinities, NaN and a large k."""
    mesh, size = sharding.mesh_of("model=8"), 48
    draw = np.random.default_rng(0)
    x = draw.integers(-3, 4, (6, 5, size)).astype(np.float32)  # ties everywhere
    x[0, 0], x[0, 1, [3, 30]], x[0, 2, 20] = -np.inf, np.inf, np.nan
    x[1:3] += draw.normal(size=(2, 5, size))
    table = draw.normal(size=(size, 4)).astype(np.float32)
    token, node = jnp.asarray(draw.integers(0, size, (6, 5))), jnp.asarray(draw.integers(0, 5, (6, 5)))
    token = token.at[2, 2].set(size)  # padding; only `slot` is given such
    inside = jnp.minimum(token, size - 1)

    def counted(x):
        held = vocabulary.held(size)
        places = vocabulary.slot(token, held)
        return vocabulary.total(jnp.zeros((1, held)).at[0, places].add(jnp.arange(30.0).reshape(6, 5)) * x[1, :1])

    ways = {
        "best": vocabulary.best,
        "noisy": lambda x: vocabulary.best(x + vocabulary.gumbel(jnp.uint32(3), jnp.int32(7), size)),
        "top 1": lambda x: vocabulary.top_k(x, 1),
        "top 5": lambda x: vocabulary.top_k(x, 5),
        "top 20": lambda x: vocabulary.top_k(x, 20),  # more than a device holds
        "largest": vocabulary.largest,
        "at": lambda x: vocabulary.at(x, inside),
        "chosen": lambda x: vocabulary.chosen(x, node, inside),
        "rows": lambda x: vocabulary.rows(vocabulary.share(jnp.asarray(table), 0), inside),
        "threshold": lambda x: vocabulary.threshold(x[1:], jnp.ones_like(x[1:]), jnp.full((5, 5), 7.0)),
        "size": lambda x: jnp.int32(vocabulary.size(x)),
        "log_total": vocabulary.log_total,
        "counted": counted,
    }
    whole = lambda x: {name: way(x) for name, way in ways.items()}

    def parts(x):
        with vocabulary.split("model"):
            return whole(x)

    over = PartitionSpec(None, None, "model")
    split = jax.shard_map(parts, mesh=mesh, in_specs=over, out_specs=PartitionSpec(), check_vma=False)
    got, wanted = jax.jit(split)(x), jax.jit(whole)(x)
    for name in ways:
        near = {"rtol": 1e-6} if name in ("log_total", "counted") else {"rtol": 0}  # added in another order
        jax.tree.map(functools.partial(np.testing.assert_allclose, err_msg=name, **near), got[name], wanted[name])


def groups() -> None:
    """What is no row's own is one number on all devices, made of what every group of them found."""
    mesh = sharding.mesh_of("data=4,model=2")

    def found(x):
        return spread._agreed(x[0], mesh), spread._agreed(x[0].astype(jnp.int32), mesh)

    run = jax.shard_map(found, mesh=mesh, in_specs=PartitionSpec("data"), out_specs=PartitionSpec(), check_vma=False)
    for got, wanted in zip(jax.jit(run)(jnp.array([1.0, 7.0, 2.0, 4.0])), (3.5, 7), strict=True):
        assert [part.data.item() for part in got.addressable_shards] == [wanted] * 8


def kernels() -> None:
    """Kernels on each device's part, in their interpreter: the tokens of plain XLA on one device."""
    sharding.WORTH = 0
    sizes = {"vocab_size": V, "num_heads": 8, "num_kv_heads": 4, "head_dim": 16, "hidden_size": 128}
    sizes |= {"intermediate_size": 256}

    def run(backend, mesh):
        config, headed = tiny.model_config("dense", **sizes), tiny.head_config(True, mask_token_id=V - 1, **sizes)
        model, shapes = qwen3.build(config, jnp.float32, backend)
        draft, drafted = block.build(headed, jnp.float32, backend=backend)
        params = tiny.random_like(shapes, 2)
        params["embedding"] = params["embedding"] * 4.0
        loaded, drafts = (
            tiny.Loaded(model, params, config),
            tiny.LoadedHead(draft, tiny.random_like(drafted, 1), headed),
        )
        found = speculate.generate(loaded, drafts, PROMPTS[:2], TreeConfig(8), SamplingConfig(6, eos=()), mesh=mesh)
        return [(r.token_ids, r.tree_sizes) for r in found]

    assert run(Hopper(), "data=2,model=2") == run(PLAIN_XLA, None)


def host() -> None:
    """What the host does between programs: rows that come later, budgets that change, pieces of prompts, paces."""

    def admitted(mesh):
        engine = speculate.start(target("dense"), told("dense", GREEDY), PROMPTS[:4], TreeConfig(8), GREEDY, mesh=mesh)
        found = engine.finish()
        engine.release(2)
        engine.admit([Row(PROMPTS[4], requests.resolve(engine.target, GREEDY), 8, None, False)])
        engine.budgets([4] * len(engine.rows))
        found += engine.finish()
        return [(r.token_ids, r.accept_lengths) for r in found], jax.device_get(engine.first_logits())[:4]

    def read(mesh):
        option, prompts = SamplingConfig(8, eos=(), logprobs=True), [[5, 4, 3] * 15, [7, 8]]
        found = speculate.generate(target("moe"), None, prompts, sampling=option, prefill_chunk=16, mesh=mesh)
        return [r.token_ids for r in found], np.array([r.logprobs for r in found])

    def paced(mesh):
        option, tree = SamplingConfig(24, eos=()), TreeConfig("auto")
        return [
            r.token_ids
            for r in speculate.generate(target("dense"), head("jetspec"), PROMPTS[:3], tree, option, mesh=mesh)
        ]

    for mesh in ("data=2,model=4", "data=4,model=2"):
        (rows, logits), (wanted, near) = admitted(mesh), admitted(None)
        assert rows == wanted
        np.testing.assert_allclose(logits, near, atol=1e-4)
        (rows, logprobs), (wanted, near) = read(mesh), read(None)
        assert rows == wanted
        np.testing.assert_allclose(logprobs, near, atol=1e-4)
        assert paced(mesh) == paced(None)


def weights() -> None:
    """Each device's part of a file is read once and alone, and together they are the file."""
    read: list[int] = []
    part, whole = checkpoint.Folder.part, checkpoint.Folder.read

    def counted(self, name, index):
        found = part(self, name, index)
        read.append(found.size)
        return found

    def refused(self, name):
        raise AssertionError(f"{name} is read whole")

    for kind, mesh in itertools.product(("dense", "moe"), ("model=8", "data=2,model=4", "model=2,expert=4")):
        if kind == "dense" and "expert" in mesh:
            continue
        loaded, inner = target(kind), head("eagle3" if kind == "dense" else "scored")
        with tempfile.TemporaryDirectory() as folder:
            tiny.save_target(folder + "/target", loaded.config, _raw(kind), loaded.params)
            bare = {name: x for name, x in inner.params.items() if name != "scorer"}
            checkpoint.save_head(folder + "/head", inner.config, bare)
            if kind == "moe":
                scorer_file.save(folder + "/head", inner.params["scorer"])
            checkpoint.Folder.part, checkpoint.Folder.read = counted, refused
            read.clear()
            found = load.load_target(folder + "/target", mesh=mesh)
            assert sum(read) == sum(x.size for x in jax.tree.leaves(loaded.params)), "a part is read twice or never"
            # The router is whole on every device; of all that is split, the embedding's part is the largest.
            assert max(read) == V * 16 // found.mesh.shape["model"], max(read)
            sharding.WORTH = 0
            drafts = load.load_head(folder + "/head", found)
            checkpoint.Folder.part, checkpoint.Folder.read = part, whole
        for ours, theirs in ((found.params, loaded.params), (drafts.params, inner.params)):
            jax.tree.map(np.testing.assert_array_equal, jax.device_get(ours), jax.device_get(theirs))
        layer, split = found.params["layers"][1], found.mesh.shape
        assert layer["qkv"].addressable_shards[0].data.shape[1] == 8 // split["model"]
        if kind == "moe":
            assert layer["down"].addressable_shards[0].data.shape[0] == 8 // split.get("expert", split["model"])
            assert all(x.is_fully_replicated for x in drafts.params["scorer"].values())
        split = drafts.params["layer"] if kind == "dense" else drafts.params["layers"][0]
        assert split["qkv"].sharding.spec[1] == "model", split["qkv"].sharding
        learning = on_mesh.for_training(found)
        jax.tree.map(np.testing.assert_array_equal, jax.device_get(learning.params), jax.device_get(loaded.params))
        assert tuple(learning.params["layers"][1]["down"].sharding.spec)[-2:] == ("model", None)  # experts are cut
        assert learning.mesh is None  # XLA splits the work


def _raw(kind: str) -> dict:
    """The config.json of a target."""
    c = target(kind).config
    raw = {
        "model_type": c.model_type, "vocab_size": V, "hidden_size": c.hidden_size, "head_dim": c.head_dim,
        "num_hidden_layers": c.num_layers, "num_attention_heads": c.num_heads, "rms_norm_eps": c.norm_eps,
        "num_key_value_heads": c.num_kv_heads, "intermediate_size": c.intermediate_size, "rope_theta": c.rope_theta,
        "max_position_embeddings": c.max_positions, "tie_word_embeddings": False, "torch_dtype": "float32",
    }  # fmt: skip
    if c.moe:
        raw |= {
            "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "norm_topk_prob": True,
            "mlp_only_layers": [0], "decoder_sparse_step": 1,
        }  # fmt: skip
    return raw


HOST = ("infeed", "outfeed", "send(", "recv(", "callback")


def exchanges() -> None:
    """No program that has run gathers a weight or a row of logits, or speaks with the host in its loop."""
    loops, params = 0, [target(kind).params for kind in ("dense", "moe")]
    weights = {tuple(sorted(n for n in x.shape if n > 1)) for x in jax.tree.leaves(params) if x.size >= 512}
    texts = [run.args[0].as_text() for key, run in programs._PROGRAMS.items() if backend_of(key[1])]
    for text in texts:
        assert not [word for word in HOST if word in text]
        for shape in re.findall(r"= \(?\w+\[([\d,]*)\][^=]* all-gather(?:-start)?\(", text):
            sizes = [int(n) for n in shape.split(",") if n]
            assert max(sizes) < V // 8 and tuple(sorted(n for n in sizes if n > 1)) not in weights, shape
        assert "all-to-all" not in text and "collective-permute" not in text
        loops += " while(" in text
    assert len(texts) >= 4 and loops


def refusals() -> None:
    """Each is one line that says what to do."""
    lines = {
        "data=4,model=4": "it has 16 devices, and there are 8; make it smaller",
        "model=5": "32 features of a layer do not split over model=5",
        "model=2,expert=2": "this target has no experts",
        "rows=2": "'rows=2' is none of data=N, model=N, expert=N",
        "data=2,data=2": "at most once",
        "model=0": "give e.g. data=2,model=4",
    }
    for given, said in lines.items():
        try:
            speculate.generate(target("dense"), None, [1], sampling=GREEDY, mesh=given)
        except sharding.ConfigError as error:
            assert said in str(error) and "\n" not in str(error), error
        else:
            raise AssertionError(given)
    loaded = on_mesh.target_on(target("dense"), "model=2")
    try:
        Slots(loaded, None, PLAIN, Plan(256, (1,), 1, (16,)))
    except sharding.ConfigError as error:
        assert "decode on one device" in str(error)
    else:
        raise AssertionError("slots on a mesh")
    assert loaded.mesh is not None and loaded.mesh.devices.size == 2  # the first ones
    assert on_mesh.target_on(loaded, "model=2") is loaded


if __name__ == "__main__":
    assert jax.device_count() == 8
    for name in sys.argv[1:]:
        globals()[name]()
    print("same")
