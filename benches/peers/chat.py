#!/usr/bin/env python3
"""Prepare conversations in Kiln, and compare token ids and the tokens that count with transformers.

    benches/peers/chat.py

For each of five kinds of chat templates (Llama 3, Qwen, Mistral, Gemma, ChatML), a tokenizer of that kind is trained and
1,000 conversations are generated: several turns, system prompts, white space, other scripts, spelled-out special tokens.
`kiln data prepare --chat` must write the ids of `apply_chat_template`, and count the tokens of its
`assistant_masks`, both without `{% generation %}` in the template, where Kiln finds the turns itself, and with it.
transformers always gets the template with `{% generation %}`, which must not change its ids. Needs transformers
(benches/peers/setup.sh) and kiln: cargo build --release.
"""

import argparse
import array
import json
import os
import pathlib
import random
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parents[2]
PYTHON = pathlib.Path(os.environ.get("PEER_PYTHON", ROOT / "target/peers/bin/python"))
FORMATS = ROOT / "train/data/src/chat/formats"

try:
    import tokenizers
    import transformers
except ImportError as error:
    if PYTHON.exists() and pathlib.Path(sys.executable) != PYTHON:
        os.execv(PYTHON, [str(PYTHON), *sys.argv])
    sys.exit(f"{error}; run benches/peers/setup.sh, or set PEER_PYTHON")

# Splits words as the tokenizers of Llama 3 and Qwen do: line breaks stay together, also with spaces before them.
WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# The special tokens (the first two start and end a text), and the part of the template that writes an answer.
CHATML = "'<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n'"
KINDS = {
    "llama3": (
        ["<|begin_of_text|>", "<|eot_id|>", "<|start_header_id|>", "<|end_header_id|>"],
        '{{- message["content"] | trim }}\n    {{- "<|eot_id|>" }}',
        '{{- message["content"] | trim + "<|eot_id|>" }}',
    ),
    "qwen": (
        ["<|endoftext|>", "<|im_end|>", "<|im_start|>"],
        '{{- "<|im_start|>" + message.role + "\\n" + message.content + "<|im_end|>" + "\\n" }}',
        '{{- message.content + "<|im_end|>" }}',
    ),
    "mistral": (
        ["<s>", "</s>", "[INST]", "[/INST]"],
        '{{- " " + message["content"] | trim + eos_token }}',
        '{{- " " + message["content"] | trim + eos_token }}',
    ),
    "gemma": (
        ["<bos>", "<end_of_turn>", "<start_of_turn>"],
        "{{ '<start_of_turn>' + role + '\\n' + message['content'] | trim + '<end_of_turn>\\n' }}",
        "{{ message['content'] | trim + '<end_of_turn>' }}",
    ),
    "chatml": (["<|endoftext|>", "<|im_end|>", "<|im_start|>"], "{{" + CHATML + "}}", "{{ message['content'] + '<|im_end|>' }}"),
}
BEFORE = {
    "llama3": "",
    "qwen": '{{- "<|im_start|>assistant\\n" }}',
    "mistral": "",
    "gemma": "{{ '<start_of_turn>model\\n' }}",
    "chatml": "{{ '<|im_start|>assistant\\n' }}",
}
AFTER = {"llama3": "", "qwen": '{{- "\\n" }}', "mistral": "", "gemma": "{{ '\\n' }}", "chatml": "{{ '\\n' }}"}
PIECES = [
    "Hello", "the answer is", "42", "3.14159", "don't", "naïve", "你好，世界", "привет", "🙂👍🏽", "e\u0301", "\t", "\n", "\n\n",
    "  ", "def f(x):\n    return x", "<b>", "{{ x }}", "{% raw %}", "\\n", '"quoted"', "a_b", "...", "\u00a0", "مرحبا",
]  # fmt: skip


def marked(kind, source):
    """Returns the template with `{% generation %}` around answers."""
    _, whole, answer = KINDS[kind]
    block = f"{BEFORE[kind]}{{%- generation -%}}{answer}{{%- endgeneration -%}}{AFTER[kind]}"
    condition = "{%- if message['role'] == 'assistant' -%}"
    assert source.count(whole) == 1, kind
    return source.replace(whole, f"{condition}{block}{{%- else -%}}{whole}{{%- endif -%}}")


def tokenizer_of(kind, texts):
    special = KINDS[kind][0]
    added = [tokenizers.AddedToken(spelling, special=True, normalized=False) for spelling in special]
    if kind in ("mistral", "gemma"):
        tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
        parts = [tokenizers.normalizers.Replace(" ", "▁")]
        if kind == "mistral":
            parts.insert(0, tokenizers.normalizers.Prepend("▁"))
        tokenizer.normalizer = tokenizers.normalizers.Sequence(parts)
        fallback = [f"<0x{byte:02X}>" for byte in range(256)]
        trainer = tokenizers.trainers.BpeTrainer(
            vocab_size=900, special_tokens=["<unk>", *fallback], show_progress=False, max_token_length=8
        )
    else:
        tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
        split = tokenizers.pre_tokenizers.Split(tokenizers.Regex(WORDS), "isolated")
        tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Sequence(
            [split, tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
        )
        tokenizer.decoder = tokenizers.decoders.ByteLevel()
        alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
        trainer = tokenizers.trainers.BpeTrainer(vocab_size=900, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_special_tokens(added)
    if special[0] != "<|endoftext|>":
        first = (special[0], tokenizer.token_to_id(special[0]))
        tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
            single=f"{special[0]} $A", special_tokens=[first]
        )
    elif kind == "qwen":
        tokenizer.post_processor = tokenizers.processors.ByteLevel(trim_offsets=False)
    return tokenizer


def text_of(draw, special):
    pieces = draw.choices(PIECES, k=draw.randint(1, 12))
    if draw.random() < 0.1:
        pieces.append(draw.choice(special))
    return draw.choice(["", " "]).join(pieces)


def conversation(draw, kind, special):
    messages = []
    if kind != "gemma" and draw.random() < 0.4:
        messages.append({"role": "system", "content": text_of(draw, special)})
    for _ in range(draw.randint(1, 5)):
        messages.append({"role": "user", "content": text_of(draw, special)})
        messages.append({"role": "assistant", "content": text_of(draw, special)})
    if draw.random() < 0.2:
        messages.append({"role": "user", "content": text_of(draw, special)})
    return messages


def numbers(path, code):
    values = array.array(code)
    values.frombytes(path.read_bytes())
    return values.tolist()


def prepared(folder):
    """Returns the conversations of both splits, each a list of ids and masks."""
    code = {"u16": "H", "u32": "I"}[json.loads((folder / "data.json").read_text())["dtype"]]
    splits = []
    for split in ("train", "val"):
        ids, turns = numbers(folder / f"{split}.bin", code), numbers(folder / f"{split}.turns", "I")
        conversations, at, start = [], 0, 0
        while at < len(turns):
            length, count = turns[at : at + 2]
            mask = [0] * length
            for place in range(at + 2, at + 2 + 2 * count, 2):
                first, last = turns[place : place + 2]
                mask[first:last] = [1] * (last - first)
            conversations.append((ids[start : start + length], mask))
            at, start = at + 2 + 2 * count, start + length
        splits.append(conversations)
    return splits


def compare(kiln, folder, kind, count):
    draw = random.Random(kind)
    special = KINDS[kind][0]
    conversations = [conversation(draw, kind, special) for _ in range(count)]
    texts = [message["content"] for messages in conversations for message in messages]
    (folder / "chats.jsonl").write_text("".join(json.dumps({"messages": chat}) + "\n" for chat in conversations))
    plain = (FORMATS / f"{kind}.jinja").read_text()
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer_of(kind, texts), bos_token=special[0], eos_token=special[1]
    )
    tokenizer.save_pretrained(folder)
    tokenizer = transformers.PreTrainedTokenizerFast.from_pretrained(folder)
    template = marked(kind, plain)
    expected = []
    for messages in conversations:
        both = tokenizer.apply_chat_template(
            messages, chat_template=template, return_dict=True, return_assistant_tokens_mask=True
        )
        ids = tokenizer.apply_chat_template(messages, chat_template=plain, return_dict=True)["input_ids"]
        assert ids == both["input_ids"], f"{kind}: the template with generation has other tokens"
        expected.append((ids, both["assistant_masks"]))
    wrong = 0
    for name, source in (("plain", plain), ("generation", template)):
        (folder / "chat_template.jinja").write_text(source)
        words = [kiln, "data", "prepare", "--chat", folder / "chats.jsonl", "--tokenizer", folder]
        done = subprocess.run([*map(str, words), "--out", str(folder / name)], stdout=subprocess.DEVNULL)
        if done.returncode:
            sys.exit(f"kiln data prepare ended with {done.returncode}")
        splits = prepared(folder / name)
        for index, conversation_expected in enumerate(expected):
            found = next((split for split in splits if split and split[0] == conversation_expected), None)
            if found is None:
                wrong += 1
                ids = next((split[0] for split in splits if split and split[0][0] == conversation_expected[0]), None)
                what = "the mask" if ids else "the ids"
                print(f"{kind}, {name}: {what} of conversation {index} differ: {conversations[index]}")
                break
            found.pop(0)
        wrong += any(splits) and not wrong
    tokens = sum(len(ids) for ids, _ in expected)
    counting = sum(sum(mask) for _, mask in expected)
    verdict = "differ" if wrong else "equal"
    print(f"{kind}: {count} conversations, {tokens} tokens, of which {counting} count: ids and masks {verdict}")
    return not wrong


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kiln", type=pathlib.Path, default=ROOT / "target/release/kiln", help="the program to compare")
    parser.add_argument("--conversations", type=int, default=1000, help="conversations of each kind (default 1000)")
    arguments = parser.parse_args()
    if not arguments.kiln.exists():
        sys.exit(f"{arguments.kiln} does not exist; build it with cargo build --release")
    passed = True
    for kind in KINDS:
        with tempfile.TemporaryDirectory() as folder:
            passed &= compare(arguments.kiln.resolve(), pathlib.Path(folder), kind, arguments.conversations)
    print("PASS" if passed else "FAIL")
    sys.exit(0 if passed else 1)


if __name__ == "__main__":
    main()
