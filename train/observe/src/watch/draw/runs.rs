//! All runs, and how their configurations differ.

use std::collections::BTreeSet;

use ratatui::buffer::Buffer;
use ratatui::layout::Rect;
use ratatui::style::Style;
use ratatui::text::{Line, Span};

use super::super::state::{Watch, label};
use super::super::text::{clean, duration, fit, number, short, width};
use super::super::theme::Theme;
use super::frame::{name_of, nothing, put, titled};

/// Columns of the numbers of a run.
const NUMBERS: [(&str, usize); 5] = [("step", 11), ("loss", 7), ("val", 7), ("tok/s", 6), ("left", 11)];

/// The view.
pub(super) fn draw(watch: &mut Watch, area: Rect, screen: &mut Buffer) {
    let rows = (watch.subjects.len() as u16).saturating_add(2).min(area.height * 6 / 10);
    let above = Rect { height: rows, ..area };
    table(watch, above, screen);
    let below = Rect { y: area.y + rows, height: area.height - rows, ..area };
    differences(watch, below, screen);
}

fn table(watch: &Watch, area: Rect, screen: &mut Buffer) {
    let title = format!("{} of {} runs shown", watch.shown().len(), watch.subjects.len());
    let inside = titled(Line::styled(title, Theme::title()), area, screen);
    let numbers: usize = NUMBERS.iter().map(|(_, width)| width + 1).sum();
    let state = 12;
    let name = usize::from(inside.width).saturating_sub(numbers + state + 7).max(8);
    let mut head = format!("     {:<name$} {:<state$}", "run", "state");
    NUMBERS.iter().for_each(|(title, width)| head.push_str(&format!(" {title:>width$}")));
    put(Line::styled(head, Theme::quiet()), inside, 0, screen);
    let page = usize::from(inside.height).saturating_sub(1).max(1);
    let first = (watch.at + 1).saturating_sub(page);
    for run in first..watch.subjects.len().min(first + page) {
        let line = row(watch, run, name, state);
        put(line, inside, (run - first) as u16 + 1, screen);
    }
}

fn row(watch: &Watch, run: usize, name: usize, state_width: usize) -> Line<'static> {
    let summary = &watch.summaries[run];
    let state = watch.news[run].state();
    let (style, mark) = Theme::state(state);
    let is_hidden = !watch.shown().contains(&run);
    let shown = if is_hidden { "  " } else { "▸ " };
    let word = state.map_or_else(|| "unknown".to_owned(), |state| state.to_string());
    let dash = |text: Option<String>| text.unwrap_or_else(|| "-".to_owned());
    let step = summary.step.map(|step| match summary.steps {
        Some(steps) => format!("{step}/{steps}"),
        None => step.to_string(),
    });
    let texts = [
        dash(step),
        dash(summary.loss.map(number)),
        dash(summary.val_loss.map(number)),
        dash(summary.tokens_per_s.map(short)),
        dash(summary.left_s.map(duration)),
    ];
    let of_run = if is_hidden { Theme::quiet() } else { Theme::run(run) };
    let text = fit(&name_of(watch.subjects[run].folder()), name);
    let mut spans = vec![
        Span::raw(" "),
        Span::styled(format!("{shown}{} ", label(run)), of_run),
        Span::styled(pad(&text, name + 1), of_run.patch(Theme::title())),
        Span::styled(pad(&fit(&format!("{mark} {word}"), state_width), state_width), style),
    ];
    for (text, (_, width)) in texts.into_iter().zip(NUMBERS) {
        spans.push(Span::raw(format!(" {:>width$}", fit(&text, width))));
    }
    let line = Line::from(spans);
    if run == watch.at { line.patch_style(Theme::chosen()) } else { line }
}

fn pad(text: &str, columns: usize) -> String {
    format!("{text}{}", " ".repeat(columns.saturating_sub(width(text))))
}

/// Keys whose values are not the same in all runs that are shown.
fn differences(watch: &mut Watch, area: Rect, screen: &mut Buffer) {
    let runs: Vec<usize> = watch.shown();
    let configs: Vec<_> = runs.iter().map(|run| watch.news[*run].folder.clone()).collect();
    let keys: BTreeSet<&String> = configs.iter().flat_map(|facts| facts.config.keys()).collect();
    let differ = |key: &&&String| {
        let mut values = configs.iter().map(|facts| facts.config.get(**key));
        let first = values.next();
        values.any(|value| Some(value) != first)
    };
    let keys: Vec<&String> = keys.iter().filter(differ).copied().collect();
    let title = Line::styled("configurations differ in", Theme::title());
    let inside = titled(title, area, screen);
    if runs.len() < 2 {
        return nothing(
            "two runs or more are compared here: kiln watch RUN RUN, or a folder of runs",
            inside,
            screen,
        );
    }
    if keys.is_empty() {
        return nothing("nothing", inside, screen);
    }
    let longest = keys.iter().map(|key| width(key)).max().unwrap_or(0);
    let name = longest.min(usize::from(inside.width) / 3);
    let room = usize::from(inside.width).saturating_sub(name + 2);
    let each = (room / runs.len()).clamp(10, 40);
    let cell = |text: &str| pad(&fit(text, each - 1), each);
    let mut head = vec![Span::raw(format!(" {} ", " ".repeat(name)))];
    for run in &runs {
        let text = format!("{} {}", label(*run), name_of(watch.subjects[*run].folder()));
        head.push(Span::styled(cell(&text), Theme::run(*run)));
    }
    put(Line::from(head), inside, 0, screen);
    let page = usize::from(inside.height).saturating_sub(1);
    watch.differences = watch.differences.min(keys.len().saturating_sub(page));
    for (row, key) in keys.iter().skip(watch.differences).take(page).enumerate() {
        let mut spans =
            vec![Span::styled(format!(" {} ", pad(&fit(&clean(key), name), name)), Theme::title())];
        for facts in &configs {
            let text =
                facts.config.get(*key).map_or_else(|| "-".to_owned(), |text| clean(text).replace('\n', " "));
            spans.push(Span::styled(cell(&text), Style::new()));
        }
        put(Line::from(spans), inside, row as u16 + 1, screen);
    }
}
