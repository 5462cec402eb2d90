//! Traces of the stand-in for NVIDIA's driver (`benches/standins`): the calls of one training step.

use std::fs;
use std::path::Path;

/// First kernel of an update, which is launched once per step.
const UPDATE: &str = "adamw_factors";
/// Prefix of the kernels of an update. The last of them ends a step.
const UPDATES: &str = "adamw";

/// A call to the driver, to cuBLASLt or to NCCL, as a line of a trace.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Call<'a>(&'a str);

impl<'a> Call<'a> {
    pub fn name(self) -> &'a str {
        self.0.split(' ').next().unwrap_or_default()
    }

    pub fn field(self, key: &str) -> &'a str {
        let value = |word: &'a str| word.strip_prefix(key).and_then(|rest| rest.strip_prefix('='));
        self.0.split(' ').find_map(value).unwrap_or_default()
    }

    pub fn number(self, key: &str) -> u64 {
        self.field(key).parse().unwrap_or(0)
    }

    /// Returns the product of a field of three numbers: blocks of a launch, or threads of a block.
    pub fn volume(self, key: &str) -> u64 {
        self.extent(key).iter().product()
    }

    pub fn extent(self, key: &str) -> [u64; 3] {
        let mut extent = [1; 3];
        for (to, from) in extent.iter_mut().zip(self.field(key).split(',')) {
            *to = from.parse().unwrap_or(1);
        }
        extent
    }

    /// Returns whether the call launches a kernel or a matrix product.
    pub fn launches(self) -> bool {
        matches!(self.name(), "launch" | "cublaslt_matmul")
    }
}

pub struct Trace(String);

impl Trace {
    #[cfg(test)]
    pub fn of(lines: &str) -> Trace {
        Trace(lines.to_owned())
    }

    pub fn read(folder: &Path) -> Result<Trace, String> {
        let path = folder.join("trace.txt");
        fs::read_to_string(&path).map(Trace).map_err(|error| format!("{}: {error}", path.display()))
    }

    pub fn calls(&self) -> impl Iterator<Item = Call<'_>> {
        self.0.lines().map(Call)
    }

    /// Returns the calls of the last step, up to the end of its update.
    ///
    /// Fails if there are fewer than three steps: the first two compile kernels and allocate memory.
    pub fn last_step(&self) -> Result<Vec<Call<'_>>, String> {
        let calls: Vec<_> = self.calls().collect();
        let is = |at: usize, start: &str| {
            calls[at].name() == "launch" && calls[at].field("kernel").starts_with(start)
        };
        let updates: Vec<_> = (0..calls.len()).filter(|at| is(*at, UPDATE)).collect();
        let [_, .., before, last] = updates[..] else {
            return Err(format!("{} steps in a trace, but three are needed", updates.len()));
        };
        let end = |from: usize, to: usize| (from..to).rev().find(|at| is(*at, UPDATES)).unwrap_or(from);
        Ok(calls[end(before, last) + 1..=end(last, calls.len())].to_vec())
    }
}

#[cfg(test)]
mod tests {
    use super::{Call, Trace};

    #[test]
    fn a_step_ends_with_its_update() {
        let step = |kernel: &str| {
            format!(
                "memcpy_htod stream=1 bytes=8\nlaunch stream=1 kernel={kernel}\n\
                 launch stream=1 kernel=adamw_factors_1\nlaunch stream=1 kernel=adamw_n_4_2\n\
                 launch stream=1 kernel=adamw_n_4_2\n"
            )
        };
        let trace = Trace(format!("{}{}{}event_record event=1 stream=1\n", step("a"), step("b"), step("c")));
        let last = trace.last_step().expect("three steps");
        assert_eq!(last.len(), 5);
        assert_eq!((last[0].name(), last[1].field("kernel")), ("memcpy_htod", "c"));
        assert!(Trace(step("a")).last_step().is_err());
    }

    #[test]
    fn fields_are_read() {
        let call = Call("launch stream=1 kernel=a grid=4,3,2 block=32,8,1 shared=64");
        assert!(call.launches());
        assert_eq!((call.volume("grid"), call.volume("block"), call.number("shared")), (24, 256, 64));
        assert_eq!((call.field("kernel"), call.field("none"), call.number("none")), ("a", "", 0));
    }
}
