//! Run folders as a run would write them.

use std::f64::consts::PI;
use std::fmt::Write as _;
use std::fs::{self, File, OpenOptions};
use std::io::{self, BufWriter, Write};
use std::path::{Path, PathBuf};
use std::time::SystemTime;

/// A made-up run.
pub struct MadeUp {
    folder: PathBuf,
    pub goes_on: bool,
    done: u64,
    planned: u64,
    settings: Settings,
    /// Start of its first step, in seconds since 1970.
    began: f64,
}

/// The settings in which runs differ.
#[derive(Clone, Copy)]
struct Settings {
    lr: f64,
    optimizer: &'static str,
    strategy: &'static str,
    context: u64,
    ranks: u64,
    /// The loss at the end.
    floor: f64,
    step_s: f64,
}

/// Creates those runs in `folder` that do not exist yet.
pub fn runs(folder: &Path, large_steps: u64) -> io::Result<Vec<MadeUp>> {
    let base = Settings {
        lr: 3e-3,
        optimizer: "adamw",
        strategy: "FULL_SHARD",
        context: 1024,
        ranks: 4,
        floor: 2.9,
        step_s: 0.42,
    };
    let muon = Settings { lr: 2e-2, optimizer: "muon", floor: 2.7, step_s: 0.47, ..base };
    let grad =
        Settings { lr: 1e-3, strategy: "SHARD_GRAD_OP", context: 2048, floor: 3.05, step_s: 0.55, ..base };
    let large = Settings { lr: 6e-4, ranks: 64, floor: 2.1, step_s: 0.9, ..base };
    [
        ("baseline-adamw", 2400, 4000, true, base),
        ("killed", 700, 4000, false, base),
        ("large-64-ranks", large_steps, large_steps + large_steps / 5, true, large),
        ("long-context", 3000, 3000, false, grad),
        ("muon", 4000, 4000, false, muon),
    ]
    .into_iter()
    .map(|(name, done, planned, goes_on, settings)| {
        let mut run = MadeUp { folder: folder.join(name), goes_on, done, planned, settings, began: 0.0 };
        // Its last line was written a moment ago.
        let now =
            SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).map_or(0.0, |now| now.as_secs_f64());
        run.began = now - run.time_of(done);
        if run.folder.join("run.json").exists() {
            run.done = lines(&run.folder.join("metrics.jsonl"))?;
            run.began = now - run.time_of(run.done);
        } else {
            run.write()?;
        }
        Ok(run)
    })
    .collect()
}

/// Counts the steps written, given that an evaluation line follows every 250th.
fn lines(path: &Path) -> io::Result<u64> {
    let lines = fs::read(path)?.iter().filter(|byte| **byte == b'\n').count() as u64;
    Ok(lines - lines / 251)
}

/// Returns a number from -1 to 1 that looks random but depends only on `seed`.
fn noise(seed: u64) -> f64 {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ 0xd1b5_4a32_d192_ed03;
    state = (state ^ (state >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    state = (state ^ (state >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    ((state ^ (state >> 31)) >> 11) as f64 / (1u64 << 52) as f64 - 1.0
}

impl MadeUp {
    /// Seconds from the beginning of the run to the end of a step. The run pauses for half an hour in the
    /// middle.
    fn time_of(&self, step: u64) -> f64 {
        let rest = if step * 5 > self.planned * 2 { 1800.0 } else { 0.0 };
        step as f64 * self.settings.step_s + rest
    }

    fn write(&self) -> io::Result<()> {
        fs::create_dir_all(&self.folder)?;
        let Settings { lr, optimizer, strategy, context, ranks, .. } = self.settings;
        let planned = self.planned;
        let config = format!(
            "[model]\npreset = \"10m\"\ncontext = {context}\n[train]\nsteps = {planned}\nseed = 1337\nbatch = 32\n\
             [optim]\nname = \"{optimizer}\"\nlr = {lr}\nwarmup = 200\nclip = 1.0\n[shard]\nstrategy = \"{strategy}\"\n\
             [run]\nranks = {ranks}\n[data]\npath = \"tinystories\"\n[eval]\nevery = 250\n[log]\nevery = 1\n"
        );
        fs::write(self.folder.join("config.toml"), config)?;
        let mut metrics = BufWriter::new(File::create(self.folder.join("metrics.jsonl"))?);
        (1..=self.done).try_for_each(|step| metrics.write_all(self.line(step).as_bytes()))?;
        let is_killed = self.folder.ends_with("killed");
        if is_killed {
            metrics.write_all(b"{\"step\":701,\"time\":17800")?;
        }
        metrics.flush()?;
        self.write_events()?;
        self.write_samples()?;
        fs::write(self.folder.join("run.json"), "{}")
    }

    fn write_events(&self) -> io::Result<()> {
        let mut events = String::new();
        let mut add = |step: u64, kind: &str, text: &str| {
            let time = self.began + self.time_of(step);
            let event = serde_json::json!({ "time": time, "step": step, "kind": kind, "text": text });
            let _ = writeln!(events, "{event}");
        };
        let ranks = self.settings.ranks;
        add(0, "start", &format!("training begins with {ranks} ranks"));
        add(
            self.done / 8,
            "skipped",
            "the gradient was not finite: the update was skipped, the loss scale halved",
        );
        for part in 1..=4 {
            let step = self.done * part / 4;
            add(step, "checkpoint", &format!("saved in checkpoints/fsdp_cpt{step}"));
            if part == 2 {
                add(step, "stop", "stopped by SIGTERM after a checkpoint");
                add(step, "resume", &format!("goes on from fsdp_cpt{step} with {ranks} ranks"));
            }
        }
        if !self.goes_on && self.done == self.planned {
            add(self.done, "end", "all steps are done");
        }
        fs::write(self.folder.join("events.jsonl"), events)
    }

    fn write_samples(&self) -> io::Result<()> {
        const TEXTS: [&str; 4] = [
            " the the and a was of it it to the, the a. the and and",
            " a little girl. She was a big and she was the park. The dog was very and said the ball.",
            " a little girl named Lily. She loved to play outside in the park. One day, she saw a big dog.",
            " a little girl named Lily who loved to paint. One morning she found a blue bird on her window. \
             \"Hello, little bird,\" said Lily. \"Would you like to be in my picture?\" The bird sang a song, and Lily \
             painted all day long.",
        ];
        let mut samples = String::new();
        for (part, text) in (1..).zip(TEXTS) {
            for (prompt, text) in
                [("Once upon a time, there was", text), ("The capital of France", " is a city of")]
            {
                let step = self.done * part / 4;
                let _ = writeln!(
                    samples,
                    "{}",
                    serde_json::json!({ "step": step, "prompt": prompt, "text": text })
                );
            }
        }
        fs::write(self.folder.join("samples.jsonl"), samples)
    }

    /// Performs one more step.
    pub fn go_on(&mut self) -> io::Result<()> {
        self.done += 1;
        let mut metrics = OpenOptions::new().append(true).open(self.folder.join("metrics.jsonl"))?;
        metrics.write_all(self.line(self.done).as_bytes())
    }

    /// Returns the line that the run writes after a step.
    fn line(&self, step: u64) -> String {
        let Settings { lr, context, ranks, floor, step_s, .. } = self.settings;
        let seed = step * 16 + ranks * 7 + context + (lr * 1e6) as u64;
        let at = step as f64 / self.planned as f64;
        let curve = floor + (9.7 - floor) * (1.0 + 400.0 * at).powf(-0.62);
        let loss = curve + 0.09 * noise(seed);
        let warm = (step as f64 / 200.0).min(1.0);
        let lr = lr * warm * (0.55 + 0.45 * (PI * at.min(1.0)).cos());
        let slow = if noise(seed + 1) > 0.995 { 1.6 } else { 1.0 };
        let took = step_s * slow * (1.0 + 0.04 * noise(seed + 2));
        let tokens_a_step = 32 * context * ranks / 4;
        let time = self.began + self.time_of(step);
        let [data, forward, backward, optimizer, other] =
            [0.01, 0.27, 0.48, 0.09, 0.02].map(|part| part * step_s);
        let wait = took - data - forward - backward - optimizer - other;
        let norm = 0.4 + 2.0 / (1.0 + 80.0 * at) + 0.1 * noise(seed + 3).abs();
        let mfu = 0.41 * step_s / took;
        let mut line = format!(
            "{{\"step\":{step},\"time\":{time:.3},\"loss\":{loss:.5},\"grad_norm\":{norm:.4},\"lr\":{lr:.6e},\
             \"tokens_per_s\":{:.1},\"tokens\":{},\"mfu\":{mfu:.4},\"tflops\":{:.2},\"peak_bytes\":{},\
             \"step_s\":{took:.5},\"data_s\":{data:.5},\"forward_s\":{forward:.5},\"backward_s\":{backward:.5},\
             \"optimizer_s\":{optimizer:.5},\"other_s\":{other:.5},\"wait_s\":{wait:.5}}}\n",
            tokens_a_step as f64 / took,
            tokens_a_step * step,
            mfu * 312.0 * ranks as f64,
            9_800_000_000u64 + (noise(seed / 97) * 1e8) as u64,
        );
        if step.is_multiple_of(250) {
            let val_loss = curve + 0.06 + 0.01 * noise(seed + 4);
            let _ = writeln!(
                line,
                "{{\"step\":{step},\"time\":{time:.3},\"val_loss\":{val_loss:.5},\"val_tokens\":65536,\"answer_loss\":{:.5}}}",
                val_loss + 0.3
            );
        }
        line
    }
}
