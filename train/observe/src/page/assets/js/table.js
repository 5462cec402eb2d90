// Tables whose rows can be sorted by clicking a column heading, or by keyboard.

/**
 * A table. `columns` have `name`, `cell(row)` and, for sorting, `value(row)`; `isNumber` aligns to the right.
 * The order chosen by the user is kept when the rows change.
 */
class Table {
  constructor(caption, columns, options = {}) {
    this.columns = [];
    this.isDown = options.isDown ?? false;
    this.rowClass = options.rowClass ?? (() => null);
    this.headRow = h("tr");
    this.body = h("tbody");
    this.setColumns(columns);
    this.sorted = options.sorted ?? null;
    const table = h("table", null, h("caption", options.isCaptionShown ? null : { class: "unseen" }, caption),
      h("thead", null, this.headRow), this.body);
    this.element = h("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": caption }, table);
    this.rows = [];
  }

  /** Replaces the columns, before the next `set`. The order stays if its column does. */
  setColumns(columns) {
    const sorted = columns.findIndex(({ name }) => name === this.columns[this.sorted]?.name);
    this.sorted = sorted < 0 ? null : sorted;
    this.columns = columns;
    this.heads = columns.map((column, index) => this.head(column, index));
    fill(this.headRow, this.heads);
    fill(this.body);
  }

  head(column, index) {
    const kind = [column.isNumber && "number", column.class].filter(Boolean).join(" ");
    if (!column.value) return h("th", { scope: "col", class: kind }, column.name);
    const sort = () => {
      this.isDown = this.sorted === index ? !this.isDown : Boolean(column.isNumber && column.downFirst);
      this.sorted = index;
      this.set(this.rows);
    };
    return h("th", { scope: "col", class: kind }, h("button", { type: "button", class: "sort", onclick: sort }, breakable(column.name)));
  }

  set(rows) {
    this.rows = rows;
    this.heads.forEach((head, index) => {
      if (index === this.sorted) head.setAttribute("aria-sort", this.isDown ? "descending" : "ascending");
      else head.removeAttribute("aria-sort");
    });
    const value = this.columns[this.sorted]?.value;
    const shown = value ? [...rows].sort((a, b) => compare(value(a), value(b), this.isDown)) : rows;
    const kept = [...this.body.children];
    // Rows are changed in place, so that the user's position in the table is kept.
    shown.forEach((row, place) => {
      const line = kept[place] ?? this.body.appendChild(h("tr", null, this.columns.map((column, i) =>
        h(i === 0 ? "th" : "td", { scope: i === 0 ? "row" : null, class: [column.isNumber && "number", column.class].filter(Boolean).join(" ") }))));
      line.className = this.rowClass(row) ?? "";
      this.columns.forEach((column, i) => {
        const cell = column.cell(row), at = line.children[i];
        if (cell instanceof Node) fill(at, cell);
        else setText(at, String(cell));
      });
    });
    kept.slice(shown.length).forEach((line) => line.remove());
  }
}

/** A cell with a bar behind its text, which fills `share` of it. */
const meter = (text, share) => h("span", { class: "memory" }, h("span", { class: "fill", style: { width: `${Math.min(100, 100 * (share || 0))}%` } }), h("span", null, text));

/** Columns that fit next to each other. */
const MOST_COLUMNS = 6;

/**
 * A table of `cell(row, column)`. Rows and columns have a `head()`, and `corner` names both. With more columns than fit
 * and fewer rows, rows become columns.
 */
function grid(caption, corner, rows, columns, cell, kind = {}) {
  const isTurned = columns.length > MOST_COLUMNS && columns.length > rows.length;
  const [down, across] = isTurned ? [columns, rows] : [rows, columns];
  const at = (row, column) => (isTurned ? cell(column, row) : cell(row, column));
  const number = kind.isNumber ? "number" : null;
  return h("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": caption }, h("table", { class: kind.class ?? null }, h("caption", { class: "unseen" }, caption),
    h("thead", null, h("tr", null, h("th", { scope: "col" }, corner[Number(isTurned)]), across.map(({ head }) => h("th", { scope: "col", class: number }, head())))),
    h("tbody", null, down.map((row) => h("tr", null, h("th", { scope: "row" }, row.head()), across.map((column) => h("td", { class: number }, at(row, column))))))));
}

/** Sorts numbers by size and texts alphabetically, with unknown values last in both directions. */
function compare(a, b, isDown) {
  const isNone = (value) => value === null || value === undefined || Number.isNaN(value);
  if (isNone(a) || isNone(b)) return isNone(a) - isNone(b);
  const order = typeof a === "number" && typeof b === "number" ? a - b : String(a).localeCompare(String(b), "en", { numeric: true });
  return isDown ? -order : order;
}
