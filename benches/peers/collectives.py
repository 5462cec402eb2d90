#!/usr/bin/env python3
"""Time Kiln's collectives and another system's, alternating within one run.

    benches/peers/collectives.py gloo      Kiln's processes against PyTorch's gloo
    benches/peers/collectives.py memcpy    Kiln's threads against plain copies of as many bytes

Both systems stay up throughout. A pair is one sample of Kiln and one of the other; the ratio of a
pair is the other's time over Kiln's, so more is better, and the table has the median over pairs.
The run passes if every line reaches the bar and the system that is not being timed stays almost idle.
"""

import argparse
import datetime
import functools
import json
import os
import pathlib
import platform
import shlex
import socket
import statistics
import subprocess
import sys
import time

ROOT = pathlib.Path(__file__).resolve().parents[2]
KILN = ROOT / "target/release/collectives_peer"
PYTHON = ROOT / "target/peers/bin/python"
SIZES = [1 << 10, 16 << 10, 256 << 10, 1 << 20, 4 << 20, 16 << 20, 64 << 20]
# Maximum share of one core that a system may use while the other is timed.
IDLE_LIMIT = 0.05


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class System:
    """The processes of one system; rank 0 takes commands."""

    def __init__(self, name, commands):
        self.name = name
        self.processes = []
        for rank, command in enumerate(commands):
            # Only rank 0 reads commands and answers.
            pipe = subprocess.PIPE if rank == 0 else subprocess.DEVNULL
            environment = dict(os.environ, OMP_NUM_THREADS="1")
            self.processes.append(
                subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, env=environment)
            )
        self.command = " ".join(shlex.quote(str(word)) for word in commands[0])

    def seconds(self, op, size, iterations):
        """Returns the seconds per iteration of the slowest rank."""
        rank0 = self.processes[0]
        try:
            rank0.stdin.write(f"{op} {size} {iterations}\n")
            rank0.stdin.flush()
        except BrokenPipeError:
            pass
        line = rank0.stdout.readline()
        if not line:
            sys.exit(f"{self.name} stopped; see above. It was started with\n{self.command}")
        answer = json.loads(line)
        if "error" in answer:
            sys.exit(f"{self.name}: {answer['error']}")
        return answer["seconds_per_iteration"]

    def processor_seconds(self):
        """Returns the processor time that all processes have used so far."""
        ticks = 0
        for process in self.processes:
            stat = pathlib.Path(f"/proc/{process.pid}/stat").read_text()
            # The name may contain spaces; times are fields 14 and 15, counted from 1.
            fields = stat.rpartition(")")[2].split()
            ticks += int(fields[11]) + int(fields[12])
        return ticks / os.sysconf("SC_CLK_TCK")

    def stop(self):
        """Closes the input, which ends the ranks, and terminates those that do not end."""
        try:
            self.processes[0].stdin.close()
        except BrokenPipeError:
            pass
        for process in self.processes:
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.terminate()
                process.wait()


def kiln(binary, backend, ranks):
    words = [binary, "--backend", backend, "--ranks", ranks]
    if backend == "local":
        commands = [words]
    else:
        port = free_port()
        commands = [words + ["--rank", rank, "--port", port] for rank in range(ranks)]
    return System(f"kiln {backend}", [[str(word) for word in command] for command in commands])


def gloo(python, ranks):
    script = pathlib.Path(__file__).with_name("gloo_collectives.py")
    port = free_port()
    words = [python, script, "--ranks", ranks, "--port", port]
    commands = [words + ["--rank", rank] for rank in range(ranks)]
    return System("gloo", [[str(word) for word in command] for command in commands])


def iterations_for(size):
    """Returns the number of iterations: enough for samples of a few milliseconds, the same for both systems."""
    return max(4, min(300, (96 << 20) // size))


class Idleness:
    """Processor time that each system used while the other was timed."""

    def __init__(self):
        self.used = {}
        self.waited = {}

    def watch(self, system, run):
        before, start = system.processor_seconds(), time.monotonic()
        result = run()
        used = system.processor_seconds() - before
        self.used[system.name] = self.used.get(system.name, 0) + used
        self.waited[system.name] = self.waited.get(system.name, 0) + time.monotonic() - start
        return result

    def shares(self):
        return {name: used / self.waited[name] for name, used in self.used.items()}


class Line:
    """One row of the table."""

    def __init__(self, ranks, op, size, ours, theirs):
        self.ranks, self.op, self.size = ranks, op, size
        self.ours, self.theirs = statistics.median(ours), statistics.median(theirs)
        ratios = [their / our for our, their in zip(ours, theirs)]
        self.ratio, self.low, self.high = statistics.median(ratios), min(ratios), max(ratios)

    def cells(self, bar):
        return [
            str(self.ranks),
            self.op,
            size_text(self.size),
            time_text(self.ours),
            time_text(self.theirs),
            f"{self.size / self.ours / 1e9:.3g}",
            f"{self.size / self.theirs / 1e9:.3g}",
            f"{self.ratio:.2f}",
            f"{self.low:.2f} to {self.high:.2f}",
            "yes" if self.ratio >= bar else "no",
        ]


def size_text(size):
    for unit, text in [(1 << 20, "MiB"), (1 << 10, "KiB")]:
        if size % unit == 0:
            return f"{size // unit} {text}"
    return f"{size} B"


def time_text(seconds):
    return f"{seconds * 1e3:.3f} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.1f} µs"


def measure(arguments, ranks, idleness):
    """Measures the lines of one world size."""
    ours = kiln(arguments.kiln, arguments.backend, ranks)
    theirs = ours if arguments.peer == "memcpy" else gloo(arguments.python, ranks)
    ops = ["all_gather"] if arguments.peer == "memcpy" else ["all_gather", "reduce_scatter"]
    lines = []
    try:
        for op in ops:
            their_op = "memcpy" if arguments.peer == "memcpy" else op
            for size in arguments.sizes:
                iterations = iterations_for(size)
                turns = [(ours, theirs, op), (theirs, ours, their_op)]
                samples = ([], [])
                # The first pair allocates the buffers and checks the results. It is not counted.
                for pair in range(-1, arguments.pairs):
                    for times, (system, other, name) in zip(samples, turns):
                        count = iterations if pair >= 0 else 1
                        run = functools.partial(system.seconds, name, size, count)
                        if pair < 0:
                            run()
                        elif system is other:
                            times.append(run())
                        else:
                            times.append(idleness.watch(other, run))
                lines.append(Line(ranks, op, size, *samples))
                print_row(lines[-1].cells(arguments.at_least))
    finally:
        ours.stop()
        theirs.stop()
    return lines


HEAD = ["ranks", "operation", "tensor", "kiln", "{peer}"]
HEAD += ["kiln GB/s", "{peer} GB/s", "ratio", "range", "≥ {bar}"]
WIDTHS = [5, 14, 8, 11, 11, 9, 11, 6, 14, 6]


def print_row(cells):
    print("  ".join(cell.rjust(width) for cell, width in zip(cells, WIDTHS)), flush=True)


def head(arguments):
    return [text.format(peer=arguments.peer, bar=f"{arguments.at_least:g}") for text in HEAD]


def processor():
    try:
        for line in pathlib.Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def peer_version(arguments):
    if arguments.peer == "memcpy":
        return "copies between buffers of the same process, one thread per rank"
    show = "import torch; print('gloo of PyTorch', torch.__version__)"
    return subprocess.check_output([arguments.python, "-c", show], text=True).strip()


def summary(arguments, lines, idleness):
    """Returns the closing sentences, and True if the run passed."""
    missed = [line for line in lines if line.ratio < arguments.at_least]
    busy = {name: share for name, share in idleness.shares().items() if share > IDLE_LIMIT}
    sentences = [
        f"While the other was timed, {name} used {share:.1%} of one core."
        for name, share in idleness.shares().items()
    ]
    if busy:
        sentences.append(f"That is more than {IDLE_LIMIT:.0%}: the comparison is not fair.")
    sentences.append(
        f"{len(lines) - len(missed)} of {len(lines)} lines reach a median ratio of "
        f"{arguments.at_least:g}, the bar."
    )
    passed = not missed and not busy
    sentences.append("PASS" if passed else "FAIL")
    return sentences, passed


def report(arguments, lines, sentences):
    peer = arguments.peer
    rows = [head(arguments), ["---"] * len(HEAD)]
    rows += [line.cells(arguments.at_least) for line in lines]
    table = "\n".join("| " + " | ".join(row) + " |" for row in rows)
    command = " ".join(["benches/peers/collectives.py", *map(shlex.quote, sys.argv[1:])])
    backend = arguments.backend
    return f"""# Collectives: Kiln's `{backend}` backend and {peer}

{datetime.date.today().isoformat()}, {os.cpu_count()} cores of {processor()}. Other side: \
{peer_version(arguments)}.

    {command}

f32; `tensor` is the full tensor: output of all-gather, input of reduce-scatter. Times are medians \
of {arguments.pairs} alternating samples per system; a sample is the time per iteration of the \
slowest rank. GB/s is the full tensor over that time. `ratio` is the median over the pairs of \
{peer}'s time ÷ Kiln's.

{table}

{"  ".join(sentences[:-1])}

**{sentences[-1]}**
"""


def numbers(text):
    return [int(word) for word in text.split(",")]


def parse():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("peer", choices=["gloo", "memcpy"], help="what to compare with")
    add("--ranks", type=numbers, default=[2, 4], help="world sizes (default 2,4)")
    add(
        "--sizes",
        type=numbers,
        help="bytes of the full tensor (default 1 KiB to 64 MiB; 64 MiB for memcpy)",
    )
    add("--pairs", type=int, default=5, help="samples per system and line (default 5)")
    add("--at-least", type=float, help="the bar (default 2.0 for gloo, 0.7 for memcpy)")
    add(
        "--backend",
        choices=["tcp", "sockets", "local"],
        help="Kiln's backend (default tcp; sockets is tcp between ranks that do not read each "
        "other's memory; memcpy supports local only)",
    )
    add(
        "--kiln",
        type=pathlib.Path,
        default=KILN,
        help=f"Kiln's side (default {KILN.relative_to(ROOT)})",
    )
    add("--report", type=pathlib.Path, help="also write the table to this Markdown file")
    arguments = parser.parse_args()
    memcpy = arguments.peer == "memcpy"
    if memcpy and arguments.backend not in (None, "local"):
        parser.error("memcpy is compared with --backend local")
    if arguments.pairs < 1:
        parser.error("--pairs must be at least 1")
    arguments.backend = arguments.backend or ("local" if memcpy else "tcp")
    arguments.sizes = arguments.sizes or ([64 << 20] if memcpy else SIZES)
    if arguments.at_least is None:
        arguments.at_least = 0.7 if memcpy else 2.0
    arguments.python = os.environ.get("PEER_PYTHON", PYTHON)
    if not arguments.kiln.exists():
        parser.error(
            f"{arguments.kiln} is missing; build it with\n"
            "cargo build --release -p kiln-benches --bin collectives_peer"
        )
    if not memcpy and not pathlib.Path(arguments.python).exists():
        parser.error(
            f"{arguments.python} is missing; run benches/peers/setup.sh or set PEER_PYTHON"
        )
    return arguments


def main():
    arguments = parse()
    idleness = Idleness()
    print_row(head(arguments))
    lines = [line for ranks in arguments.ranks for line in measure(arguments, ranks, idleness)]
    sentences, passed = summary(arguments, lines, idleness)
    print("\n".join(sentences))
    if arguments.report:
        arguments.report.write_text(report(arguments, lines, sentences))
    sys.exit(0 if passed else 1)


if __name__ == "__main__":
    main()
