//! The check of fused kernels at the start of a run on a GPU: through wgpu, or on an NVIDIA GPU if
//! `KILN_TEST_DEVICE` is `cuda`.

use crate::gpu::{assert_same, gpu, workspace};
use crate::support::{Ended, Workspace, names};

/// Trains on the GPU.
fn train(workspace: &Workspace, out: &str, fault: Option<&str>, more: &[&str]) -> Ended {
    let arguments = ["train", "run.toml", "--out", out, "--set", gpu()];
    end(workspace, &[&arguments, more].concat(), fault)
}

/// Runs a command with a cache folder inside the workspace.
fn end(workspace: &Workspace, arguments: &[&str], fault: Option<&str>) -> Ended {
    let mut command = workspace.command(arguments);
    command.env("XDG_CACHE_HOME", workspace.path("cache"));
    if let Some(fault) = fault {
        command.env("KILN_KERNEL_FAULT", fault);
    }
    let ended = workspace.end(command.spawn().expect("the binary starts"));
    assert_eq!(ended.code, Some(0), "{ended:?}");
    ended
}

fn verified(workspace: &Workspace) -> Vec<String> {
    names(&workspace.path("cache/kiln/verified"))
}

#[test]
fn an_operation_whose_kernel_is_wrong_is_plain() {
    let workspace = workspace(&[]);
    workspace.succeed(&["train", "run.toml", "--out", "cpu", "--set", "device.backend=cpu"]);

    // A run that disables the check stores no result.
    train(&workspace, "off", Some("rms_norm"), &["--set", "device.verify_kernels=false"]);
    assert!(!workspace.path("cache/kiln/verified").exists());

    let first = train(&workspace, "first", Some("rms_norm"), &[]);
    let told = format!("{}{}", first.stdout, first.stderr);
    assert!(told.contains("the kernel of rms_norm is wrong on "), "{told}");
    assert!(told.contains("f32: largest relative error 1.0e0 (output), bound 1e-5"), "{told}");
    assert!(told.contains("it takes several passes over memory instead of one"), "{told}");
    assert_eq!(told.matches("is wrong on").count(), 1, "{told}");
    // Backward does not keep gathered weights in memory.
    assert!(!told.contains("pins"), "{told}");
    assert_same(&workspace, "plain", "first", "cpu");

    // The result is stored, with a report.
    let files = verified(&workspace);
    let report = files.iter().find(|name| name.ends_with(".txt")).expect("a report");
    assert_eq!(files.len(), 2, "{files:?}");
    assert!(
        told.contains(&format!("please send the report on these kernels: cache/kiln/verified/{report}")),
        "{told}"
    );
    let text = workspace.text(format!("cache/kiln/verified/{report}"));
    assert!(
        text.contains("rms_norm       WRONG  f32: ") && text.contains("swiglu         right  f32: "),
        "{text}"
    );
    assert!(text.contains("drill: rms_norm was treated as wrong"), "{text}");

    // The next start trusts the stored result: an edited result of another operation is not overwritten.
    let result = files.iter().find(|name| name.ends_with(".json")).expect("a result");
    let path = format!("cache/kiln/verified/{result}");
    let error = |digits: &str| {
        let fields = ["\"op\": \"swiglu\"", "\"dtype\": \"F32\"", "\"error\": "];
        format!("{}{digits}", fields.join(",\n      "))
    };
    // Replaces an error of about 1e-7 by one of about 1.
    let edited = workspace.text(&path).replace(&error(""), &error("999999"));
    assert_ne!(edited, workspace.text(&path));
    workspace.write(&path, &edited);
    let second = train(&workspace, "second", Some("rms_norm"), &[]);
    let told = format!("{}{}", second.stdout, second.stderr);
    assert!(told.contains("an earlier start found that the kernel of rms_norm is wrong on "), "{told}");
    assert!(told.contains("an earlier start found that the kernel of swiglu is wrong on "), "{told}");
    assert_eq!(workspace.text(&path), edited);
    assert_same(&workspace, "both plain", "second", "cpu");

    // Commands that read the checkpoint also trust the result, since they use the same kernels.
    let device = gpu().trim_start_matches("device.backend=");
    for what in [&["eval", "--samples", "2"][..], &["generate", "--prompt", "abc", "--max-tokens", "2"]] {
        let arguments = [what, &["--checkpoint", "first", "--device", device]].concat();
        let ended = end(&workspace, &arguments, Some("rms_norm"));
        let told = ended.stderr;
        assert!(told.contains("an earlier start found that the kernel of rms_norm is wrong on "), "{told}");
    }
}
