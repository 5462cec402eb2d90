// A run at a glance, and all runs next to each other.

const SPENT = {
  data: ["Data", "--data"], forward: ["Forward", "--forward"], backward: ["Backward", "--backward"],
  optimizer: ["Optimizer", "--optimizer"], other: ["Other", "--other"], waiting: ["Waiting for other ranks", "--waiting"],
};

/** Settings that get a column: more are in the view of configurations. */
const MOST_SETTINGS = 12;

function overview() {
  const cards = h("section", { class: "cards", "aria-label": "The run at a glance" });
  const notices = h("div", { class: "notices" });
  const orders = controls();
  const events = h("section", { class: "panel" });
  const charts = {
    loss: new Chart({ title: "Loss", format: format.loss, note: `Training loss as a line; of up to ${MANY_RUNS} runs, validation loss pale with points.` }),
    speed: new Chart({ title: METRICS.tokens_per_s.name, format: format.short }),
    mfu: new Chart({ title: METRICS.mfu.name, format: format.percent }),
  };
  const facts = [
    { name: "Run", cell: (run) => named(run), value: (run) => run.id },
    { name: "State", cell: (run) => badge(run.state), value: (run) => run.state },
    { name: "Step", isNumber: true, cell: (run) => format.count(run.step), value: (run) => run.step },
    { name: "Loss", isNumber: true, cell: (run) => format.loss(run.loss), value: (run) => run.loss },
    { name: "Validation", isNumber: true, cell: (run) => format.loss(run.val_loss), value: (run) => run.val_loss },
    { name: "Tokens/s", isNumber: true, downFirst: true, cell: (run) => format.short(run.tokens_per_s), value: (run) => run.tokens_per_s },
    { name: "MFU", isNumber: true, downFirst: true, cell: (run) => format.percent(run.mfu), value: (run) => run.mfu },
    { name: "Peak memory", isNumber: true, cell: (run) => format.bytes(run.peak_bytes), value: (run) => run.peak_bytes },
    { name: "Left", isNumber: true, cell: (run) => (run.is_over || !run.eta_s ? NONE : format.duration(run.eta_s)), value: (run) => run.eta_s },
  ];
  const runs = new Table("Runs", facts, { rowClass: (run) => (run.id === state.detail ? "chosen" : null) });
  const table = h("section", { class: "panel" }, h("h2", null, "All runs"), runs.element);
  charts.loss.element.classList.add("first");
  const root = h("div", { class: "view" }, notices, cards, orders.root, h("section", { class: "charts", "aria-label": "Loss and speed" }, Object.values(charts).map((chart) => chart.element)), table, events);
  let settingsOf = "";

  /** Adds a column for each setting in which the runs differ. Settings are read again if the list of runs changes. */
  async function showSettings() {
    const ids = JSON.stringify(state.runs.map((run) => run.id));
    if (ids === settingsOf || state.runs.length < 2) return;
    const answer = await ask("/api/config").catch(() => null);
    if (!answer) return;
    // A run that is starting has no settings yet.
    const isWhole = answer.runs.every((_, place) => answer.keys.some(({ values }) => values[place] !== null));
    settingsOf = isWhole ? ids : null;
    const places = new Map(answer.runs.map((id, place) => [id, place]));
    runs.setColumns([...facts, ...answer.keys.filter((key) => key.differs).slice(0, MOST_SETTINGS).map(({ key, values }) => {
      const value = (run) => values[places.get(run.id)] ?? null;
      const isNumber = values.every((one) => one === null || Number.isFinite(Number(one)));
      return { name: key, class: "setting", isNumber, cell: (run) => value(run) ?? NONE, value: (run) => (isNumber && value(run) !== null ? Number(value(run)) : value(run)) };
    })]);
  }

  async function update() {
    const run = detailRun();
    fill(notices, noticesOf(run));
    table.hidden = state.runs.length < 2;
    await showSettings();
    runs.set(state.runs);
    orders.update(run);
    if (!run) return void fill(cards, h("p", { class: "quiet" }, "There is no run yet."));
    const compared = comparedRuns();
    const keys = ["loss", "val_loss", "tokens_per_s", "mfu"];
    const [answers, own, happened, marked] = await Promise.all([
      Promise.all(compared.map((one) => seriesOf(one, { key: keys, points: 500 }))),
      seriesOf(run, { key: ["loss", "tokens_per_s"], points: 60 }),
      eventsOf(run),
      Promise.all(compared.map(eventsOf)),
    ]);
    fill(cards, cardsOf(run, own.series));
    const lines = (key, more) => compared.map((one, i) => ({ name: one.id, ...lookOf(one.id), data: answers[i].series[key], events: marked[i].events, ...more }));
    const validation = compared.length > MANY_RUNS ? [] : lines("val_loss", { isPale: true, points: true, events: [] }).map((line) => ({ ...line, name: `${line.name}, validation` }));
    charts.loss.set([...lines("loss"), ...validation], { theme: theme() });
    charts.speed.set(lines("tokens_per_s"), { theme: theme() });
    charts.mfu.set(lines("mfu"), { theme: theme() });
    fill(events, h("h2", null, `Events of ${run.id}`), eventList(happened.events.slice(0, 6)),
      happened.total > 6 ? h("p", null, h("a", { href: "#/events" }, `All ${happened.total} events`)) : null);
  }
  return { root, update, remove: () => Object.values(charts).forEach((chart) => chart.remove()) };
}

/** A run's name with its colour, as a button that shows its details. */
function named(run) {
  const show = () => chooseDetail(run.id);
  return h("button", { type: "button", class: "name", onclick: show, "aria-pressed": String(run.id === state.detail) },
    keyOf(lookOf(run.id)), h("span", null, run.id));
}

function noticesOf(run) {
  const told = [...state.problems, ...(run?.problems ?? [])];
  return told.length ? h("div", { class: "notice", role: "note" }, h("b", null, "Some files could not be read. "), h("ul", null, told.map((text) => h("li", null, text)))) : null;
}

function card(title, value, ...more) {
  return h("div", { class: "card" }, h("h3", null, title), h("p", { class: "value" }, value), more);
}

function cardsOf(run, series) {
  const spark = (key) => sparkline(series[key]?.mean ?? [], runColor(run.id));
  const share = run.steps ? Math.min(1, (run.step ?? 0) / run.steps) : null;
  const quiet = (...text) => h("p", { class: "quiet" }, ...text);
  const since = known(run.changed) ? Math.max(0, state.now - run.changed) : null;
  return [
    h("div", { class: "card verdict" }, h("h3", null, run.id), h("p", { class: "value" }, badge(run.state)), h("p", null, sentence(run.text)),
      quiet(run.folder, run.ranks ? `, ${plural(run.ranks, "rank")}` : "", since !== null && !run.is_over && since > 120 ? `, last line ${format.duration(since)} ago` : "")),
    card("Step", [format.count(run.step), run.steps ? h("small", null, ` of ${format.count(run.steps)}`) : null],
      share === null ? null : h("progress", { max: 1, value: share, "aria-label": "Share of the steps that are done" }),
      quiet(run.is_over ? `${format.short(run.tokens)} tokens` : run.steps && run.step >= run.steps ? "all steps are done" : known(run.eta_s) ? `${format.duration(run.eta_s)} left` : "unknown time left",
        known(run.saved) ? `, saved at ${format.count(run.saved)}` : ", no checkpoint yet")),
    card("Loss", format.loss(run.loss), spark("loss"),
      quiet(known(run.val_loss) ? `validation ${format.loss(run.val_loss)}, best ${format.loss(run.best_val_loss)}` : "no evaluation yet")),
    card("Tokens per second", format.short(run.tokens_per_s), spark("tokens_per_s"), quiet(known(run.mfu) ? `MFU ${format.percent(run.mfu)}` : `${format.flops(run.tflops)}, unknown peak`)),
    card("Peak memory", format.bytes(run.peak_bytes), quiet("of the rank with the most")),
    h("div", { class: "card spent" }, h("h3", null, "Time of a step"), h("p", { class: "value" }, format.seconds(run.step_s)), spentBar(run.spent)),
  ];
}

/** The breakdown of a step's time, as one bar with its parts. */
function spentBar(spent) {
  const total = spent.reduce((sum, [, seconds]) => sum + Math.max(0, seconds), 0);
  if (!total) return h("p", { class: "quiet" }, "The breakdown was not recorded.");
  const parts = spent.filter(([, seconds]) => seconds > 0);
  return [
    stack(parts, total),
    h("ul", { class: "parts" }, parts.map(([name, seconds]) => h("li", null,
      h("span", { class: "key", style: { "--key": `var(${SPENT[name][1]})` } }), SPENT[name][0], " ", h("b", null, format.percent(seconds / total))))),
  ];
}

/** A bar made of parts, hidden from screen readers. The rest of `total` stays empty. */
const stack = (parts, total) => h("div", { class: "stack", "aria-hidden": "true" }, parts.map(([name, seconds]) =>
  h("span", { style: { "flex-grow": String(seconds / total), background: `var(${SPENT[name][1]})` } })));

const KINDS = {
  start: ["Start", "note"], resume: ["Resumed", "note"], checkpoint: ["Checkpoint", "good"], skipped: ["Skipped step", "warn"],
  stop: ["Stopped", "note"], end: ["Finished", "done"], failure: ["Failure", "bad"],
};

const kindBadge = (kind) => h("span", { class: `badge ${KINDS[kind]?.[1] ?? "note"}` }, KINDS[kind]?.[0] ?? kind);

function eventList(events) {
  if (!events.length) return h("p", { class: "quiet" }, "There are no events.");
  return h("ol", { class: "events" }, events.map((event) => h("li", null, kindBadge(event.kind),
    h("span", { class: "what" }, event.text), h("span", { class: "quiet" }, `step ${format.count(event.step)}, `,
      h("time", null, format.moment(event.time))))));
}

/** Buttons for the run whose details are shown, and the run's responses. */
function controls() {
  const buttons = h("p", { class: "buttons" });
  const said = h("p", { class: "quiet", role: "status" });
  const root = h("section", { class: "controls", "aria-label": "Orders", hidden: true }, buttons, said);
  let shown = null;

  async function give(run, path, question) {
    if (question && !confirm(question)) return;
    setText(said, "Sending…");
    const told = await ask(path, { run: run.id }, { method: "POST", headers: { "x-kiln-control": "1" } })
      .then((answer) => answer.said, (error) => `failed: ${error.message}`);
    if (shown === run.id) setText(said, sentence(told));
  }

  function update(run) {
    root.hidden = !state.orders || !run || run.is_over;
    if (root.hidden || shown === run.id) return;
    shown = run.id;
    setText(said, "");
    fill(buttons,
      h("button", { type: "button", onclick: () => give(run, "/api/checkpoint") }, "Save a checkpoint"),
      h("button", { type: "button", onclick: () => give(run, "/api/stop", `Save ${run.id}, and end it?`) }, "Save and end"));
  }
  return { root, update };
}
