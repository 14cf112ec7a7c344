"""A tokenizer to test with, in a folder of its own."""

import json
import pathlib

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

TEMPLATE = (
    "{% for m in messages %}{% if m.role not in ['system', 'user', 'assistant'] %}{{ raise_exception('no ' + m.role) }}"
    "{% endif %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)
CORPUS = [
    "the quick brown fox jumps over the lazy dog",
    "def add(a, b):\n    return a + b",
    "你好世界你好",
    "été déjà vu",
]
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]


def make(folder: pathlib.Path, template: str | None = TEMPLATE) -> pathlib.Path:
    """A byte-level BPE tokenizer of some 300 tokens: most characters beyond ASCII are several tokens."""
    inner = tokenizers.Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=300, initial_alphabet=alphabet, special_tokens=SPECIAL, show_progress=False
    )
    inner.train_from_iterator(CORPUS, trainer)
    folder.mkdir(exist_ok=True)
    inner.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|im_end|>",
        "clean_up_tokenization_spaces": True,
    }
    (folder / "tokenizer_config.json").write_text(
        json.dumps(config | ({"chat_template": template} if template else {}))
    )
    return folder
