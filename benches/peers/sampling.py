#!/usr/bin/env python3
"""Compare the tokens that Kiln samples with the probabilities of transformers' logits processors and warpers.

    benches/peers/sampling.py

For each option, `kiln generate` draws 20,000 times the token after a prompt, and transformers computes the
probabilities from the same logits (`kiln eval --logits`). A chi-squared test compares them; a token that transformers
excludes must never be drawn. Needs PyTorch and transformers (benches/peers/setup.sh) and kiln: cargo build --release
--workspace.
"""

import argparse
import collections
import json
import math
import os
import pathlib
import subprocess
import sys
import tempfile

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))
# Ends with advice if PyTorch is missing.
from reference_run import torch  # noqa: E402

import numpy  # noqa: E402
import transformers  # noqa: E402

ROOT = pathlib.Path(__file__).resolve().parents[2]
TARGET = pathlib.Path(os.environ.get("CARGO_TARGET_DIR", ROOT / "target"))
TOKENS = 20_000
# Tokens that are expected less often than this are counted together, as is usual for chi-squared tests.
FEWEST = 5
CONFIG = """
[model]
d_model = 32
layers = 2
heads = 4
kv_heads = 2
d_ff = 64
[data]
path = "text"
text = ["builtin:arithmetic"]
vocab_size = 300
seq_len = 32
[train]
steps = 60
global_batch = 8
micro_batch = 8
[optim]
lr = 1e-2
warmup_steps = 0
[eval]
samples = 8
"""
# A text with repetitions, whose tokens the repetition penalty concerns.
PROMPT = "1 + 2 = 3\n1 + "
# `model.generate` of transformers passes the same keys to the same classes.
OPTIONS = [
    {},
    {"temperature": 0.7},
    {"temperature": 2.5},
    {"top_k": 7},
    {"top_p": 0.8},
    {"min_p": 0.05},
    {"repetition_penalty": 1.5},
    {"repetition_penalty": 0.7},
    {"temperature": 1.6, "top_k": 50, "top_p": 0.95, "min_p": 0.02, "repetition_penalty": 1.2},
]


def kiln(program, *words):
    done = subprocess.run([str(program), *map(str, words)], stdout=subprocess.PIPE, text=True)
    if done.returncode:
        sys.exit(f"{program} {' '.join(map(str, words))} ended with {done.returncode}")
    return done.stdout


def probabilities(option, ids, logits):
    """Returns the probabilities of the next token, in the order in which `model.generate` applies its classes."""
    parts = [
        ("repetition_penalty", transformers.RepetitionPenaltyLogitsProcessor),
        ("temperature", transformers.TemperatureLogitsWarper),
        ("top_k", transformers.TopKLogitsWarper),
        ("top_p", transformers.TopPLogitsWarper),
        ("min_p", transformers.MinPLogitsWarper),
    ]
    chain = transformers.LogitsProcessorList(part(option[key]) for key, part in parts if key in option)
    scores = chain(torch.tensor([ids]), torch.tensor(logits)[None])
    return torch.softmax(scores[0].double(), dim=-1).tolist()


def chi_squared(counts, expected):
    """Returns the p-value of `counts` by token for the probabilities `expected`; 0 if an excluded token was drawn."""
    if any(expected[token] == 0 for token in counts):
        return 0.0
    bins, rare = [], [0.0, 0]
    for token, p in enumerate(expected):
        if p * TOKENS >= FEWEST:
            bins.append((p * TOKENS, counts[token]))
        else:
            rare = [rare[0] + p * TOKENS, rare[1] + counts[token]]
    if rare[0] >= FEWEST:
        bins.append(tuple(rare))
    statistic = sum((count - mean) ** 2 / mean for mean, count in bins)
    half = torch.tensor([(len(bins) - 1) / 2, statistic / 2], dtype=torch.float64)
    return torch.special.gammaincc(half[0], half[1]).item() if len(bins) > 1 else 1.0


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kiln", default=TARGET / "release" / "kiln", type=pathlib.Path, help="the program")
    parser.add_argument("--seed", default=1, type=int, help="seed of the draws (default 1)")
    arguments = parser.parse_args()
    program = arguments.kiln.resolve()
    # The chance that a correct sampler fails is 0.1 % over all options.
    bound = 1e-3 / len(OPTIONS)
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        pathlib.Path("run.toml").write_text(CONFIG)
        kiln(program, "train", "run.toml", "--out", "run")
        # The tokenizer's ids of the prompt.
        vocabulary = transformers.PreTrainedTokenizerFast(tokenizer_file="text/tokenizer.json")
        ids = vocabulary.encode(PROMPT, add_special_tokens=False)
        kiln(program, "eval", "run", "--tokens", ",".join(map(str, ids)), "--logits", "logits.npy")
        logits = numpy.load("logits.npy")[-1]
        end = vocabulary.convert_tokens_to_ids("<|endoftext|>")
        passed = True
        for option in OPTIONS:
            # Kiln has another default temperature.
            flags = {"temperature": 1.0, **option}
            words = [word for key, value in flags.items() for word in (f"--{key.replace('_', '-')}", value)]
            lines = kiln(
                program, "generate", "run", "--prompt", PROMPT, "--max-tokens", 1, "--samples", TOKENS,
                "--rows", TOKENS, "--seed", arguments.seed, "--json", *words,
            )  # fmt: skip
            drawn = [json.loads(line)["tokens"] for line in lines.splitlines()]
            # The end of the text is a token that the text lacks.
            counts = collections.Counter(tokens[0] if tokens else end for tokens in drawn)
            expected = probabilities(option, ids, logits)
            p = chi_squared(counts, expected)
            possible = sum(p > 0 for p in expected)
            is_good = p >= bound and sum(counts.values()) == TOKENS and not math.isnan(p)
            passed &= is_good
            name = ", ".join(f"{key} {value}" for key, value in option.items()) or "no option"
            print(f"{'ok  ' if is_good else 'FAIL'} {name}: {possible} possible tokens, p = {p:.4f}", flush=True)
    print("PASS" if passed else "FAIL")
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
