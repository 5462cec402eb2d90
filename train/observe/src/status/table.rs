//! Formats the state of a run as text of 80 columns.

use kiln_sys::words::{in_ranges, number_of, size};

use super::{Look, ProcessLook, RankLook, ranks_of};
use crate::ask::Thread;

const WIDTH: usize = 80;

const MOST_CALLS: usize = 24;

/// Formats the state of a run, with its ranks and threads.
pub fn text(look: &Look) -> String {
    let mut lines = wrapped(&headline(look), "", "  ");
    if !look.ranks.is_empty() {
        lines.push(row(["rank", "step", "doing", "for", "memory", "waits for"]));
    }
    let is_same = |a: &RankLook, b: &RankLook| a.silent.is_some() && a.silent == b.silent;
    lines.extend(look.ranks.chunk_by(is_same).map(rank));
    lines.extend(wrapped(&format!("{}: {}", look.state, look.text), "", "  "));
    lines.extend(look.processes.iter().flat_map(threads));
    lines.join("\n")
}

/// Formats the state of a run in one paragraph, without its ranks.
pub fn summary(look: &Look) -> String {
    wrapped(&format!("{}; {}: {}", headline(look), look.state, look.text), "", "  ").join("\n")
}

fn headline(look: &Look) -> String {
    let mut parts = Vec::new();
    if !look.ranks.is_empty() {
        let mut hosts: Vec<_> = look.processes.iter().map(|process| &process.host).collect();
        hosts.sort();
        hosts.dedup();
        let seen: usize = look.processes.iter().map(|process| process.ranks.len()).sum();
        let count = look.processes.len();
        let processes = format!("{count} process{}", if count == 1 { "" } else { "es" });
        let (ranks, machines) = (number_of(look.ranks.len(), "rank"), number_of(hosts.len(), "machine"));
        parts.push(match seen < look.ranks.len() {
            true => format!("{ranks}, {seen} of them in {processes} on this machine"),
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

fn rank(looks: &[RankLook]) -> String {
    let [look, ..] = looks else { return String::new() };
    let number = in_ranges(&looks.iter().map(|look| look.rank).collect::<Vec<_>>());
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
        (Some(call), _) => (format!("{activity}: {} {}", call.operation, call.module), call.seconds),
        (None, last) => {
            let after = last.as_ref().map(|call| format!(", after {} {}", call.operation, call.module));
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

fn fit(text: &str, width: usize) -> String {
    match text.chars().count() > width {
        true => text.chars().take(width - 1).chain(['…']).collect(),
        false => text.to_owned(),
    }
}

/// Wraps `text` to 80 columns: the first line starts with `first`, the others with `indent`.
fn wrapped(text: &str, first: &str, indent: &str) -> Vec<String> {
    let mut words = text.split(' ');
    let mut lines = vec![first.to_owned() + words.next().unwrap_or_default()];
    for word in words {
        match lines.last_mut() {
            Some(line) if line.chars().count() + 1 + word.chars().count() <= WIDTH => {
                *line += &format!(" {word}")
            }
            _ => lines.push(indent.to_owned() + word),
        }
    }
    lines
}

fn threads(process: &ProcessLook) -> Vec<String> {
    let Some(threads) = &process.threads else { return Vec::new() };
    let ranks = match &process.ranks[..] {
        [] => String::new(),
        ranks => format!(" of {}", ranks_of(ranks)),
    };
    let mut lines = vec![String::new(), format!("threads{ranks}, process {}:", process.process)];
    let problem =
        threads.iter().filter(|thread| !thread.calls.is_empty()).find_map(|thread| thread.problem.as_ref());
    lines.extend(problem.into_iter().flat_map(|problem| wrapped(&format!("({problem})"), "", "")));
    let mut shown: Vec<(&Thread, Vec<String>)> = Vec::new();
    for thread in threads {
        let name = format!("{} ({})", thread.name, thread.id);
        let same = |(other, _): &&mut (&Thread, _)| {
            (&other.calls, &other.problem) == (&thread.calls, &thread.problem)
        };
        match shown.iter_mut().find(same) {
            Some((_, names)) => names.push(name),
            None => shown.push((thread, vec![name])),
        }
    }
    for (Thread { calls, problem, .. }, names) in shown {
        lines.extend(wrapped(&names.join(", "), "  ", "  "));
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

#[cfg(test)]
mod tests {
    use kiln_collectives::{Activity, Operation, Phase};

    use super::super::{Call, State};
    use super::*;

    #[test]
    fn status_fits_80_columns() {
        let call = |module: &str, seconds| Call {
            group: "world".into(),
            sequence: 812,
            operation: Operation::ReduceScatter,
            module: module.into(),
            phase: Phase::Backward,
            seconds,
        };
        let rank = |rank, pending, waits_for| RankLook {
            rank,
            step: Some(123),
            activity: Some(Activity { name: "backward".into(), seconds: 14.25 }),
            pending,
            last: Some(call("layers.11", 14.3)),
            waits_for,
            bytes: Some(1_288_490_189),
            ..RankLook::default()
        };
        let silent = RankLook { rank: 2, silent: Some("is stopped".into()), ..RankLook::default() };
        let thread = |id, name: &str, calls: &[&str]| Thread {
            id,
            name: name.into(),
            calls: calls.iter().map(|call| (*call).to_owned()).collect(),
            addresses: Vec::new(),
            problem: None,
        };
        let threads = Some(vec![
            thread(7, "kiln", &["epoll_wait"]),
            thread(8, "rank0", &[&"deep::".repeat(20), "main"]),
            thread(9, "rank1", &["epoll_wait"]),
        ]);
        let process = ProcessLook { host: "here".into(), process: 7, ranks: vec![0, 1, 2], threads };
        let look = Look {
            run: "runs/90m".into(),
            state: State::Suspicion,
            text: format!("rank 2 is {}", "late ".repeat(20).trim_end()),
            culprits: vec![2],
            step: Some(123),
            steps: Some(1000),
            saved: None,
            loss: Some(3.21017),
            tokens_per_s: Some(1_241_200.4),
            deadline_s: None,
            ranks: vec![rank(0, None, vec![]), rank(1, Some(call("layers.3", 0.25)), vec![0, 2]), silent],
            processes: vec![process],
        };
        let expected = "\
run runs/90m: 3 ranks in 1 process on 1 machine, step 123 of 1000, loss 3.2102,
  1,241,200 tok/s
rank  step    doing                                  for      memory  waits for
0     123     backward, after reduce_scatter l…   14.2 s     1.2 GiB  -
1     123     backward: reduce_scatter layers.3    0.2 s     1.2 GiB  0, 2
2     is stopped
suspicion: rank 2 is late late late late late late late late late late late late
  late late late late late late late late

threads of ranks 0-2, process 7:
  kiln (7), rank1 (9)
    epoll_wait
  rank0 (8)
    deep::deep::deep::deep::deep::deep::deep::deep::deep::deep::deep::deep::dee…
    main";
        assert_eq!(text(&look), expected);
    }
}
