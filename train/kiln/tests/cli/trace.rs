//! Whole runs on CUDA with the stand-ins for NVIDIA's libraries, and the order of their calls to the driver.
//! Kernels do nothing there, so the numbers of a run are meaningless. `benches/trace.sh` sets this up.
//!
//! One rank that communicates as one of many would takes three steps. Tests examine the third: by then
//! kernels are compiled and memory is allocated.

use std::collections::HashMap;
use std::net::TcpListener;
use std::sync::OnceLock;

use crate::support::{Ended, Workspace, names};

/// Makes a single rank communicate; as a process of its own, it does so through NCCL.
const ALONE: &[&str] = &["--set", "shard.communicate_alone=true"];

/// The call that ends a step.
const UPDATE: &str = "adamw";

/// One call to the driver or to NCCL.
#[derive(Debug)]
pub(crate) struct Call {
    pub(crate) name: String,
    fields: HashMap<String, String>,
}

impl Call {
    fn read(line: &str) -> Call {
        let mut words = line.split(' ');
        let name = words.next().unwrap_or_default().to_owned();
        let fields = words.filter_map(|word| word.split_once('='));
        let fields = fields.map(|(key, value)| (key.to_owned(), value.to_owned()));
        Call { name, fields: fields.collect() }
    }

    pub(crate) fn field(&self, key: &str) -> &str {
        self.fields.get(key).map_or("", String::as_str)
    }

    fn is(&self, name: &str, stream: &str) -> bool {
        self.name == name && self.field("stream") == stream
    }

    pub(crate) fn updates(&self) -> bool {
        self.name == "launch" && self.field("kernel").contains(UPDATE)
    }

    /// Returns `true` if the host waits in this call.
    fn waits(&self) -> bool {
        self.name.contains("synchron")
    }

    fn allocates(&self) -> bool {
        self.name.starts_with("alloc") || self.name.starts_with("free")
    }
}

/// A collective: its call in the trace, the work that it waits for, and the work that waits for it.
#[derive(Debug)]
struct Collective {
    name: String,
    called: usize,
    /// Index of the call before which the compute stream must have finished the work on the collective's buffers.
    ready: usize,
    /// Index from which on the work of the compute stream waits for the collective.
    joined: usize,
}

/// Runs three steps with additional arguments and variables. Returns the result and the calls.
fn start(variables: &[(&str, &str)], more: &[&str]) -> (Ended, Vec<Call>) {
    for name in ["LD_LIBRARY_PATH", "CUDA_PATH"] {
        assert!(std::env::var_os(name).is_some(), "{name} is not set: benches/trace.sh runs this");
    }
    let workspace = Workspace::new();
    // Values that no kernel has written may be NaN.
    let changes = [
        ("train.steps", "3"),
        ("train.ranks", "1"),
        // One micro-batch.
        ("train.global_batch", "2"),
        ("train.nonfinite", "'skip'"),
        ("device.backend", "'cuda'"),
        // The check would reject kernels that compute nothing.
        ("device.verify_kernels", "false"),
    ];
    workspace.config("run.toml", &changes);
    workspace.replace("run.toml", "threads = 1\n", "");
    let arguments = ["train", "run.toml", "--out", "run"];
    let child = workspace
        .command(&[&arguments, more].concat())
        .env("FAKE_CUDA_TRACE", workspace.path("trace.txt"))
        .env_remove("FAKE_CUDA_PTX_DIR")
        // All runs in these tests share a cache.
        .env("XDG_CACHE_HOME", env!("CARGO_TARGET_TMPDIR"))
        .envs(variables.iter().copied())
        .spawn();
    let ended = workspace.end(child.expect("the binary starts"));
    let calls = workspace.text("trace.txt").lines().map(Call::read).collect();
    if let Some(kept) = std::env::var_os("TRACE_KEPT") {
        std::fs::write(kept, workspace.text("trace.txt")).expect("a file for the trace");
    }
    (ended, calls)
}

/// Returns the calls of a run, which must succeed.
pub(crate) fn run(variables: &[(&str, &str)], more: &[&str]) -> Vec<Call> {
    let (ended, calls) = start(variables, more);
    assert_eq!(ended.code, Some(0), "{ended:?}");
    assert!(ended.stdout.contains("device: GPU 0 (NVIDIA stand-in"), "{ended:?}");
    assert!(ended.stdout.contains("done: 3 steps"), "{ended:?}");
    assert!(calls.iter().filter(|call| call.updates()).count() >= 3, "no {UPDATE} is launched");
    calls
}

/// Returns the calls of a run in one process, as under a launcher; shared by all tests.
pub(crate) fn run_as_process() -> &'static [Call] {
    static CALLS: OnceLock<Vec<Call>> = OnceLock::new();
    CALLS.get_or_init(|| as_process(&[], |variables| run(variables, ALONE)))
}

/// Calls `run` with the variables of a process that is the only rank, and `more`.
fn as_process<R>(more: &[(&str, &str)], run: impl FnOnce(&[(&str, &str)]) -> R) -> R {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    let port = listener.local_addr().expect("an address").port().to_string();
    drop(listener);
    let variables = [
        ("RANK", "0"),
        ("LOCAL_RANK", "0"),
        ("WORLD_SIZE", "1"),
        ("LOCAL_WORLD_SIZE", "1"),
        ("MASTER_ADDR", "127.0.0.1"),
        ("MASTER_PORT", &port),
    ];
    run(&[&variables, more].concat())
}

/// Returns the calls of the third step: from the first call after the last host wait before its first gather, to the
/// last call of its update.
pub(crate) fn third_step(calls: &[Call]) -> &[Call] {
    let updates: Vec<_> = (0..calls.len()).filter(|at| calls[*at].updates()).collect();
    assert!(updates.len().is_multiple_of(3), "{} updates in three steps", updates.len());
    let of_step = updates.len() / 3;
    let (before, last) = (updates[2 * of_step - 1], updates[3 * of_step - 1]);
    let first_gather = (before..last).find(|at| calls[*at].name == "nccl_all_gather");
    let first_gather = first_gather.expect("a gather");
    let waited = (before..first_gather).rev().find(|at| calls[*at].waits()).unwrap_or(before);
    &calls[waited + 1..=last]
}

/// Returns the collectives of a step in call order, and the compute stream.
fn collectives(step: &[Call]) -> (Vec<Collective>, String) {
    let compute = step.last().expect("an update").field("stream").to_owned();
    let is_collective = |call: &Call| call.name.starts_with("nccl_");
    let stream = step.iter().find(|call| is_collective(call)).expect("one").field("stream");
    assert_ne!(stream, compute, "communication has a stream of its own");
    let find = |mut range: std::ops::Range<usize>, name: &str, stream: &str, event: &str| {
        range.find(|at| step[*at].is(name, stream) && step[*at].field("event") == event)
    };
    let all = (0..step.len()).filter(|at| is_collective(&step[*at])).map(|called| {
        assert!(step[called].field("stream") == stream, "one stream for communication");
        // The collective waits for earlier work of the compute stream; an event marks its end.
        let wait = (0..called).rev().find(|at| step[*at].is("stream_wait_event", stream));
        let event = step[wait.expect("it waits for its buffers")].field("event");
        let ready = (0..called)
            .rev()
            .find(|at| step[*at].is("event_record", &compute) && step[*at].field("event") == event);
        let done = (called..step.len()).find(|at| step[*at].is("event_record", stream));
        let done = done.expect("its end is marked");
        let joined = find(done..step.len(), "stream_wait_event", &compute, step[done].field("event"));
        Collective {
            name: step[called].name.clone(),
            called,
            ready: ready.expect("the compute stream says when"),
            joined: joined.unwrap_or_else(|| panic!("nothing waits for {:?}", step[called])),
        }
    });
    (all.collect(), compute)
}

/// Returns how many kernels the compute stream gets between two calls; zero if the second call comes first.
fn launches(step: &[Call], compute: &str, from: usize, to: usize) -> usize {
    let between = step.get(from..to).unwrap_or_default();
    between.iter().filter(|call| call.is("launch", compute)).count()
}

#[test]
#[ignore = "needs stand-ins for the driver: benches/trace.sh"]
fn a_thread_trains_on_a_gpu() {
    let two = &["--ranks", "2", "--set", "train.global_batch=4"][..];
    for more in [&[][..], ALONE, two] {
        let calls = run(&[], more);
        // Threads move data without NCCL.
        assert!(calls.iter().all(|call| !call.name.starts_with("nccl_")));
    }
}

/// A gather overlaps with computation: of the next block in forward, of the previous one in backward. No
/// reduction starts before the next gather has started.
#[test]
#[ignore = "needs stand-ins for the driver: benches/trace.sh"]
fn gathers_and_reductions_overlap_with_compute() {
    let calls = run_as_process();
    let step = third_step(calls);
    let (all, compute) = collectives(step);
    let names: Vec<_> = all.iter().map(|one| one.name.trim_start_matches("nccl_")).collect();
    // Order: embedding, two blocks, head; then in reverse: a block is gathered before the later module is reduced.
    // Backward does not gather the embedding, because it reads none of the embedding's rows.
    let (gather, scatter) = ("all_gather", "reduce_scatter");
    let forward = [gather; 4];
    let backward = [gather, scatter, gather, scatter, scatter, scatter];
    let in_step: Vec<_> = names.iter().copied().take(10).collect();
    assert_eq!(in_step, [&forward[..], &backward].concat(), "{names:?}");

    let gathers: Vec<_> = all.iter().filter(|one| one.name == "nccl_all_gather").collect();
    for (index, pair) in gathers.windows(2).enumerate() {
        let (this, next) = (pair[0], pair[1]);
        let beside = launches(step, &compute, next.called, next.joined);
        assert!(beside > 0, "nothing is computed while {next:?} is under way");
        // The next gather is called, and may begin, before any computation uses the current one; in backward, even
        // before the wait for the current one. At the turning point, the backward of the head calls the next gather.
        let before = launches(step, &compute, this.joined, next.ready);
        assert!(before == 0 || index == 3, "{before} kernels before {next:?}, {beside} beside it");
    }
    for pair in gathers[..4].windows(2) {
        // Computation waits for the gather it needs, but not for the one in progress.
        let waits = step[pair[0].joined + 1..pair[1].joined]
            .iter()
            .filter(|call| call.is("stream_wait_event", &compute))
            .count();
        assert_eq!(waits, 0, "compute waits for more than {:?}", pair[0]);
    }
    // There is exactly one wait for each collective.
    let waits = step.iter().filter(|call| call.is("stream_wait_event", &compute)).count();
    assert_eq!(waits, all.len());
    // The reduction of a module overlaps with the backward of the next module.
    let scatters: Vec<_> = all.iter().filter(|one| one.name == "nccl_reduce_scatter").collect();
    for one in &scatters[..3] {
        assert!(launches(step, &compute, one.called, one.joined) > 0, "{one:?}");
    }
}

#[test]
#[ignore = "needs stand-ins for the driver: benches/trace.sh"]
fn a_step_makes_the_host_wait_for_nothing() {
    let calls = run_as_process();
    let step = third_step(calls);
    let waits: Vec<_> = step.iter().filter(|call| call.waits()).collect();
    assert!(waits.is_empty(), "{waits:#?}");
}

#[test]
#[ignore = "needs stand-ins for the driver: benches/trace.sh"]
fn the_third_step_allocates_nothing() {
    let calls = run_as_process();
    let step = third_step(calls);
    let allocations: Vec<_> = step.iter().filter(|call| call.allocates()).collect();
    assert!(allocations.is_empty(), "{allocations:#?}");
}

/// A run creates its GPU's context only once, because the driver takes tenths of a second for it.
#[test]
#[ignore = "needs stand-ins for the driver: benches/trace.sh"]
fn a_context_is_created_once() {
    let calls = run_as_process();
    let created: Vec<_> = calls.iter().filter(|call| call.name == "context_create").collect();
    assert!(matches!(created[..], [call] if call.field("device") == "0"), "{created:?}");
}

/// NCCL reads the fields of the configuration that we set, and no padding. A field that NCCL 2.30.5 added lies
/// behind the last field that versions up to 2.30.4 know.
#[test]
#[ignore = "needs stand-ins for the driver: benches/trace.sh"]
fn every_nccl_reads_the_configuration_that_was_meant() {
    let unset = i32::MIN.to_string();
    for version in ["22803", "23004", "23005", "23203"] {
        let calls = as_process(&[("FAKE_NCCL_VERSION", version)], |variables| run(variables, ALONE));
        let read: Vec<_> = calls.iter().filter(|call| call.name == "comm_config").collect();
        assert!(!read.is_empty(), "NCCL {version}");
        for call in read {
            assert_eq!(call.field("blocking"), "0", "NCCL {version}");
            for field in ["max_p2p_peers", "graph_stream_ordering"] {
                assert_eq!(call.field(field), unset, "NCCL {version}: {call:?}");
            }
        }
    }
}

/// While NCCL queues an operation in the background, the launching thread does not sleep.
#[test]
#[ignore = "needs stand-ins for the driver: benches/trace.sh"]
fn launches_do_not_sleep() {
    const LOOKS: &str = "20";
    let calls = as_process(&[("FAKE_NCCL_LOOKS", LOOKS)], |variables| run(variables, ALONE));
    let number = |call: &Call, key: &str| call.field(key).parse::<u64>().expect("a number");
    let step = third_step(&calls);
    let waited: Vec<_> = step.iter().filter(|call| call.name == "comm_looked").collect();
    assert!(waited.len() >= 5, "{waited:?}");
    // On a busy machine, a thread may lose the processor for a whole millisecond.
    let patient = waited.iter().filter(|call| number(call, "sleeps") < number(call, "looks") / 2);
    assert!(2 * patient.count() > waited.len(), "{waited:?}");
}

/// A healthy communicator is finalized and then destroyed; a failed one is aborted.
#[test]
#[ignore = "needs stand-ins for the driver: benches/trace.sh"]
fn communicators_end_in_good_order_unless_they_are_sick() {
    let count = |calls: &[Call], name: &str| calls.iter().filter(|call| call.name == name).count();
    let calls = run_as_process();
    let made = count(calls, "nccl_init");
    assert!(made > 0);
    for (name, times) in [("nccl_finalize", made), ("nccl_destroy", made), ("nccl_abort", 0)] {
        assert_eq!(count(calls, name), times, "{name}");
    }
    let destroyed: Vec<_> = calls.iter().filter(|call| call.name == "nccl_destroy").collect();
    for call in &destroyed {
        assert_eq!(call.field("busy"), "0", "{call:?}");
        let is_its = |other: &&Call| other.field("comm") == call.field("comm");
        let of_it: Vec<_> = calls.iter().filter(is_its).map(|call| call.name.as_str()).collect();
        let end = of_it.iter().position(|name| *name == "nccl_finalize").expect("finalized");
        assert!(of_it[end..].iter().all(|name| !name.contains("all_") && !name.contains("scatter")));
    }

    // A network that fails in the middle of a step.
    let broken = [("FAKE_NCCL_FAILS", "8")];
    let (ended, calls) = as_process(&broken, |variables| start(variables, ALONE));
    assert_eq!(ended.code, Some(1), "{ended:?}");
    assert!(ended.stderr.contains("NCCL cannot continue"), "{ended:?}");
    let made = count(&calls, "nccl_init");
    assert!(made > 0);
    for (name, times) in [("nccl_finalize", 0), ("nccl_destroy", 0), ("nccl_abort", made)] {
        assert_eq!(count(&calls, name), times, "{name}");
    }
}

/// A compiler that looks like NVRTC from outside but compiles nothing.
const NO_NVRTC: &str = "
    int nvrtcVersion(int *major, int *minor) { return *major = 13, *minor = 0, 0; }
    int nvrtcGetNumSupportedArchs(int *count) { return *count = 2, 0; }
    int nvrtcGetSupportedArchs(int *all) { return all[0] = 75, all[1] = 90, 0; }
    const char *nvrtcGetErrorString(int error) { return error ? \"error\" : \"none\"; }
    static int program;
    int nvrtcCreateProgram(void **made, ...) { return *made = &program, 0; }
    int nvrtcCompileProgram(void *program, int count, void *options) { return 6; }
    int nvrtcGetProgramLogSize(void *program, unsigned long *size) { return *size = 9, 0; }
    int nvrtcGetProgramLog(void *program, char *log) { return __builtin_memcpy(log, \"compiled\", 9), 0; }
    int nvrtcGetPTXSize(void *program, unsigned long *size) { return 6; }
    int nvrtcGetPTX(void *program, char *ptx) { return 6; }
    int nvrtcGetCUBINSize(void *program, unsigned long *size) { return 6; }
    int nvrtcGetCUBIN(void *program, char *cubin) { return 6; }
    int nvrtcDestroyProgram(void **program) { return 0; }
";

/// Every kernel launched while CUPTI was recording is in the trace, under its name.
#[test]
#[ignore = "needs stand-ins for the driver: benches/trace.sh"]
fn a_trace_has_the_kernels_of_its_steps() {
    let folder = Workspace::new();
    let file = folder.path("gpu.pftrace");
    let file = file.to_str().expect("UTF-8");
    let calls = run(&[], &["--trace", &format!("steps=2-3,{file}")]);
    let at = |name: &str, field: &str| {
        let is_it = |call: &Call| call.name == name && (field.is_empty() || call.field("kind") == field);
        calls.iter().position(is_it).unwrap_or_else(|| panic!("no {name} in the trace"))
    };
    let mut launched: HashMap<&str, u64> = HashMap::new();
    for call in &calls[at("cupti_enable", "10")..at("cupti_flush", "")] {
        if call.name == "launch" {
            *launched.entry(call.field("kernel")).or_default() += 1;
        }
    }
    let ended = folder.kiln(&["trace", "summary", file, "--json"]);
    assert_eq!(ended.code, Some(0), "{ended:?}");
    let summary: serde_json::Value = serde_json::from_str(&ended.stdout).expect("JSON");
    let kernels = summary["kernels"].as_array().expect("kernels").iter();
    let recorded: HashMap<&str, u64> = kernels
        .map(|kernel| (kernel["name"].as_str().expect("a name"), kernel["calls"].as_u64().expect("a count")))
        .collect();
    assert!(launched.len() > 5 && recorded == launched, "{recorded:?} of {launched:?}");
    let gpu = &summary["gpus"][0];
    assert!(gpu["rank"] == 0 && gpu["busy_s"].as_f64().is_some_and(|busy| busy > 0.0), "{gpu}");
    // Recording is disabled after the last step.
    assert!(calls.iter().any(|call| call.name == "cupti_disable" && call.field("kind") == "10"));
}

/// Processes that start at the same time fill one cache; a process that starts later compiles nothing.
#[test]
#[ignore = "needs stand-ins for the driver: benches/trace.sh"]
fn kernels_are_compiled_once() {
    let workspace = Workspace::new();
    let cache = workspace.path("cache");
    let cache = ("XDG_CACHE_HOME", cache.to_str().expect("UTF-8"));
    std::thread::scope(|scope| {
        let runs = [(); 2].map(|()| scope.spawn(|| run(&[cache], &[])));
        for run in runs {
            run.join().expect("a run");
        }
    });
    let folder = workspace.path("cache/kiln/kernels");
    let files = names(&folder);
    // The driver here refuses machine code, which is kept for other machines.
    let is_kernel = |name: &String| name.ends_with(".ptx") || name.ends_with(".cubin");
    assert!(files.len() > 10 && files.iter().all(is_kernel), "{files:?}");

    // The key of a kernel includes the version of NVRTC.
    let libraries = std::env::var("LD_LIBRARY_PATH").expect("a path");
    workspace.write("nvrtc.c", NO_NVRTC);
    workspace.write("stand-in/none", "");
    let library = workspace.path("stand-in/libnvrtc.so.13");
    let built = std::process::Command::new("cc")
        .args(["-fPIC", "-shared", "-Wl,-soname,libnvrtc.so.13", "-o"])
        .args([&library, &workspace.path("nvrtc.c")])
        .status();
    assert!(built.expect("a C compiler").success());
    let first = format!("{}:{libraries}", workspace.path("stand-in").display());
    let stand_in = ("LD_LIBRARY_PATH", first.as_str());
    run(&[cache, stand_in], &[]);
    assert_eq!(names(&folder), files);
    // If the folder cannot be created, the only cost is time.
    run(&[("XDG_CACHE_HOME", "/dev/null")], &[]);
    // Without cached kernels, the stand-in cannot compile.
    let empty = workspace.path("empty");
    let (ended, _) = start(&[("XDG_CACHE_HOME", empty.to_str().expect("UTF-8")), stand_in], &[]);
    assert_eq!(ended.code, Some(1), "{ended:?}");
}
