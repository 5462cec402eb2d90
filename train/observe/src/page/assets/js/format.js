// Formats numbers for people. Unknown values are a dash.

const NONE = "–";
/** Formats a text of the server as a sentence. */
const sentence = (text) => (text ? text[0].toUpperCase() + text.slice(1) + (/[.!?]$/.test(text) ? "" : ".") : "");
const plural = (count, noun) => `${count} ${noun}${count === 1 ? "" : "s"}`;
const known = (value) => value !== null && value !== undefined && Number.isFinite(value);

const format = {
  /** Such as 2.9134 or 3.2e-6. */
  number(value) {
    if (!known(value)) return NONE;
    const size = Math.abs(value);
    if (size !== 0 && (size < 1e-3 || size >= 1e7)) return value.toExponential(2).replace("e+", "e");
    if (size >= 1000) return Math.round(value).toLocaleString("en");
    return String(Number(value.toPrecision(4)));
  },
  loss: (value) => (known(value) ? value.toFixed(value < 0.1 ? 5 : 4) : NONE),
  count: (value) => (known(value) ? Math.round(value).toLocaleString("en") : NONE),
  /** Such as 1.2 M. */
  short(value) {
    if (!known(value)) return NONE;
    if (Math.abs(value) >= 1e3 && Math.abs(value) < 1e4) return format.count(value);
    for (const [size, unit] of [[1e12, " T"], [1e9, " B"], [1e6, " M"], [1e3, " k"]]) {
      if (Math.abs(value) >= size) return Number((value / size).toPrecision(3)) + unit;
    }
    return String(Number(value.toPrecision(3)));
  },
  percent: (value) => (known(value) ? `${(100 * value).toFixed(1)} %` : NONE),
  bytes(value) {
    if (!known(value)) return NONE;
    for (const [size, unit] of [[2 ** 40, "TiB"], [2 ** 30, "GiB"], [2 ** 20, "MiB"], [2 ** 10, "KiB"]]) {
      if (value >= size) return `${(value / size).toFixed(value >= 100 * size ? 0 : 1)} ${unit}`;
    }
    return `${value} B`;
  },
  seconds(value) {
    if (!known(value)) return NONE;
    if (value < 1e-3) return `${(value * 1e6).toFixed(0)} µs`;
    if (value < 1) return `${(value * 1e3).toFixed(value < 0.1 ? 1 : 0)} ms`;
    if (value < 120) return `${value.toFixed(value < 10 ? 2 : 0)} s`;
    return format.duration(value);
  },
  /** Formats TFLOP/s for people, such as 12.3 GFLOP/s. */
  flops: (tflops) => (!known(tflops) ? NONE : tflops < 1 ? `${(1000 * tflops).toFixed(1)} GFLOP/s` : `${tflops.toFixed(1)} TFLOP/s`),
  /** Such as 3 h 20 min. */
  duration(value) {
    if (!known(value)) return NONE;
    const minutes = Math.round(value / 60);
    if (value < 90) return `${Math.round(value)} s`;
    if (minutes < 60) return `${minutes} min`;
    const hours = Math.floor(minutes / 60);
    if (hours < 48) return minutes % 60 ? `${hours} h ${minutes % 60} min` : `${hours} h`;
    return `${Math.floor(hours / 24)} d ${hours % 24} h`;
  },
  /** A moment in the reader's own time zone. */
  moment: (time) => (known(time) && Math.abs(time) < 1e11 ? new Date(time * 1000).toLocaleString(undefined, { dateStyle: "medium", timeStyle: "short" }) : NONE),
  microseconds: (value) => format.seconds(value / 1e6),
};

/** Units of the marks on axes, the largest first, and for some the value from which on they are used. */
format.short.units = [[1e12, " T"], [1e9, " B"], [1e6, " M"], [1e3, " k", 1e4], [1, ""]];
format.percent.units = [[0.01, " %"]];
format.bytes.units = [[2 ** 40, " TiB"], [2 ** 30, " GiB"], [2 ** 20, " MiB"], [2 ** 10, " KiB"], [1, " B"]];
format.seconds.units = [[1, " s"], [1e-3, " ms"], [1e-6, " µs"]];
format.duration.units = [[86400, "d"], [3600, "h"], [60, "min"], [1, "s"]];

/** Labels of the marks on an axis, which are `step` apart: the exact values, with as few digits as that takes. */
function labels(marks, step, write) {
  if (write === format.duration) return marks.map((mark) => exactTime(mark, step));
  const digits = (size) => { let n = 0; while (n < 9 && Math.abs((step / size) * 10 ** n - Math.round((step / size) * 10 ** n)) > 1e-6) n += 1; return n; };
  const most = Math.max(...marks.map(Math.abs)), units = write.units ?? [[1, ""]];
  const [size, unit] = units.find(([size, , from = size]) => from <= most && digits(size) <= 2) ?? units.at(-1);
  const n = digits(size);
  return marks.map((mark) => {
    if (mark === 0) return "0";
    if (!write.units && (most < 1e-3 || most >= 1e9)) return exponential(mark);
    return (mark / size).toLocaleString("en", { minimumFractionDigits: n, maximumFractionDigits: n }) + unit;
  });
}

/** Such as 2e-4. */
const exponential = (value) => Number(value.toPrecision(12)).toExponential().replace("e+", "e");

/** Such as 1 d 6 h 30 min. */
function exactTime(seconds, step) {
  if (seconds === 0 || step < 1) return `${Number(seconds.toFixed(6))} s`;
  let rest = Math.round(seconds);
  const parts = format.duration.units.map(([size, unit]) => { const count = Math.floor(rest / size); rest -= count * size; return count && `${count} ${unit}`; });
  return parts.filter(Boolean).join(" ");
}

/** The description of a metric: its name for people, and the format of its values. */
const METRICS = {
  loss: { name: "Training loss", format: format.loss },
  val_loss: { name: "Validation loss", format: format.loss },
  answer_loss: { name: "Loss of answers", format: format.loss },
  grad_norm: { name: "Gradient norm" },
  lr: { name: "Learning rate" },
  tokens_per_s: { name: "Throughput, tokens per second", format: format.short },
  mfu: { name: "Share of the hardware's FLOP/s (MFU)", format: format.percent },
  tflops: { name: "Model TFLOP/s of all ranks" },
  peak_bytes: { name: "Peak memory of a rank", format: format.bytes },
  step_s: { name: "Time of a step", format: format.seconds },
  wait_s: { name: "Waiting for other ranks, per step", format: format.seconds },
  data_s: { name: "Loading data, per step", format: format.seconds },
  forward_s: { name: "Forward pass, per step", format: format.seconds },
  backward_s: { name: "Backward pass, per step", format: format.seconds },
  optimizer_s: { name: "Optimizer, per step", format: format.seconds },
  other_s: { name: "Other work, per step", format: format.seconds },
  tokens: { name: "Tokens", format: format.short },
  time: { name: "Time" },
};

const metricName = (key) => METRICS[key]?.name ?? key;
const metricFormat = (key) => METRICS[key]?.format ?? format.number;

const STATES = {
  healthy: ["Healthy", "good"], held: ["Held", "note"], slow: ["Slow", "warn"], suspicion: ["Suspicion", "warn"],
  trouble: ["Trouble", "bad"], starting: ["Starting", "note"], finished: ["Finished", "done"],
  stopped: ["Stopped", "note"], failed: ["Failed", "bad"], dead: ["Killed", "bad"],
};

/** The state of a run as a badge. */
function badge(state) {
  const [word, kind] = STATES[state] ?? ["Unknown", "note"];
  return h("span", { class: `badge ${kind}` }, word);
}
