#!/usr/bin/env python3
"""Train the same model in Kiln and in PyTorch and compare the losses step by step.

    benches/peers/reference_run.py                      the run that the tests know
    benches/peers/reference_run.py --preset 10m         a larger model, the same data
    benches/peers/reference_run.py --record FILE        writes PyTorch's curve for the tests
    benches/peers/reference_run.py --set optim.kind=muon    Muon for the blocks' matrices
    benches/peers/reference_run.py --config train/kiln/tests/fixtures/reference_run_moe/config.toml
                                                        the run with experts

Both start from the same weights, read the same tokens in the same order, and use AdamW with the
same settings, schedule and clipping, in f32. With optim.kind = "muon", the matrices of blocks are those of
torch.optim.Muon, whose Newton-Schulz iterations compute in f32 as well here (--bf16 leaves them as they are). Kiln shards over its ranks; PyTorch is one process
that sees the whole batch at once. What remains is the order of floating-point sums.
With experts, PyTorch takes one micro-batch after the other, since the balance loss is a mean over each; the loss of
a layer is transformers' own function.

The run passes if no loss differs by more than 1e-4, relatively. Gradient norms are shown as well: a
few large gradients decide them, so they feel rounding earlier, in PyTorch's f32 as in Kiln's.
Needs PyTorch and numpy: benches/peers/setup.sh.
"""

import argparse
import json
import math
import os
import pathlib
import struct
import subprocess
import sys
import tempfile
import tomllib
import types

ROOT = pathlib.Path(__file__).resolve().parents[2]
KILN = ROOT / "target/release/kiln"
PYTHON = pathlib.Path(os.environ.get("PEER_PYTHON", ROOT / "target/peers/bin/python"))
CONFIG = ROOT / "train/kiln/tests/fixtures/reference_run/config.toml"

try:
    import numpy
    import torch
    import torch.nn.functional as F
except ModuleNotFoundError as error:
    if PYTHON.exists() and "REFERENCE_RUN_AGAIN" not in os.environ:
        os.environ["REFERENCE_RUN_AGAIN"] = "1"
        os.execv(PYTHON, [str(PYTHON), *sys.argv])
    sys.exit(f"{error}; run benches/peers/setup.sh, or set PEER_PYTHON")

# Largest relative difference of a loss allowed.
LOSS_BOUND = 1e-4
MASK = (1 << 64) - 1


# Kiln's side.


def train(kiln, config, out, settings):
    """Runs `kiln train`; returns the resolved configuration."""
    words = [kiln, "train", config, "--out", out]
    for setting in settings:
        words += ["--set", setting]
    # Relative paths of the configuration are below the folder of this comparison.
    done = subprocess.run([str(word) for word in words], cwd=out.parent, stdout=subprocess.PIPE)
    if done.returncode:
        sys.exit(f"{kiln} train ended with {done.returncode}; see above")
    return tomllib.loads((out / "config.toml").read_text())


def curve_of(out):
    """Returns the losses and gradient norms in a run's metrics."""
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if "loss" in line]
    return [step["loss"] for step in steps], [step["grad_norm"] for step in steps]


def read_weights(folder):
    """Returns the weights of a full checkpoint, f32, by name."""
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    weights = {}
    for name in sorted(set(index["weight_map"].values())):
        content = (folder / name).read_bytes()
        (length,) = struct.unpack_from("<Q", content)
        header = json.loads(content[8 : 8 + length])
        header.pop("__metadata__", None)
        for weight, entry in header.items():
            if entry["dtype"] != "F32":
                sys.exit(f"{folder / name}: {weight} is {entry['dtype']}, expected F32")
            begin, end = entry["data_offsets"]
            values = numpy.frombuffer(content[8 + length + begin : 8 + length + end], "<f4")
            weights[weight] = torch.from_numpy(values.reshape(entry["shape"]).copy())
    return weights


def initial_weights(kiln, config, out, settings):
    """Returns Kiln's initial weights, from a checkpoint after a step that changed nothing."""
    still = ["train.steps=1", "optim.lr=0", "optim.weight_decay=0", "optim.warmup_steps=0"]
    if any(setting.replace('"', "") == "optim.kind=muon" for setting in settings):
        still.append("optim.muon.lr=0")
    still.append("checkpoint.format=full")
    train(kiln, config, out, settings + still)
    checkpoints = out / "checkpoints"
    return read_weights(checkpoints / (checkpoints / "latest").read_text().strip())


# Kiln's data, in the same order.


def mix(value):
    """The finaliser of SplitMix64."""
    mixed = (value + 0x9E3779B97F4A7C15) & MASK
    mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & MASK
    return mixed ^ (mixed >> 31)


def sample_at(position, samples, shuffle, seed):
    """Returns the sample at a position of the run, as train/data/src/order.rs does: a Feistel network,
    applied until its result is the index of a sample."""
    epoch, sample = divmod(position, samples)
    if not shuffle:
        return sample
    key = mix(mix(seed) ^ epoch)
    half = max(((samples - 1).bit_length() + 1) // 2, 1)
    low = (1 << half) - 1
    while True:
        left, right = sample >> half, sample & low
        for turn in range(8):
            mixed = mix(right ^ ((key + (turn << 56)) & MASK)) & low
            left, right = right, left ^ mixed
        sample = (left << half) | right
        if sample < samples:
            return sample


class Data:
    """The training tokens as batches `[global_batch, seq_len]` of inputs and targets."""

    def __init__(self, folder, config):
        self.info = json.loads((folder / "data.json").read_text())
        width = {"u16": "<u2", "u32": "<u4"}[self.info["dtype"]]
        self.tokens = numpy.fromfile(folder / "train.bin", dtype=width).astype(numpy.int64)
        self.seq_len = config["data"]["seq_len"]
        self.shuffle = config["data"]["shuffle"]
        self.seed = config["train"]["seed"]
        self.rows = config["train"]["global_batch"]
        self.samples = (len(self.tokens) - 1) // self.seq_len

    def batch(self, step):
        """Returns the batch of a step, counted from 0."""
        positions = range(step * self.rows, (step + 1) * self.rows)
        order = [sample_at(at, self.samples, self.shuffle, self.seed) for at in positions]
        length = self.seq_len
        rows = [self.tokens[sample * length : (sample + 1) * length + 1] for sample in order]
        rows = torch.from_numpy(numpy.stack(rows))
        return rows[:, :-1], rows[:, 1:]


# PyTorch's side.


class Decoder(torch.nn.Module):
    """A Llama-style decoder. Matrices are `[d_in, d_out]`, as in Kiln. Those of blocks may be `transposed`, as in
    torch.nn.Linear: Muon's learning rate depends on their shape."""

    def __init__(self, model, weights, transposed):
        super().__init__()
        self.model, self.transposed = model, transposed
        if transposed:
            weights = {name: v.T.contiguous() if is_matrix(name, v) else v for name, v in weights.items()}
        self.head_dim = model.get("head_dim", model["d_model"] // model["heads"])
        # ParameterDict does not accept dots. Until version 4 of the format, names contained the variant of an enum.
        names = {name: name.replace(".SwiGlu", "").replace(".", "/") for name in weights}
        self.weights = torch.nn.ParameterDict(
            {names[name]: torch.nn.Parameter(value) for name, value in weights.items()}
        )

    def weight(self, *path):
        weight = self.weights["/".join([*map(str, path), "weight"])]
        return weight.T if self.transposed and path[0] == "layers" and weight.dim() == 2 else weight

    def norm(self, x, *path):
        scale = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.model["norm_eps"])
        return x * scale * self.weight(*path)

    def rotate(self, x):
        """Rotates `[batch, heads, seq, head_dim]` by position: halves are the two coordinates."""
        half = self.head_dim // 2
        exponents = torch.arange(half, dtype=torch.float64) / half
        frequencies = self.model["rope_theta"] ** -exponents
        angles = torch.arange(x.shape[2], dtype=torch.float64)[:, None] * frequencies
        cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
        first, second = x[..., :half], x[..., half:]
        return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)

    def attention(self, x, layer):
        model = self.model

        def heads(name, count):
            flat = x @ self.weight("layers", layer, "attention", name)
            return flat.unflatten(-1, (count, self.head_dim)).transpose(1, 2)

        q = self.rotate(heads("q_proj", model["heads"]))
        k = self.rotate(heads("k_proj", model["kv_heads"]))
        v = heads("v_proj", model["kv_heads"])
        group = model["heads"] // model["kv_heads"]
        k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        mixed = mixed.transpose(1, 2).flatten(2)
        return mixed @ self.weight("layers", layer, "attention", "o_proj")

    def feed_forward(self, x, layer):
        gate = F.silu(x @ self.weight("layers", layer, "ffn", "gate_proj"))
        up = x @ self.weight("layers", layer, "ffn", "up_proj")
        return (gate * up) @ self.weight("layers", layer, "ffn", "down_proj")

    def experts(self, x, layer):
        """Returns the output of a layer of experts, and the router's logits."""
        moe = self.model["moe"]
        tokens = x.flatten(0, 1)
        logits = tokens @ self.weight("layers", layer, "ffn", "router")
        weights, chosen = logits.softmax(-1).topk(moe["experts_per_token"], dim=-1)
        if moe["norm_topk_prob"]:
            weights = weights / weights.sum(-1, keepdim=True)
        names = ("gate_proj", "up_proj", "down_proj")
        stacked = [self.weights[f"layers/{layer}/ffn/experts/{name}"] for name in names]
        y = torch.zeros_like(tokens)
        for expert, (gate, up, down) in enumerate(zip(*stacked)):
            rows, choice = torch.where(chosen == expert)
            inner = F.silu(tokens[rows] @ gate) * (tokens[rows] @ up)
            y = y.index_add(0, rows, inner @ down * weights[rows, choice, None])
        if "shared_expert_d_ff" in moe:
            gate, up, down = (self.weight("layers", layer, "ffn", "shared_expert", name) for name in names)
            y = y + (F.silu(tokens @ gate) * (tokens @ up)) @ down
        return y.view_as(x), logits

    def forward(self, tokens):
        """Returns logits, and the weighted balance loss of experts."""
        x = self.weight("embed_tokens")[tokens]
        moe, balance = self.model.get("moe"), []
        for layer in range(self.model["layers"]):
            x = x + self.attention(self.norm(x, "layers", layer, "attention_norm"), layer)
            normed = self.norm(x, "layers", layer, "ffn_norm")
            if moe is None or layer in moe.get("dense_layers", []):
                x = x + self.feed_forward(normed, layer)
                continue
            y, logits = self.experts(normed, layer)
            x = x + y
            balance.append(logits)
        x = self.norm(x, "norm")
        if balance:
            # Over all layers together, as in transformers; or the mean of the layers' losses.
            together = moe.get("router_aux_loss_over") == "all_layers"
            parts = [tuple(balance)] if together else [(logits,) for logits in balance]
            losses = [balance_loss(part, moe["experts"], moe["experts_per_token"]) for part in parts]
            balance = moe["router_aux_loss_coef"] * sum(losses) / len(losses)
        else:
            balance = 0.0
        if self.model["tie_embeddings"]:
            return x @ self.weight("embed_tokens").T, balance
        return x @ self.weight("lm_head"), balance


def balance_loss(*arguments):
    from transformers.models.qwen3_moe.modeling_qwen3_moe import load_balancing_loss_func

    return load_balancing_loss_func(*arguments)


def learning_rate(optim, step, steps):
    """Returns the rate of a step, counted from 1, as train/config/src/schedule.rs does."""
    peak, warmup = optim["lr"], optim["warmup_steps"]
    if step <= warmup:
        return peak * step / warmup
    floor = peak * optim["min_lr_ratio"]
    if optim["schedule"] == "constant":
        return peak
    if optim["schedule"] == "cosine":
        progress = min((step - warmup) / (steps - warmup), 1.0)
        return floor + (peak - floor) * 0.5 * (1 + math.cos(math.pi * progress))
    decay = optim.get("decay_steps", steps // 10)
    stable = max(steps - decay, 0)
    return peak if step <= stable else floor + (peak - floor) * (1 - (step - stable) / decay)


def is_matrix(name, weight):
    """Returns True for a matrix of a block."""
    return name.startswith("layers") and weight.dim() == 2


def optimizers_of(optim, model):
    """Returns the optimizers of the run, each with the section of its learning rate."""
    is_muon = optim.get("kind") == "muon"
    named = [(name.removeprefix("weights."), p) for name, p in model.named_parameters()]
    of_blocks = [p for name, p in named if is_muon and is_matrix(name, p)]
    others = [p for name, p in named if not (is_muon and is_matrix(name, p))]
    matrices = [p for p in others if p.dim() >= 2]
    vectors = [p for p in others if p.dim() < 2]
    adamw = torch.optim.AdamW(
        [
            {"params": matrices, "weight_decay": optim["weight_decay"]},
            {"params": vectors, "weight_decay": 0.0},
        ],
        lr=optim["lr"],
        betas=(optim["beta1"], optim["beta2"]),
        eps=optim["eps"],
    )
    if not is_muon:
        return [(adamw, optim)]
    section = optim["muon"]
    muon = torch.optim.Muon(
        of_blocks,
        lr=section["lr"],
        weight_decay=section["weight_decay"],
        momentum=section["momentum"],
        nesterov=section["nesterov"],
        ns_steps=section["ns_steps"],
        adjust_lr_fn=section["adjust_lr"],
    )
    return [(adamw, optim), (muon, optim | {"lr": section["lr"]})]


def compute_muon_in(dtype):
    """Makes the iterations of torch.optim.Muon compute in this dtype instead of bf16."""

    class Torch(types.ModuleType):
        bfloat16 = dtype

        def __getattr__(self, name):
            return getattr(torch, name)

    sys.modules["torch.optim._muon"].torch = Torch("torch")


def train_torch(config, weights, data, dtype):
    """Returns the losses and gradient norms of the same run in PyTorch."""
    optim, steps = config["optim"], config["train"]["steps"]
    weights = {name: value.to(dtype) for name, value in weights.items()}
    model = Decoder(config["model"], weights, transposed=optim.get("kind") == "muon")
    optimizers = optimizers_of(optim, model)
    losses, norms = [], []
    for step in range(1, steps + 1):
        for optimizer, section in optimizers:
            optimizer.zero_grad()
            for group in optimizer.param_groups:
                group["lr"] = learning_rate(section, step, steps)
        inputs, targets = data.batch(step - 1)
        parts = len(inputs) // config["train"]["micro_batch"] if "moe" in config["model"] else 1
        total = 0.0
        for part_inputs, part_targets in zip(inputs.chunk(parts), targets.chunk(parts)):
            logits, balance = model(part_inputs)
            loss = F.cross_entropy(logits.flatten(0, 1), part_targets.flatten()) + balance
            (loss / parts).backward()
            total += loss.item() / parts
        most = optim["grad_clip"] or math.inf
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), most)
        for optimizer, _ in optimizers:
            optimizer.step()
        losses.append(total)
        norms.append(norm.item())
    return losses, norms


# The comparison.


def with_preset(config, preset, folder):
    """Writes a copy of the configuration whose model is a preset."""
    lines, section = [], None
    for line in config.read_text().splitlines():
        if line.startswith("["):
            section = line.strip()
            lines.append(line)
            if section == "[model]":
                lines += [f'preset = "{preset}"', ""]
        elif section != "[model]":
            lines.append(line)
    path = folder / "config.toml"
    path.write_text("\n".join(lines) + "\n")
    return path


def check_comparable(config):
    """Exits with an error if the configuration uses a feature that PyTorch's side here lacks."""
    model, unknown = config["model"], []
    unknown += [key for key in ("dropout", "qk_norm", "feed_forward_bias", "window", "block", "logit_softcap") if model.get(key)]
    unknown += ["rope_scaling"] if "rope_scaling" in model else []
    unknown += ["attention_bias"] if model.get("attention_bias", "none") != "none" else []
    if unknown:
        sys.exit(f"the model has {', '.join(unknown)}, which PyTorch's side here lacks")
    if any(value != "f32" for value in config["precision"].values()):
        sys.exit("precision is not f32; the comparison is in f32")
    if config["optim"].get("kind", "adamw") not in ("adamw", "muon") or config["optim"].get("groups"):
        sys.exit("optim: PyTorch's side here supports only adamw and muon, without groups")
    if config["train"].get("z_loss") or config.get("loss", {}).get("kind", "cross_entropy") != "cross_entropy":
        sys.exit("loss: PyTorch's side here supports only cross-entropy")
    if config["train"].get("freeze"):
        sys.exit("train.freeze: PyTorch's side here trains all parameters")
    if config["log"]["every"] != 1:
        sys.exit("log.every must be 1, so that all losses can be compared")


def differences(ours, theirs):
    return [abs(a - b) / abs(b) for a, b in zip(ours, theirs, strict=True)]


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kiln", type=pathlib.Path, default=KILN, help="the program to compare")
    parser.add_argument("--config", type=pathlib.Path, default=CONFIG, help="the run to compare")
    parser.add_argument("--preset", help="use this preset as the model")
    parser.add_argument(
        "--set", action="append", default=[], metavar="SECTION.KEY=VALUE", help="as for kiln train"
    )
    parser.add_argument("--threads", type=int, default=1, help="threads of PyTorch (default 1)")
    parser.add_argument(
        "--float64", action="store_true", help="let PyTorch compute in f64, to see which side drifts"
    )
    parser.add_argument("--bf16", action="store_true", help="leave PyTorch's Muon computing in bf16")
    parser.add_argument("--record", type=pathlib.Path, help="write PyTorch's curve here, as JSON")
    arguments = parser.parse_args()
    kiln = arguments.kiln.resolve()
    if not kiln.exists():
        sys.exit(f"{kiln} does not exist; build it with cargo build --release")
    torch.use_deterministic_algorithms(True)
    torch.set_num_threads(arguments.threads)
    dtype = torch.float64 if arguments.float64 else torch.float32
    if not arguments.bf16:
        compute_muon_in(dtype)

    with tempfile.TemporaryDirectory() as folder:
        folder = pathlib.Path(folder)
        config = arguments.config.resolve()
        if arguments.preset:
            config = with_preset(config, arguments.preset, folder)
        resolved = train(kiln, config, folder / "run", arguments.set)
        check_comparable(resolved)
        ours = curve_of(folder / "run")
        weights = initial_weights(kiln, config, folder / "start", arguments.set)
        data = Data(folder / resolved["data"]["path"], resolved)
        theirs = train_torch(resolved, weights, data, dtype)

    loss_differences = differences(ours[0], theirs[0])
    norm_differences = differences(ours[1], theirs[1])
    print("| step | loss, kiln | loss, torch | relative | norm, kiln | norm, torch | relative |")
    print("|---|---|---|---|---|---|---|")
    rows = zip(ours[0], theirs[0], loss_differences, ours[1], theirs[1], norm_differences)
    for step, (a, b, loss, c, d, norm) in enumerate(rows, 1):
        print(f"| {step} | {a:.7f} | {b:.7f} | {loss:.1e} | {c:.6f} | {d:.6f} | {norm:.1e} |")
    parameters = sum(value.numel() for value in weights.values())
    print(
        f"\n{parameters / 1e6:.2f}M parameters, {resolved['train']['ranks']} ranks, "
        f"{resolved['shard']['strategy']}, torch {torch.__version__}, "
        f"{str(dtype).removeprefix('torch.')}"
    )
    loss, norm = max(loss_differences), max(norm_differences)
    print(f"largest difference of a loss: {loss:.1e} (bound {LOSS_BOUND:.0e})")
    print(f"largest difference of a norm: {norm:.1e}")
    if arguments.record:
        recorded = {
            # Settings on which the curve depends. Tests compare only runs with the same values.
            "config": {
                "model": resolved["model"],
                "data": {key: resolved["data"][key] for key in ("seq_len", "shuffle")},
                "train": {key: resolved["train"][key] for key in ("steps", "global_batch", "seed")},
                "optim": resolved["optim"],
            },
            "data_sha256": data.info["train"]["sha256"],
            "torch": torch.__version__,
            "losses": theirs[0],
            "grad_norms": theirs[1],
        }
        arguments.record.write_text(json.dumps(recorded, indent=1) + "\n")
    passed = loss <= LOSS_BOUND
    print("PASS" if passed else "FAIL")
    sys.exit(0 if passed else 1)


if __name__ == "__main__":
    main()
