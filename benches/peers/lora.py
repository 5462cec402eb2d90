#!/usr/bin/env python3
"""Train low-rank adapters of one model in Kiln and in PEFT, and compare the losses of 50 steps.

    benches/peers/lora.py

Both start from the same model, which Kiln exports and transformers reads, and from the same adapters, which Kiln
exports and PEFT reads. They see the same tokens, in f32 with AdamW. The run passes if no loss differs by more than
1e-6, relatively; if the adapters that PEFT saves give Kiln the same validation loss as Kiln's own; and if the merged
model of Kiln has PEFT's logits. Needs PyTorch, transformers and PEFT (benches/peers/setup.sh) and kiln: cargo build
--release.
"""

import argparse
import os
import pathlib
import sys
import tempfile
import tomllib

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))
from objectives import BOUND, ROOT, SHAPE, STEPS, TARGET, TEXT, Data, curve, model_of, run, torch, train  # noqa: E402

import peft  # noqa: E402
import torch.nn.functional as F  # noqa: E402
import transformers  # noqa: E402

LOGITS = 1e-5


def val_loss(kiln, model):
    line = run(kiln, "eval", model, "--data", "text", "--samples", 32)
    return float(line.split("validation loss ")[1].split()[0])


def difference(targets, kiln):
    """Trains both; returns the largest relative difference of the losses, and of the logits."""
    train(kiln, "base", TEXT | {"train.steps": 20})
    model_of(kiln, "base")
    lora = TEXT | {"init.from": "base-hf", "lora.rank": 4, "lora.alpha": 8, "lora.targets": targets}
    train(kiln, "start", lora | {"train.steps": 1, "optim.lr": 0.0})
    run(kiln, "export", "start", "--out", "adapters")
    ours = train(kiln, "full", lora | {"init.from": "adapters", "train.steps": STEPS})

    base = transformers.AutoModelForCausalLM.from_pretrained("base-hf", dtype=torch.float32)
    model = peft.PeftModel.from_pretrained(base, "adapters", is_trainable=True)
    data = Data(pathlib.Path("text"), tomllib.loads(pathlib.Path("full/config.toml").read_text()))

    def loss(step):
        inputs, targets = data.batch(step)
        return F.cross_entropy(model(inputs).logits.float().flatten(0, 1), targets.flatten())

    theirs = curve(model, loss)
    losses = max(abs(a - b) / abs(b) for a, b in zip(ours, theirs, strict=True))

    # The way back: PEFT's adapters in Kiln, and Kiln's merged model in transformers.
    model.save_pretrained("theirs")
    assert val_loss(kiln, "theirs") == val_loss(kiln, "full"), "the adapters that PEFT saved"
    run(kiln, "export", "full", "--out", "merged", "--merge")
    merged = transformers.AutoModelForCausalLM.from_pretrained("merged", dtype=torch.float32)
    inputs, _ = data.batch(0)
    with torch.no_grad():
        a, b = merged(inputs).logits, model.merge_and_unload()(inputs).logits
    print(f"{targets}: {len(ours)} steps, loss {ours[0]:.6f} to {ours[-1]:.6f}, largest relative difference "
          f"{losses:.1e} (bound {BOUND:.0e}); logits of the merged model {(a - b).abs().max():.1e} (bound {LOGITS:.0e})")
    return losses <= BOUND and (a - b).abs().max() <= LOGITS


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--profile", default="release", help="folder of the program in target (release)")
    kiln = TARGET / parser.parse_args().profile / "kiln"
    passed = True
    for targets in ('["*_proj"]', '["q_proj", "v_proj"]', '["layers.1.attention.*", "layers.0.ffn.up_proj"]'):
        with tempfile.TemporaryDirectory() as work:
            os.chdir(work)
            pathlib.Path("run.toml").write_text(SHAPE)
            passed &= difference(targets, kiln)
            os.chdir(ROOT)
    print("PASS" if passed else "FAIL")
    sys.exit(0 if passed else 1)


main()
