//! The choice of the device, and the messages if it is missing.
//!
//! Builds with CUDA are tested with the stand-ins for NVIDIA's libraries in `benches/standins`, which are
//! compiled here: a driver that can be old, broken, full or without a GPU, and libraries that may be missing.

use std::path::Path;
use std::process::{Command, Stdio};

use crate::messages::Messages;
use crate::support::{Ended, Workspace};

/// Variables that could lead to a GPU, to libraries, or to a place among ranks.
const VARIABLES: &[&str] = &[
    "LD_LIBRARY_PATH",
    "CUDA_PATH",
    "CUDA_VISIBLE_DEVICES",
    "VIRTUAL_ENV",
    "CONDA_PREFIX",
    "PYTHONPATH",
    "HOME",
    "XDG_CACHE_HOME",
    "KILN_LOG",
    "NCCL_MULTI_RANK_GPU_ENABLE",
];

/// Runs `kiln` without the relevant variables of this machine, and with `variables`.
fn kiln(workspace: &Workspace, variables: &[(&str, &str)], arguments: &[&str]) -> Ended {
    let mut command = Command::new(env!("CARGO_BIN_EXE_kiln"));
    VARIABLES.iter().for_each(|name| {
        command.env_remove(name);
    });
    let child = command
        .env("PATH", "bin")
        .args(arguments)
        .envs(variables.iter().copied())
        .current_dir(workspace.path(""))
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn();
    let mut ended = workspace.end(child.expect("the binary starts"));
    // The kernel reports absolute paths, which differ between machines.
    let here = workspace.path("").canonicalize().expect("the folder");
    for text in [&mut ended.stdout, &mut ended.stderr] {
        *text = text.replace(&format!("{}/", here.display()), "");
    }
    ended
}

/// Returns a workspace whose run requests a GPU.
fn on_cuda() -> Workspace {
    let workspace = Workspace::new();
    workspace.replace("run.toml", "backend = \"cpu\"\nthreads = 1\n", "backend = \"cuda\"\n");
    workspace
}

/// The variables of rank 2 of 3 on this node, which must fail before it meets the other ranks.
const RANK: [(&str, &str); 6] = [
    ("RANK", "2"),
    ("LOCAL_RANK", "2"),
    ("WORLD_SIZE", "3"),
    ("LOCAL_WORLD_SIZE", "3"),
    ("MASTER_ADDR", "localhost"),
    ("MASTER_PORT", "1"),
];

const TRAIN: &[&str] = &["train", "run.toml", "--out", "run"];

/// Returns the doctor's lines about GPUs.
fn gpus(ended: &Ended) -> Vec<&str> {
    assert_eq!((ended.code, ended.stderr.as_str()), (Some(0), ""), "{ended:?}");
    let lines = ended.stdout.lines().skip_while(|line| !line.contains("  GPUs "));
    let lines = lines.enumerate().take_while(|(index, line)| *index == 0 || line.starts_with(' '));
    lines.map(|(_, line)| line.split_once("  GPUs ").map_or(line, |(_, detail)| detail).trim()).collect()
}

fn has_driver() -> bool {
    Path::new("/proc/driver/nvidia/version").exists()
}

/// On a machine with a driver, the GPUs are hidden, which gives a different message.
#[test]
fn without_a_gpu() {
    let workspace = on_cuda();
    let hide: &[_] = if has_driver() { &[("CUDA_VISIBLE_DEVICES", "")] } else { &[] };
    let ended = kiln(&workspace, hide, TRAIN);
    assert!(!workspace.path("run").exists());
    let mut messages = Messages::default();
    messages.record("train on CUDA", &ended, 2);
    let text = messages.finish();
    if !cfg!(feature = "cuda") {
        insta::assert_snapshot!("train_without_cuda", text);
    } else if has_driver() {
        assert!(text.contains("CUDA_VISIBLE_DEVICES is empty"), "{text}");
    } else {
        insta::assert_snapshot!("train_without_driver", text);
    }

    let doctor = kiln(&workspace, hide, &["doctor"]);
    let lines = gpus(&doctor);
    if cfg!(feature = "cuda") {
        let driver = if has_driver() { "driver: " } else { "driver: there is no NVIDIA driver; " };
        assert!(lines[0].starts_with(driver), "{lines:#?}");
        for part in ["NVRTC: ", "headers: ", "cuBLASLt: ", "NCCL: "] {
            assert!(lines.iter().any(|line| line.starts_with(part)), "{part} {lines:#?}");
        }
    } else {
        assert!(lines[0].starts_with("program: this program was built without CUDA; "), "{lines:#?}");
        assert!(lines[1].starts_with("driver: "), "{lines:#?}");
    }
}

/// `auto` chooses the CPU and reports why.
#[test]
fn automatic() {
    let workspace = Workspace::new();
    workspace.replace("run.toml", "backend = \"cpu\"", "backend = \"auto\"");
    let hide = [("CUDA_VISIBLE_DEVICES", "")];
    let ended = kiln(&workspace, &hide, TRAIN);
    assert_eq!(ended.code, Some(0), "{ended:?}");
    let why = match (cfg!(feature = "cuda"), has_driver()) {
        (false, _) => "this program was built without CUDA",
        (true, false) => "there is no NVIDIA driver",
        (true, true) => "there is no GPU",
    };
    let lines: Vec<_> = ended.stdout.lines().filter(|line| line.starts_with("device: ")).collect();
    assert_eq!(lines, [format!("device: CPU, not a GPU: {why}")]);

    let ended =
        kiln(&workspace, &hide, &["train", "run.toml", "--out", "cpu", "--set", "device.backend=cpu"]);
    assert!(ended.stdout.contains("device: CPU, as device.backend says\n"), "{ended:?}");
}

/// Values that are invalid on a GPU.
#[test]
fn combinations_that_cannot_be() {
    let workspace = on_cuda();
    let mut messages = Messages::default();
    for (title, variables, arguments) in [
        ("threads of the CPU", &[][..], &["--set", "device.threads=2"][..]),
        ("communication of the CPU", &RANK, &["--set", "comm.backend=tcp", "--set", "train.global_batch=6"]),
    ] {
        let ended = kiln(&workspace, variables, &[TRAIN, arguments].concat());
        messages.record(title, &ended, 2);
    }
    let name = match cfg!(feature = "cuda") {
        true => "combinations_with_cuda",
        false => "combinations_without_cuda",
    };
    insta::assert_snapshot!(name, messages.finish());
}

/// Tests that need a build with CUDA, which looks for GPUs.
#[cfg(feature = "cuda")]
mod with_stand_ins {
    use std::fs;
    use std::path::{Path, PathBuf};
    use std::process::Command;

    use super::{RANK, TRAIN, gpus, has_driver, kiln, on_cuda};
    use crate::messages::Messages;
    use crate::support::Workspace;

    const SOURCES: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../benches/standins");

    /// A compiler without output. Like NVRTC, it opens its library of builtins by the bare name when it compiles.
    const NVRTC: &str = "
        #include <dlfcn.h>
        #include <stdio.h>
        #include <stdlib.h>
        #include <string.h>
        static int program;
        static char log[100];
        int nvrtcCreateProgram(void **made) { return *made = &program, 0; }
        int nvrtcDestroyProgram(void **made) { return *made = 0, 0; }
        int nvrtcCompileProgram(void *of) {
            if (dlopen(\"libnvrtc-builtins.so.13.0\", RTLD_NOW) != NULL)
                return 0;
            strcpy(log, \"nvrtc: error: failed to open libnvrtc-builtins.so.13.0.\");
            return 7;
        }
        int nvrtcGetProgramLogSize(void *of, size_t *size) { return *size = strlen(log) + 1, 0; }
        int nvrtcGetProgramLog(void *of, char *to) { return strcpy(to, log), 0; }
        int nvrtcGetPTXSize(void *of, size_t *size) { return *size = 0, 0; }
        int nvrtcGetPTX(void *of, char *to) { return 0; }
        int nvrtcGetCUBINSize(void *of, size_t *size) { return *size = 0, 0; }
        int nvrtcGetCUBIN(void *of, char *to) { return 0; }
        int nvrtcVersion(int *major, int *minor) {
            const char *set = getenv(\"NVRTC_MINOR\");
            *major = 13, *minor = set ? atoi(set) : 0;
            return 0;
        }
        int nvrtcGetNumSupportedArchs(int *count) { return *count = 2, 0; }
        int nvrtcGetSupportedArchs(int *all) { return all[0] = 75, all[1] = 90, 0; }
        const char *nvrtcGetErrorString(int error) { return error ? \"error\" : \"none\"; }
    ";

    fn build(library: &Path, sources: &[PathBuf]) {
        let name = library.file_name().expect("a name").to_str().expect("text");
        fs::create_dir_all(library.parent().expect("a folder")).expect("a folder");
        let status = Command::new("cc")
            .args(["-std=gnu11", "-fPIC", "-shared", "-pthread", &format!("-Wl,-soname,{name}"), "-o"])
            .arg(library)
            .args(sources)
            .status();
        // Rust uses the same C compiler for linking.
        assert!(status.expect("a C compiler").success(), "{name}");
    }

    /// Returns the source files of a stand-in library.
    fn sources(files: &[&str]) -> Vec<PathBuf> {
        ["trace.c"].iter().chain(files).map(|file| Path::new(SOURCES).join(file)).collect()
    }

    const DRIVER_SOURCES: &[&str] = &["cuda.c", "memory.c", "streams.c"];
    const NCCL_SOURCES: &[&str] =
        &["nccl.c", "nccl_collectives.c", "nccl_config.c", "nccl_ranks.c", "nccl_sum.c"];

    /// Creates a driver in `driver/`, where the loader is told to look, and a virtual environment `venv/`
    /// with the Python packages in `parts`.
    fn machine(parts: &[&str]) -> Workspace {
        let workspace = on_cuda();
        build(&workspace.path("driver/libcuda.so.1"), &sources(DRIVER_SOURCES));
        let packages = "venv/lib/python3.12/site-packages/nvidia";
        for part in parts {
            let library = |path: &str| workspace.path(format!("{packages}/{path}"));
            match *part {
                "nvrtc" => {
                    workspace.write("nvrtc.c", NVRTC);
                    build(&library("cu13/lib/libnvrtc.so.13"), &[workspace.path("nvrtc.c")]);
                    workspace.write("builtins.c", "");
                    // Builtins for every version of NVRTC that tests select.
                    for minor in [0, 2] {
                        let builtins = library(&format!("cu13/lib/libnvrtc-builtins.so.13.{minor}"));
                        build(&builtins, &[workspace.path("builtins.c")]);
                    }
                }
                "headers" => {
                    for header in [
                        "cuda_runtime.h",
                        "cuda_bf16.h",
                        "mma.h",
                        "cooperative_groups.h",
                        "cccl/cuda/barrier",
                    ] {
                        workspace.write(&format!("{packages}/cu13/include/{header}"), "");
                    }
                }
                "cublaslt" => build(&library("cu13/lib/libcublasLt.so.13"), &sources(&["cublaslt.c"])),
                "nccl" => build(&library("nccl/lib/libnccl.so.2"), &sources(NCCL_SOURCES)),
                other => panic!("{other}"),
            }
        }
        workspace
    }

    const DRIVER: (&str, &str) = ("LD_LIBRARY_PATH", "driver");
    const PACKAGES: (&str, &str) = ("VIRTUAL_ENV", "venv");
    const ALL: &[&str] = &["nvrtc", "headers", "cublaslt", "nccl"];

    #[test]
    fn drivers_that_will_not_do() {
        let workspace = machine(ALL);
        let mut messages = Messages::default();
        let mut record = |title: &str, variables: &[(&str, &str)], arguments: &[&str]| {
            let variables = [&[DRIVER, PACKAGES], variables].concat();
            let ended = kiln(&workspace, &variables, &[TRAIN, arguments].concat());
            assert!(!workspace.path("run").exists(), "{title}");
            messages.record(title, &ended, 2);
        };
        record("a driver that is broken", &[("FAKE_CUDA_INIT", "803")], &[]);
        record("an old driver", &[("FAKE_CUDA_VERSION", "12020")], &[]);
        record("a driver older than the compiler", &[("NVRTC_MINOR", "2")], &[]);
        record("no GPU", &[("FAKE_CUDA_DEVICES", "0")], &[]);
        record("hidden GPUs", &[("CUDA_VISIBLE_DEVICES", "")], &[]);
        record("an old GPU", &[("FAKE_CUDA_CAPABILITY", "7.0")], &[]);
        let bf16 = ["--set", "precision.compute=bf16"];
        record("a GPU without bf16", &[("FAKE_CUDA_CAPABILITY", "7.5")], &bf16);
        record("a GPU that is full", &[("FAKE_CUDA_FREE_GIB", "0.5")], &[]);
        let two = [&RANK[..], &[("FAKE_CUDA_DEVICES", "2")]].concat();
        record("more ranks than GPUs", &two, &["--set", "train.global_batch=6"]);
        record(
            "an old NCCL",
            &[&RANK[..], &[("FAKE_NCCL_VERSION", "21602")]].concat(),
            &["--set", "train.global_batch=6"],
        );
        insta::assert_snapshot!("drivers", messages.finish());
    }

    /// Another process uses the GPU's memory.
    #[test]
    fn a_check_finds_a_gpu_that_is_full() {
        let workspace = machine(ALL);
        let variables = [DRIVER, PACKAGES, ("FAKE_CUDA_FREE_GIB", "0.5")];
        let ended = kiln(&workspace, &variables, &["check", "run.toml", "--out", "run"]);
        let says = ["has too little free memory: 0.5 of 80.0 GiB are free", "-> end the programs on the GPU"];
        crate::check::assert_found(&ended, ["env", "device"], &says);
        assert!(ended.stdout.contains("skipped: needs env: device"), "{ended:?}");
    }

    /// Each missing library is reported by name. On a machine that has all of them, this test does nothing.
    #[test]
    fn libraries_that_are_not_there() {
        if has_driver() || Path::new("/usr/local/cuda").exists() || Path::new("/opt/cuda").exists() {
            eprintln!("not run: this machine has libraries of NVIDIA's");
            return;
        }
        let mut messages = Messages::default();
        for (count, missing) in ["nvrtc", "headers", "cublaslt", "nccl"].into_iter().enumerate() {
            let workspace = machine(&ALL[..count]);
            let variables = [&[DRIVER, PACKAGES], &RANK[..]].concat();
            let arguments = ["--set", "train.global_batch=6"];
            let ended = kiln(&workspace, &variables, &[TRAIN, &arguments].concat());
            messages.record(missing, &ended, 2);
        }
        // A file with the right name that is not a library.
        let workspace = machine(&[]);
        workspace.write("venv/lib/python3.12/site-packages/nvidia/cu13/lib/libnvrtc.so.13", "text");
        let ended = kiln(&workspace, &[DRIVER, PACKAGES], TRAIN);
        messages.record("a damaged library", &ended, 2);
        insta::assert_snapshot!("libraries", messages.finish());
    }

    /// Counting GPUs needs only the driver.
    #[test]
    fn ranks_per_gpu_are_counted() {
        let workspace = machine(&[]);
        let launch = |gpus: &'static str, word: &'static str| {
            let ranks = ["--nproc-per-node", word, "--log-dir", "logs", "--program", "/bin/sh"];
            let command = ["--", "-c", "echo $WORLD_SIZE ranks"];
            let arguments = [&["launch"][..], &ranks, &command].concat();
            kiln(&workspace, &[DRIVER, ("FAKE_CUDA_DEVICES", gpus)], &arguments)
        };
        for (gpus, word) in [("3", "gpu"), ("2", "auto")] {
            let ended = launch(gpus, word);
            assert_eq!((ended.code, ended.stdout), (Some(0), format!("{gpus} ranks\n")));
        }
        let ended = launch("0", "gpu");
        assert_eq!(ended.code, Some(2), "{ended:?}");
        assert!(ended.stderr.contains("cannot count GPUs (there is no GPU"), "{ended:?}");
    }

    /// If a GPU exists but cannot be used, `auto` fails; without a GPU, it chooses the CPU.
    #[test]
    fn automatic_passes_over_no_gpu() {
        let workspace = machine(ALL);
        workspace.replace("run.toml", "backend = \"cuda\"", "backend = \"auto\"");
        let variables = |more: &[(&'static str, &'static str)]| [&[DRIVER, PACKAGES], more].concat();
        let mut messages = Messages::default();
        let tcp = ["--set", "comm.backend=tcp", "--set", "train.global_batch=6"];
        for (title, more, arguments) in [
            ("a driver that is broken", &[("FAKE_CUDA_INIT", "803")][..], &[][..]),
            ("an old driver", &[("FAKE_CUDA_VERSION", "12020")], &[]),
            ("an old GPU", &[("FAKE_CUDA_CAPABILITY", "7.0")], &[]),
            ("a GPU that is full", &[("FAKE_CUDA_FREE_GIB", "0.5")], &[]),
            ("no compiler", &[("VIRTUAL_ENV", "none")], &[]),
            ("ranks that do not reach it", &RANK, &tcp),
        ] {
            let ended = kiln(&workspace, &variables(more), &[TRAIN, arguments].concat());
            assert!(!workspace.path("run").exists(), "{title}");
            if title != "no compiler" {
                messages.record(title, &ended, 2);
            } else {
                // Another test covers the places searched.
                let start = "error: the GPU cannot be used: NVRTC, which compiles kernels, is";
                assert!(ended.code == Some(2) && ended.stderr.starts_with(start), "{ended:?}");
            }
        }
        insta::assert_snapshot!("automatic", messages.finish());

        for (index, more) in [
            // Without a GPU, the age of the driver does not matter.
            &[("FAKE_CUDA_DEVICES", "0"), ("FAKE_CUDA_VERSION", "12020")][..],
            &[("CUDA_VISIBLE_DEVICES", "")],
        ]
        .into_iter()
        .enumerate()
        {
            let out = format!("cpu{index}");
            let ended = kiln(&workspace, &variables(more), &["train", "run.toml", "--out", &out]);
            assert_eq!(ended.code, Some(0), "{ended:?}");
            assert!(ended.stdout.contains("device: CPU, not a GPU: there is no GPU\n"), "{ended:?}");
        }
    }

    /// Offloaded state claims no memory on the GPU, and presets account for that: each start gets as far as its
    /// missing data.
    #[test]
    fn presets_fit_into_80_gib() {
        let workspace = machine(ALL);
        let start = |preset: &str, more: &[&str]| {
            let config = crate::presets::folder().join(format!("{preset}.toml"));
            let config = config.to_str().expect("UTF-8");
            let variables = [DRIVER, PACKAGES, ("FAKE_CUDA_FREE_GIB", "70")];
            let ended = kiln(&workspace, &variables, &[&["train", config, "--out", "run"], more].concat());
            assert_eq!(ended.code, Some(2), "{ended:?}");
            ended.stderr
        };
        let no_data = |said: &str, preset: &str| {
            assert!(said.contains(&format!("runs/data/{preset}")), "{preset}: {said}");
        };
        for preset in ["90m", "300m", "1b"] {
            no_data(&start(preset, &[]), preset);
        }
        // Independent of this machine's own memory.
        let offload = ["--set", "shard.offload=true", "--set", "device.memory=200GiB"];
        no_data(&start("7b", &offload), "7b");
        let said = start("7b", &[]);
        assert!(said.contains("GPU 0") || said.contains("shard.offload = true"), "{said}");
    }

    /// Everything is found in Python packages that the loader does not search; NCCL has a file name that cudarc
    /// does not look for.
    #[test]
    fn everything_is_there() {
        let workspace = machine(ALL);
        let cache = workspace.path("cache");
        workspace.write(&format!("cache/kiln/kernels/{}.cubin", "0a".repeat(32)), vec![0; 3 << 19]);
        let cache = ("XDG_CACHE_HOME", cache.to_str().expect("UTF-8"));
        let variables = [DRIVER, PACKAGES, ("FAKE_CUDA_DEVICES", "2"), cache];
        let doctor = kiln(&workspace, &variables, &["doctor"]);
        let site = "venv/lib/python3.12/site-packages/nvidia";
        assert_eq!(
            gpus(&doctor),
            [
                "driver: for CUDA 13.0".to_owned(),
                "GPU: 0 (NVIDIA stand-in, compute capability 9.0, 80.0 of 80.0 GiB free)".to_owned(),
                "GPU: 1 (NVIDIA stand-in, compute capability 9.0, 80.0 of 80.0 GiB free)".to_owned(),
                format!("NVRTC: 13.0 ({site}/cu13/lib/libnvrtc.so.13)"),
                format!("cuBLASLt: {site}/cu13/lib/libcublasLt.so.13"),
                format!("NCCL: 2.28 ({site}/nccl/lib/libnccl.so.2)"),
                format!("headers: {site}/cu13/include"),
                "kernels: 1 compiled kernels (1.5 MiB) are kept in cache/kiln/kernels".to_owned(),
                "products: cuBLASLt's first choices; kiln warmup CONFIG --products measures others"
                    .to_owned(),
            ]
        );
    }

    /// The only variable is PATH, whose `python3` links into a virtual environment.
    #[test]
    fn the_environment_of_python3_is_searched() {
        let workspace = machine(ALL);
        fs::create_dir_all(workspace.path("bin")).expect("a folder");
        workspace.write("venv/bin/python3", "");
        std::os::unix::fs::symlink("../venv/bin/python3", workspace.path("bin/python3")).expect("a link");
        let doctor = kiln(&workspace, &[DRIVER], &["doctor"]);
        let site = "bin/../venv/lib/python3.12/site-packages/nvidia";
        for line in [
            "NVRTC: 13.0 (venv/lib/python3.12/site-packages/nvidia/cu13/lib/libnvrtc.so.13)".to_owned(),
            format!("headers: {site}/cu13/include"),
        ] {
            assert!(gpus(&doctor).contains(&line.as_str()), "{line} {doctor:?}");
        }
    }

    /// NVRTC cannot compile without its builtins, which is detected before a run starts.
    #[test]
    fn a_compiler_without_builtins_is_refused() {
        let workspace = machine(ALL);
        let lib = "venv/lib/python3.12/site-packages/nvidia/cu13/lib";
        fs::remove_file(workspace.path(format!("{lib}/libnvrtc-builtins.so.13.0"))).expect("the builtins");
        let variables = [DRIVER, PACKAGES];
        let missing =
            format!("{lib}/libnvrtc.so.13 (without libnvrtc-builtins.so.13.0, which belongs next to it)");
        let doctor = kiln(&workspace, &variables, &["doctor"]);
        let line = gpus(&doctor).into_iter().find(|line| line.starts_with("NVRTC: ")).expect("a line");
        assert!(line.contains(&missing), "{line}");
        let ended = kiln(&workspace, &variables, TRAIN);
        assert!(ended.code == Some(2) && ended.stderr.contains(&missing), "{ended:?}");
    }
}
