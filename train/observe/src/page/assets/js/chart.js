// Curves of one quantity, of one run or several, drawn by uPlot.

/** Spacings of the marks on an axis: 1, 2 and 5 times a power of ten, whole numbers, powers of two, and times. */
const ROUND = Array.from({ length: 90 }, (_, i) => Number(`${[1, 2, 5][i % 3]}e${Math.floor(i / 3) - 12}`));
const WHOLE = ROUND.filter((step) => step >= 1);
const BYTE_MARKS = Array.from({ length: 40 }, (_, i) => 2 ** (i + 8));
const TIMES = [...ROUND.filter((step) => step < 10), ...[10, 15, 30, 60, 120, 300, 600, 900, 1800], ...[1, 2, 3, 6, 12].map((hours) => hours * 3600), ...WHOLE.map((days) => days * 86400)];
/** Marks on logarithmic axes of bytes and of times, in threes as in `ROUND`. */
const LOG_BYTES = [0, 1, 2, 3, 4].flatMap((power) => WHOLE.slice(0, 9).map((count) => count * 1024 ** power));
const LOG_TIMES = [...ROUND.filter((seconds) => seconds < 10), 10, 20, 30, 60, 120, 300, 600, 1200, 1800, 3600, 7200, 18000, ...WHOLE.map((days) => days * 86400)];

/** Horizontal axes: the name, the key of the metric, the format of a position, that of the marks, their spacings and distance in pixels. */
const AXES = {
  step: { name: "Step", over: undefined, format: format.count, tick: format.short, spacings: WHOLE, room: 70 },
  tokens: { name: "Tokens", over: "tokens", format: format.short, tick: format.short, spacings: WHOLE, room: 70 },
  time: { name: "Time since the start", over: "time", format: format.duration, tick: format.duration, spacings: TIMES, room: 110 },
};

/** Distance in pixels within which a curve's point counts as under the cursor. */
const NEAR = 12;

/** Signs of events below the curves. Others have a square. */
const SIGNS = { start: "▲", resume: "▲", checkpoint: "●", skipped: "✕" };
const signOf = (kind) => SIGNS[kind] ?? "■";

/** Marks of a logarithmic axis of `length` pixels: all, such as 1, 2 and 5 times powers of ten, or fewer if they are not `room` apart. */
function logMarks(low, high, length, room, marks) {
  const distance = (a, b) => (length * Math.log(b / a)) / Math.log(high / low);
  for (let every = 1; ; every = every === 1 ? 3 : every + 3) {
    const shown = marks.filter((mark, i) => i % every === 0 && mark >= low * (1 - 1e-9) && mark <= high * (1 + 1e-9));
    if (shown.every((mark, i) => i === 0 || distance(shown[i - 1], mark) >= room)) return shown;
  }
}

/** The range of a logarithmic axis: from a mark to a mark, so that there are at least two. */
function logRange(low, high, marks) {
  if (!(low > 0)) return [1, 10];
  const from = marks.findLast((mark) => mark <= low) ?? low, to = marks.find((mark) => mark >= high) ?? high;
  return from < to ? [from, to] : [from, marks.find((mark) => mark > to) ?? 2 * to];
}

/** Smooths values: each becomes a mean of the values up to it, in which older ones weigh less. */
function smoothed(values, weight) {
  if (!weight) return values;
  let sum = 0, total = 0;
  return values.map((value) => {
    if (value === null || value === undefined) return value;
    sum = weight * sum + (1 - weight) * value;
    total = weight * total + (1 - weight);
    return sum / total;
  });
}

/** The positions of a curve's points on the axis. Times are relative to the run's start (`began`). */
function places(curve, axis, began) {
  if (axis === "step" || !curve.over) return curve.steps;
  if (axis !== "time") return curve.over;
  return curve.over.map((time) => (time === null ? null : time - (began ?? 0)));
}

class Chart {
  /**
   * `options`: `title`, `format(value)`, `axis` (of `AXES`), `isLogX`, `isLogY`, `smoothing`, `height`, `isZoomed`,
   * `onzoom(from, to)` in steps.
   */
  constructor(options) {
    this.options = { axis: "step", height: 240, format: format.number, ...options };
    this.curves = [];
    this.plot = null;
    this.legend = h("ul", { class: "legend" });
    this.place = h("p", { class: "place quiet" });
    this.area = h("div", { class: "plot", tabindex: "0", role: "img", onkeydown: (event) => this.key(event) });
    this.tip = h("div", { class: "tip", hidden: true });
    this.table = h("div");
    this.alternative = h("details", { class: "values", ontoggle: () => this.writeTable() }, h("summary", null, "Values as a table"), this.table);
    this.element = h("figure", { class: `chart ${options.class ?? ""}` },
      h("figcaption", null, h("h3", null, breakable(options.title)), options.note ? h("p", { class: "quiet" }, options.note) : null, this.place),
      this.legend, this.area, h("div", { class: "below" }, this.alternative,
        h("button", { type: "button", class: "small", onclick: () => this.download(), "aria-label": `Download the values of ${options.title} as CSV` }, "CSV")));
    this.resized = new ResizeObserver(() => this.resize());
    this.resized.observe(this.area);
  }

  /**
   * Draws curves: each has `name`, `color`, `dash` and `key` (see `lookOf`), `data` (as the server sends it) and maybe
   * `isPale`, `points`, `began` (for the axis of time) and `events`, which are marked below the curves.
   */
  set(curves, changed = {}) {
    Object.assign(this.options, changed);
    this.curves = curves.filter((curve) => curve.data && curve.data.steps.length > 0);
    const shape = JSON.stringify([this.curves.map((c) => [c.name, c.color, Boolean(c.data.low), c.key, c.isPale, c.points, c.data.steps.length < 3, c.data.steps.length < 80]),
      this.options.axis, this.options.isLogX, this.options.isLogY, this.options.smoothing > 0, this.options.theme]);
    this.element.classList.toggle("empty", this.curves.length === 0);
    const parts = [this.options.smoothing, this.options.isZoomed, ...this.curves.flatMap((curve) => [curve.data, curve.events])];
    const isNew = shape !== this.shape || !this.plot;
    if (!isNew && parts.every((part, i) => part === this.parts[i])) return;
    [this.shape, this.parts] = [shape, parts];
    if (isNew) this.draw(this.data());
    else this.plot.setData(this.data());
    this.describe();
    this.showValues(this.plot?.cursor.idx ?? null);
    if (this.alternative.open) this.writeTable();
  }

  /** The columns that uPlot draws: smallest and largest values, means, and smoothed means of each curve. */
  data() {
    const { axis, smoothing, isLogX, isLogY } = this.options;
    // A logarithmic axis has no place for other values than positive ones.
    const shown = (value) => (isLogY && value !== null && value <= 0 ? undefined : value);
    const tables = this.curves.map(({ data, began }) => {
      const xs = places(data, axis, began).map((x) => (isLogX && x !== null && x <= 0 ? null : x));
      const keep = xs.map((x, i) => (x === null || (i > 0 && x === xs[i - 1]) ? -1 : i)).filter((i) => i >= 0);
      keep.sort((a, b) => xs[a] - xs[b]);
      const pick = (values) => keep.map((i) => values[i]);
      const draw = (values) => pick(values).map(shown);
      const mean = draw(data.mean);
      const band = data.low ? [draw(data.low), draw(data.high)] : [];
      return [pick(xs), ...band, mean, ...(smoothing > 0 ? [smoothed(mean, smoothing)] : [])];
    });
    return tables.length ? uPlot.join(tables) : [[]];
  }

  draw(data) {
    this.plot?.destroy();
    this.plot = null;
    fill(this.area);
    if (this.curves.length === 0) {
      fill(this.area, h("p", { class: "quiet" }, this.options.nothing ?? "No values yet."));
      return;
    }
    const { axis, isLogX, isLogY, smoothing, height } = this.options;
    const series = [{}], bands = [];
    this.means = [];
    for (const curve of this.curves) {
      const many = curve.data.steps.length;
      const points = { show: many < 3 || (Boolean(curve.points) && many < 80), size: 5, fill: curve.color };
      if (curve.data.low) {
        bands.push({ series: [series.length + 1, series.length], fill: `${curve.color}26` });
        for (let i = 0; i < 2; i++) series.push({ stroke: "transparent", width: 0, points: { show: false } });
      }
      const line = { stroke: curve.isPale ? `${curve.color}70` : curve.color, width: 1.75, pxAlign: 0, dash: curve.dash, points, label: curve.name };
      if (smoothing > 0) series.push({ ...line, stroke: `${curve.color}40`, width: 1, points: { show: false } });
      this.means.push(series.length);
      series.push(line);
    }
    const { tick, spacings, room } = AXES[axis], write = this.options.format, marks = write === format.bytes ? LOG_BYTES : ROUND;
    const lines = { stroke: color("--muted"), grid: { stroke: color("--line"), width: 1 }, ticks: { show: false }, font: "12px system-ui, sans-serif" };
    const zoomed = (plot) => {
      const { left, width } = plot.select;
      if (width > 4 && this.options.onzoom) this.options.onzoom(this.stepAt(plot.posToVal(left, "x")), this.stepAt(plot.posToVal(left + width, "x")));
    };
    /** The marks and the labels of an axis. Each label of a logarithmic axis has its own unit. */
    const scaled = (isLog, write, all, room, length) => (!isLog
      ? { values: (_, values, index, space, step) => labels(values, step, write) }
      : { splits: (plot, index, low, high) => logMarks(low, high, length(plot), room, all), values: (_, values) => values.map((value) => (!write.units && values[0] < 1e-3 ? exponential(value) : labels([value], value, write)[0])), filter: (_, values) => values });
    this.plot = new uPlot({
      width: Math.max(200, this.area.clientWidth), height, series, bands, padding: [10, axis === "time" ? 34 : 24, 0, 0],
      legend: { show: false },
      cursor: { drag: { x: Boolean(this.options.onzoom), y: false, setScale: false }, points: { size: 7 }, focus: { prox: -1 }, dataIdx: (plot, column, index) => this.near(plot, column, index) },
      scales: {
        x: { time: false, ...(isLogX ? { distr: 3, range: (_, low, high) => (low < high ? [low, high] : [low / 2, low * 2]) } : {}) },
        y: isLogY ? { distr: 3, range: (_, low, high) => logRange(low, high, marks) } : { range: (_, low, high) => padded(low, high) },
      },
      axes: [
        { ...lines, ...scaled(isLogX, tick, axis === "time" ? LOG_TIMES : ROUND, 55, (plot) => plot.width - 80), incrs: spacings, space: room, size: 34 },
        { ...lines, ...scaled(isLogY, write, marks, 20, () => height - 44), incrs: write === format.bytes ? BYTE_MARKS : ROUND, size: (_, texts) => Math.max(44, ...(texts ?? []).map((text) => 7 * text.length + 14)), space: 38 },
      ],
      hooks: { draw: [(plot) => this.drawMarks(plot)], setCursor: [(plot) => { this.showValues(plot.cursor.idx); this.showTip(plot); }], setSelect: [zoomed] },
    }, data, this.area);
    this.plot.over.append(this.tip);
  }

  /** The step of the first curve nearest to a position on the axis. */
  stepAt(x) {
    let best = null, distance = Infinity;
    for (const { data, began } of this.curves) {
      places(data, this.options.axis, began).forEach((place, i) => {
        if (place !== null && Math.abs(place - x) < distance) [best, distance] = [data.steps[i], Math.abs(place - x)];
      });
    }
    return best ?? 0;
  }

  resize() {
    const width = this.area.clientWidth;
    if (this.plot && width > 0 && Math.abs(this.plot.width - width) > 1) this.plot.setSize({ width, height: this.options.height });
  }

  /** The index of a curve's point at the position `index`, or of the nearest one. A run has none after its end. */
  near(plot, column, index) {
    const xs = plot.data[0], values = plot.data[column];
    if (column === 0 || index === null) return index;
    if (!this.means.includes(column)) return null;
    let left = index, right = index;
    while (left >= 0 && values[left] === undefined) left -= 1;
    while (right < xs.length && values[right] === undefined) right += 1;
    if (right === xs.length) return null;
    const away = (i) => (i < 0 ? Infinity : Math.abs(plot.valToPos(xs[i], "x") - plot.valToPos(xs[index], "x")));
    const best = away(left) <= away(right) ? left : right;
    return away(best) <= NEAR ? best : null;
  }

  /** Shows the values at the cursor in the legend, or else the last ones. */
  showValues(index) {
    const { format: write, axis } = this.options;
    const place = this.plot && index !== null && index !== undefined ? this.plot.data[0][index] : null;
    // Null was recorded and is not finite; undefined was not recorded.
    const text = (value) => (value === undefined ? "" : value === null ? "not finite" : write(value));
    const entries = this.curves.map((curve, i) => [curve, place === null ? curve.data.last?.[1] : this.plot.data[this.means[i]][this.plot.cursor.idxs[this.means[i]]]]);
    const isReduced = this.curves.some(({ data }) => data.low);
    setText(this.place, place === null ? (entries.length ? "Last values" : "") : `${AXES[axis].name} ${AXES[axis].format(place)}${isReduced ? ", means around it" : ""}`);
    fill(this.legend, entries.map(([curve, value]) =>
      h("li", { class: value === undefined ? "absent" : null }, keyOf({ ...curve, key: curve.isPale ? `${curve.key} pale` : curve.key }), h("span", null, breakable(curve.name)), " ", h("b", null, text(value)))));
  }

  /** Draws a sign for each event at the bottom, and keeps their places. Events before the first or after the last point are at the ends. */
  drawMarks(plot) {
    const { axis, isZoomed } = this.options, { ctx, bbox } = plot, { min, max } = plot.scales.x, ratio = window.devicePixelRatio || 1;
    const taken = new Set();
    this.marks = [];
    ctx.save();
    ctx.font = `${10 * ratio}px system-ui, sans-serif`;
    ctx.textAlign = "center";
    ctx.textBaseline = "bottom";
    for (const curve of this.curves) {
      const { steps, over } = curve.data;
      for (const event of curve.events ?? []) {
        let x = axis === "step" ? event.step : axis === "time" ? event.time - (curve.began ?? 0) : over?.[Math.max(0, steps.findLastIndex((step) => step <= event.step))];
        if (!isZoomed) x = Math.min(max, Math.max(min, x));
        if (!(min <= x && x <= max)) continue;
        this.marks.push({ left: plot.valToPos(x, "x"), curve, event });
        // Of several at the same place, one is seen.
        const place = `${Math.round(this.marks.at(-1).left / 3)} ${signOf(event.kind)}`;
        if (taken.has(place)) continue;
        taken.add(place);
        ctx.fillStyle = curve.color;
        const inside = Math.min(bbox.left + bbox.width - 5 * ratio, Math.max(bbox.left + 5 * ratio, plot.valToPos(x, "x", true)));
        ctx.fillText(signOf(event.kind), inside, bbox.top + bbox.height);
      }
    }
    ctx.restore();
  }

  /** Describes the events at the cursor. */
  showTip(plot) {
    const { left, top } = plot.cursor, isNear = top > plot.over.clientHeight - 18;
    const found = isNear ? this.marks.filter((mark) => Math.abs(mark.left - left) <= 6) : [];
    this.tip.hidden = !found.length;
    if (!found.length) return;
    fill(this.tip, found.slice(0, 6).map(({ curve, event }) => h("p", null, keyOf(curve), h("span", null, `${signOf(event.kind)} ${curve.name}, step ${format.count(event.step)}: ${event.text}`))),
      found.length > 6 ? h("p", null, `and ${found.length - 6} more`) : null);
    const width = plot.over.clientWidth, isRight = left > width / 2;
    this.tip.style.setProperty("left", isRight ? "auto" : `${left}px`);
    this.tip.style.setProperty("right", isRight ? `${width - left}px` : "auto");
  }

  /** The shown values as CSV: a line for each step, a column for each curve. */
  csv() {
    // A name must not begin a formula.
    const quoted = (name) => `"${name.replace(/^(?=[=+@-])/, "'").replaceAll('"', '""')}"`;
    const columns = this.curves.map(({ data }) => new Map(data.steps.map((step, i) => [step, data.mean[i] ?? "NaN"])));
    const steps = [...new Set(this.curves.flatMap(({ data }) => data.steps))].sort((a, b) => a - b);
    const lines = steps.map((step) => [step, ...columns.map((column) => column.get(step) ?? "")].join());
    return `${[["step", ...this.curves.map(({ name }) => quoted(name))].join(), ...lines].join("\n")}\n`;
  }

  download() {
    const address = URL.createObjectURL(new Blob([this.csv()], { type: "text/csv" }));
    h("a", { href: address, download: `${this.options.title.replace(/[^\w.-]+/g, "-")}.csv` }).click();
    setTimeout(() => URL.revokeObjectURL(address), 1000);
  }

  key(event) {
    if (!this.plot || !["ArrowLeft", "ArrowRight", "Home", "End", "Escape"].includes(event.key)) return;
    event.preventDefault();
    const xs = this.plot.data[0], last = xs.length - 1;
    const at = this.plot.cursor.idx ?? last, stride = Math.max(1, Math.round(last / 100));
    const next = { ArrowLeft: at - stride, ArrowRight: at + stride, Home: 0, End: last, Escape: null }[event.key];
    if (next === null) return this.plot.setCursor({ left: -10, top: -10 });
    this.plot.setCursor({ left: this.plot.valToPos(xs[Math.min(last, Math.max(0, next))], "x"), top: 10 });
  }

  describe() {
    const { format: write, title } = this.options;
    const told = this.curves.map(({ name, data }) => {
      const values = data.mean.filter((value) => value !== null);
      return values.length ? `${name}: ${write(values[0])} at step ${data.steps[0]}, ${write(values[values.length - 1])} at step ${data.steps[data.steps.length - 1]}` : `${name}: no values`;
    });
    this.area.setAttribute("aria-label", `${title}. ${told.join(". ")}. Arrow keys read values; a table follows.`);
  }

  writeTable() {
    if (!this.alternative.open) return;
    const { format: write } = this.options;
    const steps = [...new Set(this.curves.flatMap(({ data }) => data.steps))].sort((a, b) => a - b);
    const every = Math.max(1, Math.ceil(steps.length / (this.curves.length > MOST_COLUMNS ? 8 : 24)));
    const shown = steps.filter((_, i) => (steps.length - 1 - i) % every === 0);
    const value = ({ data }, step) => {
      let i = data.steps.length - 1;
      if (step > data.steps[i]) return NONE;
      while (i >= 0 && data.steps[i] > step) i -= 1;
      return i >= 0 ? write(data.mean[i]) : NONE;
    };
    fill(this.table, grid(`Values of ${this.options.title}`, ["Step", "Run"], shown.map((step) => ({ step, head: () => format.count(step) })),
      this.curves.map((curve) => ({ ...curve, head: () => breakable(curve.name) })), ({ step }, curve) => value(curve, step), { isNumber: true }));
  }

  remove() {
    this.resized.disconnect();
    this.plot?.destroy();
  }
}

/** The range of a vertical axis, with some room. */
function padded(low, high) {
  if (low === null || high === null) return [0, 1];
  const room = (high - low) * 0.06 || Math.abs(high) * 0.05 || 1;
  return [low >= 0 && low - room < 0 ? 0 : low - room, high + room];
}
