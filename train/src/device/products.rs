//! Algorithms of matrix products that were measured, in a file beside the compiled kernels.
//!
//! `kiln warmup --products` writes it, and every process that computes on an NVIDIA GPU reads it. It is written
//! beside and renamed, so that processes may read and write at the same time.

use std::io;
use std::path::{Path, PathBuf};

use kiln_model::ops::cube::matmul::{ProductAlgorithms, use_algorithms};
use kiln_nvidia::{environment, kernel_cache};
use sha2::{Digest, Sha256};

use crate::metrics::write_beside;

/// The name of the file.
pub(super) const FILE: &str = "products.json";

/// The most bytes that it may have.
const MAX_BYTES: u64 = 64 << 20;

/// Uses what was measured from now on. A file that cannot be read is told, and counts as none.
pub(super) fn load() {
    let Some(folder) = kernel_cache::folder(&environment) else { return };
    match read(&folder) {
        Ok(kept) => use_algorithms(kept),
        Err(error) => tracing::warn!(
            "{} has no measured algorithms that can be read, and products use cuBLASLt's first choices: {error}; \
             kiln warmup --products measures again once the file is removed",
            folder.join(FILE).display()
        ),
    }
}

/// The folder of the file.
///
/// # Errors
///
/// If there is none.
pub(crate) fn folder() -> io::Result<PathBuf> {
    kernel_cache::folder_to_keep()
}

/// Whether what is in `folder` can be read, to be added to.
///
/// # Errors
///
/// If it cannot.
pub(crate) fn check(folder: &Path) -> io::Result<()> {
    read(folder)
        .map(drop)
        .map_err(|error| io::Error::new(error.kind(), format!("{FILE}: {error}; remove it")))
}

/// What tells the algorithms that are kept from others; nothing where none are.
pub(super) fn fingerprint() -> String {
    let file = kernel_cache::folder(&environment).map(|folder| folder.join(FILE));
    let text = file.and_then(|file| kiln_storage::files::read(&file, MAX_BYTES).ok());
    text.map_or(String::new(), |text| format!(", products {:x}", Sha256::digest(text)))
}

/// Keeps what was measured in `folder`, with what is there.
///
/// # Errors
///
/// If the file cannot be read or written.
pub(crate) fn keep(folder: &Path, measured: ProductAlgorithms) -> io::Result<()> {
    write(folder, &read(folder)?.with(measured))
}

/// What the file in `folder` has; nothing if there is none.
pub(super) fn read(folder: &Path) -> io::Result<ProductAlgorithms> {
    match kiln_storage::files::read(&folder.join(FILE), MAX_BYTES) {
        Ok(text) => Ok(serde_json::from_slice(&text)?),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(ProductAlgorithms::default()),
        Err(error) => Err(error),
    }
}

pub(super) fn write(folder: &Path, algorithms: &ProductAlgorithms) -> io::Result<()> {
    std::fs::create_dir_all(folder)?;
    write_beside(&folder.join(FILE), &serde_json::to_vec(algorithms)?)
}

/// A line for the doctor.
pub(super) fn describe() -> String {
    let kept = kernel_cache::folder(&environment).map(|folder| (read(&folder), folder.join(FILE)));
    match kept {
        Some((Ok(kept), file)) if !kept.is_empty() => {
            let products = crate::words::number_of(kept.len(), "product");
            format!("measured algorithms for {products} are kept in {}", file.display())
        }
        Some((Err(error), file)) => format!("{} cannot be read: {error}", file.display()),
        _ => "cuBLASLt's first choices; kiln warmup CONFIG --products measures others".to_owned(),
    }
}
