//! Packs the cached kernels and the measured algorithms for products into a tar archive for another machine.

use std::fs::{self, File};
use std::io::{self, BufReader, Read};
use std::path::Path;

use kiln_model::ops::cube::matmul::ProductAlgorithms;
use kiln_nvidia::kernel_cache;
use kiln_nvidia::kernel_files::{Form, form_of, kernel_of};
use tar::{Archive, Builder, Header};

use super::products;
use kiln_sys::durable::{write_atomic, write_named};

const MAX_KERNEL: u64 = 64 << 20;

/// Writes all cached kernels to `archive`; returns their number.
///
/// # Errors
///
/// If the folder or the archive cannot be accessed.
pub fn pack(archive: &Path) -> io::Result<usize> {
    pack_from(&kernel_cache::folder_to_keep()?, archive)
}

/// The numbers of kernels and products in an archive.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Unpacked {
    pub kernels: usize,
    /// Kernels that were not in the cache yet.
    pub new: usize,
    /// Products with measured algorithms.
    pub products: usize,
}

/// Adds the kernels of `archive` to the cache, and its algorithms for products that were not measured here.
///
/// # Errors
///
/// If the folder or the archive cannot be accessed, or the archive contains anything but whole kernels.
pub fn unpack(archive: &Path) -> io::Result<Unpacked> {
    unpack_to(archive, &kernel_cache::folder_to_keep()?)
}

fn is_archive(start: &[u8]) -> bool {
    start.get(257..262) == Some(b"ustar") || (start.len() == 512 && start.iter().all(|byte| *byte == 0))
}

fn pack_from(folder: &Path, archive: &Path) -> io::Result<usize> {
    let mut files = Vec::new();
    for entry in fs::read_dir(folder)? {
        let path = entry?.path();
        let name = path.file_name().and_then(|name| name.to_str());
        let Some((name, form)) = name.and_then(|name| Some((name.to_owned(), form_of(name)?))) else {
            continue;
        };
        // A machine that loads cubins does not need the PTX.
        if form == Form::Ptx && path.with_extension(Form::Cubin.extension()).exists() {
            continue;
        }
        let content = fs::read(&path)?;
        // A damaged kernel is compiled again when it is needed.
        if kernel_of(&content).is_some() {
            files.push((name, content));
        }
    }
    let kernels = files.len();
    let measured = products::read(folder)?;
    if !measured.is_empty() {
        files.push((products::FILE.to_owned(), serde_json::to_vec(&measured)?));
    }
    // Sorted, so that the same kernels make the same archive.
    files.sort_unstable();
    let mut builder = Builder::new(Vec::new());
    for (name, content) in &files {
        let mut header = Header::new_ustar();
        header.set_size(content.len() as u64);
        header.set_mode(0o644);
        builder.append_data(&mut header, name, content.as_slice())?;
    }
    write_named(archive, &builder.into_inner()?, "tar archive", is_archive)?;
    Ok(kernels)
}

fn unpack_to(archive: &Path, folder: &Path) -> io::Result<Unpacked> {
    let invalid = |what: String| io::Error::new(io::ErrorKind::InvalidData, what);
    fs::create_dir_all(folder)?;
    let mut unpacked = Unpacked { kernels: 0, new: 0, products: 0 };
    for entry in Archive::new(BufReader::new(File::open(archive)?)).entries()? {
        let entry = entry?;
        let name = entry.path()?.to_string_lossy().into_owned();
        let has_products = name == products::FILE;
        if !entry.header().entry_type().is_file() || !(has_products || form_of(&name).is_some()) {
            return Err(invalid(format!("{name} in it is not a kernel")));
        }
        let mut content = Vec::new();
        entry.take(MAX_KERNEL + 1).read_to_end(&mut content)?;
        if has_products {
            let measured: ProductAlgorithms = serde_json::from_slice(&content)?;
            unpacked.products = measured.len();
            // Measurements from this machine take precedence.
            products::write(folder, &measured.with(products::read(folder)?))?;
            continue;
        }
        if content.len() as u64 > MAX_KERNEL || kernel_of(&content).is_none() {
            return Err(invalid(format!("the kernel {name} in it is damaged")));
        }
        let file = folder.join(&name);
        let is_there = fs::read(&file).is_ok_and(|there| kernel_of(&there).is_some());
        if !is_there {
            write_atomic(&file, &content)?;
            unpacked.new += 1;
        }
        unpacked.kernels += 1;
    }
    Ok(unpacked)
}

#[cfg(test)]
mod tests {
    use kiln_nvidia::kernel_files::Kept;

    use super::*;

    fn kept(folder: std::path::PathBuf) -> Kept {
        Kept::new(folder, "13.0".to_owned())
    }

    fn unpacked(kernels: usize, new: usize) -> Unpacked {
        Unpacked { kernels, new, products: 0 }
    }

    #[test]
    fn kernels_move_between_folders() {
        let folder = tempfile::tempdir().expect("a folder");
        let (from, to) = (folder.path().join("from"), folder.path().join("to"));
        let (kept_from, kept_to) = (kept(from.clone()), kept(to.clone()));
        let archive = folder.path().join("kernels.tar");
        assert!(pack_from(&from, &archive).is_err(), "nothing is kept yet");
        for source in ["one", "two", "three"] {
            kept_from.write(&kept_from.file(source.as_bytes(), &[]), Form::Ptx, source.as_bytes());
        }
        fs::write(kept_from.file(b"three", &[]).with_extension("ptx"), "damaged").expect("a file");
        fs::write(from.join("notes.txt"), "notes").expect("a file");
        kept_from.write(&kept_from.file(b"two", &[]), Form::Cubin, b"two, compiled");
        kept_to.write(&kept_to.file(b"one", &[]), Form::Ptx, b"one");
        assert_eq!(pack_from(&from, &archive).expect("an archive"), 2);
        assert_eq!(pack_from(&from, &archive).expect("an archive in the place of an earlier one"), 2);
        let notes = from.join("notes.txt");
        assert_eq!(pack_from(&from, &notes).map_err(|error| error.kind()), Err(io::ErrorKind::AlreadyExists));
        assert_eq!(fs::read(notes).expect("a file"), b"notes");
        assert_eq!(unpack_to(&archive, &to).expect("kernels"), unpacked(2, 1));
        let two = kept_to.file(b"two", &[]);
        assert_eq!(kept_to.read(&two, Form::Cubin).as_deref(), Some(&b"two, compiled"[..]));
        assert_eq!(kept_to.read(&two, Form::Ptx), None);
        assert_eq!(unpack_to(&archive, &to).expect("kernels"), unpacked(2, 0));
    }

    #[test]
    fn foreign_archives_are_refused() {
        let folder = tempfile::tempdir().expect("a folder");
        let (archive, to) = (folder.path().join("kernels.tar"), folder.path().join("a/to"));
        let name = format!("{}.ptx", "0".repeat(64));
        for (name, content) in [("notes.txt", "notes"), ("../x.ptx", "x"), (name.as_str(), "damaged")] {
            let mut builder = Builder::new(Vec::new());
            let mut header = Header::new_ustar();
            header.set_size(content.len() as u64);
            header.as_mut_bytes()[..name.len()].copy_from_slice(name.as_bytes());
            header.set_cksum();
            builder.append(&header, content.as_bytes()).expect("an entry");
            fs::write(&archive, builder.into_inner().expect("an archive")).expect("a file");
            let error = unpack_to(&archive, &to).expect_err("no kernels");
            assert_eq!(error.kind(), io::ErrorKind::InvalidData, "{name}: {error}");
        }
        fs::write(&archive, "no archive at all").expect("a file");
        assert!(unpack_to(&archive, &to).is_err());
        assert_eq!(fs::read_dir(&to).expect("the folder").count(), 0);
        assert!(!folder.path().join("a/x.ptx").exists());
    }
}
