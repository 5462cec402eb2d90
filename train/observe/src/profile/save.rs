//! The files of a memory profile.

use std::fmt::Write as _;
use std::io;
use std::path::{Path, PathBuf};

use super::model::Profile;
use crate::fresh::write_new;

/// Writes a drawing for each rank and a text for all of them into `folder`. Existing files are not replaced.
/// Returns the path of the text.
///
/// # Errors
///
/// Those of the file system.
pub fn save(profiles: &[Profile], folder: &Path) -> io::Result<PathBuf> {
    let mut text = String::new();
    let step = profiles.first().map_or(0, |profile| profile.step);
    for profile in profiles {
        let name = format!("step-{step}-rank-{}.svg", profile.rank);
        let drawing = write_new(&folder.join(name), profile.svg().as_bytes())?;
        let drawing = drawing.file_name().unwrap_or_default().to_string_lossy().into_owned();
        // Writing into a String cannot fail.
        let _ = writeln!(text, "rank {}, step {step}: {profile}", profile.rank);
        let after = profile.peak.held.after * 1e3;
        let _ = writeln!(
            text,
            "  {after:.1} ms into a step of {:.1} ms, {} allocations and releases, drawn in {drawing}",
            profile.seconds * 1e3,
            profile.changes
        );
    }
    write_new(&folder.join(format!("step-{step}.txt")), text.as_bytes())
}
