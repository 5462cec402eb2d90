//! The launcher's final report: the root cause first, then its consequences.

use kiln_sys::launcher::Word;
use signal_hook::consts::SIGKILL;

use super::end::{End, Ends};
use super::environment::Job;
use super::say::{say, signal_name};
use super::verdict::Verdict;

/// Number of characters of a text that are searched for in a log.
const COMPARED: usize = 200;

/// Reports how the ranks ended, unless all ended well.
pub(super) fn tell(job: &Job, ends: &Ends, verdict: &Verdict) {
    for end in &ends.ranks {
        for (_, note) in end.words.iter().filter(|(word, _)| *word == Word::Note) {
            say(&format!("rank {}: {note}", end.rank));
        }
    }
    match verdict {
        Verdict::Done => return,
        Verdict::Preempted if ends.ranks.iter().any(End::was_stopped) => {
            return say("a rank was asked to stop before there was anything to save; start it again");
        }
        Verdict::Preempted => return say("preempted; the ranks have saved what they had"),
        _ => {}
    }
    let mut failed: Vec<&End> = ends.ranks.iter().filter(|end| end.failed()).collect();
    // The earliest of the ranks that were not told to end and that blame no other; the others follow from it.
    failed.sort_by_key(|end| (end.told, end.is_consequence(), end.at));
    let Some((cause, others)) = failed.split_first() else { return };
    let first = if cause.told { "did not end well when told to" } else { "failed first" };
    say(&format!("rank {} (pid {}) {first}: {}", cause.rank, cause.pid, how(cause)));
    show_words(cause);
    if let Some(folder) = &cause.crash {
        say(&format!("  what is known of it: {}", folder.display()));
    }
    show_stderr(cause);
    for end in others {
        let why = match end.told {
            // The launcher also ended the rank that is named first, so these are no different.
            true if cause.told => first,
            true => "told to end by the launcher",
            false => "failed after it",
        };
        say(&format!("rank {} (pid {}) {why}: {}", end.rank, end.pid, how(end)));
        match end.last_lines == cause.last_lines && !end.last_lines.is_empty() {
            _ if end.told => {}
            _ if end.last_lines.is_empty() && !end.words.is_empty() => show_words(end),
            true => say(&format!("  it says the same ({})", end.stderr.display())),
            false => show_stderr(end),
        }
    }
    if *verdict == Verdict::Failed && job.node.nodes > 1 && cause.code == Some(1) {
        say("the cause may lie on another node: compare with what their launchers say");
    }
}

/// Describes the exit code or signal, and its time.
fn how(end: &End) -> String {
    let after = end.after.as_secs_f64();
    let what = match (end.code, end.signal) {
        (Some(code), _) => format!("exit code {code}"),
        (None, Some(signal)) => format!("killed by {}", signal_name(signal)),
        (None, None) => "ended in an unknown way".to_owned(),
    };
    let hint = match (end.signal, &end.killed) {
        (Some(SIGKILL), Some(why)) => format!(", by this launcher: {why}"),
        (Some(SIGKILL), None) if !end.told => {
            "; if nobody did that by hand, it was probably out of memory: see `dmesg` and `kiln explain \
             out-of-memory`"
                .to_owned()
        }
        _ => String::new(),
    };
    format!("{what} after {after:.1} s{hint}")
}

/// Shows the reason that a rank gives for its failure, unless its log shows it too.
fn show_words(end: &End) {
    for (_, text) in end.words.iter().filter(|(word, _)| *word != Word::Note) {
        let mut lines = text.lines();
        let first: String = lines.next().unwrap_or_default().chars().take(COMPARED).collect();
        if !end.last_lines.iter().any(|line| line.contains(&first)) {
            text.lines().for_each(|line| say(&format!("  it says: {line}")));
        }
    }
}

fn show_stderr(end: &End) {
    let path = end.stderr.display();
    if end.last_lines.is_empty() && !end.words.is_empty() {
        return;
    }
    if end.last_lines.is_empty() {
        return say(&format!("  it wrote nothing to stderr ({path})"));
    }
    say(&format!("  its last lines on stderr, all of which are in {path}:"));
    for line in &end.last_lines {
        say(&format!("  | {line}"));
    }
}
