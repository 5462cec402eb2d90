#!/usr/bin/env python3
"""Reads Kiln's event files with the package of TensorBoard: see tensorboard.sh in this folder."""

import csv
import io
import json
import math
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import time
import tomllib
import urllib.parse
import urllib.request

import numpy as np
from tensorboard.backend.event_processing import event_accumulator, plugin_event_accumulator
from tensorboard.plugins.hparams import plugin_data_pb2
from tensorboard.util import tensor_util

# The names of torchtitan, and the factor for the value in metrics.jsonl.
TAGS = {
    "loss": ("loss_metrics/global_avg_loss", 1),
    "tokens_per_s": ("throughput(tps)", 1),
    "mfu": ("mfu(%)", 100),
    "step_s": ("time_metrics/end_to_end(s)", 1),
    "data_s": ("time_metrics/data_loading(s)", 1),
    "forward_s": ("time_metrics/forward(s)", 1),
    "backward_s": ("time_metrics/backward(s)", 1),
    "optimizer_s": ("time_metrics/optimizer(s)", 1),
    "other_s": ("time_metrics/other(s)", 1),
    "wait_s": ("comm/exposed(s)", 1),
    "peak_bytes": ("memory/max_reserved(GiB)", 2**-30),
    "val_loss": ("validation_metrics/loss", 1),
    "tokens": ("n_tokens_seen", 1),
}
SHARES = {"data_s": "time_metrics/data_loading(%)", "wait_s": "comm/exposed(%)"}
EVERYTHING = {name: 0 for name in ("scalars", "histograms", "tensors", "compressedHistograms")}

failures = []


def check(is_right, what):
    if not is_right:
        failures.append(what)
        print(f"  WRONG: {what}")


def kiln(*arguments, **options):
    done = subprocess.run([KILN, *map(str, arguments)], capture_output=True, text=True, **options)
    if done.returncode != 0:
        sys.exit(f"kiln {' '.join(map(str, arguments))}\n{done.stdout}{done.stderr}FAIL")
    return done.stdout


def train_arguments(out, steps, *more):
    sets = {
        "data.path": ROOT / "data",
        "train.steps": steps,
        "log.every": 3,
        "log.tensorboard": "true",
        "log.histograms": 10,
        "log.activations": "true",
        "log.gradients": "true",
        "eval.every": 20,
        "checkpoint.every": 20,
        "checkpoint.keep": 0,
        "sample.prompts": '["2 + ", "12 - "]',
        "sample.max_tokens": 8,
    }
    sets = [word for key, value in sets.items() for word in ("--set", f"{key}={value}")]
    return ["train", "configs/debug.toml", "--out", out, *sets, *more]


def lines_of(out):
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


def expected_scalars(out):
    """Returns the expected contents, from metrics.jsonl: step, f32 value and time by tag."""
    curves = {}
    for line in lines_of(out):
        numbers = {
            key: math.nan if value is None else value
            for key, value in line.items()
            if key not in ("step", "time", "parameter")
        }
        values = {}
        for key, value in numbers.items():
            tag, factor = TAGS.get(key, (key, 1))
            values[tag] = value * factor
        for key, tag in SHARES.items():
            if key in numbers and "step_s" in numbers:
                values[tag] = 100 * numbers[key] / numbers["step_s"]
        for tag, value in values.items():
            curves.setdefault(tag, []).append((line["step"], np.float32(value), line.get("time")))
    return curves


def same(found, expected):
    return len(found) == len(expected) and all(
        step == wanted_step
        and np.array_equal(np.float32(value), wanted, equal_nan=True)
        and (wanted_time is None or math.isclose(at, wanted_time, abs_tol=1e-6))
        for (step, value, at), (wanted_step, wanted, wanted_time) in zip(found, expected)
    )


def compare_scalars(what, found, expected):
    check(set(found) == set(expected), f"{what}: tags {sorted(set(found) ^ set(expected))}")
    for tag in set(found) & set(expected):
        check(same(found[tag], expected[tag]), f"{what}: {tag}: {found[tag]} for {expected[tag]}")
    print(f"  {what}: {len(expected)} tags, {sum(map(len, expected.values()))} values")


def read(folder):
    """Returns the folder's contents as read by the accumulator of TensorBoard's Python interface."""
    events = event_accumulator.EventAccumulator(str(folder), EVERYTHING, purge_orphaned_data=True)
    return events.Reload()


def check_scalars(what, out, folder):
    """Returns the folder's contents as read by each of TensorBoard's two accumulators."""
    expected, events = expected_scalars(out), read(folder)
    found = {tag: [(e.step, e.value, e.wall_time) for e in events.Scalars(tag)] for tag in events.Tags()["scalars"]}
    compare_scalars(f"{what}, EventAccumulator", found, expected)
    events = plugin_event_accumulator.EventAccumulator(str(folder), {"tensors": 0}, purge_orphaned_data=True)
    events.Reload()
    found = {
        tag: [(e.step, tensor_util.make_ndarray(e.tensor_proto), e.wall_time) for e in events.Tensors(tag)]
        for tag in events.PluginTagToContent("scalars")
    }
    compare_scalars(f"{what}, the server's accumulator", found, expected)


def check_texts(out, folder):
    """Returns the texts of samples.jsonl, the prompts of a step in their order."""
    samples, expected, found = [json.loads(line) for line in (out / "samples.jsonl").open()], {}, {}
    for sample in samples:
        of_step = [other for other in samples if other["step"] == sample["step"]]
        tag = f"samples/{of_step.index(sample)}"
        expected.setdefault(tag, []).append((sample["step"], sample["prompt"] + sample["text"]))
    events = read(folder)
    for tag in events.PluginTagToContent("text"):
        for event in events.Tensors(tag):
            text = tensor_util.make_ndarray(event.tensor_proto).item().decode()
            text = "\n".join(line.removeprefix("    ") for line in text.split("\n"))
            found.setdefault(tag, []).append((event.step, text))
    check(found == expected, f"texts: {found} for {expected}")
    print(f"  {len(samples)} texts")


def flat(value, key=""):
    if isinstance(value, dict):
        return {k: v for name, inner in value.items() for k, v in flat(inner, f"{key}.{name}" if key else name).items()}
    return {key: value}


def check_settings(out, folder):
    content = read(folder).PluginTagToContent("hparams")["_hparams_/session_start_info"]
    settings = plugin_data_pb2.HParamsPluginData.FromString(content).session_start_info.hparams
    expected = flat(tomllib.loads((out / "config.toml").read_text()))
    check(set(settings) == set(expected), f"hparams: {set(settings) ^ set(expected)}")
    for key, value in expected.items():
        kind = settings[key].WhichOneof("kind")
        found = getattr(settings[key], kind)
        is_list = isinstance(value, list)
        check(is_list or found == value, f"hparams: {key} is {found}, not {value}")
    print(f"  {len(expected)} settings")


def weights_of(checkpoint, scratch):
    """Returns the names and values of a checkpoint."""
    kiln("convert", "--checkpoint", checkpoint, "--out", scratch)
    weights = {}
    for file in scratch.rglob("*.safetensors"):
        data = file.read_bytes()
        length = int.from_bytes(data[:8], "little")
        for name, entry in json.loads(data[8 : 8 + length]).items():
            if name != "__metadata__" and "optim" not in file.name and entry["dtype"] == "F32":
                start, end = (8 + length + offset for offset in entry["data_offsets"])
                weights[name] = np.frombuffer(data[start:end], np.float32)
    return weights


def check_histograms(out, folder, steps, checkpoint=None):
    events = read(folder)
    tags = events.Tags()["histograms"]
    modules = sorted(tag.removeprefix("weights/") for tag in tags if tag.startswith("weights/"))
    check(set(tags) == {f"{what}/{module}" for what in ("weights", "gradients") for module in modules}, str(tags))
    norms = {line["step"]: line for line in lines_of(out) if "grad_norm" in line}
    compared = 0
    for tag in tags:
        found = {event.step: event.histogram_value for event in events.Histograms(tag)}
        check(sorted(found) == steps, f"{tag}: steps {sorted(found)}, not {steps}")
        for step, histogram in found.items():
            check(sum(histogram.bucket) == histogram.num > 0, f"{tag}: counts of step {step}")
            what, module = tag.split("/")
            if what == "gradients" and step in norms:
                norm = norms[step][f"grad_norm.{module}"]
                check(math.isclose(math.sqrt(histogram.sum_squares), norm, rel_tol=1e-6), f"{tag}: norm of step {step}")
                compared += 1
    check(compared > 0, "no step has both gradients and their norm")
    if checkpoint is not None:
        weights = weights_of(checkpoint, ROOT / f"full-{out.name}")
        step = int(re.search(r"\d+$", checkpoint.name)[0])
        for module in modules:
            prefixes = {"embed": ("embed_tokens.",), "head": ("norm.", "lm_head.")}.get(module, (f"{module}.",))
            values = np.concatenate([v for name, v in weights.items() if name.startswith(prefixes)]).astype(float)
            found = {event.step: event.histogram_value for event in events.Histograms(f"weights/{module}")}[step]
            check((found.min, found.max) == (values.min(), values.max()), f"{module}: ends")
            check(found.num == len(values), f"{module}: {found.num} values, not {len(values)}")
            check(math.isclose(found.sum, values.sum(), rel_tol=1e-9, abs_tol=1e-9), f"{module}: sum")
            check(math.isclose(found.sum_squares, (values**2).sum(), rel_tol=1e-9), f"{module}: squares")
            for before, limit, count in zip(found.bucket_limit, found.bucket_limit[1:], found.bucket[1:]):
                # A limit belongs to the bucket further from 0.
                inside = values >= before if before > 0 else values > before
                inside &= values <= limit if limit < 0 else values < limit
                check(count == inside.sum(), f"{module}: {count} values from {before} to {limit}, not {inside.sum()}")
    print(f"  {len(tags)} histograms of {len(steps)} steps, {compared} with norms")


def check_server(logdir, runs):
    """Checks the server's answers to the browser, with each of its loaders."""
    for loader in ("false", "true"):
        command = [sys.executable, "-m", "tensorboard.main", "--logdir", logdir, "--port", "0", "--load_fast", loader]
        command += ["--samples_per_plugin", "scalars=100000,text=1000,histograms=1000"]
        server = subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True)
        try:
            url = next((m[0] for m in (re.search(r"http://\S+:\d+/", line) for line in server.stderr) if m), None)
            if url is None:
                check(False, f"the server with --load_fast={loader} does not start")
                continue

            def get(path, body=None):
                data = None if body is None else json.dumps(body).encode()
                request = urllib.request.Request(url + path, data, {"Content-Type": "application/json"})
                return json.loads(urllib.request.urlopen(request).read())

            deadline = time.monotonic() + 60
            while set(get("data/plugin/scalars/tags")) < set(runs) and time.monotonic() < deadline:
                time.sleep(0.2)
            tags = get("data/plugin/scalars/tags")
            for run, out in runs.items():
                expected = expected_scalars(out)
                found = {}
                for tag in tags.get(run, {}):
                    query = urllib.parse.urlencode({"run": run, "tag": tag})
                    points = get(f"data/plugin/scalars/scalars?{query}")
                    found[tag] = [(s, math.nan if v in (None, "NaN") else v, at) for at, s, v in points]
                compare_scalars(f"server, --load_fast={loader}, {run}", found, expected)
                for plugin in ("histograms", "text"):
                    check(run in get(f"data/plugin/{plugin}/tags"), f"--load_fast={loader}: no {plugin} of {run}")
            experiment = get("data/plugin/hparams/experiment", {"experimentName": ""})
            names = {info["name"] for info in experiment["hparamInfos"]}
            check({"train.steps", "optim.lr"} <= names, f"--load_fast={loader}: settings {names}")
        finally:
            server.send_signal(signal.SIGTERM)
            server.wait()


def check_exports(out):
    expected = {}
    for line in lines_of(out):
        expected.setdefault(line["step"], {}).update(line)
    rows = list(csv.DictReader(io.StringIO(kiln("metrics", out, "--csv"))))
    check([int(row["step"]) for row in rows] == list(expected), "csv: steps")
    for row, values in zip(rows, expected.values()):
        check(set(row) >= set(values), f"csv: columns {set(values) - set(row)}")
        for key, cell in row.items():
            value = values.get(key)
            is_same = cell == "" if value is None else cell == value or float(cell) == value
            check(is_same, f"csv: {key} is {cell}, not {value}")
    print(f"  csv: {len(rows)} rows, {len(rows[0])} columns")

    boards = ROOT / "boards"
    kiln("metrics", out, "--tensorboard", boards)
    check_scalars("export --tensorboard", out, boards / out.name)
    check_settings(out, boards / out.name)
    check_texts(out, boards / out.name)


def main():
    shutil.rmtree(ROOT, ignore_errors=True)
    ROOT.mkdir(parents=True)
    out = ROOT / "fox"
    folder = out / "tensorboard"

    print("a run of 40 steps")
    kiln(*train_arguments(out, 40))
    check_scalars("new", out, folder)
    check_settings(out, folder)
    check_texts(out, folder)
    check_histograms(out, folder, [10, 20, 30, 40], out / "checkpoints/fsdp_cpt40")

    print("resumed to step 60")
    kiln(*train_arguments(out, 60, "--resume", "latest"))
    check_scalars("resumed", out, folder)
    check_histograms(out, folder, [10, 20, 30, 40, 50, 60])

    print("resumed from step 20 to step 50, without the evaluations of the first run")
    more = ["--resume", out / "checkpoints/fsdp_cpt20", "--set", "eval.every=0", "--set", "optim.lr=1e-3"]
    kiln(*train_arguments(out, 50, *more))
    check(not any("val_loss" in line and line["step"] == 40 for line in lines_of(out)), "step 40 was not cut")
    check_scalars("resumed from step 20", out, folder)
    check_texts(out, folder)
    check_histograms(out, folder, [10, 20, 30, 40, 50])

    print("killed and restarted")
    killed = ROOT / "killed"
    run = subprocess.Popen([KILN, *map(str, train_arguments(killed, 100000))], stdout=subprocess.DEVNULL)
    deadline = time.monotonic() + 120
    while not (killed / "checkpoints/fsdp_cpt40").is_dir() and time.monotonic() < deadline:
        time.sleep(0.05)
    run.kill()
    run.wait()
    last = lines_of(killed)[-1]["step"]
    kiln(*train_arguments(killed, last + 5, "--resume", "latest"))
    check_scalars("killed", killed, killed / "tensorboard")

    print("HYBRID_SHARD on 4 ranks, in a folder of several runs")
    boards = ROOT / "all"
    more = ["--ranks", "4", "--set", "shard.strategy=HYBRID_SHARD", "--set", "shard.shard_size=2"]
    more += ["--set", f"log.tensorboard={boards}"]
    hybrid = ROOT / "hybrid"
    kiln(*train_arguments(hybrid, 20, *more))
    check_scalars("hybrid", hybrid, boards / "hybrid")
    check_histograms(hybrid, boards / "hybrid", [10, 20], hybrid / "checkpoints/fsdp_cpt20")

    print("TensorBoard's server")
    check_server(ROOT, {"fox/tensorboard": out, "killed/tensorboard": killed, "all/hybrid": hybrid})

    print("exports")
    check_exports(out)
    print(f"{len(failures)} wrong\nFAIL" if failures else "PASS")
    return 1 if failures else 0


if __name__ == "__main__":
    KILN, ROOT = sys.argv[1], pathlib.Path(sys.argv[2]).resolve()
    sys.exit(main())
