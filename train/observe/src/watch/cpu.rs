//! How much CPU time processes of this machine take.

use std::collections::HashMap;
use std::fs;
use std::time::Instant;

/// CPU time of processes, by the kernel's count.
#[derive(Debug, Default)]
pub(super) struct CpuMeter {
    before: HashMap<i32, (Instant, u64)>,
}

impl CpuMeter {
    /// CPU time that process `pid` has taken since the last call, as a share of one core. `None` at the first call
    /// and where there is no such process.
    pub(super) fn share(&mut self, pid: i32, now: Instant) -> Option<f64> {
        let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
        let ticks = ticks(&stat)?;
        let (then, before) = self.before.insert(pid, (now, ticks))?;
        let seconds = now.checked_duration_since(then)?.as_secs_f64();
        let taken = ticks.checked_sub(before)? as f64 / rustix::param::clock_ticks_per_second() as f64;
        (seconds > 0.0).then(|| taken / seconds)
    }
}

/// Clock ticks of CPU time, in user mode and in the kernel, that `/proc/<pid>/stat` tells.
fn ticks(stat: &str) -> Option<u64> {
    // The name before the last bracket may hold anything.
    let mut fields = stat.rsplit_once(')')?.1.split_whitespace().skip(11);
    let mut next = || fields.next()?.parse::<u64>().ok();
    Some(next()? + next()?)
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn time_is_told_between_two_looks() {
        let stat = "7 (a ) b) S 1 7 7 0 -1 4194304 100 0 0 0 250 50 0 0 20 0 1 0 500 0 0";
        assert_eq!((ticks(stat), ticks("7 (a"), ticks("7 (a) S 1")), (Some(300), None, None));
        let mut meter = CpuMeter::default();
        let pid = std::process::id().cast_signed();
        let now = Instant::now();
        assert_eq!((meter.share(pid, now), meter.share(-1, now)), (None, None));
        // In an hour, a process that has just begun has taken less than one.
        let share = meter.share(pid, now + Duration::from_secs(3600)).unwrap();
        assert!((0.0..1.0).contains(&share), "{share}");
    }
}
