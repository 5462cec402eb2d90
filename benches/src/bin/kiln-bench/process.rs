//! The age and the memory of this process, as reported by the system.

use std::fs::read_to_string;

use nix::time::{ClockId, clock_gettime};

/// Ticks per second in `/proc`, the same on every architecture that Linux supports today.
const TICKS: f64 = 100.0;

/// Returns the seconds since this process started, to hundredths.
pub fn age() -> Option<f64> {
    let stat = read_to_string("/proc/self/stat").ok()?;
    let started = started(&stat)? / TICKS;
    let now = clock_gettime(ClockId::CLOCK_BOOTTIME).ok()?;
    Some(now.tv_sec() as f64 + now.tv_nsec() as f64 * 1e-9 - started)
}

/// Parses field 22 (`proc_pid_stat(5)`). The program's name, field 2, may contain spaces and brackets.
fn started(stat: &str) -> Option<f64> {
    let (_, fields) = stat.rsplit_once(')')?;
    fields.split_whitespace().nth(19)?.parse().ok()
}

pub fn peak_rss() -> Option<u64> {
    high_water(&read_to_string("/proc/self/status").ok()?)
}

fn high_water(status: &str) -> Option<u64> {
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:"))?;
    let kibibytes: u64 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
    Some(kibibytes << 10)
}

#[cfg(test)]
mod tests {
    use super::{age, high_water, peak_rss, started};

    #[test]
    fn the_system_is_understood() {
        let stat = "7 (a) b) S 1 7 7 0 -1 4 1 0 0 0 1 2 0 0 20 0 9 0 123456 1 2 3";
        assert_eq!(started(stat), Some(123_456.0));
        assert_eq!(started("7 (a"), None);
        assert_eq!(high_water("Name:\tkiln\nVmHWM:\t   12 kB\nVmRSS:\t 3 kB"), Some(12 << 10));
        assert_eq!(high_water("VmRSS:\t 3 kB"), None);
    }

    #[test]
    fn this_process_has_an_age_and_a_size() {
        let young = age().expect("an age");
        std::thread::sleep(std::time::Duration::from_millis(30));
        let old = age().expect("an age");
        assert!((0.0..3600.0).contains(&young) && old > young, "{young} {old}");
        let block = vec![1u8; 64 << 20];
        assert!(peak_rss().expect("a size") > block.len() as u64);
    }
}
