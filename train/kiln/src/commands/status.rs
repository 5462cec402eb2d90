//! `kiln status`: the state of a live run from its processes, of a starting run (`meeting.rs`) from the ranks that have
//! arrived, and of an ended run (`ended.rs`) from its files.

pub(crate) mod ended;
mod meeting;

use std::io::{self, IsTerminal, Write, stdout};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use clap::Args;

use crate::error::{CommandError, Result};
use kiln_observe::ask::ask_all;
use kiln_observe::run::find_runs;
use kiln_observe::status::{Look, LookAt, State, look, summary, text};
use kiln_train::process::output::{eprint_line, print_line, printable};
use kiln_train::run::{Progress, progress};

const EVERY: Duration = Duration::from_secs(1);

/// Arguments of `kiln status`.
#[derive(Args, Clone, Debug)]
pub struct StatusArgs {
    /// Run folder, or a folder of run folders.
    run: PathBuf,
    /// Update every second until the run ends.
    #[arg(long)]
    follow: bool,
    /// Show the stack of every thread.
    #[arg(long)]
    stacks: bool,
    /// Print JSON, one line per update.
    #[arg(long)]
    json: bool,
}

impl StatusArgs {
    /// Prints the status of the run, once or repeatedly. Returns the exit code: 1 if the run needs attention.
    pub fn run(&self) -> Result<u8> {
        let redraws = self.follow && !self.json && stdout().is_terminal();
        let mut is_first = true;
        loop {
            let begun = Instant::now();
            let look = match look_at(&self.run, self.stacks) {
                Ok(look) => look,
                // A folder that is not a run may contain some.
                Err(error) => match find_runs(std::slice::from_ref(&self.run)) {
                    Ok(runs) if runs != [self.run.clone()] => return self.list(&runs),
                    _ => return Err(error),
                },
            };
            let text = match self.json {
                true => {
                    serde_json::to_string(&look).map_err(|error| CommandError::usage(error.to_string()))?
                }
                false => text(&look),
            };
            let between = match (redraws, is_first || self.json) {
                // Clears the terminal and moves to its top left corner.
                (true, _) => "\x1b[H\x1b[2J",
                (false, true) => "",
                (false, false) => "\n",
            };
            if let Err(error) = show(between, &text) {
                // A reader that has closed the pipe is not an error.
                if error.kind() != io::ErrorKind::BrokenPipe {
                    eprint_line(&format!("error: cannot write to standard output: {error}"));
                }
                return Ok(1);
            }
            if !self.follow || look.state.is_over() {
                return Ok(u8::from(look.state.is_bad()));
            }
            is_first = false;
            thread::sleep(EVERY.saturating_sub(begun.elapsed()));
        }
    }
}

impl StatusArgs {
    /// Prints one line for each of `runs`. Returns the exit code: 1 if one of them needs attention.
    fn list(&self, runs: &[PathBuf]) -> Result<u8> {
        if self.follow || self.stacks {
            let (runs, first) = (self.run.display(), runs[0].display());
            return Err(CommandError::usage(format!(
                "{runs} is a folder of runs; --follow and --stacks need one, such as {first}"
            )));
        }
        let mut code = 0;
        for run in runs {
            let look = match look_at(run, false) {
                Ok(look) => look,
                Err(error) => {
                    eprint_line(&format!("{}: {error}", run.display()));
                    code = 1;
                    continue;
                }
            };
            code |= u8::from(look.state.is_bad());
            print_line(&match self.json {
                true => {
                    serde_json::to_string(&look).map_err(|error| CommandError::usage(error.to_string()))?
                }
                false => summary(&look),
            });
        }
        Ok(code)
    }
}

fn show(between: &str, text: &str) -> io::Result<()> {
    let mut out = stdout().lock();
    writeln!(out, "{between}{}", printable(text))?;
    out.flush()
}

/// Returns a function that reads the status of a run, for `kiln watch` and its page.
pub(crate) fn look_at_runs() -> LookAt {
    Arc::new(|out| look_at(out, false).map_err(|error| error.to_string()))
}

fn look_at(out: &Path, stacks: bool) -> Result<Look> {
    let answers = ask_all(out, stacks).map_err(|error| {
        let out = out.display();
        CommandError::usage(format!("{out}/debug: {error}; only the owner of a run and root can inspect it"))
    })?;
    match answers.processes.is_empty() {
        true => meeting::look(out).map_or_else(|| ended::look(out, stacks), Ok),
        false => {
            let mut look = look(out.display().to_string(), answers);
            // Failed ranks exit first; hung or busy ranks may still answer for a while.
            if let Some(verdict) = ended::verdict(out).filter(|_| !look.state.is_bad()) {
                (look.state, look.text) = (State::Trouble, format!("the run is about to fail: {verdict}"));
            }
            // Processes that are all stopped do not answer; the run folder still shows the run's progress.
            let Progress { steps, logged, loss, saved } = progress(out);
            look.steps = look.steps.or(steps);
            look.step = look.step.or(logged);
            look.loss = look.loss.or(loss);
            look.saved = look.saved.max(saved);
            Ok(look)
        }
    }
}
