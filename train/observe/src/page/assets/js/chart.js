// Curves of one quantity, of one run or several, drawn by uPlot.

/** Spacings of the marks on an axis of bytes. */
const BYTE_MARKS = Array.from({ length: 40 }, (_, i) => 2 ** (i + 8));

/** Horizontal axes: the name, the key of the metric, and the format of a position. */
const AXES = {
  step: { name: "Step", over: undefined, format: format.count, tick: format.short },
  tokens: { name: "Tokens", over: "tokens", format: format.short, tick: format.short },
  time: { name: "Time since the start", over: "time", format: format.duration, tick: format.duration },
};

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
   * `options`: `title`, `format(value)`, `axis` (of `AXES`), `isLogX`, `isLogY`, `smoothing`, `height`,
   * `onzoom(from, to)` in steps.
   */
  constructor(options) {
    this.options = { axis: "step", height: 260, format: format.number, ...options };
    this.curves = [];
    this.plot = null;
    this.legend = h("ul", { class: "legend" });
    this.place = h("p", { class: "place quiet" });
    this.area = h("div", { class: "plot", tabindex: "0", role: "img", onkeydown: (event) => this.key(event) });
    this.table = h("div");
    this.alternative = h("details", { class: "values", ontoggle: () => this.writeTable() }, h("summary", null, "Values as a table"), this.table);
    this.element = h("figure", { class: `chart ${options.class ?? ""}` },
      h("figcaption", null, h("h3", null, options.title), options.note ? h("p", { class: "quiet" }, options.note) : null, this.place),
      this.legend, this.area, this.alternative);
    this.resized = new ResizeObserver(() => this.resize());
    this.resized.observe(this.area);
  }

  /**
   * Draws curves: each has `name`, `color`, `dash` and `key` (see `lookOf`), `data` (as the server sends it) and maybe
   * `isPale`, `points` and `began` (for the axis of time).
   */
  set(curves, changed = {}) {
    Object.assign(this.options, changed);
    this.curves = curves.filter((curve) => curve.data && curve.data.steps.length > 0);
    const shape = JSON.stringify([this.curves.map((c) => [c.name, c.color, Boolean(c.data.low), c.key, c.isPale, c.points, c.data.steps.length < 3, c.data.steps.length < 80]),
      this.options.axis, this.options.isLogX, this.options.isLogY, this.options.smoothing > 0, this.options.theme]);
    this.element.classList.toggle("empty", this.curves.length === 0);
    const data = this.data();
    if (shape !== this.shape || !this.plot) {
      this.shape = shape;
      this.draw(data);
    } else {
      this.plot.setData(data);
    }
    this.describe();
    this.showValues(null);
    if (this.alternative.open) this.writeTable();
  }

  /** The columns that uPlot draws: smallest and largest values, means, and smoothed means of each curve. */
  data() {
    const { axis, smoothing, isLogX } = this.options;
    const tables = this.curves.map(({ data, began }) => {
      const xs = places(data, axis, began).map((x) => (isLogX && x !== null && x <= 0 ? null : x));
      const keep = xs.map((x, i) => (x === null || (i > 0 && x === xs[i - 1]) ? -1 : i)).filter((i) => i >= 0);
      keep.sort((a, b) => xs[a] - xs[b]);
      const pick = (values) => keep.map((i) => values[i]);
      const mean = pick(data.mean);
      const band = data.low ? [pick(data.low), pick(data.high)] : [];
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
    const lines = { stroke: color("--muted"), grid: { stroke: color("--line"), width: 1 }, ticks: { show: false }, font: "12px system-ui, sans-serif" };
    const zoomed = (plot) => {
      const { left, width } = plot.select;
      if (width > 4 && this.options.onzoom) this.options.onzoom(this.stepAt(plot.posToVal(left, "x")), this.stepAt(plot.posToVal(left + width, "x")));
    };
    // On a logarithmic axis with a narrow range, only the ends would have labels.
    const ticks = (values, write) => values.map((value) => (value === null ? "" : write(value)));
    this.plot = new uPlot({
      width: Math.max(200, this.area.clientWidth), height, series, bands, padding: [10, 14, 0, 0],
      legend: { show: false },
      cursor: { drag: { x: Boolean(this.options.onzoom), y: false, setScale: false }, points: { size: 7 }, focus: { prox: -1 } },
      scales: { x: { time: false, distr: isLogX ? 3 : 1 }, y: isLogY ? { distr: 3 } : { range: (_, low, high) => padded(low, high) } },
      axes: [
        { ...lines, values: (_, values) => ticks(values, AXES[axis].tick), space: 70, size: 34 },
        { ...lines, values: (_, values) => ticks(values, this.options.tick ?? this.options.format), size: 62, space: 38, ...(this.options.format === format.bytes ? { incrs: BYTE_MARKS } : {}) },
      ],
      hooks: { setCursor: [(plot) => this.showValues(plot.cursor.idx)], setSelect: [zoomed] },
    }, data, this.area);
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

  /** Shows the values at the cursor in the legend, or else the last ones. */
  showValues(index) {
    const { format: write, axis } = this.options;
    const place = this.plot && index !== null && index !== undefined ? this.plot.data[0][index] : null;
    const entries = this.curves.map((curve, i) => {
      const column = this.plot?.data[this.means[i]] ?? [];
      // Between points (undefined), a run keeps the previous value; after its end it has none. Null: not finite.
      const last = column.findLastIndex((value) => value !== undefined);
      let at = place === null ? last : index > last ? -1 : index;
      while (at >= 0 && column[at] === undefined) at -= 1;
      return [curve, write(column[at])];
    });
    setText(this.place, place === null ? (entries.length ? "Last values" : "") : `${AXES[axis].name} ${AXES[axis].format(place)}`);
    fill(this.legend, entries.map(([curve, value]) =>
      h("li", null, keyOf({ ...curve, key: curve.isPale ? `${curve.key} pale` : curve.key }), curve.name, " ", h("b", null, value))));
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
      this.curves.map((curve) => ({ ...curve, head: () => curve.name })), ({ step }, curve) => value(curve, step), { isNumber: true }));
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
