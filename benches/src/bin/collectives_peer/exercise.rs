//! One operation on buffers that are reused in every iteration, as in a trainer.

use kiln_collectives::{Buffer, Communicator, DType, Label, Phase};
use std::collections::BTreeMap;
use std::error::Error;
use std::fmt;
use std::hint::black_box;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

pub type Failure = Box<dyn Error + Send + Sync>;

pub const PATIENCE: Duration = Duration::from_secs(60);

pub fn label(name: &str) -> Label {
    Label::new(name, Phase::Other)
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Op {
    AllGather,
    ReduceScatter,
    Memcpy,
}

impl Op {
    pub const ALL: [Op; 3] = [Op::AllGather, Op::ReduceScatter, Op::Memcpy];
}

impl fmt::Display for Op {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Op::AllGather => "all_gather",
            Op::ReduceScatter => "reduce_scatter",
            Op::Memcpy => "memcpy",
        })
    }
}

/// The buffers that `memcpy` copies from, by size. Ranks share them, as ranks in a gather read the same chunks.
#[derive(Clone, Default)]
pub struct Sources(Arc<Mutex<BTreeMap<usize, Arc<Buffer>>>>);

impl Sources {
    fn get(&self, elements: usize) -> Arc<Buffer> {
        let mut sources = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let source = sources.entry(elements).or_insert_with(|| {
            let values: Vec<f32> = (0..elements).map(|index| value(0, index)).collect();
            Arc::new(Buffer::from_slice(&values))
        });
        Arc::clone(source)
    }
}

/// An operation with its buffers, whose result has been checked once.
pub struct Exercise {
    op: Op,
    label: Label,
    input: Arc<Buffer>,
    /// `None` only while an operation is using it.
    output: Option<Buffer>,
}

impl Exercise {
    /// Creates the buffers for a full tensor of `bytes`, runs once and checks every element.
    ///
    /// The error is a sentence for the driver, the same on every rank.
    pub fn new(
        group: &dyn Communicator,
        op: Op,
        bytes: usize,
        sources: &Sources,
    ) -> Result<Exercise, String> {
        let (rank, ranks) = (group.rank(), group.world_size());
        if bytes == 0 || !bytes.is_multiple_of(4 * ranks) {
            return Err(format!("{bytes} bytes do not divide into f32 on {ranks} ranks"));
        }
        let (full, shard) = (bytes / 4, bytes / 4 / ranks);
        let values = |start: usize, len: usize| {
            let values: Vec<f32> = (start..start + len).map(|index| value(rank, index)).collect();
            Arc::new(Buffer::from_slice(&values))
        };
        let (input, output) = match op {
            Op::AllGather => (values(0, shard), full),
            Op::ReduceScatter => (values(0, full), shard),
            Op::Memcpy => (sources.get(full), full),
        };
        let output = Some(Buffer::from_slice(&vec![-1.0f32; output]));
        let mut exercise = Exercise { op, label: label("exercise"), input, output };
        let outcome = exercise.run(group).and_then(|()| exercise.check(rank, ranks));
        // All ranks must agree on whether the exercise exists.
        let wrong = Buffer::from_slice(&[f32::from(u8::from(outcome.is_err()))]);
        let wrong = group.all_reduce(label("check"), wrong).wait(PATIENCE);
        match wrong.as_ref().map(Buffer::as_slice::<f32>) {
            Ok(Ok([0.0])) => Ok(exercise),
            _ => {
                let cause = outcome.err().map_or("another rank's".into(), |e| e.to_string());
                Err(format!("the result of {op} of {bytes} bytes is wrong: {cause}"))
            }
        }
    }

    pub fn run(&mut self, group: &dyn Communicator) -> Result<(), Failure> {
        let mut output = self.output.take().ok_or("an earlier run failed")?;
        let (label, input) = (self.label.clone(), Arc::clone(&self.input));
        self.output = Some(match self.op {
            Op::AllGather => group.all_gather(label, input, output).wait(PATIENCE)?,
            Op::ReduceScatter => group.reduce_scatter(label, input, output).wait(PATIENCE)?,
            Op::Memcpy => {
                output.as_bytes_mut().copy_from_slice(black_box(&input).as_bytes());
                black_box(output)
            }
        });
        Ok(())
    }

    /// Compares every element with its expected value: small integers, whose sums are exact in any order.
    fn check(&self, rank: usize, ranks: usize) -> Result<(), Failure> {
        let output = self.output.as_ref().ok_or("an earlier run failed")?;
        debug_assert_eq!(output.dtype(), DType::F32);
        let values = output.as_slice::<f32>()?;
        let expected = |index: usize| match self.op {
            Op::AllGather => {
                let shard = values.len() / ranks;
                value(index / shard, index % shard)
            }
            Op::ReduceScatter => (0..ranks).map(|peer| value(peer, rank * values.len() + index)).sum(),
            Op::Memcpy => value(0, index),
        };
        match (0..values.len()).find(|index| values[*index] != expected(*index)) {
            None => Ok(()),
            Some(index) => Err(format!(
                "element {index} on rank {rank} is {}, expected {}",
                values[index],
                expected(index)
            )
            .into()),
        }
    }
}

/// Returns element `index` of the input of `rank`; neighbouring ranks and elements have different values.
fn value(rank: usize, index: usize) -> f32 {
    // At most 1020: a sum over any sensible world is an exact f32.
    ((index * 31 + rank * 7) % 1021) as f32
}
