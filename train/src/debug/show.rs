//! A look at a run as text of 80 columns.

use super::look::{Look, ProcessLook, RankLook};
use super::message::Thread;
use super::opinion::State;
use crate::checkpoint::size;
use crate::words::{in_ranges, number_of};

/// Columns of a line.
const WIDTH: usize = 80;

/// Functions of a thread that are shown, from the innermost one.
const MOST_CALLS: usize = 24;

/// The text of a look.
pub(super) fn text(look: &Look) -> String {
    let mut lines = wrapped(&headline(look), "  ");
    if !look.ranks.is_empty() {
        lines.push(row(["rank", "step", "doing", "for", "memory", "waits for"]));
    }
    lines.extend(look.ranks.iter().map(rank));
    let word = match look.state {
        State::Healthy => "healthy",
        State::Slow => "slow",
        State::Suspicion => "suspicion",
        State::Trouble => "trouble",
        State::Starting => "starting or ending",
        State::Finished => "finished",
        State::Stopped => "stopped",
        State::Failed => "failed",
        State::Dead => "dead",
    };
    lines.extend(wrapped(&format!("{word}: {}", look.text), "  "));
    lines.extend(look.processes.iter().flat_map(threads));
    lines.join("\n")
}

fn headline(look: &Look) -> String {
    let mut parts = Vec::new();
    if !look.ranks.is_empty() {
        let mut hosts: Vec<_> = look.processes.iter().map(|process| &process.host).collect();
        hosts.sort();
        hosts.dedup();
        let seen: usize = look.processes.iter().map(|process| process.ranks.len()).sum();
        let processes = match look.processes.len() {
            1 => "1 process".to_owned(),
            count => format!("{count} processes"),
        };
        let (ranks, machines) = (number_of(look.ranks.len(), "rank"), number_of(hosts.len(), "machine"));
        parts.push(match seen < look.ranks.len() {
            true => format!("{ranks}, of which {seen} in {processes} here"),
            false => format!("{ranks} in {processes} on {machines}"),
        });
    }
    let of = look.steps.map_or_else(String::new, |steps| format!(" of {steps}"));
    parts.push(match look.step {
        Some(step) => format!("step {step}{of}"),
        None => format!("before its first step{of}"),
    });
    parts.extend(look.loss.map(|loss| format!("loss {loss:.4}")));
    parts.extend(look.tokens_per_s.map(|speed| format!("{} tok/s", thousands(speed))));
    format!("run {}: {}", look.run, parts.join(", "))
}

/// Such as `41,200`.
fn thousands(number: f64) -> String {
    let digits = format!("{number:.0}");
    let mut text = String::new();
    for (index, digit) in digits.chars().enumerate() {
        if index > 0 && (digits.len() - index).is_multiple_of(3) {
            text.push(',');
        }
        text.push(digit);
    }
    text
}

fn rank(look: &RankLook) -> String {
    let number = look.rank.to_string();
    if let Some(silent) = &look.silent {
        return fit(&format!("{number:<5} {silent}"), WIDTH);
    }
    let step = match look.step {
        None => "-".to_owned(),
        Some(0) => "start".to_owned(),
        Some(step) => step.to_string(),
    };
    let activity = look.activity.as_ref().map_or("", |activity| &activity.name);
    let (doing, seconds) = match (&look.pending, &look.last) {
        (Some(call), _) => (format!("{activity}: {} {}", call.operation, call.unit), call.seconds),
        (None, last) => {
            let after = last.as_ref().map(|call| format!(", after {} {}", call.operation, call.unit));
            let seconds = look.activity.as_ref().map_or(0.0, |activity| activity.seconds);
            (format!("{activity}{}", after.unwrap_or_default()), seconds)
        }
    };
    let memory = look.bytes.or(look.peak_bytes).map_or_else(|| "-".to_owned(), size);
    let waits = match &look.waits_for[..] {
        [] => "-".to_owned(),
        ranks => in_ranges(ranks),
    };
    row([&number, &step, &doing, &format!("{seconds:.1} s"), &memory, &waits])
}

fn row([rank, step, doing, seconds, memory, waits]: [&str; 6]) -> String {
    let line = format!("{rank:<5} {step:<7} {:<33} {seconds:>8}  {memory:>10}  {waits}", fit(doing, 33));
    fit(line.trim_end(), WIDTH)
}

/// `text` cut to `width` characters.
fn fit(text: &str, width: usize) -> String {
    match text.chars().count() > width {
        true => text.chars().take(width - 1).chain(['…']).collect(),
        false => text.to_owned(),
    }
}

/// `text` in lines of 80 columns, all but the first of which begin with `indent`.
fn wrapped(text: &str, indent: &str) -> Vec<String> {
    let mut lines = Vec::new();
    let mut line = String::new();
    for word in text.split(' ') {
        if !line.trim_start().is_empty() && line.chars().count() + 1 + word.chars().count() > WIDTH {
            lines.push(std::mem::replace(&mut line, indent.to_owned()));
        } else if !line.is_empty() {
            line.push(' ');
        }
        line.push_str(word);
    }
    lines.push(line);
    lines
}

fn threads(process: &ProcessLook) -> Vec<String> {
    let Some(threads) = &process.threads else { return Vec::new() };
    let ranks = match &process.ranks[..] {
        [] => String::new(),
        [rank] => format!(" of rank {rank}"),
        ranks => format!(" of ranks {}", in_ranges(ranks)),
    };
    let mut lines = vec![String::new(), format!("threads{ranks}, process {}:", process.process)];
    if let Some(problem) =
        threads.iter().find_map(|thread| thread.problem.as_ref().filter(|_| !thread.calls.is_empty()))
    {
        lines.extend(wrapped(&format!("({problem})"), ""));
    }
    for Thread { id, name, calls, problem } in threads {
        lines.push(fit(&format!("  {name} ({id})"), WIDTH));
        if calls.is_empty() {
            lines.extend(problem.iter().map(|problem| fit(&format!("    {problem}"), WIDTH)));
        }
        lines.extend(calls.iter().take(MOST_CALLS).map(|call| fit(&format!("    {call}"), WIDTH)));
        if let Some(more) = calls.len().checked_sub(MOST_CALLS).filter(|more| *more > 0) {
            lines.push(format!("    and {more} more"));
        }
    }
    lines
}
