use super::backoff::Backoff;
use super::group::Group;
use ::mpi::request::multiple_scope;
use ::mpi::topology::SimpleCommunicator;
use ::mpi::traits::{Communicator, Destination, Source};
use std::io::Write;
use std::time::{Duration, Instant};

const LIMIT: usize = 1 << 30;

const PAUSE: Duration = Duration::from_micros(200);

/// Time limit for a transfer after its group has failed. It normally completes, because all ranks take part.
const GRACE: Duration = Duration::from_secs(3);

/// Sends and receives concurrently until all messages have arrived, between ranks that have entered an operation. Ranks
/// are ranks of the group. MPI cannot cancel a send, so if the group fails and the transfer does not finish, ends the
/// job.
pub(super) fn exchange(group: &Group, sends: &[(usize, &[u8])], receives: Vec<(usize, &mut [u8])>) {
    let world = SimpleCommunicator::world();
    let process = |rank: usize| world.process_at_rank(group.identity.world_ranks[rank] as i32);
    let tag = group.number;
    multiple_scope(2 * group.world_size(), |scope, requests| {
        for (rank, buffer) in receives {
            for part in buffer.chunks_mut(LIMIT) {
                requests.add(process(rank).immediate_receive_into_with_tag(scope, part, tag));
            }
        }
        for (rank, buffer) in sends {
            for part in buffer.chunks(LIMIT) {
                requests.add(process(*rank).immediate_send_with_tag(scope, part, tag));
            }
        }
        let mut backoff = Backoff::new(PAUSE);
        let mut failed: Option<Instant> = None;
        while requests.incomplete() > 0 {
            if requests.test_any().is_some() {
                backoff.reset();
                continue;
            }
            backoff.wait();
            if group.failure().is_some() {
                let since = *failed.get_or_insert_with(Instant::now);
                if since.elapsed() > GRACE {
                    end_job(group, &world);
                }
            }
        }
    });
}

fn end_job(group: &Group, world: &SimpleCommunicator) -> ! {
    let verdict = group.world.verdict();
    let verdict = verdict.map_or_else(|| "the group has failed".into(), |v| v.to_string());
    // MPI still uses the buffers, so this function cannot return.
    let _ = writeln!(
        std::io::stderr(),
        "rank {} of group \"{}\" is stuck in a transfer that MPI cannot cancel; ending the job: \
         {verdict}",
        group.identity.rank,
        group.identity.name
    );
    world.abort(1)
}
