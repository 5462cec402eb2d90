//! Simulated answers of the processes of made-up runs.

use std::fs;
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use kiln_collectives::{Activity, DType, Label, Operation, Phase, Record, Span, StepTimeline};
use kiln_observe::status::{Call, Look, ProcessLook, RankLook, State};

const LAYERS: usize = 12;

/// Number of looks so far.
static LOOKS: AtomicU64 = AtomicU64::new(0);

fn name(folder: &Path) -> &str {
    folder.file_name().and_then(|name| name.to_str()).unwrap_or_default()
}

fn ranks(folder: &Path) -> usize {
    match name(folder) {
        "large-64-ranks" => 64,
        "one-rank" => 1,
        _ => 4,
    }
}

/// Returns a look at the made-up run at this moment.
pub fn look_at(folder: &Path) -> Result<Look, String> {
    let (state, text) = match name(folder) {
        "baseline-adamw" | "one-rank" => (State::Healthy, "no rank has been waiting longer than usual"),
        "large-64-ranks" => (
            State::Slow,
            "rank 41 was late for 57 of the last 96 collectives; the other ranks waited for it 12 % of the time",
        ),
        "muon" | "long-context" => (State::Finished, "all steps are done"),
        "killed" => {
            (State::Dead, "its processes are gone and have reported no error: it was killed after step 700")
        }
        _ => return Err("its processes cannot be reached from this machine".to_owned()),
    };
    let is_live = !state.is_over();
    let turn = LOOKS.fetch_add(1, Ordering::Relaxed);
    let step = last_step(folder);
    let count = if is_live { ranks(folder) } else { 0 };
    let culprit = 41;
    let rank = |rank: usize| {
        let is_late = rank == culprit;
        let phases = ["forward", "backward", "backward", "optimizer"];
        let phase = phases[(turn as usize + rank / 16) % phases.len()];
        let pending = (!is_late && !rank.is_multiple_of(3)).then(|| Call {
            group: "shard".to_owned(),
            sequence: step.unwrap_or_default() * 40 + 7,
            operation: if phase == "forward" { Operation::AllGather } else { Operation::ReduceScatter },
            module: format!("layers.{}", (turn + rank as u64 / 8) % 12),
            phase: if phase == "forward" { Phase::Forward } else { Phase::Backward },
            seconds: 0.02 + 0.003 * (rank % 7) as f64,
        });
        RankLook {
            rank,
            silent: (rank == 63).then(|| "is on node-7 and cannot be reached from this machine".to_owned()),
            step,
            activity: Some(Activity { name: phase.to_owned(), seconds: 0.04 + 0.001 * rank as f64 }),
            waits_for: if pending.is_some() && count > culprit { vec![culprit] } else { Vec::new() },
            pending,
            last: None,
            bytes: Some(7_900_000_000 + 40_000_000 * (rank as u64 * 37 % 23)),
            peak_bytes: Some(9_800_000_000 + 30_000_000 * (rank as u64 * 17 % 31)),
        }
    };
    Ok(Look {
        run: folder.display().to_string(),
        state,
        text: text.to_owned(),
        culprits: if state == State::Slow { vec![culprit] } else { Vec::new() },
        step,
        steps: None,
        saved: step.map(|step| step / 500 * 500),
        loss: None,
        tokens_per_s: None,
        deadline_s: Some(600.0),
        ranks: (0..count).map(rank).collect(),
        processes: (0..count.div_ceil(8))
            .map(|process| ProcessLook {
                host: format!("node-{process}"),
                process: 4100 + process as i32,
                ranks: (process * 8..count.min(process * 8 + 8)).collect(),
                threads: None,
            })
            .collect(),
    })
}

fn last_step(folder: &Path) -> Option<u64> {
    use std::io::{Read, Seek, SeekFrom};
    let mut file = fs::File::open(folder.join("metrics.jsonl")).ok()?;
    let length = file.metadata().ok()?.len();
    file.seek(SeekFrom::Start(length.saturating_sub(2000))).ok()?;
    let mut text = String::new();
    file.read_to_string(&mut text).ok()?;
    let line = text.lines().rfind(|line| line.ends_with('}') && line.contains("\"loss\""))?;
    serde_json::from_str::<serde_json::Value>(line).ok()?["step"].as_u64()
}

/// Returns a made-up step of every rank of the run.
pub fn timelines_at(folder: &Path) -> Result<Vec<StepTimeline>, String> {
    match look_at(folder)?.state.is_over() {
        true => Err("the run has ended, and its processes with it".to_owned()),
        false => {
            Ok((0..ranks(folder)).map(|rank| timeline(rank, last_step(folder).unwrap_or_default())).collect())
        }
    }
}

/// The progress of a rank's thread through a step.
struct Walk {
    now: f64,
    spans: Vec<Span>,
    records: Vec<Record>,
    bytes: u64,
}

impl Walk {
    fn work(&mut self, activity: &str, module: Option<&str>, seconds: f64, bytes: i64) {
        self.bytes = self.bytes.saturating_add_signed(bytes);
        self.push(activity, module, None, seconds);
    }

    /// Issues a call that ends `seconds` after now, and returns its number.
    fn call(&mut self, operation: Operation, module: &str, phase: Phase, seconds: f64, bytes: u64) -> u64 {
        let sequence = self.records.len() as u64;
        let at = |time: f64| Some(Duration::from_secs_f64(time));
        self.records.push(Record {
            sequence,
            group: "shard".into(),
            operation,
            label: Label::new(module, phase),
            dtype: DType::F32,
            count: bytes as usize / 4,
            bytes_sent: bytes,
            enqueued: at(self.now),
            started: at(self.now + 0.0004),
            finished: at(self.now + seconds),
        });
        sequence
    }

    fn wait(&mut self, activity: &str, module: &str, call: u64, seconds: f64) {
        self.push(activity, Some(module), Some(("shard".to_owned(), call)), seconds);
    }

    fn push(&mut self, activity: &str, module: Option<&str>, waits_for: Option<(String, u64)>, seconds: f64) {
        let start = self.now;
        self.now += seconds;
        let (activity, module) = (activity.to_owned(), module.map(str::to_owned));
        self.spans.push(Span { activity, module, waits_for, start, end: self.now, bytes: self.bytes });
    }
}

fn timeline(rank: usize, step: u64) -> StepTimeline {
    const MIB: i64 = 1 << 20;
    let start = step as f64 * 0.4;
    let mut walk = Walk {
        now: start,
        spans: Vec::new(),
        records: Vec::new(),
        bytes: 5200 * MIB as u64 + (rank as u64 * 37 % 11) * 24 * MIB as u64,
    };
    // One rank is slow, and the others wait for it.
    let is_late = rank == 41;
    let pace = if is_late { 1.0 } else { 0.95 - 0.01 * (rank * 29 % 7) as f64 };
    walk.work("data loading", None, 0.004 * pace, 0);
    for layer in 0..LAYERS {
        let module = format!("layers.{layer}");
        let call = walk.call(Operation::AllGather, &module, Phase::Forward, 0.0032, 28 << 20);
        walk.wait("forward", &module, call, 0.0004 + 0.0085 * (1.0 - pace));
        walk.work("forward", Some(&module), 0.0085 * pace, 310 * MIB);
    }
    for layer in (0..LAYERS).rev() {
        let module = format!("layers.{layer}");
        let call = walk.call(Operation::AllGather, &module, Phase::Backward, 0.0035, 28 << 20);
        walk.wait("backward", &module, call, 0.0005 + 0.016 * (1.0 - pace));
        walk.work("backward", Some(&module), 0.016 * pace, -305 * MIB);
        walk.call(Operation::ReduceScatter, &module, Phase::Backward, 0.007, 28 << 20);
    }
    let call = walk.call(Operation::AllReduce, "norm", Phase::Optimizer, 0.004, 8);
    walk.wait("optimizer", "norm", call, 0.001 + 0.004 * (1.0 - pace));
    walk.work("optimizer", None, 0.03 * pace, 420 * MIB);
    let call = walk.call(Operation::AllReduce, "step", Phase::Loss, 0.002, 64);
    walk.wait("optimizer", "step", call, 0.001 + 0.03 * (1.0 - pace));
    walk.work("log", None, 0.004, -480 * MIB);
    StepTimeline {
        rank,
        // The name of a launcher, which is not the name of the machine.
        node: format!("node{}", rank / 8),
        step,
        start,
        end: walk.now,
        created: 1000.0 + rank as f64 * 0.0001,
        spans: walk.spans,
        records: walk.records,
    }
}
