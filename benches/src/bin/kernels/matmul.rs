//! Times of matrix products, from NVIDIA's heuristics.

use std::collections::BTreeMap;
use std::io::Write;
use std::path::Path;
use std::process::{Command, Stdio};

use crate::kernel_time::Gpu;
use crate::trace::Call;

const SCRIPT: &str = "benches/matmul_times.py";

/// cuBLASLt's number for f32 (`CUDA_R_32F`).
const F32: &str = "0";

pub struct Matmuls {
    /// By the arguments of the script.
    seconds: BTreeMap<String, f64>,
    expected: f64,
}

fn is_f32(call: Call<'_>) -> bool {
    call.field("types").ends_with(&format!(",{F32}"))
}

/// Returns a product as arguments of the script, in cuBLASLt's column-major order: rows, columns, inner dimension,
/// transposed operands, dtype of the result.
fn words(call: Call<'_>) -> String {
    let result = if is_f32(call) { "f32" } else { "bf16" };
    let [m, n, k] = ["m", "n", "k"].map(|key| call.number(key));
    format!("{m} {n} {k} {} {result}", call.field("transposed"))
}

/// Returns the bytes of its result that a product reads to add to it.
fn read_of_result(call: Call<'_>) -> f64 {
    let adds = !matches!(call.field("beta"), "" | "0");
    let bytes = if is_f32(call) { 4.0 } else { 2.0 };
    let [m, n] = ["m", "n"].map(|key| call.number(key) as f64);
    if adds { m * n * bytes } else { 0.0 }
}

fn flops(call: Call<'_>) -> f64 {
    2.0 * ["m", "n", "k"].map(|key| call.number(key) as f64).iter().product::<f64>()
}

impl Matmuls {
    pub fn of<'a>(
        calls: impl Iterator<Item = Call<'a>>,
        gpu: &str,
        python: &Path,
        expected: f64,
    ) -> Result<Matmuls, String> {
        let mut seconds: BTreeMap<String, f64> = calls.map(|call| (words(call), 0.0)).collect();
        let at = |problem: String| format!("{} {SCRIPT}: {problem}", python.display());
        let mut child = Command::new(python)
            .args([SCRIPT, gpu])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .map_err(|error| at(error.to_string()))?;
        let input: String = seconds.keys().map(|words| format!("{words}\n")).collect();
        if let Some(mut stdin) = child.stdin.take() {
            stdin.write_all(input.as_bytes()).map_err(|error| at(error.to_string()))?;
        }
        let output = child.wait_with_output().map_err(|error| at(error.to_string()))?;
        if !output.status.success() {
            return Err(at(format!("{}; see above", output.status)));
        }
        let said = String::from_utf8_lossy(&output.stdout);
        let mut lines = said.lines();
        for (words, seconds) in &mut seconds {
            let line = lines.next().unwrap_or_default();
            *seconds = line.parse().map_err(|_| at(format!("says {line:?} of {words}")))?;
        }
        Ok(Matmuls { seconds, expected })
    }

    pub fn source(&self) -> &'static str {
        "nvidia-matmul-heuristics, at least; at the plan's share of the peak, expected"
    }

    /// Returns the name of a product, and its minimum and expected seconds.
    pub fn time(&self, call: Call<'_>, gpu: &Gpu) -> (String, f64, f64) {
        let words = words(call);
        let least = self.seconds.get(&words).copied().unwrap_or(0.0);
        // Small products and memory-bound products are slower than the share implies.
        let expected = least.max(flops(call) / self.expected);
        // NVIDIA's times exclude the reads of a product that adds to its result, which other tiles are not expected to
        // hide.
        let (_, reads) = gpu.moves(read_of_result(call));
        (format!("product {words}"), least, expected + reads)
    }
}

#[cfg(test)]
mod tests {
    use super::read_of_result;
    use crate::trace::Trace;

    #[test]
    fn products_that_add_read_their_result() {
        let trace = Trace::of(
            "cublaslt_matmul m=8 n=4 k=2 types=14,14,14 alpha=1 beta=1\n\
             cublaslt_matmul m=8 n=4 k=2 types=14,14,0 alpha=1 beta=1\n\
             cublaslt_matmul m=8 n=4 k=2 types=14,14,14 alpha=1 beta=0\n",
        );
        let read: Vec<_> = trace.calls().map(read_of_result).collect();
        assert_eq!(read, [64.0, 128.0, 0.0]);
    }
}
