//! A backend whose ranks are threads of one process and exchange copies of their buffers through a table.

use kiln_collectives::{
    Abort, AskAll, Backend, Buffer, Call, CallSite, Cause, CommError, GroupControl, GroupRank, Holds,
    Payload, ProcessGroup, RankShared, Verdict, Witness, WorkerStart, sum_into,
};
use std::collections::BTreeMap;
use std::sync::{Arc, Condvar, Mutex};
use std::time::Duration;

/// Creates a world, one communicator for each rank.
pub fn world(size: usize, capacity: usize, on_worker_start: Option<WorkerStart>) -> Vec<ProcessGroup<Table>> {
    let holds = Arc::<Holds>::default();
    let shared =
        |rank| RankShared::new(rank, size, "here", capacity, Arc::clone(&holds), on_worker_start.clone());
    let ranks = (0..size).map(shared).collect();
    let world = Arc::new(World { ranks, groups: Mutex::default(), changed: Condvar::new() });
    let group = add_group(&mut world.groups.lock().unwrap(), "world".into(), (0..size).collect());
    (0..size).map(|rank| ProcessGroup::start(Table::new(&world, group, rank))).collect()
}

/// Everything that the ranks share, behind one lock.
struct World {
    ranks: Vec<Arc<RankShared>>,
    groups: Mutex<Vec<Group>>,
    changed: Condvar,
}

struct Group {
    name: Arc<str>,
    /// World rank of each rank.
    world_ranks: Vec<usize>,
    /// Number of operations that each rank has issued.
    issued: Vec<u64>,
    /// The reason why no further operation starts.
    failure: Option<Cause>,
    /// Operations that at least one rank has entered and not all have left, by number.
    operations: BTreeMap<u64, Operation>,
}

/// Adds a group; returns its number.
fn add_group(groups: &mut Vec<Group>, name: Arc<str>, world_ranks: Vec<usize>) -> usize {
    let (issued, operations) = (vec![0; world_ranks.len()], BTreeMap::new());
    groups.push(Group { name, world_ranks, issued, failure: None, operations });
    groups.len() - 1
}

#[derive(Default)]
struct Operation {
    /// The call of each rank that has entered, with a copy of its input.
    entries: BTreeMap<usize, (Call, Arc<Buffer>)>,
    /// Set once all ranks have entered and their calls agree: the new groups of a split, with their ranks. The
    /// operation then completes on all ranks, even if the group fails meanwhile.
    agreed: Option<Vec<(usize, Vec<usize>)>>,
    /// Number of ranks that have left.
    left: usize,
}

/// One rank's side of a group.
pub struct Table {
    world: Arc<World>,
    group: usize,
    identity: GroupRank,
}

impl Table {
    fn new(world: &Arc<World>, group: usize, rank: usize) -> Table {
        let groups = world.groups.lock().unwrap();
        let Group { name, world_ranks, .. } = &groups[group];
        let shared = Arc::clone(&world.ranks[world_ranks[rank]]);
        let identity = GroupRank { name: Arc::clone(name), rank, world_ranks: world_ranks.clone(), shared };
        Table { world: Arc::clone(world), group, identity }
    }

    /// Enters the operation at `site`, waits for all ranks, and returns the inputs in rank order and the new
    /// groups.
    fn exchange(&self, site: &CallSite, call: Call, input: Arc<Buffer>) -> Result<Exchanged, CommError> {
        let (problem, size) = (call.problem, self.identity.world_ranks.len());
        let mut groups = self.world.groups.lock().unwrap();
        if let Some(cause) = &groups[self.group].failure {
            return Err(cause.error(site, None));
        }
        let entries = &mut groups[self.group].operations.entry(site.sequence).or_default().entries;
        entries.insert(site.rank, (call, input));
        if entries.len() == size {
            let calls: Vec<Call> = entries.values().map(|(call, _)| call.clone()).collect();
            self.decide(&mut groups, site, calls);
            self.world.changed.notify_all();
        }
        loop {
            let group = &mut groups[self.group];
            if let Some(operation) = group.operations.get_mut(&site.sequence)
                && let Some(agreed) = operation.agreed.clone()
            {
                let inputs = operation.entries.values().map(|(_, input)| Arc::clone(input)).collect();
                operation.left += 1;
                if operation.left == size {
                    group.operations.remove(&site.sequence);
                }
                return Ok((inputs, agreed));
            }
            if let Some(cause) = &group.failure {
                return Err(cause.error(site, problem));
            }
            groups = self.world.changed.wait(groups).unwrap();
        }
    }

    /// Compares the calls of all ranks, and creates the groups of a split.
    fn decide(&self, groups: &mut Vec<Group>, site: &CallSite, calls: Vec<Call>) {
        let Some(split) = Call::agree(&calls) else {
            let (group, sequence) = (Arc::clone(&site.group), site.sequence);
            let error = CommError::Mismatch { group, sequence, calls: calls.into_iter().map(Some).collect() };
            groups[self.group].failure.get_or_insert(Cause::Error(error));
            return;
        };
        let mut agreed = Vec::new();
        for (name, ranks) in split {
            let world_ranks = ranks.iter().map(|rank| self.identity.world_ranks[*rank]).collect();
            agreed.push((add_group(groups, name, world_ranks), ranks));
        }
        groups[self.group].operations.entry(site.sequence).or_default().agreed = Some(agreed);
    }
}

/// The inputs of all ranks in rank order, and the new groups of a split with their ranks.
type Exchanged = (Vec<Arc<Buffer>>, Vec<(usize, Vec<usize>)>);

impl GroupControl for Table {
    fn identity(&self) -> &GroupRank {
        &self.identity
    }

    fn cause(&self, site: &CallSite) -> Option<CommError> {
        self.world.groups.lock().unwrap()[self.group].failure.as_ref().map(|cause| cause.error(site, None))
    }

    fn fail(&self, abort: Abort) {
        self.world.groups.lock().unwrap()[self.group].failure.get_or_insert(Cause::Abort(abort));
        self.world.changed.notify_all();
    }

    fn time_out(&self, site: &CallSite, waited: Duration) -> CommError {
        let mut groups = self.world.groups.lock().unwrap();
        let (group, GroupRank { name, world_ranks, .. }) = (&mut groups[self.group], &self.identity);
        let missing = (0..world_ranks.len()).filter(|rank| group.issued[*rank] <= site.sequence).collect();
        let verdict =
            Box::new(Verdict::for_wait(&witnesses(&self.world.ranks), name, world_ranks, site.sequence));
        let error = CommError::TimedOut { site: site.clone(), waited, missing, verdict };
        let error = group.failure.get_or_insert(Cause::Error(error)).error(site, None);
        self.world.changed.notify_all();
        error
    }

    fn abort(&self, reason: &str) {
        let cause = Cause::Abort(self.identity.abort(reason));
        for group in self.world.groups.lock().unwrap().iter_mut() {
            group.failure.get_or_insert(cause.clone());
        }
        self.world.changed.notify_all();
    }
}

impl Backend for Table {
    const NAME: &'static str = "table";
    const IS_ONE_PROCESS: bool = true;
    const SHARES_HOLDS: bool = true;

    fn nodes(&self) -> Vec<usize> {
        vec![0; self.identity.world_ranks.len()]
    }

    fn issued(&self, site: &CallSite, _: &Call) {
        self.world.groups.lock().unwrap()[self.group].issued[site.rank] = site.sequence + 1;
    }

    fn execute(&self, site: &CallSite, call: Call, payload: Payload) -> Result<Buffer, CommError> {
        let input = match &payload {
            Payload::AllGather { input, .. } | Payload::ReduceScatter { input, .. } => (**input).clone(),
            Payload::AllReduce { buffer } => buffer.clone(),
            Payload::Broadcast { buffer, root } if site.rank == *root => buffer.clone(),
            Payload::Broadcast { .. } | Payload::Nothing => Buffer::from_slice::<u8>(&[]),
        };
        let (inputs, _) = self.exchange(site, call, Arc::new(input))?;
        let invalid = |problem| CommError::Invalid { site: site.clone(), problem };
        match payload {
            Payload::AllGather { output, .. } => {
                // The output may come without memory.
                let mut full = Buffer::zeros(output.dtype(), output.len());
                let size = inputs[0].size_in_bytes().max(1);
                let chunks = full.as_bytes_mut().chunks_mut(size).zip(&inputs);
                chunks.for_each(|(chunk, input)| chunk.copy_from_slice(input.as_bytes()));
                Ok(full)
            }
            Payload::ReduceScatter { mut output, .. } => {
                let start = site.rank * output.len();
                sum_into(&mut output, &inputs, start).map_err(invalid)?;
                Ok(output)
            }
            Payload::AllReduce { mut buffer } => {
                sum_into(&mut buffer, &inputs, 0).map_err(invalid)?;
                Ok(buffer)
            }
            Payload::Broadcast { root, .. } => Ok((*inputs[root]).clone()),
            Payload::Nothing => Ok(Buffer::from_slice::<u8>(&[])),
        }
    }

    fn split(&self, site: &CallSite, call: Call) -> Result<Option<Table>, CommError> {
        let (_, groups) = self.exchange(site, call, Arc::new(Buffer::from_slice::<u8>(&[])))?;
        let place = |ranks: &[usize]| ranks.iter().position(|rank| *rank == site.rank);
        let new = groups.iter().find_map(|(group, ranks)| Some((*group, place(ranks)?)));
        Ok(new.map(|(group, rank)| Table::new(&self.world, group, rank)))
    }

    fn verdict(&self) -> Option<Verdict> {
        self.world.groups.lock().unwrap().iter().find_map(|group| match &group.failure {
            Some(Cause::Error(CommError::TimedOut { verdict, .. })) => Some((**verdict).clone()),
            _ => None,
        })
    }

    fn ask_all(&self) -> Option<AskAll> {
        let ranks = self.world.ranks.clone();
        Some(Arc::new(move |_| witnesses(&ranks)))
    }
}

impl Drop for Table {
    fn drop(&mut self) {
        self.leave();
    }
}

/// Returns the activity of every rank, for a verdict.
fn witnesses(ranks: &[Arc<RankShared>]) -> Vec<Witness> {
    ranks.iter().map(|rank| Witness::Answered(Box::new(rank.flight(Table::NAME, usize::MAX)))).collect()
}
