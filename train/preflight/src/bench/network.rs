//! `kiln bench network`: times the training collectives at sizes that double, and fits the line
//! `time = latency + bytes_sent / bandwidth` by least squares of the relative errors.

use std::fmt::Write as _;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use burn::tensor::Device;
use clap::Args;
use kiln_collectives::{Buffer, Communicator, DType, Label, Operation, Phase};
use kiln_shard::{ShardError, Strategy};

use super::{default_config, median, settle, unknown_ranks};
use kiln_config::device::{DeviceRequest, ResolvedDevice};
use kiln_config::links::{Link, Links};
use kiln_config::{self as config, Config};
use kiln_launch::place::{self, Role};
use kiln_sys::words::number_of;
use kiln_sys::words::size;
use kiln_train::error::{Result, TrainError};
use kiln_train::launch;
use kiln_train::process::output::print_line;
use kiln_train::world::{self, Ranks};

/// Smallest and largest size, in bytes of the whole tensor.
const SIZES: [usize; 2] = [64 << 10, 32 << 20];

const OPERATIONS: [Operation; 3] = [Operation::AllGather, Operation::ReduceScatter, Operation::AllReduce];

const CALLS: usize = 9;

/// Arguments of `kiln bench network`.
#[derive(Args)]
pub struct NetworkArgs {
    /// Number of ranks, as threads of this process; not needed under a launcher, which starts them as processes.
    #[arg(long)]
    ranks: Option<usize>,
    /// Configuration whose [comm] and [device] to use.
    #[arg(long)]
    config: Option<PathBuf>,
    /// File to add the fitted lines to; it keeps those of other numbers of ranks.
    #[arg(long, value_name = "FILE")]
    out: Option<PathBuf>,
}

#[derive(Clone, Copy, Debug, PartialEq)]
struct Point {
    bytes: usize,
    sent: u64,
    seconds: f64,
}

struct Ladder {
    link: Link,
    points: Vec<Point>,
}

impl NetworkArgs {
    /// Measures as one rank, or launches the ranks of this node. Returns the exit code.
    pub fn run(self) -> Result<u8> {
        let place = match place::find_here(&place::Flags::default())? {
            Role::Node(node) => return Ok(launch::run_node(node)?),
            Role::Rank(place) => Some(place),
            Role::Alone(_) => None,
        };
        let place = place.as_ref();
        if place.is_none() && self.ranks.is_none() {
            return Err(unknown_ranks());
        }
        let config = self.config.as_ref().map(|path| config::load(path, &[])).transpose()?;
        let mut config = config.unwrap_or_else(default_config);
        let ranks = world::ranks_of(&config, place, self.ranks)?;
        if ranks < 2 {
            return Err(TrainError::usage("a single rank sends nothing: use --ranks 2 or more"));
        }
        // Nothing is trained, so these settings do not matter.
        (config.train.ranks, config.train.global_batch) = (ranks, ranks);
        config.train.micro_batch = 1.into();
        config.shard.shard_size = None;
        config.shard.strategy = Strategy::default();
        config.data.path = "unused".into();
        if place.is_some() { config.validate() } else { config.validate_threads() }?;
        // Read first, so that an unreadable file fails before anything is measured.
        let mut links = match &self.out {
            Some(path) if path.exists() => Links::read(path)?,
            _ => Links::default(),
        };
        let request = DeviceRequest::for_weights(config.device.backend, 0, ranks, Strategy::default(), None);
        let selected = ResolvedDevice::for_request(&request, place)?;
        let identity = format!("{} network {:?} {:?}", env!("CARGO_PKG_VERSION"), config.comm, config.device);
        let met = Ranks::meet(&config, place, &identity, &selected)?;
        let device = selected.device();
        let ladders = met.run(&config, |world| measure(&*world, &device, &config))?;
        if place.is_none_or(|place| place.rank == 0) {
            print_line(&to_text(&ladders));
            if let Some(path) = &self.out {
                ladders.into_iter().for_each(|ladder| links.put(ladder.link));
                links.write(path).map_err(TrainError::io("write", path))?;
                print_line(&format!("written to {}", path.display()));
            }
        }
        Ok(0)
    }
}

fn measure(world: &dyn Communicator, device: &Device, config: &Config) -> Result<Vec<Ladder>> {
    let timeout = config.comm.timeout();
    let nodes = world.nodes().into_iter().max().unwrap_or_default() + 1;
    let mut ladders = Vec::new();
    for operation in OPERATIONS {
        let mut points = Vec::new();
        let mut bytes = SIZES[0];
        while bytes <= SIZES[1] {
            points.push(point(world, device, operation, bytes, timeout)?);
            bytes *= 2;
        }
        let [latency_s, bytes_per_s] = fit(&points);
        let (backend, ranks) = (world.backend().to_owned(), world.world_size());
        let link = Link { backend, ranks, nodes, operation, latency_s, bytes_per_s };
        ladders.push(Ladder { link, points });
    }
    Ok(ladders)
}

fn point(
    world: &dyn Communicator,
    device: &Device,
    operation: Operation,
    bytes: usize,
    timeout: Duration,
) -> Result<Point> {
    let ranks = world.world_size();
    let chunk = bytes.div_ceil(size_of::<f32>() * ranks);
    let zeros = |len| kiln_shard::zeros_on(device, DType::F32, len);
    // Ranks share gathered buffers in the same cases as in training.
    let is_shared = operation == Operation::AllGather && world.shares_gathers() && zeros(1).is_on_host();
    let new = || match operation {
        Operation::AllGather if is_shared => Buffer::unallocated(DType::F32, chunk * ranks),
        Operation::ReduceScatter => zeros(chunk),
        _ => zeros(chunk * ranks),
    };
    let label = || Label::new("network", Phase::Other);
    let (shard, whole) = (Arc::new(zeros(chunk)), Arc::new(zeros(chunk * ranks)));
    let (mut seconds, mut sent, mut kept) = (Vec::new(), 0, None);
    for call in 0..=CALLS {
        // As in training, only the first call writes to fresh memory.
        let output = kept.take().unwrap_or_else(new);
        settle(device)?;
        world.barrier(label()).wait(timeout).map_err(ShardError::from)?;
        let before = world.recorder().bytes_sent();
        let start = Instant::now();
        let work = match operation {
            Operation::AllGather => world.all_gather(label(), shard.clone(), output),
            Operation::ReduceScatter => world.reduce_scatter(label(), whole.clone(), output),
            _ => world.all_reduce(label(), output),
        };
        let output = work.wait(timeout).map_err(ShardError::from)?;
        settle(device)?;
        if call > 0 {
            seconds.push(start.elapsed().as_secs_f64());
        }
        kept = (!is_shared).then_some(output);
        sent = world.recorder().bytes_sent() - before;
    }
    let mine = median(seconds).to_le_bytes();
    let all = world::gather(world, "network", &mine, timeout)?;
    let seconds = all.iter().map(|bytes| f64::from_le_bytes(bytes.as_slice().try_into().unwrap_or_default()));
    Ok(Point { bytes: chunk * ranks * size_of::<f32>(), sent, seconds: seconds.fold(0.0, f64::max) })
}

/// Fits latency (seconds) and bandwidth (bytes per second), neither negative, by least squares of relative errors.
fn fit(points: &[Point]) -> [f64; 2] {
    // Weighted by one over the time, the equation is a + b x = 1 for rows (1 / t, x / t).
    let rows: Vec<_> = points
        .iter()
        .map(|point| {
            let seconds = point.seconds.max(1e-9);
            [1.0 / seconds, point.sent as f64 / seconds]
        })
        .collect();
    let sum = |of: fn(&[f64; 2]) -> f64| rows.iter().map(of).sum::<f64>();
    let (aa, ab, bb) = (sum(|[a, _]| a * a), sum(|[a, b]| a * b), sum(|[_, b]| b * b));
    let (a, b) = (sum(|[a, _]| *a), sum(|[_, b]| *b));
    let determinant = aa * bb - ab * ab;
    let (mut latency, mut slope) = ((a * bb - b * ab) / determinant, (b * aa - a * ab) / determinant);
    if !latency.is_finite() || latency < 0.0 {
        (latency, slope) = (0.0, b / bb);
    }
    // The slope if the times do not grow with the size.
    let least = 1e-15;
    if slope.is_nan() || slope < least {
        (latency, slope) = (a / aa, least);
    }
    [latency, 1.0 / slope]
}

fn to_text(ladders: &[Ladder]) -> String {
    let mut text = String::new();
    for Ladder { link, points } in ladders {
        let Link { backend, ranks, nodes, operation, latency_s, bytes_per_s } = link;
        let _ = writeln!(
            text,
            "{operation} over {backend}, {} on {}: {:.1} us + bytes sent / {:.3} GB/s",
            number_of(*ranks, "rank"),
            number_of(*nodes, "node"),
            latency_s * 1e6,
            bytes_per_s / 1e9
        );
        let _ = writeln!(text, "{:>12} {:>12} {:>12} {:>10} {:>8}", "size", "sent", "time", "GB/s", "fit");
        for Point { bytes, sent, seconds } in points {
            let off = link.seconds(*sent) / seconds - 1.0;
            let _ = writeln!(
                text,
                "{:>12} {:>12} {:>9.1} us {:>10.3} {:>+7.0}%",
                size(*bytes as u64),
                size(*sent),
                seconds * 1e6,
                *sent as f64 / seconds / 1e9,
                off * 100.0
            );
        }
    }
    text += "sent: bytes of one rank; time: median of the calls on the slowest rank; fit: deviation of the line \
             from the time";
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    fn points(seconds: impl Fn(f64) -> f64) -> Vec<Point> {
        let sizes = (0..10).map(|step| (64_usize << 10) << step);
        sizes.map(|bytes| Point { bytes, sent: bytes as u64, seconds: seconds(bytes as f64) }).collect()
    }

    #[track_caller]
    fn assert_close(found: [f64; 2], expected: [f64; 2]) {
        for (found, expected) in found.into_iter().zip(expected) {
            assert!((found - expected).abs() <= 1e-6 * expected, "{found} {expected}");
        }
    }

    #[test]
    fn fit_finds_the_line() {
        assert_close(fit(&points(|bytes| 2e-5 + bytes / 3e9)), [2e-5, 3e9]);
        let [latency, bandwidth] = fit(&points(|bytes| (bytes / 1e9 - 5e-5).max(1e-6)));
        assert!(latency == 0.0 && bandwidth > 0.0, "{latency} {bandwidth}");
        assert_close(fit(&points(|_| 1e-3)), [1e-3, 1e15]);
        let [latency, bandwidth] = fit(&points(|bytes| 1.0 / bytes));
        assert!(latency > 0.0 && bandwidth > 9e14, "{latency} {bandwidth}");
    }

    #[test]
    fn errors_are_relative() {
        let mut off = points(|bytes| 2e-5 + bytes / 3e9);
        off[0].seconds *= 1.1;
        let [latency, bandwidth] = fit(&off);
        assert!((latency / 2e-5 - 1.0).abs() > 0.02, "{latency}");
        assert!((bandwidth / 3e9 - 1.0).abs() < 0.02, "{bandwidth}");
    }
}
