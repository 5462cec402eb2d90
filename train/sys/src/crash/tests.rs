use std::fs;
use std::os::unix::process::ExitStatusExt;
use std::process::Command;

use kiln_collectives::{Communicator, FakeCommunicator};

use super::*;
use crate::Facts;
use crate::drills;
use crate::position::RankPosition;

const WAY: &str = "KILN_TEST_CRASH";
const OUT: &str = "KILN_TEST_CRASH_OUT";

fn facts() -> Facts {
    Facts {
        rank_of_thread: || Some(3),
        write_module_of: |rank, out| write!(out, "layers.{rank}"),
        write_holders: |out, bytes| write!(out, "out of memory: {bytes} bytes\n  12 MiB  weights"),
        version: "of a test",
    }
}

/// The tests below run this one in a separate process.
#[test]
#[ignore = "a program for another test"]
fn crashes() {
    let (Some(way), Some(out)) = (std::env::var_os(WAY), std::env::var_os(OUT)) else { return };
    crate::begin(facts()).unwrap();
    if way == "hook" {
        // As if resolving the symbols of a backtrace ran out of memory.
        panic::set_hook(Box::new(|_| allocation_failed(77)));
    }
    crate::keep_crashes(facts());
    let world = FakeCommunicator::new(3, 4);
    world.recorder().set_activity("backward");
    let present = RankPosition::new(Path::new(&out), world.view(), Box::new(|| b"{\"rank\":3}".to_vec()));
    present.begin_step(17);
    present.begin_micro_batch(1, 24, 2);
    crashes_like(&way);
}

/// Not inlined, because reports name this function.
#[inline(never)]
fn crashes_like(way: &OsStr) {
    match way.to_str() {
        Some("segv") => drills::raise_segv(),
        Some("bus") => drills::read_beyond_a_file(),
        Some("overflow") => drills::overflow_the_stack(),
        Some("abort") => std::process::abort(),
        Some("panic") => {
            let _ = thread::spawn(|| panic!("on purpose")).join();
            panic!("as well");
        }
        Some("memory") => keep("out of memory: all of it\n  12 MiB  weights", |folder| {
            eprint_line(&format!("{folder:?}"));
        }),
        Some("failed") => {
            allocation_failed(77);
            panic!("no memory");
        }
        Some("refused") => {
            allocation_failed(77);
            std::process::abort();
        }
        Some("hook") => panic!("on purpose"),
        Some("old") => {
            allocation_failed(77);
            REFUSED_AT.store(now() - FOLLOWS - 1, Ordering::Relaxed);
            panic!("for another reason");
        }
        _ => unreachable!("{way:?}"),
    }
    // Prevents tail calls, which would remove this function's frame.
    std::hint::black_box(way);
}

fn crash(way: &str, out: &Path) -> (Option<c_int>, String) {
    let mut program = Command::new(std::env::current_exe().unwrap());
    program.args(["--exact", "crash::tests::crashes", "--ignored", "--nocapture"]);
    let output = program.env(WAY, way).env(OUT, out).output().unwrap();
    (output.status.signal(), String::from_utf8_lossy(&output.stderr).into_owned())
}

#[test]
fn crashes_leave_reports_in_the_run_folder() {
    for (way, signal, what, call) in [
        ("segv", Some(libc::SIGSEGV), "SIGSEGV\n", "crash::tests::crashes"),
        ("bus", Some(libc::SIGBUS), "SIGBUS (address 0x", "drills::read_beyond_a_file"),
        ("overflow", Some(libc::SIGABRT), "SIGSEGV (address 0x", "drills::recurse"),
        ("abort", Some(libc::SIGABRT), "SIGABRT\n", "process::abort"),
        ("panic", None, "a panic at ", "crash::tests::crashes"),
        ("memory", None, "out of memory: all of it\n", "crash::tests::crashes"),
    ] {
        let out = tempfile::tempdir().unwrap();
        for folder in ["crash/rank_3", "crash/rank_3-2"] {
            let (ended_by, said) = crash(way, out.path());
            assert_eq!(ended_by, signal, "{way}: {said}");
            let folder = out.path().join(folder);
            assert!(said.contains(&folder.display().to_string()), "{way}: {said}");
            let read = |name: &str| fs::read_to_string(folder.join(name)).unwrap_or_default();
            let text = read("crash.txt");
            assert!(text.starts_with(&format!("what     {what}")), "{way}: {text}");
            for line in ["rank     3", "step     17", "phase    backward", "module   layers.3"] {
                assert!(text.lines().any(|found| found == line), "{way}: {line}: {text}");
            }
            assert!(text.contains("\nbatch    micro-batch 1, samples 24 to 25 of"), "{way}: {text}");
            assert!(text.contains(call), "{way}: {call}: {text}");
            let batch = r#"{"rank":3,"step":17,"micro_batch":1,"first_sample":24,"last_sample":25}"#;
            assert_eq!(read("batch.json").trim_end(), batch, "{way}");
            assert_eq!(read("flight.json"), r#"{"rank":3}"#, "{way}: {said}");
        }
    }
}

/// A report of a failed allocation is written without memory, so it has no backtrace.
#[test]
fn failed_allocations_report_memory_by_owner() {
    for (way, signal, what) in [
        ("failed", None, "a panic at "),
        ("hook", None, "no memory to report a crash, after an allocation of 77 bytes failed\n"),
        ("refused", Some(libc::SIGABRT), "SIGABRT, after an allocation of 77 bytes failed\n"),
    ] {
        let out = tempfile::tempdir().unwrap();
        let (ended_by, said) = crash(way, out.path());
        assert_eq!(ended_by, signal, "{way}: {said}");
        let text = fs::read_to_string(out.path().join("crash/rank_3/crash.txt")).unwrap();
        assert!(text.contains(&format!("what     {what}")), "{way}: {text}");
        assert!(text.contains("after an allocation of 77 bytes failed\n"), "{way}: {text}");
        assert!(text.contains("\nout of memory: 77 bytes\n  12 MiB  weights\n"), "{way}: {text}");
        assert_eq!(text.contains("backtrace"), way == "refused", "{way}: {text}");
        assert!(said.contains("after an allocation of 77 bytes failed on rank 3, step 17"), "{way}: {said}");
    }
    let out = tempfile::tempdir().unwrap();
    let (_, said) = crash("old", out.path());
    let text = fs::read_to_string(out.path().join("crash/rank_3/crash.txt")).unwrap();
    assert!(text.contains("backtrace:") && !text.contains("77 bytes"), "{text} {said}");
}

#[test]
fn stack_overflows_keep_rusts_message() {
    let out = tempfile::tempdir().unwrap();
    let (ended_by, said) = crash("overflow", out.path());
    assert_eq!(ended_by, Some(libc::SIGABRT), "{said}");
    assert!(said.contains("kiln: SIGSEGV (address 0x"), "{said}");
    assert!(said.contains("has overflowed its stack"), "{said}");
    assert!(!said.contains("kiln: SIGABRT"), "the first signal is the cause: {said}");
}

#[test]
fn later_panics_are_added() {
    let out = tempfile::tempdir().unwrap();
    let (_, said) = crash("panic", out.path());
    let text = fs::read_to_string(out.path().join("crash/rank_3/crash.txt")).unwrap();
    let what: Vec<_> = text.lines().filter(|line| line.starts_with("what ")).collect();
    assert_eq!(what.len(), 2, "{text}");
    assert!(text.find("on purpose") < text.find("as well"), "{text}");
    assert!(said.contains("on purpose") && said.contains("as well"), "{said}");
    assert!(!out.path().join("crash/rank_3-2").exists());
}
