"""Where the assistant's own tokens stand in what real chat templates write, whatever the answer is."""

import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from jetspec_jax.config import ConfigError
from jetspec_jax.files.tokenizer import Tokenizer
from jetspec_jax.training.data import examples, rows

SPECIAL = ["<|im_start|>", "<|im_end|>", "<think>", "</think>"]
# In the manner of SmolLM2: a default system prompt, every turn as it is.
PLAIN = """{% for m in messages %}{% if loop.first and m['role'] != 'system' %}{{ '<|im_start|>system\nBe kind<|im_end|>
' }}{% endif %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>' + '\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""
# In the manner of Qwen3: thoughts of earlier turns left out, a mark before the last answer, blanks cut, tool calls.
THINKING = """{%- set ns = namespace(last=0) %}
{%- for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}
{%- for m in messages %}{%- if m.role == 'assistant' %}
{%- set thought = m.reasoning_content or '' %}{%- set said = m.content %}
{%- if '</think>' in said %}{% set thought = said.split('</think>')[0].split('<think>')[-1].strip('\n') %}
{%- set said = said.split('</think>')[-1].lstrip('\n') %}{% endif %}{{- '<|im_start|>assistant\n' }}
{%- if loop.index0 > ns.last and (loop.last or thought) %}{{- '<think>\n' + thought + '\n</think>\n\n' }}{% endif %}
{{- said.lstrip('\n') }}
{%- for call in m.tool_calls or [] %}{{- '\n<tool_call>' + call.function.name + '</tool_call>' }}{%- endfor %}
{{- '<|im_end|>\n' }}
{%- elif m.role == 'tool' %}{{- '<|im_start|>user\n<tool_response>' + m.content + '</tool_response><|im_end|>\n' }}
{%- else %}{{- '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endif %}{% endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}
{%- if enable_thinking is defined and not enable_thinking %}{{- '<think>\n\n</think>\n\n' }}{% endif %}{% endif %}"""
# With generation marks, blanks cut, and a new line before the end token.
MARKED = """{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' }}{% if m['role'] == 'assistant' %}
{%- generation %}{{- m['content'] | trim + '\n<|im_end|>' }}{% endgeneration %}
{%- else %}{{ m['content'] + '<|im_end|>' }}{% endif %}
{{- '\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""


def tokenizer(template: str) -> Tokenizer:
    """Bytes as tokens, and the marks."""
    letters = pre_tokenizers.ByteLevel.alphabet()
    inner = tokenizers.Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(sorted(letters))}, merges=[]))
    inner.pre_tokenizer, inner.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    inner.add_special_tokens([tokenizers.AddedToken(t, special=True, normalized=False) for t in SPECIAL])
    return Tokenizer(PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<|im_end|>", chat_template=template))


def learnt(template, value, thinking=None):
    """Texts of the learnt runs of a row, or why it gives none; the other text is what the template writes."""
    reader = tokenizer(template)
    eos = reader.encode("<|im_end|>")
    good = {"prompt": "q", "response": "good"}
    given = [rows.Row("f:1", "1", value), rows.Row("f:2", "2", good)]
    kept, report = examples.build(given, reader, tuple(eos), 10_000, thinking, "all")
    if report.dropped:
        return next(iter(report.dropped))
    example, runs = kept[0], []
    for i, (token, said) in enumerate(zip(example.tokens, example.learnt, strict=True)):
        if said and not (i and example.learnt[i - 1]):
            runs.append([])
        if said:
            runs[-1].append(int(token))
    raw = reader._inner.decode
    return [raw(run) for run in runs]


def talk(*texts):
    return {"messages": [{"role": ("user", "assistant")[i % 2], "content": t} for i, t in enumerate(texts)]}


ODD = [
    "d",
    "e",
    "end",
    "im",
    "m",
    "n",
    "user",
    "assistant",
    "<",
    "|",
    "yes\n",
    "yes ",
    " \n two\n\n",
    "q",
    "\u2042",
    "a\u2042b",
]


@pytest.mark.parametrize("text", ODD)
def test_an_answer_is_found_by_where_it_stands(text):
    assert learnt(PLAIN, talk("q", text)) == [text + "<|im_end|>"]
    assert learnt(PLAIN, talk("q", text, text, "end", "im", text)) == [t + "<|im_end|>" for t in (text, "end", text)]
    assert learnt(MARKED, talk("q", text)) == [text.strip() + "\n<|im_end|>"]
    shown = text.lstrip("\n")
    assert learnt(THINKING, talk("q", text), False) == [shown + "<|im_end|>"]
    opened = "<think>\n\n</think>\n\n"  # what the target itself writes where the switch is on
    assert learnt(THINKING, talk("q", text), True) == [opened + shown + "<|im_end|>"]
    assert learnt(THINKING, talk("q", text, "more", "end"), False) == [shown + "<|im_end|>", "end<|im_end|>"]


def test_generation_marks_enclose_what_is_learnt():
    reader, value = tokenizer(MARKED), talk("q", " im\n", "and", "end")
    found = reader._inner.apply_chat_template(
        value["messages"], return_dict=True, return_assistant_tokens_mask=True, tokenize=True
    )
    wanted = [i for i, said in zip(found["input_ids"], found["assistant_masks"], strict=True) if said]
    assert "".join(learnt(MARKED, value)) == reader._inner.decode(wanted)


def test_what_was_thought_is_learnt_where_the_template_shows_it():
    said = "<think>\nend\n</think>\n\nend"
    assert learnt(THINKING, talk("q", said), True) == [said + "<|im_end|>"]
    assert learnt(THINKING, talk("q", said, "r", "end"), True)[0] == "end<|im_end|>"  # of earlier turns it is cut
    assert (
        learnt(THINKING, talk("q", said), False) == "an answer that the chat template shows in another mode of thinking"
    )
    value = talk("q", "end")
    value["messages"][1]["reasoning_content"] = "im"
    assert learnt(THINKING, value, True) == ["<think>\nim\n</think>\n\nend<|im_end|>"]
    assert learnt(PLAIN, value) == "reasoning_content that the chat template does not show"


def test_tool_calls_are_learnt_or_the_row_is_dropped_for_them():
    call = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
    value = talk("q", "let me see")
    value["messages"][1]["tool_calls"] = [call]
    assert learnt(PLAIN, value) == "messages: the chat template has no place for tool_calls; take them out"
    with_calls = "let me see\n<tool_call>add</tool_call><|im_end|>"
    assert learnt(THINKING, value, False) == [with_calls]
    value["messages"] += [{"role": "tool", "content": "3"}, {"role": "assistant", "content": "end"}]
    both = learnt(THINKING, value, False)
    assert both[-1] == "end<|im_end|>" and both[0].endswith(with_calls)
    value["messages"][1]["content"] = None
    assert learnt(THINKING, value, False)[0].endswith("\n<tool_call>add</tool_call><|im_end|>")
    assert learnt(THINKING, value | {"tools": [{}]}, False) == "tools beside the messages, which are not rendered"


def test_content_in_parts():
    part = lambda text: {"type": "text", "text": text}
    value = {
        "messages": [{"role": "user", "content": [part("a"), part("b")]}, {"role": "assistant", "content": ["im"]}]
    }
    assert learnt(PLAIN, value) == ["im<|im_end|>"]
    value["messages"][0]["content"].append({"text": "c"})  # as decoding reads it
    assert learnt(PLAIN, value) == ["im<|im_end|>"]
    value["messages"][0]["content"].append({"type": "image_url", "image_url": {}})
    assert learnt(PLAIN, value) == "a part of a message that is no text but 'image_url'"
    value["messages"][0]["content"] = []
    assert learnt(PLAIN, value) == "a message without content"


def test_a_template_that_changes_an_answer_drops_the_row():
    shouting = PLAIN.replace("m['content']", "m['content'] | upper | replace('\u2042', '*')")
    with pytest.raises(ConfigError, match="2 an answer that the chat template does not show as it is"):
        learnt(shouting, talk("q", "im"))
