"""Reads traces with the Python package `perfetto` and its trace_processor, and holds them against what Kiln's
recorders have summed up by themselves and against `kiln trace summary --json`.

    python check.py [--addr HOST:PORT ...] --files TRACE SUMMARY.json ...

Without --addr, the package downloads its trace_processor.
"""

import argparse
import collections
import json
import sys

from google.protobuf import unknown_fields
from perfetto.protos.perfetto.trace import perfetto_trace_pb2
from perfetto.trace_processor import TraceProcessor

# Sums of times may differ by what lies between the beginning of a step and the look at the recorder, at the two ends of
# a trace, and by waits too short for a slice. Calls and bytes must be equal.
SHARE, MICROSECONDS = 0.01, 200

# Slices `s` with the process `p` of their rank.
OF_RANK = """from slice s join process_track t on t.id = s.track_id join process p using (upid)"""

# The totals of a recorder.
KINDS = ("busy_ns", "waited_ns", "calls", "bytes_sent")

# Annotations of the slice `s`.
ARGS = "extract_arg(s.arg_set_id, 'debug.{}')"


def unknown(message):
    """Returns the names of messages that have fields missing from Perfetto's own schema."""
    found = set()
    if len(unknown_fields.UnknownFieldSet(message)) > 0:
        found.add(message.DESCRIPTOR.name)
    for field, value in message.ListFields():
        if field.type == field.TYPE_MESSAGE:
            for part in value if hasattr(value, "add") else [value]:
                found |= unknown(part)
    return found


class Check:
    def __init__(self, path, summary, addr):
        trace = perfetto_trace_pb2.Trace()
        with open(path, "rb") as file:
            trace.ParseFromString(file.read())
        self.failures = 0
        self.expect(not unknown(trace), "all fields are in Perfetto's schema", sorted(unknown(trace)))
        self.summary = json.load(open(summary))
        self.processor = TraceProcessor(trace=path, addr=addr)

    def expect(self, holds, what, seen=""):
        print(f"  {'ok  ' if holds else 'FAIL'} {what} {seen if seen != [] else ''}".rstrip())
        self.failures += not holds

    def rows(self, sql):
        return list(self.processor.query(sql))

    def count(self, sql):
        return self.rows(f"select count(*) as n from ({sql})")[0].n

    def run(self):
        errors = self.rows("select name, value from stats where severity in ('error', 'data_loss') and value > 0")
        self.expect(not errors, "read without errors", [(row.name, row.value) for row in errors])
        self.slices()
        self.flows()
        self.sums()
        self.against_summary()
        self.processor.close()
        return self.failures

    def slices(self):
        total = self.count("select 1 from slice")
        self.expect(total > 0, "slices:", total)
        self.expect(self.count("select 1 from slice where dur < 0") == 0, "every slice ends")
        outside = """select 1 from slice s join slice p on p.id = s.parent_id
            where s.track_id != p.track_id or s.ts < p.ts or s.ts + s.dur > p.ts + p.dur or s.depth != p.depth + 1"""
        self.expect(self.count(outside) == 0, "every slice lies within its parent")
        overlap = """select 1 from slice a join slice b on a.track_id = b.track_id and a.depth = b.depth and a.id < b.id
            where a.dur > 0 and b.dur > 0 and b.ts < a.ts + a.dur and a.ts < b.ts + b.dur"""
        self.expect(self.count(overlap) == 0, "no two slices of one depth overlap")
        nesting = {
            (row.category, row.parent)
            for row in self.rows("""select s.category, coalesce(p.category, '') as parent
                from slice s left join slice p on p.id = s.parent_id""")
        }
        known = {("step", ""), ("phase", "step"), ("phase", ""), ("module", "phase"), ("wait", ""), ("collective", "")}
        self.expect(nesting <= known, "modules lie in phases, and phases in steps", sorted(nesting - known))
        processes = [row.name for row in self.rows("select name from process where name like 'rank %' order by name")]
        self.expect(len(processes) == len(self.summary["steps"][0]["ranks"]), "a process per rank:", len(processes))

    def flows(self):
        arg = lambda slice, name: ARGS.replace("s.", f"{slice}.").format(name)
        # Each wait for a collective of the trace has one arrow, from that collective on the same rank.
        waited = self.count(f"""select 1 from slice w where w.category = 'wait' and exists (
            select 1 from slice c join process_track ct on ct.id = c.track_id
            join process_track wt on wt.id = w.track_id where c.category = 'collective' and ct.upid = wt.upid
            and {arg('c', 'group')} = {arg('w', 'group')} and {arg('c', 'sequence')} = {arg('w', 'sequence')})""")
        flows = self.count("select 1 from flow")
        self.expect(flows == waited and flows > 0, "an arrow for each wait whose collective is there:", flows)
        # Perfetto draws an arrow from the slice that began first.
        right = self.count(f"""select 1 from flow f join slice a on a.id = f.slice_out join slice b on b.id = f.slice_in
            join process_track at on at.id = a.track_id join process_track bt on bt.id = b.track_id
            where at.upid = bt.upid and {arg('a', 'group')} = {arg('b', 'group')}
            and {arg('a', 'sequence')} = {arg('b', 'sequence')}
            and a.category in ('collective', 'wait') and b.category in ('collective', 'wait')
            and a.category != b.category""")
        self.expect(right == flows, "every arrow connects a collective and the wait for it:", right)
        late = self.count(f"""select 1 from flow f
            join slice c on c.id in (f.slice_out, f.slice_in) and c.category = 'collective'
            join slice w on w.id in (f.slice_out, f.slice_in) and w.category = 'wait'
            where c.ts > w.ts + w.dur""")
        self.expect(late == 0, "no wait ends before its collective begins")

    def recorded(self):
        """Returns the recorders' totals by rank, name and kind."""
        sums = collections.Counter()
        for row in self.rows(f"""select p.name as rank, a.flat_key as key, a.int_value as value
            {OF_RANK} join args a using (arg_set_id)
            where s.category = 'step' and a.flat_key like 'debug.recorder%'"""):
            # Perfetto writes underscores for dots.
            key = row.key.removeprefix("debug.recorder_")
            kind = next(kind for kind in KINDS if key.startswith(kind))
            sums[row.rank, kind, key.removeprefix(f"{kind}_")] += row.value
        return sums

    def of_trace(self):
        """Returns the same totals, computed from the slices."""
        sums = collections.Counter()
        arg = ARGS.format
        for row in self.rows(f"""select p.name as rank, {arg('operation')} as operation, count(*) as calls,
            sum({arg('bytes_sent')}) as bytes {OF_RANK} where s.category = 'collective' group by 1, 2"""):
            sums[row.rank, "calls", row.operation] = row.calls
            sums[row.rank, "bytes_sent", row.operation] = row.bytes
        for row in self.rows(f"""select p.name as rank, {arg('activity')} as activity, sum(s.dur) as dur
            {OF_RANK} where s.category = 'wait' group by 1, 2"""):
            sums[row.rank, "waited_ns", row.activity] = row.dur
        for row in self.rows(f"""select p.name as rank, s.name as activity, sum(s.dur) as dur
            {OF_RANK} where s.category = 'phase' group by 1, 2"""):
            waited = sums[row.rank, "waited_ns", row.activity]
            sums[row.rank, "busy_ns", row.activity] = row.dur - waited
        return sums

    def sums(self):
        recorded, traced = self.recorded(), self.of_trace()
        # A reduction over zero bytes sends none, and a sum of none is not written.
        keys = {key for key, value in (recorded | traced).items() if value}
        for kind in ("calls", "bytes_sent"):
            wrong = [(key, recorded[key], traced[key]) for key in keys if key[1] == kind and recorded[key] != traced[key]]
            total = sum(value for key, value in traced.items() if key[1] == kind)
            self.expect(not wrong and total > 0, f"{kind} by rank and operation equal the recorder's, {total} in total", wrong)
        for kind in ("busy_ns", "waited_ns"):
            apart = lambda key: abs(recorded[key] - traced[key])
            bound = lambda key: max(SHARE * recorded[key], MICROSECONDS * 1e3)
            wrong = [(key, recorded[key], traced[key]) for key in keys if key[1] == kind and apart(key) > bound(key)]
            most = max((apart(key) / 1e3 for key in keys if key[1] == kind), default=0)
            self.expect(not wrong, f"{kind} by rank and activity are the recorder's within {most:.1f} us", wrong)

    def against_summary(self):
        waits = {
            row.rank: row.dur
            for row in self.rows(f"""select p.name as rank, sum(s.dur) as dur {OF_RANK}
                where s.category = 'wait' group by 1""")
        }
        summed = collections.Counter()
        for step in self.summary["steps"]:
            for rank in step["ranks"]:
                summed[f"rank {rank['rank']} ({rank['machine']})"] += rank["exposed_s"]
            path = sum(part["seconds"] for part in step["critical_path"])
            near = abs(path - step["seconds"]) <= 1e-3 * step["seconds"] + 50e-6
            self.expect(near, f"the critical path of step {step['step']} is as long as the step:", round(path, 6))
        equal = set(waits) == set(summed) and all(abs(waits[rank] / 1e9 - summed[rank]) < 1e-6 for rank in waits)
        self.expect(equal, "`kiln trace summary` has the same waits")


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--addr", nargs="+", default=[None])
    parser.add_argument("--files", nargs="+", required=True)
    arguments = parser.parse_args()
    failures = 0
    pairs = list(zip(arguments.files[::2], arguments.files[1::2]))
    # A trace_processor reads one trace.
    addresses = arguments.addr * len(pairs) if arguments.addr == [None] else arguments.addr
    for (path, summary), addr in zip(pairs, addresses, strict=True):
        print(path)
        failures += Check(path, summary, addr).run()
    sys.exit(failures > 0)


main()
