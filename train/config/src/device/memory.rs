use std::fs;
use std::path::Path;

/// An amount of memory in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Memory {
    /// Total bytes. For a machine: with swap, within the limits of this process's control groups.
    pub total: u64,
    /// Bytes that are free, or that the system would reclaim, such as cached files.
    pub free: u64,
}

impl Memory {
    /// Returns the memory of this machine; `None` if the system does not report it.
    pub fn for_machine() -> Option<Self> {
        Self::for_system(Path::new("/"))
    }

    /// Returns this machine's memory for `processes` processes with the limits of this one (`ulimit -v`, `ulimit -d`).
    pub fn for_processes(processes: usize) -> Option<Self> {
        Some(Self::for_machine()?.within_limits(Path::new("/"), processes))
    }

    fn within_limits(self, root: &Path, processes: usize) -> Self {
        let Some(left) = left_of_process(root) else { return self };
        let left = left.saturating_mul(processes as u64);
        Memory { total: self.total.min(left), free: self.free.min(left) }
    }

    fn for_system(root: &Path) -> Option<Self> {
        let info = fs::read_to_string(root.join("proc/meminfo")).ok()?;
        let kib = |name: &str| {
            let line = info.lines().find_map(|line| line.strip_prefix(name))?;
            line.split_whitespace().next()?.parse::<u64>().ok()?.checked_mul(1024)
        };
        let swap = kib("SwapTotal:").unwrap_or(0);
        let mut memory = Memory {
            total: kib("MemTotal:")?.saturating_add(swap),
            free: kib("MemAvailable:")?.saturating_add(kib("SwapFree:").unwrap_or(0)),
        };
        let groups = fs::read_to_string(root.join("proc/self/cgroup")).unwrap_or_default();
        for line in groups.lines() {
            // The format is `hierarchy:controllers:path`; version 2 names no controllers.
            let mut fields = line.splitn(3, ':').skip(1);
            let (Some(controllers), Some(path)) = (fields.next(), fields.next()) else { continue };
            let (mount, names) = match controllers {
                "" => ("sys/fs/cgroup", &VERSION_2),
                list if list.split(',').any(|name| name == "memory") => ("sys/fs/cgroup/memory", &VERSION_1),
                _ => continue,
            };
            // A group's limits also apply inside it. In a container, `path` may be the host's.
            for group in Path::new(path).ancestors() {
                let group = group.strip_prefix("/").unwrap_or(group);
                if let Some(limited) = names.read(&root.join(mount).join(group), swap) {
                    memory.total = memory.total.min(limited.total);
                    memory.free = memory.free.min(limited.free);
                }
            }
        }
        Some(memory)
    }
}

fn left_of_process(root: &Path) -> Option<u64> {
    let limits = fs::read_to_string(root.join("proc/self/limits")).ok()?;
    let status = fs::read_to_string(root.join("proc/self/status")).ok()?;
    let left = |(limit, used): (&str, &str)| {
        // The format is `Max address space  <soft>  <hard>  bytes`; `unlimited` does not parse as a number.
        let limit = limits.lines().find_map(|line| line.strip_prefix(limit))?;
        let limit: u64 = limit.split_whitespace().next()?.parse().ok()?;
        let used = status.lines().find_map(|line| line.strip_prefix(used))?;
        let used: u64 = used.split_whitespace().next()?.parse().ok()?;
        Some(limit.saturating_sub(used.saturating_mul(1024)))
    };
    [("Max address space", "VmSize:"), ("Max data size", "VmData:")].into_iter().filter_map(left).min()
}

struct GroupFiles {
    limit: &'static str,
    used: &'static str,
    /// The limit of swap: swap alone in version 2, together with memory in version 1.
    swap_limit: &'static str,
    swap_with_memory: bool,
    /// Keys in `memory.stat` with the sizes of cached files, which count as used.
    cached: [&'static str; 2],
}

const VERSION_2: GroupFiles = GroupFiles {
    limit: "memory.max",
    used: "memory.current",
    swap_limit: "memory.swap.max",
    swap_with_memory: false,
    cached: ["inactive_file", "active_file"],
};

const VERSION_1: GroupFiles = GroupFiles {
    limit: "memory.limit_in_bytes",
    used: "memory.usage_in_bytes",
    swap_limit: "memory.memsw.limit_in_bytes",
    swap_with_memory: true,
    cached: ["total_inactive_file", "total_active_file"],
};

impl GroupFiles {
    fn read(&self, group: &Path, swap: u64) -> Option<Memory> {
        // `max` does not parse as a number; version 1 uses a number beyond all memory instead.
        let number = |name: &str| fs::read_to_string(group.join(name)).ok()?.trim().parse::<u64>().ok();
        let limit = number(self.limit)?;
        let swap_limit = number(self.swap_limit);
        let total = match swap_limit {
            Some(both) if self.swap_with_memory => both.min(limit.saturating_add(swap)),
            Some(alone) => limit.saturating_add(alone.min(swap)),
            None => limit.saturating_add(swap),
        };
        let stat = fs::read_to_string(group.join("memory.stat")).unwrap_or_default();
        let cached = |name: &&str| {
            let mut lines = stat.lines().filter_map(|line| line.split_once(' '));
            lines.find(|(key, _)| key == name).and_then(|(_, value)| value.parse::<u64>().ok())
        };
        let cached: u64 = self.cached.iter().filter_map(cached).sum();
        let used = number(self.used).unwrap_or(0).saturating_sub(cached);
        Some(Memory { total, free: total.saturating_sub(used) })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MEMINFO: &str = "MemTotal:       1000 kB\nMemFree:  1 kB\nMemAvailable:    800 kB\n\
                           SwapTotal:       100 kB\nSwapFree:         50 kB\n";

    fn system(files: &[(&str, &str)]) -> Option<Memory> {
        let root = tempfile::tempdir().unwrap();
        for (path, content) in files {
            let path = root.path().join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, content).unwrap();
        }
        Some(Memory::for_system(root.path())?.within_limits(root.path(), 3))
    }

    fn kib(total: u64, free: u64) -> Option<Memory> {
        Some(Memory { total: total * 1024, free: free * 1024 })
    }

    #[test]
    fn unlimited_process_has_all_memory() {
        assert_eq!(system(&[("proc/meminfo", MEMINFO)]), kib(1100, 850));
        let unlimited = [
            ("proc/meminfo", MEMINFO),
            ("proc/self/cgroup", "0::/a/b\n"),
            ("sys/fs/cgroup/a/memory.max", "max\n"),
        ];
        assert_eq!(system(&unlimited), kib(1100, 850));
        assert_eq!(system(&[]), None);
        assert_eq!(system(&[("proc/meminfo", "MemTotal: x kB\n")]), None);
    }

    #[test]
    fn lowest_group_limit_counts() {
        let mut files = vec![
            ("proc/meminfo", MEMINFO),
            ("proc/self/cgroup", "0::/job/task\n"),
            ("sys/fs/cgroup/job/memory.max", "204800\n"),
            ("sys/fs/cgroup/job/memory.swap.max", "0\n"),
            ("sys/fs/cgroup/job/memory.current", "102400\n"),
            ("sys/fs/cgroup/job/memory.stat", "anon 1\nactive_file 10240\ninactive_file 10240\n"),
            ("sys/fs/cgroup/job/task/memory.max", "max\n"),
        ];
        assert_eq!(system(&files), kib(200, 120));
        files[3].1 = "51200\n";
        assert_eq!(system(&files), kib(250, 170));
        files[3].1 = "max\n";
        assert_eq!(system(&files), kib(300, 220));
        files.push(("sys/fs/cgroup/memory.max", "1024\n"));
        assert_eq!(system(&files), kib(101, 101));
    }

    #[test]
    fn version_1_groups_are_read() {
        let files = [
            ("proc/meminfo", MEMINFO),
            ("proc/self/cgroup", "9:name=systemd:/x\n5:cpu,memory:/outside/a\n0::/\n"),
            ("sys/fs/cgroup/memory/memory.limit_in_bytes", "409600\n"),
            ("sys/fs/cgroup/memory/memory.memsw.limit_in_bytes", "460800\n"),
            ("sys/fs/cgroup/memory/memory.usage_in_bytes", "307200\n"),
            ("sys/fs/cgroup/memory/memory.stat", "inactive_file 1\ntotal_inactive_file 204800\n"),
        ];
        assert_eq!(system(&files), kib(450, 350));
        let unlimited = [
            ("proc/meminfo", MEMINFO),
            ("proc/self/cgroup", "4:memory:/a\n"),
            ("sys/fs/cgroup/memory/a/memory.limit_in_bytes", "9223372036854771712\n"),
        ];
        assert_eq!(system(&unlimited), kib(1100, 850));
    }

    #[test]
    fn process_limits_count() {
        let limits = |address: &str, data: &str| {
            let limits = format!(
                "Limit                     Soft Limit           Hard Limit           Units     \n\
                 Max data size             {data:<20} unlimited            bytes     \n\
                 Max address space         {address:<20} unlimited            bytes     \n"
            );
            system(&[
                ("proc/meminfo", MEMINFO),
                ("proc/self/limits", &limits),
                ("proc/self/status", "VmPeak:\t     40 kB\nVmSize:\t     30 kB\nVmData:\t     10 kB\n"),
            ])
        };
        assert_eq!(limits("unlimited", "unlimited"), kib(1100, 850));
        assert_eq!(limits("307200", "unlimited"), kib(810, 810));
        assert_eq!(limits("307200", "102400"), kib(270, 270));
        assert_eq!(limits("349525", "unlimited"), Some(Memory { total: 956_415, free: 870_400 }));
        assert_eq!(limits("10240", "unlimited"), kib(0, 0));
    }

    #[test]
    fn this_machine_has_memory() {
        let memory = Memory::for_machine().unwrap();
        assert!(memory.total > 1 << 26 && memory.free <= memory.total, "{memory:?}");
    }
}
