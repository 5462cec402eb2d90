//! A report as one HTML page that needs nothing else: no script, no file beside it, no other host.

use maud::{DOCTYPE, Markup, PreEscaped, html};

use super::document::{Block, Cell, Document, Figure, Table};
use super::text::visible;
use crate::plot::{Ink, page_colours};

const STYLE: &str = include_str!("page.css");

/// What a browser may load for the page: nothing but the style in it.
const POLICY: &str = "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'";

/// The page.
pub(super) fn page(document: &Document) -> String {
    let sections: Vec<_> = document.blocks.iter().filter_map(title_of).collect();
    let page = html! {
        (DOCTYPE)
        html lang="en" {
            head {
                meta charset="utf-8";
                meta http-equiv="Content-Security-Policy" content=(POLICY);
                meta name="viewport" content="width=device-width, initial-scale=1";
                title { (shown(&document.title)) }
                style { (PreEscaped(page_colours())) (PreEscaped(STYLE)) }
            }
            body {
                main {
                    h1 { (shown(&document.title)) }
                    nav aria-label="Sections" {
                        ol {
                            @for (index, title) in sections.iter().enumerate() {
                                li { a href=(format!("#section-{}", index + 1)) { (shown(title)) } }
                            }
                        }
                    }
                    (blocks(&document.blocks, &mut Count::default()))
                }
            }
        }
    };
    page.into_string()
}

/// How many of each there have been.
#[derive(Default)]
struct Count {
    sections: usize,
    figures: usize,
    tables: usize,
}

fn title_of(block: &Block) -> Option<&String> {
    match block {
        Block::Section(title) => Some(title),
        _ => None,
    }
}

fn blocks(all: &[Block], count: &mut Count) -> Markup {
    html! { @for one in all { (block(one, count)) } }
}

fn block(block: &Block, count: &mut Count) -> Markup {
    match block {
        Block::Section(title) => {
            count.sections += 1;
            html! { h2 id=(format!("section-{}", count.sections)) { (count.sections) ". " (shown(title)) } }
        }
        Block::Text(text) => html! { p { (shown(text)) } },
        Block::List(items) => html! { ul { @for item in items { li { (shown(item)) } } } },
        Block::Lines(text) => html! { pre { (shown(text)) } },
        Block::Table(one) => {
            count.tables += 1;
            table(one, count.tables)
        }
        Block::Figure(one) => {
            count.figures += 1;
            figure(one, count.figures)
        }
        Block::Folded(summary, inner) => {
            html! { details { summary { (shown(summary)) } (blocks(inner, count)) } }
        }
    }
}

fn figure(figure: &Figure, number: usize) -> Markup {
    let Figure { id, caption, plot } = figure;
    // Its own text is escaped where it is drawn.
    let wide = plot.wide(Ink::Page).inline(&format!("{id}-wide"), "wide");
    let narrow = plot.narrow(Ink::Page).inline(&format!("{id}-narrow"), "narrow");
    html! {
        figure id=(id) {
            (PreEscaped(wide)) (PreEscaped(narrow))
            figcaption { b { "Figure " (number) ". " } (shown(caption)) }
        }
    }
}

fn table(table: &Table, number: usize) -> Markup {
    let is_number =
        |column: usize| table.rows.iter().any(|row| matches!(row.get(column), Some(Cell::Number(_))));
    let id = format!("table-{number}");
    html! {
        // The title stays where it is while the table scrolls, which the keyboard can do as well.
        p.caption id=(id) { b { "Table " (number) ". " } (shown(&table.caption)) }
        div.scroll tabindex="0" role="region" aria-labelledby=(id) {
            table aria-labelledby=(id) {
                thead { tr { @for (column, name) in table.head.iter().enumerate() {
                    th scope="col" class=[is_number(column).then_some("number")] { (shown(name)) }
                } } }
                tbody { @for row in &table.rows { tr { @for (column, one) in row.iter().enumerate() {
                    @if column == 0 { th scope="row" class=[is_number(0).then_some("number")] { (cell(one)) } }
                    @else if let Cell::Number(_) = one { td class="number" { (cell(one)) } }
                    @else { td { (cell(one)) } }
                } } } }
            }
        }
    }
}

fn cell(cell: &Cell) -> Markup {
    match cell {
        Cell::Text(text) | Cell::Number(text) => html! { (shown(text)) },
        Cell::Code(text) => html! { code { (shown(text)) } },
    }
}

/// Text without control characters, which HTML cannot have, and without the marks that turn the direction of
/// what follows. It is escaped where it is put into the page.
fn shown(text: &str) -> String {
    visible(text)
}
