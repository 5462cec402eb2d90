//! Measured algorithms of matrix products, in a file next to the compiled kernels.
//!
//! `kiln warmup --products` replaces the file atomically; every process on an NVIDIA GPU reads it.

use std::io;
use std::path::{Path, PathBuf};

use kiln_model::ops::cube::matmul::{ProductAlgorithms, use_algorithms};
use kiln_nvidia::{environment, kernel_cache};
use sha2::{Digest, Sha256};

use kiln_sys::durable::write_atomic;

pub(super) const FILE: &str = "products.json";

const MAX_BYTES: u64 = 64 << 20;

/// Loads the measured algorithms. An unreadable file causes a warning, and counts as missing.
pub(super) fn load() {
    let Some(folder) = kernel_cache::folder(&environment) else { return };
    match read(&folder) {
        Ok(kept) => use_algorithms(kept),
        Err(error) => tracing::warn!(
            "cannot read measured algorithms from {}, and products use cuBLASLt's first choices: {error}; to \
             measure again, remove the file and run kiln warmup --products",
            folder.join(FILE).display()
        ),
    }
}

/// Returns the folder of the file.
///
/// # Errors
///
/// If there is no such folder.
pub fn folder() -> io::Result<PathBuf> {
    kernel_cache::folder_to_keep()
}

/// Checks that the file in `folder` can be read and extended.
///
/// # Errors
///
/// If the file cannot be read or extended.
pub fn check(folder: &Path) -> io::Result<()> {
    read(folder)
        .map(drop)
        .map_err(|error| io::Error::new(error.kind(), format!("{FILE}: {error}; remove it")))
}

pub(super) fn fingerprint() -> String {
    let file = kernel_cache::folder(&environment).map(|folder| folder.join(FILE));
    let text = file.and_then(|file| kiln_sys::files::read(&file, MAX_BYTES).ok());
    text.map_or(String::new(), |text| format!(", products {:x}", Sha256::digest(text)))
}

/// Adds `measured` to the file in `folder`.
///
/// # Errors
///
/// If the file cannot be read or written.
pub fn keep(folder: &Path, measured: ProductAlgorithms) -> io::Result<()> {
    write(folder, &read(folder)?.with(measured))
}

pub(super) fn read(folder: &Path) -> io::Result<ProductAlgorithms> {
    match kiln_sys::files::read(&folder.join(FILE), MAX_BYTES) {
        Ok(text) => Ok(serde_json::from_slice(&text)?),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(ProductAlgorithms::default()),
        Err(error) => Err(error),
    }
}

pub(super) fn write(folder: &Path, algorithms: &ProductAlgorithms) -> io::Result<()> {
    std::fs::create_dir_all(folder)?;
    write_atomic(&folder.join(FILE), &serde_json::to_vec(algorithms)?)
}

pub(super) fn describe() -> String {
    let kept = kernel_cache::folder(&environment).map(|folder| (read(&folder), folder.join(FILE)));
    match kept {
        Some((Ok(kept), file)) if !kept.is_empty() => {
            let products = kiln_sys::words::number_of(kept.len(), "product");
            format!("measured algorithms for {products} are kept in {}", file.display())
        }
        Some((Err(error), file)) => format!("{} cannot be read: {error}", file.display()),
        _ => "cuBLASLt's first choices; kiln warmup CONFIG --products measures others".to_owned(),
    }
}
