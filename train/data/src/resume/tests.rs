//! Killed preparations, and the preparations that resume them.

use super::super::{PrepareOptions, Progress, Remark, TokenizerSource, prepare};
use super::*;
use rustix::process::{Signal, getpid, kill_process};
use std::collections::BTreeMap;
use std::os::unix::process::ExitStatusExt as _;
use std::path::PathBuf;
use std::process::Command;

/// Variables that give the process to be killed its folder, and the number of reports after which it ends.
const FOLDER: &str = "KILN_TEST_FOLDER";
const REPORTS: &str = "KILN_TEST_REPORTS";

/// Returns documents of some length.
fn documents(count: usize) -> String {
    let text = |number: usize| format!("line {number} of a document\n").repeat(number % 90 + 1);
    (0..count).map(|number| format!("{}\n", serde_json::json!({ "text": text(number) }))).collect()
}

fn options(folder: &Path, out: &str) -> PrepareOptions {
    let tokenizer = TokenizerSource::Train { vocab_size: 300 };
    PrepareOptions {
        validation_fraction: 0.3,
        seed: 1,
        ..PrepareOptions::new(vec![folder.join("a.jsonl")], folder.join(out), tokenizer)
    }
}

/// Prepares the data, and returns the remarks.
fn remarks(options: &PrepareOptions) -> Vec<Remark> {
    let mut remarks = Vec::new();
    let mut keep = |progress| {
        if let Progress::Remark(remark) = progress {
            remarks.push(remark);
        }
    };
    prepare(options, &mut keep).unwrap();
    remarks
}

/// Returns the files in a folder with their contents.
fn files(folder: &Path) -> BTreeMap<String, Vec<u8>> {
    let entries = fs::read_dir(folder).unwrap().map(Result::unwrap);
    let file = |entry: fs::DirEntry| {
        (entry.file_name().into_string().unwrap(), fs::read(entry.path()).unwrap_or_default())
    };
    entries.map(file).collect()
}

/// The process that is killed in the middle of its work, as if by another process.
#[test]
#[ignore = "a program for the other tests"]
fn killed() {
    let folder = PathBuf::from(std::env::var_os(FOLDER).expect("a folder"));
    let mut left: u32 = std::env::var(REPORTS).expect("a number").parse().expect("a number");
    let mut count_down = |progress: Progress| {
        if matches!(progress, Progress::Encoding { .. }) {
            left -= 1;
            if left == 0 {
                kill_process(getpid(), Signal::KILL).unwrap();
            }
        }
    };
    prepare(&options(&folder, "data"), &mut count_down).unwrap();
}

/// Kills a preparation of `folder/data` after some reports; returns the folder that it leaves.
fn kill(folder: &Path, reports: u32) -> PathBuf {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["--exact", "resume::tests::killed", "--ignored"]);
    let ended = command.env(FOLDER, folder).env(REPORTS, reports.to_string()).output().unwrap();
    assert_eq!(ended.status.signal(), Some(Signal::KILL.as_raw()), "{ended:?}");
    assert!(!folder.join("data").exists());
    unfinished(folder)
}

/// Returns the only folder of unfinished work.
fn unfinished(folder: &Path) -> PathBuf {
    let mut left = files(folder).into_keys().filter(|name| name.starts_with(".data.partial-"));
    let path = folder.join(left.next().expect("a folder"));
    assert_eq!(left.next(), None);
    path
}

/// Number of reports until a kill, and a change made to the folder afterwards.
type Change<'a> = (u32, &'a dyn Fn(&Path));

#[test]
fn a_prepare_that_was_killed_goes_on_to_the_same_bytes() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    fs::write(folder.join("a.jsonl"), documents(600)).unwrap();
    assert!(remarks(&options(folder, "whole")).is_empty());
    let whole = files(&folder.join("whole"));
    let append = |left: &Path| {
        // Data written after the last record: half of the next batch.
        let tokens = fs::read(left.join("train.bin")).unwrap();
        fs::write(left.join("train.bin"), [&tokens[..], b"xyz"].concat()).unwrap();
        fs::write(left.join("..progress.json.kiln-1-0"), "{").unwrap();
    };
    let cut = |left: &Path| fs::write(left.join("train.bin"), "xy").unwrap();
    let no_tokens = |left: &Path| Record::default().save(left).unwrap();
    let changes: [Change<'_>; 5] = [(1, &append), (2, &append), (3, &append), (2, &cut), (2, &no_tokens)];
    for (reports, change) in changes {
        let left = kill(folder, reports);
        change(&left);
        let remarks = remarks(&options(folder, "data"));
        assert!(matches!(remarks[..], [Remark::GoesOn { .. }]), "{remarks:?}");
        assert!(files(&folder.join("data")) == whole, "after {reports} reports");
        assert!(!left.exists());
        fs::remove_dir_all(folder.join("data")).unwrap();
    }
}

#[test]
fn work_on_other_text_or_with_other_options_is_kept() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    let write = |text: &str| fs::write(folder.join("a.jsonl"), text).unwrap();
    let text = documents(600);
    let base = options(folder, "data");
    let seed = PrepareOptions { seed: 2, ..base.clone() };
    let limit = PrepareOptions { limit: Some(500), ..base.clone() };
    let tokenizer = TokenizerSource::Train { vocab_size: 301 };
    let vocabulary = PrepareOptions { tokenizer, ..base.clone() };
    let changed = text.replacen("line 0 ", "LINE 0 ", 1);
    let cases = [(&seed, &text), (&limit, &text), (&vocabulary, &text), (&base, &changed)];
    for (options, now) in cases {
        write(&text);
        let left = kill(folder, 2);
        write(now);
        assert_eq!(remarks(options), [Remark::KeptWork { path: left.clone() }]);
        let fresh = PrepareOptions { out: folder.join("fresh"), ..options.clone() };
        assert_eq!(remarks(&fresh), [Remark::KeptWork { path: left.clone() }]);
        assert!(files(&folder.join("data")) == files(&fresh.out), "{options:?}");
        assert!(Record::is_in(&left));
        fs::remove_dir_all(&left).unwrap();
        for out in ["data", "fresh"] {
            fs::remove_dir_all(folder.join(out)).unwrap();
        }
    }
}

/// Text that has moved is the same text, and the record of the inputs gets its new place.
#[test]
fn text_that_has_moved_is_gone_on_with() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    fs::write(folder.join("a.jsonl"), documents(600)).unwrap();
    kill(folder, 2);
    fs::rename(folder.join("a.jsonl"), folder.join("b.jsonl")).unwrap();
    let moved = PrepareOptions { inputs: vec![folder.join("b.jsonl")], ..options(folder, "data") };
    assert!(matches!(remarks(&moved)[..], [Remark::GoesOn { .. }]));
    let inputs = fs::read_to_string(folder.join("data/inputs.json")).unwrap();
    assert!(inputs.contains("b.jsonl") && !inputs.contains("a.jsonl"), "{inputs}");
}

/// A file that cannot be read to its end, as on a failing disk, costs no work.
#[test]
fn an_error_of_a_file_keeps_the_work() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    fs::write(folder.join("a.jsonl"), documents(600)).unwrap();
    let options = options(folder, "data");
    let mut kept = Vec::new();
    let failed = prepare(&options, &mut |progress| match progress {
        Progress::Encoding { .. } => {
            // A folder in place of the record prevents writing it.
            let path = unfinished(folder);
            let _ = fs::remove_file(path.join(RECORD_FILE));
            let _ = fs::create_dir(path.join(RECORD_FILE));
        }
        Progress::Remark(remark) => kept.push(remark),
        _ => {}
    });
    assert!(matches!(failed, Err(DataError::Io { .. })), "{failed:?}");
    let left = unfinished(folder);
    assert_eq!(kept, [Remark::KeptWork { path: left }]);
}

/// A preparation of other data next to it leaves the work alone, and reports it.
#[test]
fn work_on_other_data_is_kept() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    fs::write(folder.join("a.jsonl"), documents(600)).unwrap();
    let left = kill(folder, 2);
    assert_eq!(remarks(&options(folder, "other")), [Remark::KeptWork { path: left.clone() }]);
    assert!(left.exists());
}
