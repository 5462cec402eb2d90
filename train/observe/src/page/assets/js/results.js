// Final numbers of the compared runs, how they were computed, and missing data.

/** Formats a value with its step. A value of `null` was recorded and is not finite. */
const valueAt = (at) => (at ? [at.value === null ? "not finite" : format.loss(at.value), h("small", null, ` step ${format.count(at.step)}`)] : NONE);

/** A median with its quartiles, or a range. */
const spreadOf = (spread, write) => (spread ? [write(spread.median), h("small", null, ` ${write(spread.lower)} to ${write(spread.upper)}`)] : NONE);

const cellOf = (parts) => h("span", null, parts);
const numbers = (name, cell, value) => ({ name, isNumber: true, downFirst: true, cell, value });
const texts = (name, value, more) => ({ name, cell: (row) => value(row) ?? NONE, value, ...more });
const runColumn = { name: "Run", cell: (row) => h("span", { class: "named" }, keyOf(lookOf(row.id)), h("span", null, row.id)), value: (row) => row.id };
const fourDigits = (value) => (known(value) ? Number(value.toPrecision(4)).toLocaleString("en", { maximumSignificantDigits: 4 }) : NONE);

/** Columns of training strategies: `of` has the largest speed, memory and bytes of all rows, for bars. */
function strategyColumns(of) {
  const bar = (name, key, write, value = (row) => row[key]) => numbers(name, (row) => (known(value(row)) ? meter(write(value(row)), value(row) / of[key]) : NONE), value);
  return [
    texts("Strategy", (row) => row.strategy),
    texts("Mesh", (row) => row.mesh),
    bar("Tokens/s", "speed", fourDigits),
    numbers("Range", (row) => (row.tokens_per_s ? `${fourDigits(row.tokens_per_s.lower)} to ${fourDigits(row.tokens_per_s.upper)}` : NONE)),
    numbers("Relative", (row) => (known(row.relative) ? `${row.relative.toFixed(2)}×` : NONE), (row) => row.relative),
    bar("Peak memory", "peak_bytes", format.bytes),
    numbers("Waiting", (row) => (known(row.waits) ? meter(format.percent(row.waits), row.waits) : NONE), (row) => row.waits),
  ];
}

/** The largest value of each key. */
const mostOf = (rows, keys) => Object.fromEntries(keys.map((key) => [key, rows.reduce((most, row) => Math.max(most, row[key] ?? 0), 0) || 1]));

const panel = (title, ...children) => h("section", { class: "panel" }, h("h2", null, title), children);
const list = (items) => h("ul", { class: "list" }, items.map((item) => h("li", null, item)));
const quoted = (word) => (/^[\w./+=:@%-]+$/.test(word) ? word : `'${word.replaceAll("'", "'\\''")}'`);

const TRAINING_LOSS = "The training loss of a step is the mean loss of all tokens of the global batch, before the update. Validation loss is measured after the update of the given step.";
const SPEEDS = "Speeds and times are medians over the logged steps after the first tenth, which is the warm-up. Next to them are the first and the third quartile.";
const PEAK = "Peak memory is the most bytes that any rank held.";
const WAITING = "Waiting is the share of a step in which rank 0 could only wait for other ranks: communication that computation does not hide.";
const MFU = "MFU is the FLOP/s that the model needs in theory, without recomputation, divided by the peak FLOP/s of the devices.";
const SEEDS = "Each row is one run with one seed, and does not show the spread between seeds.";

/** Facts about runs: fewer runs than facts are columns, which is narrower; others are rows, which can be sorted. */
class Facts {
  constructor(caption, columns) {
    [this.caption, this.columns, this.table, this.element] = [caption, columns, new Table(caption, columns), h("div")];
  }

  set(rows) {
    const [run, ...facts] = this.columns, isMany = rows.length >= facts.length;
    if (isMany) this.table.set(rows);
    const few = () => grid(this.caption, [""], facts.map((fact) => ({ ...fact, head: () => fact.name })), rows.map((row) => ({ ...row, head: () => run.cell(row) })),
      (fact, row) => fact.cell(row), { class: "config" });
    if (!isMany || this.element.firstChild !== this.table.element) fill(this.element, isMany ? this.table.element : few());
  }
}

function resultsView() {
  const results = new Facts("Final numbers", [
    runColumn,
    { name: "State", cell: (row) => badge(row.state), value: (row) => row.state },
    numbers("Step", (row) => [format.count(row.step), row.steps ? ` of ${format.count(row.steps)}` : ""].join(""), (row) => row.step),
    ...[["Training loss", "loss"], ["Best validation", "best_val_loss"], ["Last validation", "val_loss"]].map(([name, key]) => ({ ...numbers(name, (row) => cellOf(valueAt(row[key])), (row) => row[key]?.value), downFirst: false })),
    numbers("Tokens", (row) => format.count(row.tokens), (row) => row.tokens),
    numbers("Time", (row) => format.duration(row.seconds), (row) => row.seconds),
    ...[["Tokens/s", "tokens_per_s", fourDigits], ["Time of a step", "step_s", format.seconds], ["MFU", "mfu", format.percent], ["TFLOP/s", "tflops", format.number]]
      .map(([name, key, write]) => numbers(name, (row) => cellOf(spreadOf(row[key], write)), (row) => row[key]?.median)),
    numbers("Peak memory", (row) => format.bytes(row.peak_bytes), (row) => row.peak_bytes),
    numbers("Skipped steps", (row) => format.count(row.skipped), (row) => row.skipped),
    numbers("Restarts", (row) => format.count(row.restarts), (row) => row.restarts),
    numbers("Checkpoints", (row) => (row.checkpoints.length ? `${row.checkpoints.length}, last ${format.count(row.checkpoints.at(-1))}` : "none"), (row) => row.checkpoints.length),
  ]);
  const largest = { speed: 1, peak_bytes: 1 };
  const strategies = new Table("Strategies and ranks", [runColumn, ...strategyColumns(largest).filter(({ name }) => name !== "Range"), texts("Training loss", (row) => row.losses, { class: "words" })]);
  const spread = h("p", { class: "quiet" });
  const times = new Table("Mean time of a step on rank 0", [
    runColumn,
    { name: "Parts", class: "wide", cell: (row) => (row.spent ? stack([...row.spent.filter(([, seconds]) => seconds > 0)], row.longest) : NONE) },
    ...Object.entries(SPENT).map(([key, [name]]) => {
      const value = (row) => row.spent?.find(([part]) => part === key)?.[1];
      return numbers(name.replace(" for other ranks", ""), (row) => format.seconds(value(row)), value);
    }),
    numbers("Step", (row) => format.seconds(row.whole), (row) => row.whole),
  ]);
  const environment = new Facts("How the runs were computed", [
    runColumn, texts("Device", (row) => row.device), texts("Machine of rank 0", (row) => row.host),
    numbers("Ranks", (row) => format.count(row.ranks), (row) => row.ranks), texts("Mesh", (row) => row.mesh), texts("Strategy", (row) => row.strategy),
    texts("Dtypes", (row) => row.dtypes), texts("Seed", (row) => row.seed), texts("Began (UTC)", (row) => row.created),
    texts("Program", (row) => row.build, { class: "words" }), texts("SHA-256 of the data", (row) => row.data, { class: "words" }), texts("Folder", (row) => row.folder, { class: "words" }),
  ]);
  const ways = panel("Strategies and ranks", spread, strategies.element);
  const spent = panel("Time of a step on rank 0", times.element);
  const missing = h("section", { class: "panel" }), again = h("pre");
  const root = h("div", { class: "view" }, panel("Results", results.element), ways, spent, panel("Environment", environment.element), missing,
    panel("How these numbers were measured", list([TRAINING_LOSS, SPEEDS, PEAK, WAITING, MFU, SEEDS]), h("p", null, "These commands repeat the runs, with ranks as threads of one process:"), again));
  let answer = null, asked = "", when = 0;

  async function update() {
    const name = JSON.stringify([[...state.compared], theme()]);
    // Medians over all steps are not worth recomputing every second.
    if (name === asked && (report || performance.now() - when < 10_000)) return;
    answer = state.compared.size ? await ask("/api/comparison", { run: comparedNames() }) : { runs: [], differences: [], other_keys: [] };
    [asked, when] = [name, performance.now()];
    const speed = (one) => one.tokens_per_s?.median;
    const rows = answer.runs.filter(({ id }) => state.compared.has(id)).map((one) => ({
      ...state.runs.find(({ id }) => id === one.id), ...one, speed: speed(one), relative: speed(one) / speed(answer.runs[0]),
      losses: one.losses ?? (one.id === answer.runs[0].id ? "the reference" : null), whole: one.spent?.reduce((sum, [, seconds]) => sum + seconds, 0),
    }));
    Object.assign(largest, mostOf(rows, ["speed", "peak_bytes"]));
    rows.forEach((row) => { row.longest = mostOf(rows, ["whole"]).whole; });
    results.set(rows);
    ways.hidden = !answer.is_spread;
    setText(spread, `Relative speed and losses are compared with ${answer.runs[0]?.id}.${answer.other_keys.length ? ` The runs also differ in ${answer.other_keys.join(", ")}, so losses may differ.` : ""}`);
    strategies.set(rows);
    spent.hidden = !rows.some((row) => row.spent);
    times.set(rows.filter((row) => row.spent));
    environment.set(rows);
    const notes = [...answer.differences.map((what) => `The runs differ in their ${what}, so speeds and bits may differ.`), ...rows.flatMap((row) => row.missing.map((text) => `${row.id}: ${text}`))];
    fill(missing, h("h2", null, "Missing"), notes.length ? list(notes) : h("p", { class: "quiet" }, "Nothing."));
    setText(again, rows.map((row) => `kiln train ${quoted(`${row.folder}/config.toml`)} --out ${quoted(`${row.id}-again`)}`).join("\n"));
  }
  return { root, update };
}

/** The measurements of `kiln bench strategies`. */
function strategiesView() {
  const measured = report.answers["/api/strategies"];
  const rows = measured.rows.map((row) => ({ ...row, speed: row.tokens_per_s, tokens_per_s: { lower: row.tokens_per_s_range[0], upper: row.tokens_per_s_range[1] }, relative: row.relative_speed, waits: row.wait_share }));
  const largest = mostOf(rows, ["speed", "peak_bytes", "sent_bytes"]);
  const count = (name, key) => numbers(name, (row) => format.count(row[key]), (row) => row[key]);
  const table = new Table("Strategies", [...strategyColumns(largest), numbers("Sent", (row) => meter(format.bytes(row.sent_bytes), row.sent_bytes / largest.sent_bytes), (row) => row.sent_bytes),
    count("Gathers", "gathers"), count("Reductions", "reductions")]);
  table.set(rows);
  const root = h("div", { class: "view" },
    panel("Sharding strategies", h("p", null, `Every strategy on the same work: a decoder of ${format.short(measured.parameters)} parameters on ${plural(measured.ranks, "rank")}, ${plural(measured.global_batch, "sequence")} of ${plural(measured.seq_len, "token")} per optimizer step. Bytes and counts are those of one rank and one step.`), table.element),
    panel("Environment", list(Object.entries(measured.facts).map(([name, value]) => `${name}: ${value}`))),
    panel("How these numbers were measured", list([
      `In each of ${plural(measured.rounds, "round")}, every strategy trains one step to warm up, and then ${plural(measured.steps, "step")} that are measured. Strategies alternate, so changes in the speed of the machine affect all of them. Tokens are made up.`,
      `Throughput and waiting are medians over rounds; the range is from the slowest to the fastest round. Relative speed is the throughput divided by that of ${rows[0]?.strategy} in the same round; the median of the rounds is shown.`,
      PEAK, WAITING]), h("p", null, "The command:"), h("pre", null, measured.command.map(quoted).join(" "))));
  return { root, update: async () => {} };
}
