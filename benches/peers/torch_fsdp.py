#!/usr/bin/env python3
"""Time training steps of Kiln's models in PyTorch and print one JSON line.

    benches/peers/torch_fsdp.py --preset 10m --threads 2
    benches/peers/torch_fsdp.py --preset 10m --mode fsdp --ranks 2
    benches/peers/torch_fsdp.py --preset 1b --mode fsdp --device cuda --dtype bf16 --compile
    benches/peers/torch_fsdp.py --preset 1b --device cuda --dtype bf16 --kernels
    benches/peers/torch_fsdp.py --count

The decoder is Kiln's (RMSNorm, RoPE, SwiGLU, grouped-query attention through SDPA), with random weights
on random tokens; AdamW is PyTorch's fused one, and the gradient's norm is clipped to 1. A single process
trains without sharding (`single`), several through FSDP2 (`fsdp` frees the weights of a block after forward,
`shard_grad_op` keeps them until backward) or DDP (`ddp`). --accumulate sets how gradients of micro-batches are
reduced, by default as in Kiln: FSDP2 reduces each (its default), DDP once per step. With --dtype bf16, computation is
in bf16, and weights, moments and reductions are in f32: a mixed-precision policy under FSDP2, else autocast.

A step is timed on the slowest rank, from zeroing the gradients until the device is idle. `tokens_per_s` is
computed from the median of the steps after --warmup. With --kernels, times single operations instead, at the
preset's shapes. Needs PyTorch: benches/peers/setup.sh.
"""

import argparse
import json
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time
import warnings

# vocab, d_model, layers, heads, kv_heads, d_ff, tied: as in model/src/config.rs.
PRESETS = {
    "10m": (4096, 256, 10, 4, 4, 688, True),
    "90m": (32000, 640, 14, 10, 10, 1728, True),
    "300m": (32000, 1024, 21, 16, 16, 2816, True),
    "1b": (32000, 2048, 22, 32, 4, 5632, False),
    "7b": (32000, 4096, 32, 32, 32, 11008, False),
}
MODES = ["single", "fsdp", "shard_grad_op", "ddp"]
# Timeout in seconds for the report of a rank.
PATIENCE = 3600


def process_age():
    """Returns the seconds since this process was started, as recorded by the system (in hundredths)."""
    fields = pathlib.Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    started = int(fields[19]) / os.sysconf("SC_CLK_TCK")
    return time.clock_gettime(time.CLOCK_BOOTTIME) - started


def peak_rss():
    """Returns the peak memory of this process in bytes."""
    for line in pathlib.Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    sys.exit("/proc/self/status has no VmHWM")


def parse():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--preset", choices=PRESETS, default="10m", help="shape of the model (default 10m)")
    add("--layers", type=int, help="number of blocks (default: the preset's)")
    add("--mode", choices=MODES, default="single", help="kind of parallelism (default single)")
    add("--device", choices=["cpu", "cuda"], default="cpu", help="where (default cpu)")
    add("--dtype", choices=["f32", "bf16"], default="f32", help="dtype of computation (default f32)")
    add("--compile", action="store_true", help="compile the blocks and the loss")
    add("--recompute", action="store_true", help="recompute the activations of blocks in backward")
    add("--batch", type=int, default=4, help="sequences per step, over all ranks (default 4)")
    add("--micro-batch", type=int, help="sequences per pass of a rank (default: its sequences of a step)")
    add(
        "--accumulate",
        choices=["sharded", "unsharded"],
        help="reduce gradients in every micro-batch or once per step (default sharded under FSDP2)",
    )
    add("--seq", type=int, default=256, help="tokens per sequence (default 256)")
    add("--steps", type=int, default=10, help="timed steps (default 10)")
    add("--warmup", type=int, default=2, help="steps before the timed ones, at least 1 (default 2)")
    add("--ranks", type=int, default=1, help="processes (default 1)")
    add("--threads", type=int, help="threads of each process (default cores / ranks)")
    add("--kernels", action="store_true", help="time single operations instead of steps")
    add("--quick", action="store_true", help="with --kernels: time few calls")
    add("--count", action="store_true", help="print the number of parameters of every preset")
    # Passed by the first process to the others.
    add("--rank", type=int, help=argparse.SUPPRESS)
    add("--store", help=argparse.SUPPRESS)
    add("--age", type=float, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    for name in ("batch", "seq", "steps", "warmup", "ranks"):
        if getattr(arguments, name) < 1:
            parser.error(f"--{name} must be at least 1")
    for name in ("layers", "micro_batch", "threads"):
        if getattr(arguments, name) is not None and getattr(arguments, name) < 1:
            parser.error(f"--{name.replace('_', '-')} must be at least 1")
    if arguments.mode == "single" and arguments.ranks > 1:
        parser.error("--mode single is one process; omit --ranks, or choose another mode")
    if arguments.batch % arguments.ranks:
        parser.error(f"--batch {arguments.batch} cannot be shared by {arguments.ranks} ranks")
    per_rank = arguments.batch // arguments.ranks
    arguments.micro_batch = arguments.micro_batch or per_rank
    if per_rank % arguments.micro_batch:
        parser.error(f"--micro-batch {arguments.micro_batch} does not divide {per_rank}")
    default = "sharded" if arguments.mode in ("fsdp", "shard_grad_op") else "unsharded"
    arguments.accumulate = arguments.accumulate or default
    arguments.threads = arguments.threads or max((os.cpu_count() or 1) // arguments.ranks, 1)
    return arguments


# Several processes: the first starts the ranks and prints the report of rank 0. It does not load PyTorch
# itself, so that its start counts only once.


def start_ranks(arguments):
    age = process_age()
    born = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        words = [sys.executable, __file__, *sys.argv[1:], "--store", str(pathlib.Path(folder, "store"))]
        ranks = []
        try:
            for rank in range(arguments.ranks):
                since = age + time.monotonic() - born
                command = [*words, "--rank", str(rank), "--age", f"{since:.3f}"]
                output = subprocess.PIPE if rank == 0 else subprocess.DEVNULL
                ranks.append(subprocess.Popen(command, stdout=output, text=True))
            said, _ = ranks[0].communicate(timeout=PATIENCE)
            codes = [process.wait(60) for process in ranks]
        finally:
            for process in ranks:
                if process.poll() is None:
                    process.kill()
    if any(codes):
        sys.exit(f"ranks ended with {codes}; see above")
    print(said.strip())


# Everything below needs PyTorch.


def load_torch():
    global torch, F, dist, nn
    try:
        import torch
        import torch.distributed as dist
        import torch.nn.functional as F
        from torch import nn
    except ModuleNotFoundError as error:
        sys.exit(f"{error}; run benches/peers/setup.sh, or use a Python that has PyTorch")
    # Ranks may draw other initial weights than a single process; that does not matter here.
    warnings.filterwarnings("ignore", message="DTensor random operators")


def build_classes():
    """Returns the decoder. Its classes are defined here because they need PyTorch."""
    global Decoder, Block

    class Norm(nn.Module):
        def __init__(self, width):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(width))

        def forward(self, x):
            return F.rms_norm(x, self.weight.shape, self.weight, 1e-5)

    class Attention(nn.Module):
        def __init__(self, d, heads, kv_heads):
            super().__init__()
            self.heads, self.kv_heads, self.width = heads, kv_heads, d // heads
            self.q_proj = nn.Linear(d, d, bias=False)
            self.k_proj = nn.Linear(d, kv_heads * self.width, bias=False)
            self.v_proj = nn.Linear(d, kv_heads * self.width, bias=False)
            self.o_proj = nn.Linear(d, d, bias=False)

        def forward(self, x, turns):
            def heads(flat, count):
                return flat.unflatten(-1, (count, self.width)).transpose(1, 2)

            q = rotate(heads(self.q_proj(x), self.heads), turns)
            k = rotate(heads(self.k_proj(x), self.kv_heads), turns)
            v = heads(self.v_proj(x), self.kv_heads)
            return self.o_proj(attend(q, k, v).transpose(1, 2).flatten(2))

    class SwiGlu(nn.Module):
        def __init__(self, d, ff):
            super().__init__()
            self.gate_proj = nn.Linear(d, ff, bias=False)
            self.up_proj = nn.Linear(d, ff, bias=False)
            self.down_proj = nn.Linear(ff, d, bias=False)

        def forward(self, x):
            return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))

    class Block(nn.Module):
        def __init__(self, d, heads, kv_heads, ff):
            super().__init__()
            self.attention_norm, self.ffn_norm = Norm(d), Norm(d)
            self.attention, self.ffn = Attention(d, heads, kv_heads), SwiGlu(d, ff)

        def forward(self, x, turns):
            x = x + self.attention(self.attention_norm(x), turns)
            return x + self.ffn(self.ffn_norm(x))

    class Decoder(nn.Module):
        """Maps `[batch, seq]` tokens to logits `[batch, seq, vocab]`."""

        def __init__(self, shape):
            super().__init__()
            vocab, d, layers, heads, kv_heads, ff, tied = shape
            self.head_dim = d // heads
            self.embed = nn.Embedding(vocab, d)
            self.layers = nn.ModuleList(Block(d, heads, kv_heads, ff) for _ in range(layers))
            self.norm = Norm(d)
            # A tied head uses the embedding itself, which is a single parameter.
            self.lm_head = None if tied else nn.Linear(d, vocab, bias=False)
            self.turns = None

        def prepare(self, seq, device):
            """Initialises the weights and the tables of angles."""
            for parameter in self.parameters():
                if parameter.dim() > 1:
                    nn.init.normal_(parameter, std=0.02)
                else:
                    nn.init.ones_(parameter)
            self.turns = angles(seq, self.head_dim, device)

        def forward(self, tokens):
            x = self.embed(tokens)
            for layer in self.layers:
                x = layer(x, self.turns)
            x = self.norm(x)
            if self.lm_head is None:
                return F.linear(x, self.embed.weight)
            return self.lm_head(x)


def angles(seq, head_dim, device):
    """Returns cosines and sines `[seq, head_dim / 2]`."""
    half = head_dim // 2
    exponents = torch.arange(half, dtype=torch.float64) / half
    table = torch.arange(seq, dtype=torch.float64)[:, None] * 10000.0**-exponents
    return table.cos().float().to(device), table.sin().float().to(device)


def rotate(x, turns):
    """Rotates `[batch, heads, seq, head_dim]` by position: halves are the two coordinates."""
    cos, sin = (table.to(x.dtype) for table in turns)
    first, second = x.chunk(2, -1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)


def attend(q, k, v):
    grouped = q.shape[1] != k.shape[1]
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped)


def cross_entropy(logits, targets):
    return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())


def shape_of(arguments):
    shape = list(PRESETS[arguments.preset])
    shape[2] = arguments.layers or shape[2]
    return shape


def count():
    """Returns the number of parameters of every preset, without allocating them."""
    counts = {}
    for name, shape in PRESETS.items():
        with torch.device("meta"):
            counts[name] = sum(p.numel() for p in Decoder(shape).parameters())
    return counts


def model_flops_per_token(model, shape, seq):
    """Returns the same as Kiln's `ModelConfig::flops_per_token`."""
    vocab, d, layers, *_, tied = shape
    multiplying = model - (0 if tied else vocab * d)
    return 6.0 * multiplying + 12.0 * layers * d * seq


def wrapped(model, arguments):
    """Returns the model, wrapped for its mode, with initialised weights."""
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    device = torch.device(arguments.device)
    if arguments.recompute:
        for index, layer in enumerate(model.layers):
            model.layers[index] = checkpoint_wrapper(layer)
    if arguments.compile:
        for layer in model.layers:
            layer.compile()
    if arguments.mode in ("fsdp", "shard_grad_op"):
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

        policy = MixedPrecisionPolicy()
        if arguments.dtype == "bf16":
            policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        mesh = dist.init_device_mesh(arguments.device, (arguments.ranks,))
        reshard = arguments.mode == "fsdp"
        for layer in model.layers:
            fully_shard(layer, mesh=mesh, mp_policy=policy, reshard_after_forward=reshard)
        # The root keeps its weights until backward, which needs them immediately, as in Kiln.
        fully_shard(model, mesh=mesh, mp_policy=policy, reshard_after_forward=False)
    model.to_empty(device=device)
    torch.manual_seed(0)
    model.prepare(arguments.seq, device)
    if arguments.mode == "ddp":
        from torch.nn.parallel import DistributedDataParallel

        return DistributedDataParallel(model, gradient_as_bucket_view=True)
    return model


def versions(arguments):
    told = {"torch": torch.__version__, "python": sys.version.split()[0]}
    if arguments.device == "cuda":
        told["cuda"] = torch.version.cuda
        told["device"] = torch.cuda.get_device_name()
    return told


def join(arguments):
    """Connects to the other ranks through a file, so that no free port is needed."""
    if arguments.mode == "single":
        return None
    # By default, gloo resolves the host's name, which fails on some machines.
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    folder = None if arguments.store else tempfile.TemporaryDirectory()
    path = arguments.store or str(pathlib.Path(folder.name, "store"))
    backend = "nccl" if arguments.device == "cuda" else "gloo"
    store = dist.FileStore(path, arguments.ranks)
    dist.init_process_group(
        backend, store=store, rank=arguments.rank or 0, world_size=arguments.ranks
    )
    return folder


def train(arguments, age):
    """Runs one rank. Returns rank 0's report."""
    rank, ranks = arguments.rank or 0, arguments.ranks
    cuda = arguments.device == "cuda"
    if cuda:
        torch.cuda.set_device(rank % torch.cuda.device_count())
    folder = join(arguments)
    shape = shape_of(arguments)
    with torch.device("meta"):
        bare = Decoder(shape)
    parameters = sum(p.numel() for p in bare.parameters())
    model = wrapped(bare, arguments)
    matrices = [p for p in model.parameters() if p.dim() >= 2]
    vectors = [p for p in model.parameters() if p.dim() < 2]
    groups = [
        {"params": matrices, "weight_decay": 0.1},
        {"params": vectors, "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=1e-3, betas=(0.9, 0.95), eps=1e-8, fused=True)
    loss_of = torch.compile(cross_entropy) if arguments.compile else cross_entropy

    device = torch.device(arguments.device)
    generator = torch.Generator().manual_seed(1 + rank)
    passes = arguments.batch // ranks // arguments.micro_batch
    size = (passes, arguments.micro_batch, arguments.seq + 1)
    autocast = arguments.dtype == "bf16" and arguments.mode in ("single", "ddp")

    def synchronize():
        if cuda:
            torch.cuda.synchronize()

    def step(tokens):
        optimizer.zero_grad(set_to_none=True)
        total = 0.0
        for index, rows in enumerate(tokens):
            reduces = arguments.accumulate == "sharded" or index + 1 == passes
            if arguments.mode in ("fsdp", "shard_grad_op"):
                model.set_requires_gradient_sync(reduces)
            elif arguments.mode == "ddp":
                model.require_backward_grad_sync = reduces
            with torch.autocast(arguments.device, torch.bfloat16, enabled=autocast):
                loss = loss_of(model(rows[:, :-1]), rows[:, 1:]) / passes
            loss.backward()
            total = total + loss.detach()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        synchronize()
        return total

    seconds, losses, first = [], [], None
    for index in range(arguments.warmup + arguments.steps):
        tokens = torch.randint(0, shape[0], size, generator=generator).to(device)
        synchronize()
        start = time.perf_counter()
        loss = step(tokens)
        seconds.append(time.perf_counter() - start)
        if index == 0:
            first = age()
        # Not timed.
        losses.append(loss)
    losses = [float(losses[0]), float(losses[-1])]

    mine = {"seconds": seconds, "losses": losses, "rss": peak_rss()}
    if cuda:
        mine["allocated"] = torch.cuda.max_memory_allocated()
        mine["reserved"] = torch.cuda.max_memory_reserved()
    everyone = [mine]
    if dist.is_initialized():
        everyone = [None] * ranks
        dist.all_gather_object(everyone, mine)
        dist.destroy_process_group()
    if folder:
        folder.cleanup()
    slowest = [max(times) for times in zip(*(one["seconds"] for one in everyone))]
    timed = slowest[arguments.warmup :]
    tokens_per_s = arguments.batch * arguments.seq / statistics.median(timed)
    flops = model_flops_per_token(parameters, shape, arguments.seq)
    report = {
        "system": "torch",
        "preset": arguments.preset,
        "mode": arguments.mode,
        "device": arguments.device,
        "dtype": arguments.dtype,
        "compile": arguments.compile,
        "recompute": arguments.recompute,
        "accumulate": arguments.accumulate,
        "ranks": ranks,
        "threads_per_rank": torch.get_num_threads(),
        "global_batch": arguments.batch,
        "micro_batch": arguments.micro_batch,
        "seq_len": arguments.seq,
        "parameters": parameters,
        "tokens_per_s": tokens_per_s,
        "model_flops_per_s": flops * tokens_per_s,
        "step_s": timed,
        "first_step_s": first,
        "losses": [statistics.mean(one["losses"][at] for one in everyone) for at in (0, 1)],
        "peak_rss_bytes": [one["rss"] for one in everyone],
        "peak_rss_sum_bytes": sum(one["rss"] for one in everyone),
        "versions": versions(arguments),
    }
    if cuda:
        report["peak_allocated_bytes"] = max(one["allocated"] for one in everyone)
        report["peak_reserved_bytes"] = max(one["reserved"] for one in everyone)
    return report


# Single operations.


def seconds_per_call(call, cuda, quick):
    """Returns the median time over samples; on a GPU, by its own clock."""
    for _ in range(2 if quick else 5):
        call()
    calls, samples = (2, 3) if quick else (20, 7)
    times = []
    for _ in range(samples):
        if cuda:
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            for _ in range(calls):
                call()
            end.record()
            torch.cuda.synchronize()
            times.append(begin.elapsed_time(end) * 1e-3 / calls)
        else:
            begin = time.perf_counter()
            for _ in range(calls):
                call()
            times.append((time.perf_counter() - begin) / calls)
    return statistics.median(times)


def kernels(arguments):
    """Returns the seconds per call of the operations of `kiln-bench gpu`, by their names there."""
    cuda = arguments.device == "cuda"
    device = torch.device(arguments.device)
    dtype = torch.bfloat16 if arguments.dtype == "bf16" else torch.float32
    vocab, d, layers, heads, kv_heads, ff, tied = shape_of(arguments)
    rows, seq, width = arguments.batch * arguments.seq, arguments.seq, d // heads
    torch.manual_seed(0)

    def normal(*size):
        return torch.randn(size, device=device, dtype=dtype).requires_grad_()

    def both(name, forward, inputs):
        """Times `forward`, and its backward pass with the gradients of `inputs`."""
        with torch.no_grad():
            times[name] = seconds_per_call(forward, cuda, arguments.quick)
        y = forward()
        dy = torch.ones_like(y)

        def backward():
            torch.autograd.grad(y, inputs, dy, retain_graph=True)

        times[f"{name}_backward"] = seconds_per_call(backward, cuda, arguments.quick)

    times = {}
    x, scale = normal(arguments.batch, seq, d), normal(d)
    both("rms_norm", lambda: F.rms_norm(x, (d,), scale, 1e-5), [x, scale])
    q = normal(arguments.batch, heads, seq, width)
    turns = angles(seq, width, device)
    turn = torch.compile(rotate) if arguments.compile else rotate
    both("rotary", lambda: turn(q, turns), [q])
    gate, up = normal(arguments.batch, seq, ff), normal(arguments.batch, seq, ff)

    def glu(gate, up):
        return F.silu(gate) * up

    gated = torch.compile(glu) if arguments.compile else glu
    both("swiglu", lambda: gated(gate, up), [gate, up])
    table = normal(vocab, d)
    ids = torch.randint(0, vocab, (arguments.batch, seq), device=device)
    both("embedding", lambda: F.embedding(ids, table), [table])
    both("dropout", lambda: F.dropout(x, 0.1), [x])
    k, v = normal(arguments.batch, kv_heads, seq, width), normal(arguments.batch, kv_heads, seq, width)
    both("attention", lambda: attend(q, k, v), [q, k, v])
    # Weights in the layout of `nn.Linear`, `[d_out, d_in]`.
    weight = normal(ff, d)
    both("linear", lambda: F.linear(x, weight), [x, weight])
    head = normal(vocab, d)
    targets = torch.randint(0, vocab, (arguments.batch, seq), device=device)
    loss_of = torch.compile(cross_entropy) if arguments.compile else cross_entropy

    def loss_and_gradients():
        loss = loss_of(F.linear(x, head), targets)
        torch.autograd.grad(loss, [x, head])

    # Kiln computes the gradients along with the loss.
    times["cross_entropy"] = seconds_per_call(loss_and_gradients, cuda, arguments.quick)
    del x, q, k, v, gate, up, weight, head, table

    block = 2 * d * d + 2 * d * kv_heads * width + 3 * d * ff + 2 * d
    flat = torch.randn(block, device=device)
    times["cast"] = seconds_per_call(lambda: flat.to(torch.bfloat16), cuda, arguments.quick)
    # Norm, clipping and AdamW on the parameters of a model of one block.
    with torch.device("meta"):
        one = Decoder([vocab, d, 1, heads, kv_heads, ff, tied])
    weights = [nn.Parameter(torch.randn(p.shape, device=device)) for p in one.parameters()]
    for weight in weights:
        weight.grad = torch.randn_like(weight)
    optimizer = torch.optim.AdamW(weights, lr=1e-3, betas=(0.9, 0.95), fused=True)

    def update():
        torch.nn.utils.clip_grad_norm_(weights, 1.0)
        optimizer.step()

    times["update"] = seconds_per_call(update, cuda, arguments.quick)
    return {
        "system": "torch",
        "preset": arguments.preset,
        "device": arguments.device,
        "dtype": arguments.dtype,
        "compile": arguments.compile,
        "batch": arguments.batch,
        "seq_len": seq,
        "rows": rows,
        "kernels": times,
        "versions": versions(arguments),
    }


def main():
    arguments = parse()
    several = arguments.ranks > 1 and not (arguments.kernels or arguments.count)
    if several and arguments.rank is None:
        return start_ranks(arguments)
    # The start of a rank is that of the process that started it.
    before = arguments.age or 0.0
    os.environ["OMP_NUM_THREADS"] = str(arguments.threads)
    load_torch()
    build_classes()
    torch.set_num_threads(arguments.threads)
    if arguments.count:
        return print(json.dumps({"system": "torch", "parameters": count()}))
    if arguments.device == "cuda" and not torch.cuda.is_available():
        sys.exit("PyTorch finds no GPU that it can use")
    if arguments.kernels:
        return print(json.dumps(kernels(arguments)))
    report = train(arguments, lambda: before + process_age())
    if not arguments.rank:
        print(json.dumps(report), flush=True)
    # PyTorch sometimes aborts while it tears down the threads of a process of several ranks.
    os._exit(0)


if __name__ == "__main__":
    main()
