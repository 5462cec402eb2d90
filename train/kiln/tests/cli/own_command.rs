//! Your own program, `train/kiln/examples/own_command.rs`: a command next to those of `kiln`.

use crate::support::{Ended, Workspace, example};

fn run(workspace: &Workspace, arguments: &[&str]) -> Ended {
    workspace.run(&example("own_command"), arguments)
}

#[test]
fn command_runs_alone_and_as_ranks_of_the_launcher() {
    let workspace = Workspace::new();
    let alone = run(&workspace, &["sum", "-1.5"]);
    assert_eq!((alone.code, alone.stdout.as_str()), (Some(0), "-1.5 over 1 ranks\n"), "{alone:?}");
    let launched = run(&workspace, &["launch", "--nproc-per-node", "2", "--", "sum", "1.5"]);
    assert_eq!((launched.code, launched.stdout.as_str()), (Some(0), "3 over 2 ranks\n"), "{launched:?}");
    let unknown = workspace.kiln(&["launch", "--nproc-per-node", "2", "--", "sum", "1.5"]);
    assert_eq!(unknown.code, Some(2), "{unknown:?}");
}

#[test]
fn arguments_of_a_command_belong_to_it() {
    let workspace = Workspace::new();
    for arguments in [&["1", "--help"][..], &["--", "1"], &["--rank", "8", "--out", "here"]] {
        for before in [&["sum"][..], &["launch", "--nproc-per-node", "2", "--", "sum"]] {
            let ended = run(&workspace, &[before, arguments].concat());
            assert_eq!(ended.code, Some(1), "{arguments:?}: {ended:?}");
            assert!(ended.stderr.contains("error: sum: "), "{arguments:?}: {ended:?}");
        }
    }
    assert!(!workspace.path("here").exists());
}

#[test]
fn error_of_a_command_has_its_name_and_code_1() {
    let workspace = Workspace::new();
    let ended = run(&workspace, &["sum", "x"]);
    assert_eq!(ended.code, Some(1), "{ended:?}");
    assert_eq!(ended.stderr, "error: sum: invalid float literal\n");
    let ended = run(&workspace, &["launch", "--nproc-per-node", "2", "--", "sum", "x"]);
    assert_eq!(ended.code, Some(1), "{ended:?}");
    assert!(ended.stderr.contains("error: sum: invalid float literal\n"), "{ended:?}");
}

#[test]
fn panic_of_a_command_is_reported() {
    let workspace = Workspace::new();
    for before in [&[][..], &["launch", "--"]] {
        let ended = workspace.run(&example("planted"), &[before, &["panic"]].concat());
        assert_eq!(ended.code, Some(1), "{ended:?}");
        assert!(ended.stderr.contains("error: rank 0 panicked: planted panic"), "{ended:?}");
        assert!(ended.stderr.contains("examples/planted.rs:"), "{ended:?}");
    }
}

#[test]
fn help_lists_the_commands_of_the_program() {
    let workspace = Workspace::new();
    let help = run(&workspace, &["--help"]).stdout;
    assert!(help.contains("\nThis program:\n  sum       Sum a number over all ranks\n\nOptions:"), "{help}");
    for flag in ["--help", "-h"] {
        let help = run(&workspace, &["sum", flag]);
        assert_eq!(help.code, Some(0), "{help:?}");
        let text = "Sum a number over all ranks\n\nUsage: own_command sum NUMBER\n";
        assert_eq!((help.stdout.as_str(), help.stderr.as_str()), (text, ""));
    }
    // Without a help text, the command reads the flag itself.
    let ended = workspace.run(&example("planted"), &["panic", "--help"]);
    assert!(ended.stderr.contains("planted panic"), "{ended:?}");
    assert!(!workspace.succeed(&["--help"]).contains("This program"));
    let unknown = run(&workspace, &["sun", "1"]);
    assert_eq!(unknown.code, Some(2), "{unknown:?}");
    assert!(
        unknown.stderr.contains("similar subcommands exist") && unknown.stderr.contains("'sum'"),
        "{unknown:?}"
    );
}
