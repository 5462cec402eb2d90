//! Formats a summary as text of 80 columns.

use std::fmt::{self, Display, Formatter};

use kiln_sys::words::number_of;

use super::{
    GpuSummary, KernelSummary, OperationSummary, PathPart, RankSummary, Slowest, StepSummary, Summary,
    UnitWait,
};

const SHOWN: usize = 6;

const MOST_KERNELS: usize = 12;

const MOST_RANKS: usize = 16;

fn ms(seconds: f64) -> String {
    format!("{:.3} ms", seconds * 1e3)
}

fn percent(part: f64, whole: f64) -> String {
    format!("{:.1} %", if whole > 0.0 { 100.0 * part / whole } else { 0.0 })
}

fn mib(bytes: u64) -> String {
    format!("{:.2} MiB", bytes as f64 / f64::from(1 << 20))
}

impl Display for Summary {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        let ranks = self.steps.first().map_or(0, |step| step.ranks.len());
        let machines = self.machines.len();
        write!(f, "{} on {}", number_of(ranks, "rank"), number_of(machines, "machine"))?;
        match self.clock_error_s {
            None => f.write_str("; the clock of some rank could not be aligned")?,
            Some(error) if error > 0.0 => write!(f, "; clocks aligned within {}", ms(error))?,
            Some(_) => {}
        }
        if self.steps.is_empty() {
            f.write_str("\nno step was recorded by all ranks")?;
        }
        self.steps.iter().try_for_each(|step| write!(f, "\n\n{step}"))?;
        if self.gpus.is_empty() {
            return Ok(());
        }
        writeln!(f, "\n\nGPUs, in all steps")?;
        write!(f, "  rank           time         busy   exposed communication")?;
        for GpuSummary { rank, seconds, busy_s, exposed_s } in self.gpus.iter().take(MOST_RANKS) {
            let (busy, exposed) = (percent(*busy_s, *seconds), percent(*exposed_s, *seconds));
            write!(f, "\n    {rank:<5} {:>12} {busy:>12} {exposed:>12}", ms(*seconds))?;
        }
        let all: f64 = self.kernels.iter().map(|kernel| kernel.seconds).sum();
        write!(f, "\n  kernels and copies                                calls          time   share")?;
        for KernelSummary { name, calls, seconds } in self.kernels.iter().take(MOST_KERNELS) {
            let share = percent(*seconds, all);
            write!(f, "\n    {:<42} {calls:>10} {:>13} {share:>7}", cut(name, 42), ms(*seconds))?;
        }
        if let Some(rest @ [_, ..]) = self.kernels.get(MOST_KERNELS..) {
            let time: f64 = rest.iter().map(|kernel| kernel.seconds).sum();
            let calls: u64 = rest.iter().map(|kernel| kernel.calls).sum();
            let (more, share) = (number_of(rest.len(), "more kind"), percent(time, all));
            write!(f, "\n    {more:<42} {calls:>10} {:>13} {share:>7}", ms(time))?;
        }
        Ok(())
    }
}

impl Display for StepSummary {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        writeln!(f, "step {}: {}", self.step, ms(self.seconds))?;
        self.show_path(f)?;
        self.show_ranks(f)?;
        writeln!(f, "  exposed communication, by where ranks waited   mean    most of a rank")?;
        if self.exposed.is_empty() {
            writeln!(f, "    none")?;
        }
        for UnitWait { place, mean_s, most_s } in self.exposed.iter().take(SHOWN) {
            writeln!(f, "    {:<34} {:>15} {:>15}", cut(place, 34), ms(*mean_s), ms(*most_s))?;
        }
        let rest: f64 = self.exposed.iter().skip(SHOWN).map(|wait| wait.mean_s).sum();
        if rest > 0.0 {
            let more = format!("{} more places", self.exposed.len() - SHOWN);
            writeln!(f, "    {more:<34} {:>15}", ms(rest))?;
        }
        self.show_slowest(f)?;
        write!(f, "  collectives            calls         sent      moving   late ranks        GB/s")?;
        for sum in &self.operations {
            let OperationSummary { operation, calls, bytes_sent, moving_s, late_s, gb_per_s, .. } = sum;
            let gb_per_s = gb_per_s.map_or_else(|| "-".to_owned(), |rate| format!("{rate:.2}"));
            let (moving, late) = (ms(*moving_s), ms(*late_s));
            let sent = mib(*bytes_sent);
            write!(f, "\n    {operation:<15} {calls:>10} {sent:>13} {moving:>12} {late:>12} {gb_per_s:>8}")?;
        }
        Ok(())
    }
}

impl StepSummary {
    fn show_path(&self, f: &mut Formatter<'_>) -> fmt::Result {
        let communication =
            self.critical_path.iter().filter(|part| part.is_communication).map(|part| part.seconds);
        let share = percent(communication.sum(), self.seconds);
        writeln!(f, "  critical path ({share} of the step is communication)")?;
        for PathPart { rank, what, seconds, .. } in self.critical_path.iter().take(SHOWN) {
            let (share, time) = (percent(*seconds, self.seconds), ms(*seconds));
            writeln!(f, "    {share:>7} {time:>14}  rank {rank}: {}", cut(what, 44))?;
        }
        let rest: f64 = self.critical_path.iter().skip(SHOWN).map(|part| part.seconds).sum();
        if rest > 0.0 {
            let more = number_of(self.critical_path.len() - SHOWN, "more part");
            writeln!(f, "    {:>7} {:>14}  {more}", percent(rest, self.seconds), ms(rest))?;
        }
        Ok(())
    }

    fn show_ranks(&self, f: &mut Formatter<'_>) -> fmt::Result {
        writeln!(f, "  rank      computing         data   checkpoint      exposed   communication")?;
        writeln!(f, "                                                               overlapped")?;
        for summary in self.ranks.iter().take(MOST_RANKS) {
            let RankSummary { rank, computing_s, data_s, checkpoint_s, exposed_s, overlap, .. } = summary;
            let [computing, data, checkpoint, exposed] =
                [computing_s, data_s, checkpoint_s, exposed_s].map(|seconds| ms(*seconds));
            let overlap = overlap.map_or_else(|| "-".to_owned(), |share| percent(share, 1.0));
            writeln!(
                f,
                "    {rank:<5} {computing:>12} {data:>12} {checkpoint:>12} {exposed:>12} {overlap:>12}"
            )?;
        }
        let more = self.ranks.len().saturating_sub(MOST_RANKS);
        if more > 0 {
            writeln!(f, "    and {more} more ranks: --json has all")?;
        }
        Ok(())
    }

    fn show_slowest(&self, f: &mut Formatter<'_>) -> fmt::Result {
        let Some(Slowest { rank, machine, excess_s, reasons }) = &self.slowest else {
            let word = match self.ranks.len() {
                1 => "there is one rank",
                _ => "none: the work of all ranks took about the same time",
            };
            return writeln!(f, "  slowest rank: {word}");
        };
        writeln!(f, "  slowest rank: {rank} on {}", cut(machine, 50))?;
        writeln!(f, "    its work took {} more than the median of the others:", ms(*excess_s))?;
        for reason in reasons {
            let (taken, others) = (ms(reason.seconds), ms(reason.others_s));
            writeln!(f, "      {}: {taken}, others {others}", cut(&reason.what, 36))?;
        }
        Ok(())
    }
}

fn cut(text: &str, width: usize) -> String {
    match text.char_indices().nth(width) {
        None => text.to_owned(),
        Some(_) => text.chars().take(width - 1).chain(['…']).collect(),
    }
}
