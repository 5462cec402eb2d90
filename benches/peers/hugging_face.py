#!/usr/bin/env python3
"""Compare Kiln with transformers on the same weights, imported and exported.

    benches/peers/hugging_face.py                   every case, with a table
    benches/peers/hugging_face.py llama_gqa qwen3   these cases only
    benches/peers/hugging_face.py --fixtures DIR    writes the cases for Kiln's own tests and stops

Each case is a tiny model of transformers with random weights, norms and biases included. `kiln eval`
computes the logits of a sequence from the folder that transformers wrote; then the model goes
through `kiln import` and `kiln export`, and transformers computes them from the folder that Kiln
wrote. Both must agree with transformers' own logits to 1e-4, no weight may be missing or left over,
and all weights must be the same bits.
"""

import argparse
import json
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parents[2]
KILN = ROOT / "target/release/kiln"
PYTHON = ROOT / "target/peers/bin/python"
TOLERANCE = 1e-4
TOKENS = [7, 3, 3, 38, 0, 21, 14, 9, 39, 1, 30, 12]


def in_peer_environment():
    """Restarts in the interpreter that has transformers."""
    python = os.environ.get("PEER_PYTHON", str(PYTHON))
    if os.environ.get("KILN_PEER") == python:
        return
    if not pathlib.Path(python).exists():
        sys.exit(f"{python} is missing; run benches/peers/setup.sh or set PEER_PYTHON")
    environment = dict(os.environ, KILN_PEER=python, HF_HUB_OFFLINE="1", OMP_NUM_THREADS="1")
    os.execve(python, [python, *sys.argv], environment)


# Everything that needs transformers is imported inside functions, after `in_peer_environment`.

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    # Short, so that it affects the few positions of a test.
    "original_max_position_embeddings": 16,
}


EXPERTS = dict(num_experts=6, num_experts_per_tok=2, moe_intermediate_size=12)


class Case:
    """A model of transformers: its architecture, its settings other than the common ones, its files."""

    def __init__(self, model_type, dtype="float32", shard="5GB", old=False, **keys):
        self.model_type, self.dtype, self.shard, self.old = model_type, dtype, shard, old
        self.keys = keys


CASES = {
    "llama_mha": Case("llama"),
    "llama_gqa": Case("llama", num_key_value_heads=2, rms_norm_eps=1e-5, eos_token_id=[2, 5]),
    "llama_tied": Case("llama", num_key_value_heads=1, tie_word_embeddings=True),
    "llama_rope_llama3": Case("llama", num_key_value_heads=2, rope_parameters=LLAMA3),
    "llama_rope_linear": Case(
        "llama",
        rope_parameters={"rope_type": "linear", "factor": 3.0, "rope_theta": 5000.0},
    ),
    "llama_biases": Case("llama", num_key_value_heads=2, attention_bias=True, mlp_bias=True),
    "llama_head_dim": Case("llama", num_key_value_heads=2, head_dim=6),
    "llama_bf16": Case("llama", dtype="bfloat16", num_key_value_heads=2),
    "llama_f16": Case("llama", dtype="float16", num_key_value_heads=2),
    "llama_shards": Case("llama", shard="8KB", num_key_value_heads=2),
    "llama_old_file": Case(
        "llama", old=True, num_key_value_heads=2, tie_word_embeddings=True, rope_parameters=LLAMA3
    ),
    "mistral": Case("mistral", num_key_value_heads=2, sliding_window=None),
    "mistral_window": Case("mistral", num_key_value_heads=2, sliding_window=5),
    "qwen2": Case("qwen2", num_key_value_heads=2),
    "qwen2_tied": Case("qwen2", num_key_value_heads=2, tie_word_embeddings=True),
    "qwen2_window": Case(
        "qwen2", num_key_value_heads=2, use_sliding_window=True, sliding_window=4, max_window_layers=1
    ),
    "qwen3": Case("qwen3", num_key_value_heads=2, head_dim=8),
    "qwen3_biases_tied": Case(
        "qwen3", num_key_value_heads=1, head_dim=4, attention_bias=True, tie_word_embeddings=True
    ),
    "qwen3_layer_types": Case(
        "qwen3",
        num_key_value_heads=2,
        head_dim=8,
        use_sliding_window=True,
        sliding_window=3,
        layer_types=["sliding_attention", "full_attention"],
    ),
    "qwen3_moe": Case("qwen3_moe", num_key_value_heads=2, head_dim=8, **EXPERTS, norm_topk_prob=True),
    "qwen3_moe_mixed": Case(
        "qwen3_moe",
        num_hidden_layers=4,
        num_key_value_heads=2,
        head_dim=4,
        **EXPERTS,
        norm_topk_prob=False,
        decoder_sparse_step=2,
        mlp_only_layers=[1],
        tie_word_embeddings=True,
    ),
}


def make(name, case, folder):
    """Writes the folder of a case as transformers writes it."""
    import torch
    import transformers

    sizes = dict(
        vocab_size=40,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=64,
        bos_token_id=1,
        eos_token_id=2,
    )
    config = transformers.AutoConfig.for_model(case.model_type, **{**sizes, **case.keys})
    # A different seed for each case, the same in every process.
    torch.manual_seed(sum(name.encode()))
    model = transformers.AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            noise = torch.randn_like(parameter)
            norm = parameter.dim() == 1 and parameter_name.endswith("weight")
            parameter.copy_(1 + 0.3 * noise if norm else 0.3 * noise)
    model = model.to(getattr(torch, case.dtype))
    model.save_pretrained(folder, max_shard_size=case.shard)
    if case.old:
        make_old(folder, LLAMA3)


def make_old(folder, rope):
    """Rewrites the files as transformers before version 5 would have written them."""
    import safetensors.torch
    import torch

    path = folder / "config.json"
    config = json.loads(path.read_text())
    rope = dict(rope)
    config.pop("rope_parameters")
    config["torch_dtype"] = config.pop("dtype")
    config["rope_theta"] = rope.pop("rope_theta")
    config["rope_scaling"] = rope
    config["pretraining_tp"] = 1
    path.write_text(json.dumps(config, indent=2) + "\n")
    path = folder / "model.safetensors"
    tensors = safetensors.torch.load_file(path)
    # Adds the copies of tied weights and the buffers that old versions saved.
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    for layer in range(config["num_hidden_layers"]):
        tensors[f"model.layers.{layer}.self_attn.rotary_emb.inv_freq"] = torch.rand(2)
    safetensors.torch.save_file(tensors, path, metadata={"format": "pt"})


def transformers_logits(folder):
    """Returns logits `[seq, vocab]` in f32, and transformers' report on the weights it found."""
    import torch
    import transformers

    model, found = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
    )
    with torch.no_grad():
        logits = model(torch.tensor([TOKENS])).logits[0]
    left = {key: sorted(map(str, found.get(key, []))) for key in ("missing_keys", "unexpected_keys")}
    return logits.numpy(), left


def tensors_of(folder):
    """Returns all weights by name, without buffers and copies of a tied head."""
    import safetensors.torch

    tensors = {}
    for path in sorted(folder.glob("*.safetensors")):
        tensors.update(safetensors.torch.load_file(path))
    if json.loads((folder / "config.json").read_text()).get("tie_word_embeddings"):
        tensors.pop("lm_head.weight", None)
    return {name: value for name, value in tensors.items() if "rotary_emb" not in name}


def same_bits(a, b, dtype=None):
    import torch

    if a.keys() != b.keys():
        return False
    to = (lambda tensor: tensor.to(dtype)) if dtype else (lambda tensor: tensor)
    raw = lambda tensor: tensor.contiguous().view(torch.uint8)
    return all(
        to(a[name]).dtype == b[name].dtype and torch.equal(raw(to(a[name])), raw(b[name]))
        for name in a
    )


def run(kiln, *words):
    words = [str(kiln), *map(str, words)]
    done = subprocess.run(words, capture_output=True, text=True)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(words)}\n{done.stderr.strip()}")


def compare(name, case, kiln, work):
    """Returns one row of the table: differences of logits after import and export, bits, names."""
    import numpy
    import torch

    source = work / name
    make(name, case, source)
    expected, _ = transformers_logits(source)
    out = work / f"{name}.npy"
    run(kiln, "eval", "--checkpoint", source, "--tokens", ",".join(map(str, TOKENS)), "--logits", out)
    inward = float(abs(numpy.load(out) - expected).max())
    checkpoint, f32, native = (work / f"{name}-{step}" for step in ("kiln", "f32", "native"))
    run(kiln, "import", "--hf", source, "--out", checkpoint)
    run(kiln, "export", "--checkpoint", checkpoint, "--out", f32, "--max-shard-gb", "0.00001")
    dtype = {"float32": "f32", "bfloat16": "bf16", "float16": "f16"}[case.dtype]
    run(kiln, "export", "--checkpoint", checkpoint, "--out", native, "--dtype", dtype)
    outward, left, bits = 0.0, [], True
    before = tensors_of(source)
    for folder, wanted in [(f32, torch.float32), (native, None)]:
        logits, found = transformers_logits(folder)
        outward = max(outward, float(abs(logits - expected).max()))
        left += found["missing_keys"] + found["unexpected_keys"]
        bits &= same_bits(before, tensors_of(folder), wanted)
    return inward, outward, bits, left


def table(cases, kiln):
    """Prints a row per case. Returns True if all cases pass."""
    passed = True
    row = "{:<20} {:>12} {:>12} {:>9} {:>9}  {}"
    print(row.format("case", "kiln reads", "kiln writes", "bits", "names", "result"))
    with tempfile.TemporaryDirectory() as work:
        for name, case in cases.items():
            try:
                inward, outward, bits, left = compare(name, case, kiln, pathlib.Path(work))
            except RuntimeError as error:
                passed = False
                print(row.format(name, "-", "-", "-", "-", "FAIL"), f"\n{error}", flush=True)
                continue
            # NaN fails the comparison.
            fine = inward <= TOLERANCE and outward <= TOLERANCE and bits and not left
            passed &= fine
            cells = [f"{inward:.1e}", f"{outward:.1e}"]
            cells += ["same" if bits else "differ", "all" if not left else ",".join(left)]
            print(row.format(name, *cells, "PASS" if fine else "FAIL"), flush=True)
    return passed


def write_fixtures(cases, folder):
    """Writes models and their logits by transformers, for tests without Python."""
    for name, case in cases.items():
        place = folder / name
        shutil.rmtree(place, ignore_errors=True)
        make(name, case, place)
        logits, _ = transformers_logits(place)
        rows = [[float(f"{value:.7g}") for value in row] for row in logits]
        text = json.dumps({"tokens": TOKENS, "logits": rows}, separators=(",", ":"))
        (place / "expected.json").write_text(text + "\n")
        print(place)


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("cases", nargs="*", metavar="CASE", help="the cases to run (default all)")
    parser.add_argument("--kiln", type=pathlib.Path, default=KILN, help="the binary `kiln`")
    parser.add_argument("--fixtures", type=pathlib.Path, help="write the cases into this folder")
    arguments = parser.parse_args()
    unknown = [name for name in arguments.cases if name not in CASES]
    if unknown:
        parser.error(f"unknown cases: {', '.join(unknown)}; choose from {', '.join(CASES)}")
    if not arguments.fixtures and not arguments.kiln.exists():
        parser.error(f"{arguments.kiln} is missing; build it with\ncargo build --release")
    in_peer_environment()
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    cases = {name: CASES[name] for name in arguments.cases or CASES}
    if arguments.fixtures:
        write_fixtures(cases, arguments.fixtures)
        return
    passed = table(cases, arguments.kiln)
    print("PASS" if passed else "FAIL")
    sys.exit(0 if passed else 1)


if __name__ == "__main__":
    main()
