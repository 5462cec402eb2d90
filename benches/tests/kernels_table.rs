//! The program `kernels` with a script as its assembler: its output and exit codes.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;

/// Prints the output of `ptxas -v` for a kernel with 40 registers.
const PTXAS: &str = "#!/bin/sh
cat >&2 <<END
ptxas info    : Compiling entry function 'sum_f32_0123abcd' for 'sm_80'
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 40 registers, used 1 barriers
END
";

const PTX: &str = ".version 8.0\n.target sm_80\n.visible .entry sum_f32_0123abcd(\n{ ret; }\n";

struct Folder(PathBuf);

impl Folder {
    fn new(name: &str) -> Folder {
        let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join(name);
        let _ = fs::remove_dir_all(&folder);
        fs::create_dir_all(folder.join("ptx")).expect("a folder");
        let script = folder.join("ptxas");
        fs::write(&script, PTXAS).expect("a file");
        fs::set_permissions(&script, fs::Permissions::from_mode(0o755)).expect("its mode");
        Folder(folder)
    }

    /// Returns the exit code and the output.
    fn run(&self, limits: &str, arguments: &[&str]) -> (Option<i32>, String) {
        fs::write(self.0.join("limits.toml"), limits).expect("a file");
        let output = Command::new(env!("CARGO_BIN_EXE_kernels"))
            .current_dir(&self.0)
            .args(["--ptxas", "./ptxas", "--limits", "limits.toml"])
            .args(arguments)
            .output()
            .expect("the program starts");
        let text = [output.stdout, output.stderr].concat();
        (output.status.code(), String::from_utf8_lossy(&text).into_owned())
    }
}

#[test]
fn kernels_are_held_to_their_limits() {
    let folder = Folder::new("kernels-limits");
    let limit = |registers: u32| format!("[[kernel]]\nname = \"sum_*\"\nregisters = {registers}\n");
    let (code, text) = folder.run(&limit(40), &["ptx"]);
    assert!(code == Some(2) && text.contains("nothing was launched"), "{code:?} {text}");

    fs::write(folder.0.join("ptx/0001.ptx"), PTX).expect("a file");
    let (code, text) = folder.run(&limit(40), &["ptx"]);
    assert_eq!(code, Some(0), "{text}");
    let (code, text) = folder.run(&limit(39), &["ptx"]);
    assert_eq!(code, Some(1), "{text}");
    assert!(text.contains("sum_f32 on sm_80: 40 registers, and the limit is 39"), "{text}");
    let (code, text) = folder.run("", &["ptx", "--entries"]);
    assert_eq!(code, Some(0), "{text}");
    assert_eq!(text, "[[kernel]]\nname = \"sum_f32\"\nregisters = 40\nspills = 0\n\n");
}

/// Writes a run of three steps with `blocks` blocks, each of which launches two kernels.
fn run_of(folder: &Path, blocks: usize) {
    fs::create_dir_all(folder).expect("a folder");
    let block = "launch stream=1 kernel=a\ncublaslt_matmul stream=1 m=1\nmemcpy_htod stream=1 bytes=8\n";
    let start = "alloc bytes=1048576 at=a result=0\nalloc_host bytes=2097152\n";
    let update = "launch stream=1 kernel=adamw_factors_1\nlaunch stream=1 kernel=adamw_n_4_2\n";
    let step = format!("{}{update}", block.repeat(blocks));
    fs::write(folder.join("trace.txt"), format!("{start}{}", step.repeat(3))).expect("a file");
    let report = format!(
        r#"{{"model": {{"vocab_size": 9, "d_model": 8, "layers": {blocks}, "heads": 2}}, "step_s": [0.001],
            "planned_rank_bytes": 524288, "global_batch": 1, "seq_len": 4, "tokens_per_s": 1.0, "model_flops_per_s": 2.0}}"#
    );
    fs::write(folder.join("report.json"), report).expect("a file");
}

#[test]
fn launches_of_a_step_are_held_to_their_limits() {
    let folder = Folder::new("kernels-host");
    let (fewer, more) = ("preset/2", "preset/4");
    run_of(&folder.0.join(fewer), 2);
    run_of(&folder.0.join(more), 4);
    let arguments = ["--host", fewer, more];
    let limits = |block: u32, reserved: u32| {
        format!("[preset]\nblock = {block}\nrest = 2\nreserved_mib = {reserved}\npinned_mib = 2\n")
    };
    let (code, text) = folder.run(&limits(2, 1), &arguments);
    assert_eq!(code, Some(0), "{text}");
    assert!(text.contains("| preset, a block | 2 |  | 0 | 8 | 0 |"), "{text}");
    assert!(text.contains("| preset, a step of 4 blocks | 10 | 100 | 0 | 32 | 0 |"), "{text}");
    let (code, text) = folder.run(&limits(1, 1), &arguments);
    assert!(code == Some(1) && text.contains("2 launches of a block, and the limit is 1"), "{code:?} {text}");
    let (code, text) = folder.run(&limits(2, 0), &arguments);
    assert!(code == Some(1) && text.contains("1 MiB reserved on the device, and the limit is 0"), "{text}");
    assert!(text.contains("| preset, 4 blocks | 1 | 0 | 100 % | 2 |"), "{text}");
    // Without limits for it, nothing is checked.
    assert_eq!(folder.run("", &arguments).0, Some(2));
}
