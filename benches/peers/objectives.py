#!/usr/bin/env python3
"""Train the objectives of train/kiln/examples, DPO and distillation, in Kiln and in PyTorch, and compare the losses of
50 steps.

    benches/peers/objectives.py

Both start from the same weights, which Kiln exports and transformers reads, and see the same tokens, in f32 with
AdamW. The run passes if no loss differs by more than 1e-6, relatively. Needs PyTorch and transformers
(benches/peers/setup.sh) and the programs: cargo build --release --workspace --examples.
"""

import argparse
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import tomllib

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))
# Ends with advice if PyTorch is missing.
from reference_run import Data, torch  # noqa: E402

import torch.nn.functional as F  # noqa: E402
import transformers  # noqa: E402

ROOT = pathlib.Path(__file__).resolve().parents[2]
TARGET = pathlib.Path(os.environ.get("CARGO_TARGET_DIR", ROOT / "target"))
BOUND = 1e-6
STEPS = 50
BETA = 0.1
SHAPE = """
[model]
d_model = 32
layers = 2
heads = 4
kv_heads = 2
d_ff = 64
[train]
global_batch = 8
micro_batch = 4
ranks = 2
[optim]
lr = 1e-3
schedule = "constant"
warmup_steps = 0
weight_decay = 0.0
grad_clip = 0.0
[eval]
samples = 8
[log]
every = 1
"""
TEXT = {"data.path": "text", "data.text": '["builtin:arithmetic"]', "data.vocab_size": 300, "data.seq_len": 32}
PAIRS = {"data.path": "pairs", "data.source": "pairs", "data.seq_len": 16}


def run(program, *words):
    done = subprocess.run([str(program), *map(str, words)], stdout=subprocess.PIPE, text=True)
    if done.returncode:
        sys.exit(f"{program} {' '.join(map(str, words))} ended with {done.returncode}")
    return done.stdout


def train(program, out, settings):
    """Runs `train`; returns the losses."""
    words = [word for key, value in settings.items() for word in ("--set", f"{key}={value}")]
    run(program, "train", "run.toml", "--out", out, *words)
    lines = map(json.loads, pathlib.Path(out, "metrics.jsonl").read_text().splitlines())
    return [line["loss"] for line in lines if "loss" in line]


def model_of(kiln, checkpoint):
    """Returns a checkpoint as transformers reads it."""
    if not pathlib.Path(f"{checkpoint}-hf").exists():
        run(kiln, "export", checkpoint, "--out", f"{checkpoint}-hf")
    return transformers.AutoModelForCausalLM.from_pretrained(f"{checkpoint}-hf", dtype=torch.float32)


def pairs(program, count):
    """Returns `count` samples of the source `pairs`: tokens, and weights of the targets."""
    shown = run(program, "data", "show", "pairs", "--seq-len", PAIRS["data.seq_len"], "--samples", count)
    cells = [line[line.index("|") + 1 : -1].split("|") for line in shown.splitlines() if line.endswith("|")]
    inputs, targets = cells[0::2], cells[1::2]
    tokens = [[int(id) for id in [*row, last[-1]]] for row, last in zip(inputs, targets)]
    weights = [[float(cell != "_") for cell in row] for row in targets]
    return torch.tensor(tokens), torch.tensor(weights)


def log_p(model, inputs, targets):
    return F.log_softmax(model(inputs).logits.float(), -1).gather(-1, targets[..., None])[..., 0]


def curve(model, loss_of_step):
    """Trains `model` with AdamW; returns the losses."""
    optim = tomllib.loads(pathlib.Path("full/config.toml").read_text())["optim"]
    adamw = torch.optim.AdamW(
        model.parameters(), lr=optim["lr"], betas=(optim["beta1"], optim["beta2"]), eps=optim["eps"], weight_decay=0.0
    )
    losses = []
    for step in range(STEPS):
        loss = loss_of_step(step)
        adamw.zero_grad()
        loss.backward()
        adamw.step()
        losses.append(loss.item())
    return losses


def dpo(kiln, program):
    train(program, "base", PAIRS | {"train.steps": 20})
    settings = PAIRS | {"init.from": "base", "loss.kind": "dpo", "loss.extra.beta": BETA, "train.steps": STEPS}
    ours = train(program, "full", settings | {"loss.frozen.reference": "base"})
    model, reference = model_of(kiln, "base"), model_of(kiln, "base")
    tokens, weights = pairs(program, 8 * STEPS)

    def loss(step):
        rows = slice(8 * step, 8 * step + 8)
        inputs, targets, of_step = tokens[rows, :-1], tokens[rows, 1:], weights[rows]
        with torch.no_grad():
            before = log_p(reference, inputs, targets)
        ratios = ((log_p(model, inputs, targets) - before) * of_step).sum(-1)
        return -F.logsigmoid(BETA * (ratios[0::2] - ratios[1::2])).mean()

    return ours, curve(model, loss)


def distillation(kiln, program):
    train(kiln, "teacher", TEXT | {"train.steps": 60, "model.d_model": 48})
    train(kiln, "student", TEXT | {"train.steps": 20})
    settings = TEXT | {"init.from": "student", "loss.kind": "distillation", "train.steps": STEPS}
    ours = train(program, "full", settings | {"loss.frozen.teacher": "teacher"})
    model, teacher = model_of(kiln, "student"), model_of(kiln, "teacher")
    data = Data(pathlib.Path("text"), tomllib.loads(pathlib.Path("full/config.toml").read_text()))

    def loss(step):
        inputs, _ = data.batch(step)
        with torch.no_grad():
            wanted = F.log_softmax(teacher(inputs).logits.float(), -1)
        found = F.log_softmax(model(inputs).logits.float(), -1)
        return F.kl_div(found, wanted, reduction="sum", log_target=True) / inputs.numel()

    return ours, curve(model, loss)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--profile", default="release", help="folder of the programs in target (release)")
    folder = TARGET / parser.parse_args().profile
    passed = True
    for compare in (dpo, distillation):
        with tempfile.TemporaryDirectory() as work:
            os.chdir(work)
            pathlib.Path("run.toml").write_text(SHAPE)
            ours, theirs = compare(folder / "kiln", folder / "examples" / compare.__name__)
            os.chdir(ROOT)
        largest = max(abs(a - b) / abs(b) for a, b in zip(ours, theirs, strict=True))
        print(f"{compare.__name__}: {len(ours)} steps, loss {ours[0]:.6f} to {ours[-1]:.6f}, largest relative "
              f"difference {largest:.1e} (bound {BOUND:.0e})")
        passed &= largest <= BOUND
    print("PASS" if passed else "FAIL")
    sys.exit(0 if passed else 1)


if __name__ == "__main__":
    main()
