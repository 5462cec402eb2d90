//! Reads and writes `.npy` files, NumPy's format for one array.

use std::fs::File;
use std::io::{self, Read, Seek};
use std::path::Path;

use crate::durable::write_named;
use crate::files;

/// Size of everything before the data is a multiple of this.
const ALIGNMENT: usize = 64;

const MAGIC: &[u8] = b"\x93NUMPY";

const LONGEST_HEADER: usize = 4096;

/// Writes `values` of `shape` in C order. Replaces an earlier `.npy` file atomically, and writes into a pipe or device.
///
/// # Errors
///
/// Fails if `path` is a file of a different kind or cannot be written.
pub fn write(path: &Path, shape: &[usize], values: &[f32]) -> io::Result<()> {
    let mut content = header(shape);
    content.extend(values.iter().flat_map(|value| value.to_le_bytes()));
    write_named(path, &content, ".npy file", |start| start.starts_with(MAGIC))
}

/// An array in a file of little-endian f32 or f64 values in C order.
pub struct Array {
    file: File,
    /// Sizes of the dimensions, slowest first.
    pub shape: Vec<usize>,
    width: usize,
    bytes: u64,
}

impl Array {
    /// Reads the header of a regular file, and checks it against the file's length.
    ///
    /// # Errors
    ///
    /// Fails if the file cannot be read, has a different kind, or has fewer values than its shape implies.
    pub fn open(path: &Path) -> io::Result<Self> {
        let wrong = |problem: &str| io::Error::new(io::ErrorKind::InvalidData, problem.to_owned());
        let mut file = files::open(path)?;
        let mut start = [0; 8];
        file.read_exact(&mut start).map_err(|_| wrong("it is not a .npy file"))?;
        if start[..6] != *MAGIC {
            return Err(wrong("it is not a .npy file"));
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
        let expected = shape.iter().try_fold(width, |bytes: usize, size| bytes.checked_mul(*size));
        let there = file.metadata()?.len().saturating_sub(file.stream_position()?);
        if expected.map(|bytes| bytes as u64) != Some(there) {
            return Err(wrong("the number of its values does not match its shape"));
        }
        Ok(Array { file, shape, width, bytes: there })
    }

    /// Reads the values as f32, into as much memory as the shape implies.
    ///
    /// # Errors
    ///
    /// Fails if the file cannot be read, or has become shorter since it was opened.
    pub fn values(mut self) -> io::Result<Vec<f32>> {
        let mut data = Vec::new();
        (&mut self.file).take(self.bytes).read_to_end(&mut data)?;
        if data.len() as u64 != self.bytes {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        let value = |bytes: &[u8]| match *bytes {
            [a, b, c, d] => f32::from_le_bytes([a, b, c, d]),
            [a, b, c, d, e, f, g, h] => f64::from_le_bytes([a, b, c, d, e, f, g, h]) as f32,
            _ => f32::NAN,
        };
        Ok(data.chunks_exact(self.width).map(value).collect())
    }
}

/// Magic bytes, version, header length, and the header padded with spaces.
fn header(shape: &[usize]) -> Vec<u8> {
    let sizes: String = shape.iter().map(|size| format!("{size}, ")).collect();
    // A tuple of one element has a trailing comma.
    let sizes = if shape.len() == 1 { sizes.trim_end() } else { sizes.trim_end_matches(", ") };
    let mut text = format!("{{'descr': '<f4', 'fortran_order': False, 'shape': ({sizes}), }}");
    let version = [1, 0];
    let before = MAGIC.len() + version.len() + size_of::<u16>();
    let length = (before + text.len() + 1).next_multiple_of(ALIGNMENT) - before;
    text.extend(std::iter::repeat_n(' ', length - 1 - text.len()));
    text.push('\n');
    let mut header = [MAGIC, &version].concat();
    // A few numbers of at most 20 digits are far below the limit of this version.
    header.extend((length as u16).to_le_bytes());
    header.extend(text.bytes());
    header
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    fn read(path: &Path) -> io::Result<(Vec<usize>, Vec<f32>)> {
        let array = Array::open(path)?;
        Ok((array.shape.clone(), array.values()?))
    }

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
        assert!(read(&path).unwrap_err().to_string().contains("does not match its shape"));
        fs::write(&path, "no array").unwrap();
        assert!(read(&path).unwrap_err().to_string().contains("not a .npy file"));
    }

    /// A sparse file takes no disk space.
    #[test]
    fn a_header_is_believed_only_as_far_as_the_file_goes() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("x.npy");
        let huge = 1 << 36;
        fs::write(&path, header(&[huge])).unwrap();
        assert!(Array::open(&path).is_err());
        let file = File::options().write(true).open(&path).unwrap();
        file.set_len(header(&[huge]).len() as u64 + 4 * huge as u64).unwrap();
        assert_eq!(Array::open(&path).unwrap().shape, [huge]);
        fs::remove_file(&path).unwrap();
        nix::unistd::mkfifo(&path, nix::sys::stat::Mode::S_IRWXU).unwrap();
        assert_eq!(Array::open(&path).err().map(|error| error.kind()), Some(io::ErrorKind::InvalidInput));
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
        assert!(error.to_string().contains("is not a .npy file"), "{error}");
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
