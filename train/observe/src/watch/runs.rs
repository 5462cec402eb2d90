//! The view of all runs and the differences of their configurations.

use std::collections::BTreeSet;
use std::iter;

use ratatui::buffer::Buffer;
use ratatui::layout::{Constraint, Layout, Rect};
use ratatui::style::Style;
use ratatui::text::{Line, Span};
use ratatui::widgets::{Row, StatefulWidget, Table, TableState, Widget};

use super::format::{clean, duration, fit, name_of, nothing, number, plain_title, short, titled, width};
use super::state::{Watch, label};
use super::theme::Theme;

const NUMBERS: [(&str, usize); 5] = [("step", 11), ("loss", 7), ("val", 7), ("tok/s", 6), ("left", 11)];

const MARKS: usize = 4;
const STATE: usize = 12;

pub(super) fn draw(watch: &mut Watch, area: Rect, screen: &mut Buffer) {
    let rows = (watch.runs.len() as u16).saturating_add(2).min(area.height * 6 / 10);
    let [above, below] = area.layout(&Layout::vertical([Constraint::Length(rows), Constraint::Fill(1)]));
    table(watch, above, screen);
    differences(watch, below, screen);
}

fn table(watch: &Watch, area: Rect, screen: &mut Buffer) {
    let shown = watch.shown();
    let title = plain_title(format!("{} of {} runs shown", shown.len(), watch.runs.len()));
    let inside = titled(title, area, screen);
    let numbers: Vec<_> = (0..watch.runs.len()).map(|run| numbers(watch, run)).collect();
    let longest = |at: usize| numbers.iter().map(|texts| width(&texts[at])).max().unwrap_or(0);
    let widths = NUMBERS.iter().enumerate().map(|(at, (_, least))| longest(at).max(*least));
    let widths: Vec<usize> = widths.collect();
    let taken = MARKS + STATE + widths.iter().map(|width| width + 1).sum::<usize>() + 2;
    let name = usize::from(inside.width).saturating_sub(taken + 1).max(8);
    let row = |(run, numbers): (usize, [String; 5])| {
        let snapshot = &watch.runs[run];
        let (style, state) = Theme::state(snapshot.state());
        let is_shown = shown.contains(&run);
        let own = if is_shown { Theme::run(run).into() } else { Theme::QUIET };
        let cells = [
            Line::styled(format!(" {} {}", if is_shown { "▸" } else { " " }, label(run)), own),
            Line::styled(fit(&name_of(&snapshot.folder), name), own.patch(Theme::TITLE)),
            Line::styled(fit(&state, STATE), style),
        ];
        Row::new(cells.into_iter().chain(numbers.map(|text| Line::raw(text).right_aligned())))
    };
    let head = ["", "run", "state"].map(Line::from).into_iter();
    let head = head.chain(NUMBERS.map(|(title, _)| Line::raw(title).right_aligned()));
    let widths = [MARKS, name, STATE].into_iter().chain(widths).map(|width| Constraint::Length(width as u16));
    let rows: Vec<_> = numbers.into_iter().enumerate().map(row).collect();
    let table = Table::new(rows, widths).header(Row::new(head).style(Theme::QUIET));
    let table = table.row_highlight_style(Theme::SELECTED);
    StatefulWidget::render(table, inside, screen, &mut TableState::default().with_selected(watch.front));
}

fn numbers(watch: &Watch, run: usize) -> [String; 5] {
    let run = &watch.runs[run].progress;
    let steps = run.steps.map_or_else(String::new, |steps| format!("/{steps}"));
    let texts = [
        run.step.map(|step| format!("{step}{steps}")),
        run.loss.map(number),
        run.val_loss.map(number),
        run.tokens_per_s.map(short),
        run.eta_s.map(duration),
    ];
    texts.map(|text| text.unwrap_or_else(|| "-".to_owned()))
}

fn differences(watch: &mut Watch, area: Rect, screen: &mut Buffer) {
    let runs = watch.shown();
    let configs: Vec<_> =
        runs.iter().filter_map(|run| Some(watch.runs[*run].run.as_ref()?.config())).collect();
    let keys: BTreeSet<&String> = configs.iter().flat_map(|config| config.keys()).collect();
    let differs = |key: &&String| configs.windows(2).any(|pair| pair[0].get(*key) != pair[1].get(*key));
    let keys: Vec<&String> = keys.into_iter().filter(differs).collect();
    let longest = keys.iter().map(|key| width(key)).max().unwrap_or(0);
    let name = longest.min(usize::from(area.width) / 3);
    let room = usize::from(area.width).saturating_sub(name + 2);
    let each = (room / runs.len().max(1)).clamp(10, 40);
    let count = runs.len().min(room / each);
    let mut title = vec![plain_title("configurations differ in")];
    if count < runs.len() && !keys.is_empty() {
        let part = format!("  {count} of {} runs; hide some to see the others", runs.len());
        title.push(Span::styled(part, Theme::QUIET));
    }
    let inside = titled(title, area, screen);
    if runs.len() < 2 {
        let how = "to compare runs, name several: kiln watch RUN RUN, or a folder of runs";
        return nothing(how, inside, screen);
    }
    if keys.is_empty() {
        return nothing("nothing", inside, screen);
    }
    let page = usize::from(inside.height).saturating_sub(1);
    watch.rows.difference = watch.rows.difference.min(keys.len().saturating_sub(page));
    let row = |key: &&String| {
        let value = |run: &usize| {
            let value = watch.runs[*run].run.as_ref().and_then(|run| run.config().get(*key));
            let value = value.map_or_else(|| "-".to_owned(), |value| clean(value).replace('\n', " "));
            Line::raw(fit(&value, each - 1))
        };
        let key = Line::styled(format!(" {}", fit(&clean(key), name)), Theme::TITLE);
        Row::new(iter::once(key).chain(runs.iter().take(count).map(value)))
    };
    let head = runs.iter().take(count).map(|run| {
        let text = format!("{} {}", label(*run), name_of(&watch.runs[*run].folder));
        Line::styled(fit(&text, each - 1), Style::from(Theme::run(*run)))
    });
    let rows: Vec<_> = keys.iter().skip(watch.rows.difference).map(row).collect();
    let widths = iter::once(name + 1).chain(iter::repeat_n(each - 1, count));
    let table = Table::new(rows, widths.map(|width| Constraint::Length(width as u16)));
    Widget::render(table.header(Row::new(iter::once(Line::default()).chain(head))), inside, screen);
}
