//! PTX files, and the report of `ptxas -v` about them.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::sass::{self, Code};
use crate::trace::Trace;

pub struct Tools {
    pub ptxas: PathBuf,
    pub nvdisasm: Option<PathBuf>,
}

#[derive(Clone, Debug, Default, PartialEq)]
pub struct Kernel {
    /// Name in the PTX, without the hash of settings that CubeCL appends.
    pub name: String,
    pub entry: String,
    pub architecture: String,
    pub registers: u32,
    /// Spilled bytes per thread: stores and loads.
    pub spills: u32,
    /// Bytes per block, fixed by the kernel or at its launch.
    pub shared: u32,
    pub shared_fixed: u32,
    pub tensor_cores: bool,
    pub code: Code,
}

/// Instructions for tensor cores (PTX ISA): `wmma`, `mma`, asynchronous warpgroup-level, fifth generation.
const TENSOR_CORES: [&str; 4] = ["wmma.mma.", "mma.sync.", "wgmma.mma_async.", "tcgen05.mma."];

/// Compiles every `.ptx` file of `folder`. Takes shared memory at launch from `trace.txt`, if there is one.
pub fn assemble_all(folder: &Path, tools: &Tools) -> Result<Vec<Kernel>, String> {
    let at = |error: std::io::Error| format!("{}: {error}", folder.display());
    let mut files = Vec::new();
    for entry in fs::read_dir(folder).map_err(at)? {
        let path = entry.map_err(at)?.path();
        if path.extension().is_some_and(|extension| extension == "ptx") {
            files.push(path);
        }
    }
    if files.is_empty() {
        return Err(format!("{} has no .ptx file: nothing was launched", folder.display()));
    }
    files.sort();
    let launched = Trace::read(folder).map(|trace| shared_at_launch(&trace)).unwrap_or_default();
    let mut kernels = Vec::new();
    for file in files {
        for mut kernel in assemble(&file, tools)? {
            kernel.shared += launched.get(&kernel.name).copied().unwrap_or(0);
            kernel.name.truncate(without_hash(&kernel.name).len());
            kernels.push(kernel);
        }
    }
    Ok(kernels)
}

fn assemble(file: &PathBuf, Tools { ptxas, nvdisasm }: &Tools) -> Result<Vec<Kernel>, String> {
    let ptx = fs::read_to_string(file).map_err(|error| format!("{}: {error}", file.display()))?;
    let architecture = architecture(&ptx).ok_or(format!("{}: no .target", file.display()))?.to_owned();
    let machine = match nvdisasm {
        Some(_) => file.with_extension("cubin"),
        None => PathBuf::from("/dev/null"),
    };
    let output = Command::new(ptxas)
        .args(["-v", "--gpu-name", &architecture, "--output-file"])
        .arg(&machine)
        .arg(file)
        .output()
        .map_err(|error| format!("{}: {error}; see benches/standins/setup.sh", ptxas.display()))?;
    let said = String::from_utf8_lossy(&output.stderr);
    if !output.status.success() {
        return Err(format!("{} does not compile:\n{said}", file.display()));
    }
    let mut kernels = read_report(&said, &ptx, &architecture);
    if let Some(nvdisasm) = nvdisasm {
        let codes = disassemble(&machine, nvdisasm)?;
        for kernel in &mut kernels {
            let code = codes.get(&kernel.entry);
            kernel.code = code.cloned().ok_or(format!("{}: no code of {}", file.display(), kernel.entry))?;
        }
    }
    match kernels.is_empty() {
        true => Err(format!("{}: ptxas names no kernel:\n{said}", file.display())),
        false => Ok(kernels),
    }
}

fn disassemble(file: &Path, nvdisasm: &Path) -> Result<BTreeMap<String, Code>, String> {
    let at = |problem: String| format!("{} {}: {problem}", nvdisasm.display(), file.display());
    let output =
        Command::new(nvdisasm).arg("-c").arg(file).output().map_err(|error| at(error.to_string()))?;
    if !output.status.success() {
        return Err(at(String::from_utf8_lossy(&output.stderr).into_owned()));
    }
    Ok(sass::read(&String::from_utf8_lossy(&output.stdout)))
}

/// Returns a kernel's name without the eight hexadecimal digits that distinguish its variants.
fn without_hash(name: &str) -> &str {
    match name.rsplit_once('_') {
        Some((name, hash)) if hash.len() == 8 && hash.bytes().all(|b| b.is_ascii_hexdigit()) => name,
        _ => name,
    }
}

fn architecture(ptx: &str) -> Option<&str> {
    let line = ptx.lines().find_map(|line| line.trim().strip_prefix(".target "))?;
    line.split([',', ' ']).next()
}

/// Parses the report of `ptxas -v` on one file, which has several lines per kernel.
fn read_report(said: &str, ptx: &str, architecture: &str) -> Vec<Kernel> {
    let mut kernels: Vec<Kernel> = Vec::new();
    for line in said.lines() {
        if let Some(rest) = line.split("Compiling entry function '").nth(1) {
            let name = rest.split('\'').next().unwrap_or_default().to_owned();
            kernels.push(Kernel {
                tensor_cores: TENSOR_CORES.iter().any(|i| body(ptx, &name).contains(i)),
                entry: name.clone(),
                name,
                architecture: architecture.to_owned(),
                ..Kernel::default()
            });
        }
        let Some(kernel) = kernels.last_mut() else { continue };
        kernel.registers += number_before(line, " registers");
        kernel.spills +=
            number_before(line, " bytes spill stores") + number_before(line, " bytes spill loads");
        kernel.shared_fixed += number_before(line, " bytes smem");
        kernel.shared = kernel.shared_fixed;
    }
    kernels
}

/// Returns the instructions of an entry: the text up to the next entry.
fn body<'a>(ptx: &'a str, name: &str) -> &'a str {
    let start = ptx.find(&format!(".entry {name}")).unwrap_or(0);
    let rest = &ptx[start..];
    let end = rest.get(1..).and_then(|rest| rest.find(".entry ")).map_or(rest.len(), |at| at + 1);
    &rest[..end]
}

fn number_before(line: &str, unit: &str) -> u32 {
    let before = line.find(unit).map(|at| &line[..at]);
    let word = before.and_then(|before| before.rsplit(' ').next());
    word.and_then(|word| word.parse().ok()).unwrap_or(0)
}

fn shared_at_launch(trace: &Trace) -> BTreeMap<String, u32> {
    let mut most = BTreeMap::new();
    for call in trace.calls().filter(|call| call.name() == "launch") {
        let most: &mut u32 = most.entry(call.field("kernel").to_owned()).or_default();
        *most = (*most).max(call.number("shared") as u32);
    }
    most
}

#[cfg(test)]
mod tests {
    use super::{Code, Kernel, Trace, architecture, read_report, shared_at_launch, without_hash};

    const PTX: &str = "\
.version 9.0
.target sm_90a, debug
.visible .entry plain(
{ add.f32 %f1, %f2, %f3; }
.visible .entry product(
{ mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 ; }
.visible .entry warpgroup(
{ wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 ; }
";

    const REPORT: &str = "\
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function 'product' for 'sm_90a'
ptxas info    : Function properties for product
    16 bytes stack frame, 8 bytes spill stores, 12 bytes spill loads
ptxas info    : Used 168 registers, used 1 barriers, 1024 bytes smem
ptxas info    : Compile time = 1.250 ms
ptxas info    : Compiling entry function 'plain' for 'sm_90a'
ptxas info    : Function properties for plain
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 12 registers, used 0 barriers
ptxas info    : Compiling entry function 'warpgroup' for 'sm_90a'
ptxas info    : Used 90 registers, used 1 barriers
";

    #[test]
    fn a_report_is_read() {
        assert_eq!(architecture(PTX), Some("sm_90a"));
        let kernel = |name: &str, registers, spills, shared, tensor_cores| {
            let (entry, name, architecture) = (name.to_owned(), name.to_owned(), "sm_90a".to_owned());
            let shared_fixed = shared;
            let code = Code::default();
            Kernel { name, entry, architecture, registers, spills, shared, shared_fixed, tensor_cores, code }
        };
        assert_eq!(
            read_report(REPORT, PTX, "sm_90a"),
            [
                kernel("product", 168, 20, 1024, true),
                kernel("plain", 12, 0, 0, false),
                kernel("warpgroup", 90, 0, 0, true)
            ]
        );
    }

    #[test]
    fn variants_have_one_name() {
        assert_eq!(without_hash("sum_t_f32_n_4_d56ea4d3"), "sum_t_f32_n_4");
        assert_eq!(without_hash("sum_t_f32_n_4"), "sum_t_f32_n_4");
    }

    #[test]
    fn launches_say_what_they_share() {
        let trace = Trace::of(
            "launch stream=1 kernel=a grid=1,1,1 block=1,1,1 shared=64\nalloc bytes=9\n\
                     launch stream=1 kernel=a grid=1,1,1 block=1,1,1 shared=32\n",
        );
        assert_eq!(shared_at_launch(&trace).into_iter().collect::<Vec<_>>(), [("a".to_owned(), 64)]);
    }
}
