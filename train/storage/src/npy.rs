//! `.npy` files of f32, NumPy's format for one array, in version 1.0.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Read, Write};
use std::path::Path;

use crate::durable::write_beside;

/// The header of a file and what comes before it take a multiple of this many bytes.
const ALIGNMENT: usize = 64;

/// What a file starts with.
const MAGIC: &[u8] = b"\x93NUMPY";

/// Bytes of the longest header that is read.
const LONGEST_HEADER: usize = 4096;

/// Writes `values` of `shape`, in C order. An earlier file of the kind is replaced as a whole, where a link
/// leads to it as well; into a pipe or a device it is written.
///
/// # Errors
///
/// If `path` is a file of another kind, which stays as it is, or cannot be written.
pub fn write(path: &Path, shape: &[usize], values: &[f32]) -> io::Result<()> {
    let mut content = header(shape);
    content.extend(values.iter().flat_map(|value| value.to_le_bytes()));
    let kind = match fs::metadata(path) {
        Ok(metadata) => metadata.file_type(),
        // Through a link that leads nowhere yet, the file is made where it leads.
        Err(error) if error.kind() == io::ErrorKind::NotFound && path.is_symlink() => {
            return fs::write(path, &content);
        }
        Err(error) if error.kind() == io::ErrorKind::NotFound => return write_beside(path, &content),
        Err(error) => return Err(error),
    };
    if !kind.is_file() {
        return OpenOptions::new().write(true).open(path)?.write_all(&content);
    }
    let path = path.canonicalize()?;
    let mut start = Vec::new();
    File::open(&path)?.take(MAGIC.len() as u64).read_to_end(&mut start)?;
    if !start.is_empty() && start != MAGIC {
        let problem = "it is there already and is no .npy file: name another file";
        return Err(io::Error::new(io::ErrorKind::AlreadyExists, problem));
    }
    write_beside(&path, &content)
}

/// The shape and the values of the array in a file of little-endian f32 or f64 in C order.
///
/// # Errors
///
/// If it cannot be read, or is of another kind.
pub fn read(path: &Path) -> io::Result<(Vec<usize>, Vec<f32>)> {
    let wrong = |problem: &str| io::Error::new(io::ErrorKind::InvalidData, problem.to_owned());
    let mut file = File::open(path)?;
    let mut start = [0; 8];
    file.read_exact(&mut start).map_err(|_| wrong("it is no .npy file"))?;
    if start[..6] != *MAGIC {
        return Err(wrong("it is no .npy file"));
    }
    let mut length = [0; 4];
    let bytes = if start[6] == 1 { 2 } else { 4 };
    file.read_exact(&mut length[..bytes])?;
    let length = u32::from_le_bytes(length) as usize;
    if length > LONGEST_HEADER {
        return Err(wrong("its header is too long"));
    }
    let mut text = vec![0; length];
    file.read_exact(&mut text)?;
    let text = String::from_utf8_lossy(&text);
    let width = match () {
        () if text.contains("'fortran_order': True") => return Err(wrong("it is in Fortran order")),
        () if text.contains("'<f4'") => 4,
        () if text.contains("'<f8'") => 8,
        () => return Err(wrong("its values are neither f32 nor f64")),
    };
    let shape = text.split_once("'shape': (").and_then(|(_, rest)| rest.split_once(')'));
    let (shape, _) = shape.ok_or_else(|| wrong("its header has no shape"))?;
    let sizes = shape.split(',').map(str::trim).filter(|size| !size.is_empty());
    let shape = sizes.map(str::parse).collect::<Result<Vec<usize>, _>>();
    let shape = shape.map_err(|_| wrong("its header has no shape"))?;
    let mut data = Vec::new();
    file.read_to_end(&mut data)?;
    let expected = shape.iter().try_fold(width, |bytes: usize, size| bytes.checked_mul(*size));
    if expected != Some(data.len()) {
        return Err(wrong("it does not have as many values as its shape says"));
    }
    let value = |bytes: &[u8]| match *bytes {
        [a, b, c, d] => f32::from_le_bytes([a, b, c, d]),
        [a, b, c, d, e, f, g, h] => f64::from_le_bytes([a, b, c, d, e, f, g, h]) as f32,
        _ => f32::NAN,
    };
    Ok((shape, data.chunks_exact(width).map(value).collect()))
}

/// Everything before the data: magic, version, length of the header, and the header, filled up with spaces.
fn header(shape: &[usize]) -> Vec<u8> {
    let sizes: String = shape.iter().map(|size| format!("{size}, ")).collect();
    // A tuple of one has a comma behind it.
    let sizes = if shape.len() == 1 { sizes.trim_end() } else { sizes.trim_end_matches(", ") };
    let mut text = format!("{{'descr': '<f4', 'fortran_order': False, 'shape': ({sizes}), }}");
    let version = [1, 0];
    let before = MAGIC.len() + version.len() + size_of::<u16>();
    let length = (before + text.len() + 1).next_multiple_of(ALIGNMENT) - before;
    text.extend(std::iter::repeat_n(' ', length - 1 - text.len()));
    text.push('\n');
    let mut header = [MAGIC, &version].concat();
    // A few numbers of 20 digits at most keep the header far below the limit of this version.
    header.extend((length as u16).to_le_bytes());
    header.extend(text.bytes());
    header
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn headers_are_aligned_and_say_the_shape() {
        for (shape, said) in [
            (&[1, 1][..], "(1, 1)"),
            (&[3, 257], "(3, 257)"),
            (&[7], "(7,)"),
            (&[], "()"),
            (&[2, 3, 4], "(2, 3, 4)"),
            (&[usize::MAX, usize::MAX], "(18446744073709551615, 18446744073709551615)"),
        ] {
            let header = header(shape);
            assert_eq!(header.len() % 64, 0, "{shape:?}");
            assert_eq!(header[..8], *b"\x93NUMPY\x01\x00");
            let length = u16::from_le_bytes([header[8], header[9]]);
            assert_eq!(usize::from(length), header.len() - 10);
            let text = std::str::from_utf8(&header[10..]).expect("text");
            let says = format!("'shape': {said}, }}");
            assert!(text.trim_end().ends_with(&says) && text.ends_with('\n'), "{text:?}");
        }
    }

    #[test]
    fn what_is_written_is_read() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("x.npy");
        for shape in [&[2, 3][..], &[6], &[1, 2, 3]] {
            let values = [1.0, -2.5, 0.0, f32::MAX, 1e-20, 3.0];
            write(&path, shape, &values).unwrap();
            assert_eq!(read(&path).unwrap(), (shape.to_vec(), values.to_vec()));
        }
        let mut content = fs::read(&path).unwrap();
        content.pop();
        fs::write(&path, &content).unwrap();
        assert!(read(&path).unwrap_err().to_string().contains("as many values"));
        fs::write(&path, "no array").unwrap();
        assert!(read(&path).unwrap_err().to_string().contains("no .npy file"));
    }

    #[test]
    fn only_an_earlier_file_of_its_kind_is_replaced() {
        let folder = tempfile::tempdir().unwrap();
        let [old, link, dangling, other, pipe] =
            ["old.npy", "link", "dangling", "config.toml", "pipe"].map(|name| folder.path().join(name));
        write(&old, &[1, 2], &[1.0, 2.0]).unwrap();
        let content = fs::read(&old).unwrap();
        assert_eq!(content[content.len() - 8..], [0, 0, 128, 63, 0, 0, 0, 64]);
        std::os::unix::fs::symlink(&old, &link).unwrap();
        std::os::unix::fs::symlink(folder.path().join("new.npy"), &dangling).unwrap();
        for path in [&link, &dangling] {
            write(path, &[1, 2], &[2.0, 1.0]).unwrap();
            assert!(path.is_symlink());
            assert_eq!(fs::read(path).unwrap()[content.len() - 8..], [0, 0, 0, 64, 0, 0, 128, 63]);
        }
        assert_eq!(fs::read(&old).unwrap(), fs::read(&link).unwrap());

        fs::write(&other, "[model]").unwrap();
        let error = write(&other, &[1, 2], &[1.0, 2.0]).unwrap_err();
        assert!(error.to_string().contains("is no .npy file"), "{error}");
        assert_eq!(fs::read(&other).unwrap(), b"[model]");

        assert!(std::process::Command::new("mkfifo").arg(&pipe).status().unwrap().success());
        let read = std::thread::spawn({
            let pipe = pipe.clone();
            move || fs::read(pipe).unwrap()
        });
        write(&pipe, &[1, 2], &[1.0, 2.0]).unwrap();
        assert_eq!(read.join().unwrap(), content);
        assert!(!fs::metadata(&pipe).unwrap().is_file());
    }
}
