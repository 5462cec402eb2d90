//! Runs without a process that answers: finished, failed, killed, or about to start.

use std::path::Path;

use crate::commands::inspect;
use crate::error::{CommandError, Result};
use kiln_observe::ask::{ProcessState, state_of, threads_of};
use kiln_observe::status::{Look, ProcessLook, State};
use kiln_train::flight;
use kiln_train::process::ProcessId;
use kiln_train::run::{FAILURE, Progress, Standing, last_event, progress, standing};

/// The status of the run in `out` according to its files.
///
/// # Errors
///
/// If the folder holds no run.
pub(crate) fn look(out: &Path, stacks: bool) -> Result<Look> {
    let standing = match standing(out)? {
        Standing::NoRun(why) => {
            return Err(CommandError::usage(format!(
                "{} is not the folder of a run: {why}; name the one that --out has named, or that the run has \
                 told at its start",
                out.display()
            )));
        }
        standing => standing,
    };
    let Progress { steps, logged, loss, saved } = progress(out);
    let (state, text) = judge(out, &standing, steps, logged, saved);
    let processes = match standing {
        Standing::Held(Some(process)) => vec![holder(process, stacks)],
        _ => Vec::new(),
    };
    Ok(Look {
        run: out.display().to_string(),
        state,
        text,
        culprits: Vec::new(),
        step: logged.max(saved),
        steps,
        saved,
        loss,
        tokens_per_s: None,
        deadline_s: None,
        ranks: Vec::new(),
        processes,
    })
}

/// The verdict on a failed run from the flight recorders that its ranks left. Those of earlier starts are
/// stored elsewhere.
pub(super) fn verdict(out: &Path) -> Option<String> {
    let is_there = !flight::files_in(&flight::flight_folder(out)).is_empty();
    let text = is_there.then(|| inspect::flight(out).ok())?;
    let verdict = text.as_ref().and_then(|text| text.lines().next());
    let verdict = verdict.unwrap_or("verdict: there is none, see its folder flight");
    // Flight recorders only show which rank waits for which.
    (!verdict.ends_with(NOTHING)).then(|| verdict.to_owned())
}

/// Last part of a verdict on ranks that failed without waiting, such as for a NaN loss.
const NOTHING: &str = "no rank waits for another";

/// Why the last start of the run in `out` failed, according to its events.
fn failure(out: &Path) -> Option<String> {
    let event = last_event(out)?;
    (event.kind == FAILURE).then(|| format!("it failed after step {}: {}", event.step, event.text))
}

fn holder(process: ProcessId, stacks: bool) -> ProcessLook {
    let threads = stacks.then(|| threads_of(process.pid)).filter(|_| process.is_gone() == Some(false));
    ProcessLook { host: process.host, process: process.pid, ranks: Vec::new(), threads }
}

fn judge(
    out: &Path,
    standing: &Standing,
    steps: Option<u64>,
    logged: Option<u64>,
    saved: Option<u64>,
) -> (State, String) {
    let go_on = match saved {
        Some(step) => format!("step {step} is saved, and --resume latest continues from there"),
        None => "nothing was saved".to_owned(),
    };
    match standing {
        Standing::Held(Some(process)) => {
            let is_here = process.is_gone() == Some(false);
            match state_of(process.pid) {
                ProcessState::Stopped if is_here => {
                    let by = "as by Ctrl-Z, SIGSTOP or a debugger";
                    (State::Trouble, format!("its process {} is stopped, {by}", process.pid))
                }
                _ if is_here => (
                    State::Starting,
                    format!("process {} prepares it, or ends it, and no rank can be asked", process.pid),
                ),
                _ => {
                    let host = &process.host;
                    (State::Starting, format!("it is on {host}: look at it there, with kiln status"))
                }
            }
        }
        Standing::Held(None) => (State::Starting, "a process is about to begin or to end it".to_owned()),
        Standing::Killed(process) => {
            let (host, pid) = (&process.host, process.pid);
            let gone = format!("its process {pid} on {host} was killed, or the machine went down");
            (State::Dead, format!("{gone}: it ended without a word; {go_on}"))
        }
        _ if let Some(why) = verdict(out).or_else(|| failure(out)) => {
            (State::Failed, format!("{why}; {go_on}"))
        }
        _ if steps.is_some() && logged.max(saved) >= steps => {
            (State::Finished, "all of its steps are done".to_owned())
        }
        _ if saved.is_some() && saved >= logged => (State::Stopped, format!("it was asked to stop: {go_on}")),
        _ => (State::Failed, format!("it ended before its last step; {go_on}")),
    }
}
