//! The guarantees of every communicator, on the MPI backend under a real `mpirun`.
//!
//!     cargo test --release -p kiln-collectives --features mpi --test conformance_mpi
//!
//! Without `mpirun`, this program starts itself under it with several numbers of processes, even with more
//! processes than cores. Each process runs the checks of the conformance suite for its own rank, as a world
//! of one member.

#[path = "mpi/own.rs"]
mod own;

use half::{bf16, f16};
use kiln_collectives::DType;
use kiln_collectives::mpi::{Mpi, MpiOptions};
use kiln_conformance::{Settings, World, failures, groups, label, results, share};
use std::env;
use std::process::{Command, ExitCode};

/// Numbers of processes to run with.
const WORLDS: [usize; 6] = [1, 2, 3, 4, 6, 8];

fn main() -> ExitCode {
    // The variables of Open MPI's `mpirun`, and of other implementations.
    let started = ["OMPI_COMM_WORLD_SIZE", "PMI_SIZE"].iter().any(|name| env::var_os(name).is_some());
    if started {
        check_all();
        return ExitCode::SUCCESS;
    }
    let mut failed = 0;
    for processes in WORLDS {
        let passed = start(processes);
        failed += usize::from(!passed);
        let outcome = if passed { "ok" } else { "FAILED" };
        println!("test conformance with {processes} processes ... {outcome}");
    }
    let outcome = if failed == 0 { "ok" } else { "FAILED" };
    println!("\ntest result: {outcome}. {} passed; {failed} failed", WORLDS.len() - failed);
    ExitCode::from(u8::from(failed > 0))
}

/// Runs this program under `mpirun`; returns whether all processes succeeded.
fn start(processes: usize) -> bool {
    let program = env::current_exe().expect("a running program has a path");
    let status = Command::new("mpirun")
        // By default, Open MPI refuses to run as root and to oversubscribe; both are fine for a test.
        .envs([("OMPI_ALLOW_RUN_AS_ROOT", "1"), ("OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1")])
        .args(["--oversubscribe", "-n", &processes.to_string()])
        .arg(program)
        .status();
    match status {
        Ok(status) => status.success(),
        Err(error) => {
            eprintln!("mpirun cannot be started: {error}; install Open MPI");
            false
        }
    }
}

/// Runs every check that this number of processes allows, each in a separate world.
fn check_all() {
    let mpi = Mpi::start().expect("MPI starts under mpirun");
    let size = mpi.world_size();
    // Worlds with one member in this process.
    let world = || {
        let Settings { recorder_capacity, on_worker_start, .. } = Settings::default();
        share([mpi.world(MpiOptions { recorder_capacity, on_worker_start })])
    };
    for len in [0, 1, 1023] {
        results::check_operations::<f64>(&world(), len);
        results::check_operations::<f32>(&world(), len);
        results::check_operations::<f16>(&world(), len);
        results::check_operations::<bf16>(&world(), len);
    }
    results::check_operations::<f32>(&world(), 10_000_000 / size);
    own::check_few_elements(&world());
    own::check_bytes(&world());
    own::check_lifetime(&world());
    own::check_records(&world());
    failures::check_byte_sums(&world());
    if size > 1 {
        own::check_abort(&world());
        own::check_leaving(world(), &world());
        own::check_time_out(&world(), &world());
        own::check_slow_rank(&world());
    }
    match size {
        3 => check_mismatches(world),
        4 => {
            groups::check_mesh(&world());
            own::check_abort_across_groups(&world());
            own::check_totals(&world());
        }
        6 => groups::check_split(&world()),
        _ => {}
    }
}

fn check_mismatches(world: impl Fn() -> World) {
    let common = "all_reduce of 4 f32 for \"block 0\" (forward)";
    let reduce = || failures::reduce("block 0", DType::F32, 4);
    let errors = failures::diverge(world(), reduce(), |member| member.barrier(label("block 0")));
    failures::check_mismatch(&errors, common, "barrier for \"block 0\" (forward)");
    let others = [
        (failures::reduce("block 0", DType::BF16, 4), "all_reduce of 4 bf16 for \"block 0\" (forward)"),
        (failures::reduce("block 0", DType::F32, 5), "all_reduce of 5 f32 for \"block 0\" (forward)"),
        (failures::reduce("block 1", DType::F32, 4), "all_reduce of 4 f32 for \"block 1\" (forward)"),
    ];
    for (other, text) in others {
        failures::check_mismatch(&failures::diverge(world(), reduce(), other), common, text);
    }
    own::check_invalid(&world());
}
