//! The findings of a kernel check, as text.

use std::fmt::Write;
use std::path::{Path, PathBuf};
use std::time::Duration;

use kiln_model::verify::Finding;

use super::kept::Key;
use kiln_sys::words::duration;

/// Returns the path of the report next to a result's file.
pub(super) fn beside(file: &Path) -> PathBuf {
    file.with_extension("txt")
}

/// Returns a report for developers who can fix a kernel.
pub(super) fn text(key: &Key, findings: &[Finding], time: Duration) -> String {
    let mut text = format!(
        "Kiln compared the fused kernels of a GPU with the same operations on the CPU in f64.\n\n\
         device: {}\nprogram: {}\nattention (width of a head, window): {:?}\ntook: {}\n",
        key.device,
        key.build,
        key.shapes.attention,
        duration(time)
    );
    if let Some(op) = key.fault {
        let _ = writeln!(text, "drill: {op} was treated as wrong; this does not report a real fault");
    }
    text.push('\n');
    for finding in findings {
        let _ = writeln!(text, "{}", line(finding));
    }
    text
}

/// Returns a line about one operation in one dtype.
pub(super) fn line(finding: &Finding) -> String {
    let verdict = if finding.is_right() { "right" } else { "WRONG" };
    let name = finding.op.name();
    format!("{name:<14} {verdict}  {}", error(finding))
}

/// Describes the error of an operation in one dtype.
pub(super) fn error(finding: &Finding) -> String {
    let Finding { dtype, bound, place, .. } = finding;
    let dtype = format!("{dtype:?}").to_lowercase();
    match finding.error {
        Some(error) => {
            format!("{dtype}: largest relative error {error:.1e} ({place}), bound {bound:.0e}")
        }
        None => format!("{dtype}: no finite result ({place}), bound {bound:.0e}"),
    }
}
