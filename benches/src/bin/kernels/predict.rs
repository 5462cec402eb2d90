//! Predicts the minimum and the expected time of a step on another GPU, launch by launch, from the traces of two runs
//! with few and with more blocks.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use kiln::config::Precision;
use kiln::device::DataSheet;
use kiln::planner::products_share;
use kiln_model::ModelConfig;

use crate::host::Report;
use crate::kernel_time::{Gpu, Shape};
use crate::matmul::Matmuls;
use crate::ptx::{self, Kernel, Tools};
use crate::trace::{Call, Trace};

/// Minimum expected seconds of a launch.
const LAUNCH_S: f64 = 2e-6;

#[derive(Clone, Copy, Debug, Default)]
struct Time {
    launches: f64,
    /// Seconds at the data sheet's rates.
    least: f64,
    /// Seconds at the rates that such kernels reach elsewhere.
    expected: f64,
}

type Times = BTreeMap<String, Time>;

/// Prints the prediction for the steps in `folders`, two for each preset.
pub fn run(folders: &[PathBuf], gpu: &str, tools: &Tools, python: &Path) -> Result<(), String> {
    let sheet = DataSheet::named(gpu).ok_or(format!("no data sheet for {gpu}"))?;
    let gpu = Gpu::new(sheet.peak_flops(Precision::Bf16), sheet.bandwidth * 1e9);
    let mut attention = BTreeMap::new();
    let mut summary = String::new();
    let mut tables = String::new();
    for pair in folders.chunks(2) {
        let [fewer, more] = pair else { return Err("two folders are needed for each preset".to_owned()) };
        let preset = fewer.parent().and_then(Path::file_name).unwrap_or_default().to_string_lossy();
        let model = ModelConfig::preset(&preset).ok_or(format!("unknown preset {preset}"))?;
        let step = Step::new(fewer, more, &gpu, tools, python, sheet, &mut attention)?;
        let (text, row) = step.text(&preset, model.layers as f64, sheet.peak_flops(Precision::Bf16));
        tables.push_str(&text);
        summary.push_str(&row);
    }
    println!("# Predicted for {}: not measured\n", sheet.name);
    println!(
        "Nothing here was measured on a GPU. *At least*: every launch at the rates of the data sheet, and products of \
         matrices by NVIDIA's matmul heuristics, without a limit of power. *Expected*: products at {} of the \
         data sheet's FLOP/s, memory and attention at the shares in `benches/src/bin/kernels/kernel_time.rs`, and \
         {} µs for a launch. Communication and reading of data are not in it.\n",
        products_share(gpu.flops),
        LAUNCH_S * 1e6
    );
    println!(
        "| preset | tokens | launches | at least, ms | MFU, at most | expected, ms | expected MFU | µs per launch that the host may take |"
    );
    println!("|---|---|---|---|---|---|---|---|");
    print!("{summary}");
    println!(
        "\n## Attention on tensor cores\n\nThe hot loop of a warp in machine code for sm_90, and the unit that it keeps busy longest.\n"
    );
    println!(
        "| kernel | registers | shared | blocks per SM | instructions | tensor | special | f32 | integer | bytes of L1 | cycles | by | of peak, at most |"
    );
    println!("|---|---|---|---|---|---|---|---|---|---|---|---|---|");
    attention.values().for_each(|row| println!("{row}"));
    print!("{tables}");
    Ok(())
}

struct Step {
    reports: [Report; 2],
    times: [Times; 2],
    matmuls: &'static str,
}

impl Step {
    fn new(
        fewer: &Path,
        more: &Path,
        gpu: &Gpu,
        tools: &Tools,
        python: &Path,
        sheet: &DataSheet,
        attention: &mut BTreeMap<String, String>,
    ) -> Result<Step, String> {
        let reports = [Report::read(fewer)?, Report::read(more)?];
        if reports[0].model.layers >= reports[1].model.layers {
            return Err(format!("{} must have more blocks than {}", more.display(), fewer.display()));
        }
        let traces = [Trace::read(fewer)?, Trace::read(more)?];
        let calls = [traces[0].last_step()?, traces[1].last_step()?];
        let mut kernels: BTreeMap<String, Kernel> = BTreeMap::new();
        for folder in [fewer, more] {
            for kernel in ptx::assemble_all(folder, tools)? {
                kernels.insert(kernel.entry.clone(), kernel);
            }
        }
        let products = calls.iter().flatten().copied().filter(|call| call.name() == "cublaslt_matmul");
        let matmuls = Matmuls::of(products, sheet.name, python, products_share(gpu.flops) * gpu.flops)?;
        let mut times = [Times::new(), Times::new()];
        for (index, calls) in calls.iter().enumerate() {
            let shape = Shape::of(&reports[index]);
            for call in calls {
                let Some((operation, least, expected)) =
                    time(*call, gpu, &shape, &kernels, &matmuls, attention)?
                else {
                    continue;
                };
                let time = times[index].entry(operation).or_default();
                time.launches += 1.0;
                time.least += least;
                time.expected += expected.max(LAUNCH_S);
            }
        }
        Ok(Step { reports, times, matmuls: matmuls.source() })
    }

    fn text(&self, preset: &str, layers: f64, peak: f64) -> (String, String) {
        let [fewer, more] = &self.reports;
        let (low, high) = (fewer.model.layers as f64, more.model.layers as f64);
        let whole = |fewer: f64, more: f64| fewer + (layers - low) * (more - fewer) / (high - low);
        let mut names: Vec<_> = self.times.iter().flat_map(Times::keys).collect();
        names.sort();
        names.dedup();
        let mut rows: Vec<(&str, Time)> = Vec::new();
        let mut sum = Time::default();
        for name in names {
            let [fewer, more] = [0, 1].map(|at| self.times[at].get(name).copied().unwrap_or_default());
            let time = Time {
                launches: whole(fewer.launches, more.launches),
                least: whole(fewer.least, more.least),
                expected: whole(fewer.expected, more.expected),
            };
            rows.push((name, time));
            sum.launches += time.launches;
            sum.least += time.least;
            sum.expected += time.expected;
        }
        rows.sort_by(|one, other| other.1.expected.total_cmp(&one.1.expected));
        let tokens = (fewer.global_batch * fewer.seq_len) as f64;
        let flops = tokens * whole(fewer.flops_per_token(), more.flops_per_token());
        let mfu = |seconds: f64| 100.0 * flops / (seconds * peak);
        let mut text = format!(
            "\n## {preset}, {} x {} tokens, {layers} blocks\n\nProducts by {}.\n\n\
             | operation | launches | at least, ms | expected, ms | share |\n|---|---|---|---|---|\n",
            fewer.global_batch, fewer.seq_len, self.matmuls
        );
        rows.push(("all", sum));
        for (name, time) in rows {
            text.push_str(&format!(
                "| {name} | {:.0} | {:.2} | {:.2} | {:.1} % |\n",
                time.launches,
                time.least * 1e3,
                time.expected * 1e3,
                100.0 * time.expected / sum.expected
            ));
        }
        let row = format!(
            "| {preset} | {tokens:.0} | {:.0} | {:.1} | {:.1} % | {:.1} | {:.1} % | {:.0} |\n",
            sum.launches,
            sum.least * 1e3,
            mfu(sum.least),
            sum.expected * 1e3,
            mfu(sum.expected),
            sum.expected * 1e6 / sum.launches
        );
        (text, row)
    }
}

/// Returns a call's operation, and its minimum and expected seconds; `None` for calls that leave the device idle.
fn time(
    call: Call<'_>,
    gpu: &Gpu,
    shape: &Shape,
    kernels: &BTreeMap<String, Kernel>,
    matmuls: &Matmuls,
    attention: &mut BTreeMap<String, String>,
) -> Result<Option<(String, f64, f64)>, String> {
    if call.name() == "cublaslt_matmul" {
        return Ok(Some(matmuls.time(call, gpu)));
    }
    if call.name() != "launch" {
        return Ok(None);
    }
    let name = call.field("kernel");
    let kernel = kernels.get(name).ok_or(format!("{name} was launched, but its PTX is missing"))?;
    let time = gpu.time(call, kernel, shape);
    if let Some(row) = time.row {
        attention.insert(format!("{} {}", kernel.name, shape.head_width()), row);
    }
    Ok(Some((time.operation.to_owned(), time.least, time.expected)))
}
