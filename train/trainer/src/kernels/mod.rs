//! The check of fused kernels before a run relies on them.
//!
//! On a new GPU or driver, each fused kernel is compared with plain operations, which replace wrong kernels.

mod kept;

use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use burn::tensor::FloatDType;
use kiln_collectives::Communicator;
use kiln_model::ModelConfig;
use kiln_model::ops::{FusedOp, use_plain};
use kiln_model::verify::{Finding, Shapes, verify};
use kiln_nvidia::{cache_folder, environment};
use kiln_shard::Strategy;
use serde::Deserialize;
use serde::de::IntoDeserializer;

use crate::error::{Result, TrainError};
use crate::world;
use kept::{Kept, Key};
use kiln_config::device::{DeviceError, DeviceRequest, ResolvedDevice};
use kiln_config::{Backend, CommSection, Config, Precision};
use kiln_sys::words::duration;

/// Environment variable with an operation whose kernel is treated as wrong: a drill of the fallback.
const FAULT: &str = "KILN_KERNEL_FAULT";

/// Replaces kernels that are wrong on `device`, before a run of `config` uses them.
/// Collective if there is a `world`: an operation that is plain on one rank is plain on all.
///
/// # Errors
///
/// If the ranks lose each other, or `KILN_KERNEL_FAULT` names an unknown operation.
pub fn settle(
    config: &Config,
    model: &ModelConfig,
    device: &ResolvedDevice,
    world: Option<&dyn Communicator>,
) -> Result<()> {
    if !config.device.verify_kernels {
        return Ok(());
    }
    settle_in(config.precision.compute(), model, device, world, &config.comm)
}

/// Like [`settle`], on one of several ranks; ranks that are threads share the findings. Collective.
pub fn settle_on_rank(
    config: &Config,
    model: &ModelConfig,
    device: &ResolvedDevice,
    world: &dyn Communicator,
) -> Result<()> {
    let are_threads = world.is_one_process();
    if are_threads && world.rank() != 0 {
        return Ok(());
    }
    settle(config, model, device, (!are_threads).then_some(world))
}

/// Like [`settle`], for a command that reads no configuration and computes in `precision`.
pub fn settle_in(
    precision: Precision,
    model: &ModelConfig,
    device: &ResolvedDevice,
    world: Option<&dyn Communicator>,
    comm: &CommSection,
) -> Result<()> {
    if !device.is_gpu() {
        return Ok(());
    }
    let mut attention: Vec<_> =
        (0..model.layers).map(|layer| (model.head_dim(), model.window_of(layer))).collect();
    attention.sort_unstable();
    attention.dedup();
    let shapes = Shapes { attention, experts: model.moe.is_some() };
    let key = Key::new(device.fingerprint(), vec![precision.into()], shapes, fault()?);
    let wrong = checked(device, &key);
    let Some(world) = world else {
        use_plain(&wrong);
        return Ok(());
    };
    let mine: Vec<u8> = FusedOp::ALL.iter().map(|op| u8::from(wrong.contains(op))).collect();
    let of_all = world::gather(world, "kernels that are wrong", &mine, comm.timeout())?;
    for (op, ranks) in wrong_anywhere(&of_all) {
        use_plain(&[op]);
        if !wrong.contains(&op) {
            tracing::warn!(
                "the kernel of {op} is wrong on the GPUs of ranks {ranks:?}. This rank also replaces it with {}",
                op.substitute()
            );
        }
    }
    Ok(())
}

/// Returns the operations that are wrong on some ranks, with these ranks; `of_all[rank]` has a byte per operation.
fn wrong_anywhere(of_all: &[Vec<u8>]) -> Vec<(FusedOp, Vec<usize>)> {
    let ranks = |index: usize| -> Vec<usize> {
        (0..of_all.len()).filter(|&rank| of_all[rank].get(index).is_some_and(|wrong| *wrong != 0)).collect()
    };
    let ops = FusedOp::ALL.into_iter().enumerate().map(|(index, op)| (op, ranks(index)));
    ops.filter(|(_, ranks)| !ranks.is_empty()).collect()
}

/// Returns the operations whose kernels are wrong, according to an earlier start's check or a new one.
fn checked(device: &ResolvedDevice, key: &Key) -> Vec<FusedOp> {
    let folder = cache_folder(&environment).map(|cache| cache.join("verified"));
    let file = folder.as_ref().map(|folder| folder.join(key.file_name()));
    if let Some(file) = &file
        && let Some(findings) = Kept::read(file, key)
    {
        let wrong = wrong(&findings);
        if wrong.is_empty() {
            tracing::debug!("kernels: an earlier start found no fault, as recorded in {}", file.display());
        } else {
            warn(device, &findings, Some(&report_beside(file)), "an earlier start found that ");
        }
        return wrong;
    }
    let begun = Instant::now();
    let findings = verify(&device.device(), &key.dtypes, &key.shapes, key.fault);
    let time = begun.elapsed();
    let kept = file.as_deref().filter(|file| keep(file, key, &findings, time));
    let wrong = wrong(&findings);
    if wrong.is_empty() {
        tracing::info!("{}", all_right(&findings, time));
    } else {
        warn(device, &findings, kept.map(report_beside).as_deref(), "");
    }
    wrong
}

/// Writes the findings and a report, without which a run continues. Returns whether that succeeded.
fn keep(file: &Path, key: &Key, findings: &[Finding], time: Duration) -> bool {
    let report = report_text(key, findings, time);
    let written = Kept::write(file, key, findings).and_then(|()| match wrong(findings).is_empty() {
        true => Ok(()),
        false => crate::metrics::write_atomic(&report_beside(file), report.as_bytes()),
    });
    if let Err(error) = &written {
        let file = file.display();
        tracing::warn!("cannot keep the result of the kernel check: writing {file} failed: {error}");
    }
    written.is_ok()
}

fn wrong(findings: &[Finding]) -> Vec<FusedOp> {
    let is_wrong = |op: &FusedOp| findings.iter().any(|finding| finding.op == *op && !finding.is_right());
    FusedOp::ALL.into_iter().filter(is_wrong).collect()
}

fn all_right(findings: &[Finding], time: Duration) -> String {
    let ops = FusedOp::ALL.iter().filter(|op| findings.iter().any(|finding| finding.op == **op)).count();
    format!("kernels: {ops} fused operations agree with their plain forms, checked in {}", duration(time))
}

fn warn(device: &ResolvedDevice, findings: &[Finding], report: Option<&Path>, who: &str) {
    for op in wrong(findings) {
        let wrong: Vec<_> =
            findings.iter().filter(|finding| finding.op == op && !finding.is_right()).collect();
        let how: Vec<_> = wrong.iter().map(|finding| error_of(finding)).collect();
        tracing::warn!(
            "{who}the kernel of {op} is wrong on {}: {}. The run uses {} instead, which gives correct \
             results; {}",
            device.name(),
            how.join("; "),
            op.substitute(),
            op.cost()
        );
    }
    match report {
        Some(report) => tracing::warn!("please send the report on these kernels: {}", report.display()),
        None => tracing::warn!("the report on these kernels could not be written"),
    }
}

fn report_beside(file: &Path) -> PathBuf {
    file.with_extension("txt")
}

fn report_text(key: &Key, findings: &[Finding], time: Duration) -> String {
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
        let _ = writeln!(text, "{}", line_of(finding));
    }
    text
}

fn line_of(finding: &Finding) -> String {
    let verdict = if finding.is_right() { "right" } else { "WRONG" };
    let name = finding.op.name();
    format!("{name:<14} {verdict}  {}", error_of(finding))
}

fn error_of(finding: &Finding) -> String {
    let Finding { dtype, bound, place, .. } = finding;
    let dtype = format!("{dtype:?}").to_lowercase();
    match finding.error {
        Some(error) => {
            format!("{dtype}: largest relative error {error:.1e} ({place}), bound {bound:.0e}")
        }
        None => format!("{dtype}: no finite result ({place}), bound {bound:.0e}"),
    }
}

/// Checks a GPU's kernels; returns a line for each kernel and dtype, and whether all are right.
/// Auto selects an NVIDIA GPU if there is one, else wgpu's adapter.
pub fn examine(backend: Backend) -> (Vec<String>, bool) {
    match examined(backend) {
        Ok(found) => found,
        Err(error) => (vec![format!("not checked: {error}")], false),
    }
}

fn examined(backend: Backend) -> Result<(Vec<String>, bool)> {
    let select = |backend| {
        let request = DeviceRequest::for_weights(backend, 0, 1, Strategy::NoShard, None);
        ResolvedDevice::for_request(&request, None)
    };
    let device = match (select(backend)?, backend) {
        (device, Backend::Auto) if !device.is_gpu() => select(Backend::Wgpu)?,
        (device, _) => device,
    };
    if !device.is_gpu() {
        return Err(DeviceError::NoGpu { visible: None }.into());
    }
    let dtypes = vec![FloatDType::F32, FloatDType::BF16, FloatDType::F16];
    let shapes = Shapes { attention: vec![(64, None), (128, None)], experts: true };
    let key = Key::new(device.fingerprint(), dtypes, shapes, fault()?);
    let begun = Instant::now();
    let findings = verify(&device.device(), &key.dtypes, &key.shapes, key.fault);
    let mut lines = vec![key.device.clone()];
    lines.extend(findings.iter().map(line_of));
    let (is_right, time) = (wrong(&findings).is_empty(), begun.elapsed());
    lines.push(match is_right {
        true => all_right(&findings, time),
        false => format!(
            "kernels are wrong: runs on this GPU use other kernels or plain operations instead; checked in {}",
            duration(time)
        ),
    });
    Ok((lines, is_right))
}

fn fault() -> Result<Option<FusedOp>> {
    let Some(name) = environment(FAULT) else { return Ok(None) };
    let name = name.to_string_lossy().into_owned();
    let op: Result<_, serde::de::value::Error> = FusedOp::deserialize(name.as_str().into_deserializer());
    let names = FusedOp::ALL.map(FusedOp::name).join(", ");
    op.map(Some).map_err(|_| TrainError::usage(format!("{FAULT}={name}: must be one of {names}")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranks_compute_in_plain_operations_what_is_wrong_on_any() {
        let of = |wrong: &[FusedOp]| -> Vec<u8> {
            FusedOp::ALL.iter().map(|op| u8::from(wrong.contains(op))).collect()
        };
        assert_eq!(wrong_anywhere(&[of(&[]), of(&[])]), Vec::new());
        let ranks = [of(&[FusedOp::Swiglu]), of(&[]), of(&[FusedOp::RmsNorm, FusedOp::Swiglu])];
        let expected = vec![(FusedOp::RmsNorm, vec![2]), (FusedOp::Swiglu, vec![0, 2])];
        assert_eq!(wrong_anywhere(&ranks), expected);
    }
}
